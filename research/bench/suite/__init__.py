"""Suites of `research.bench`: prompts by category, every peer on each of them, a report."""
