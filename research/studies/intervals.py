"""Confidence intervals as text."""

from __future__ import annotations

from collections.abc import Sequence


def format_ci(value: Sequence[float], digits: int = 2, sign: bool = False) -> str:
    """`value [low, high]` of a (value, low, high) triple; with `sign` a plus before positive numbers."""
    spec = f"{'+' if sign else ''}.{digits}f"
    middle, low, high = (format(number, spec) for number in value)
    return f"{middle} [{low}, {high}]"


__all__ = ["format_ci"]
