"""Compressors of the visual tokens that a drafter reads."""
