"""Suites of `mmspec bench`: prompts by category, every peer on each of them, a report."""
