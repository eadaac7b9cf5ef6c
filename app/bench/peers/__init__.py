"""Peers of `mmspec bench`: other ways to decode the same prompts with the same weights."""
