"""Peers of `research.bench`: other ways to decode the same prompts with the same weights."""
