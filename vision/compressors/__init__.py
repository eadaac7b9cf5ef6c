"""Compressors: reduce the visual tokens that a drafter reads."""
