"""Loops at the end of a caption: what small models repeat until their tokens are used up."""

from __future__ import annotations

LOOP = "loop"
"""The `finish_reason` of a caption of which a loop was cut."""
MIN_REPEATS = 3
MIN_CHARACTERS = 24
"""Repetitions, and characters that they have together, below which they may be meant: "very very very"."""


def without_loop(text: str) -> str | None:
    """A caption with what is repeated at its end, the last time perhaps in part, there one time; None without a loop.

    Works on characters, so also where words are not apart; of several readings the shortest repeated text counts.
    """
    text = text.rstrip()
    for period in range(1, len(text) // MIN_REPEATS + 1):
        same = 0
        while same + period < len(text) and text[-1 - same] == text[-1 - same - period]:
            same += 1
        if same + period >= max(MIN_REPEATS * period, MIN_CHARACTERS):
            return text[: len(text) - same].rstrip(" ,;:-\n")
    return None
