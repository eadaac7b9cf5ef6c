"""Round numbers at the axes of charts."""

from __future__ import annotations

import math


def axis_ticks(top: float) -> list[float]:
    """From 0 to at least `top`, at most six, a multiple of 1, 2 or 5 times a power of ten apart."""
    exponent = math.floor(math.log10(top / 5)) if top > 0 else 0
    step = next(step for factor in (1, 2, 5, 10) if 5 * (step := factor * 10.0**exponent) >= top)
    return [round(step * index, 12) for index in range(max(1, math.ceil(top / step - 1e-9)) + 1)]
