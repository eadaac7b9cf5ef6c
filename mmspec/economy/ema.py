"""Exponential moving averages of measurements on shared machines, with bounded influence of outliers."""

from __future__ import annotations


def ema(
    mean: float | None, value: float, weight: float, *, restart_below: float = 0.0, clip_above: float = 2.0
) -> float:
    """The mean after one more value.

    A first value is taken as it is. Values much larger than the mean are clipped: a single delay on a shared machine
    is no evidence.

    Args:
        mean: the mean so far; None or 0 before the first value.
        value: the new value.
        weight: weight of the new value.
        restart_below: values below this fraction of the mean replace it. First uses are slow (kernels are selected,
            memory is allocated), so that a much faster run is the better estimate at once.
        clip_above: values are clipped at this multiple of the mean; `inf` for no clipping.
    """
    if not mean or value < restart_below * mean:
        return float(value)
    return mean + weight * (min(value, clip_above * mean) - mean)
