"""Counters, phase times and derived metrics."""
