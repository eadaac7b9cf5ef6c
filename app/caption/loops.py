"""Loops at the end of a caption: what small models repeat until their tokens are used up."""

from __future__ import annotations

import re

LOOP = "loop"
"""The `finish_reason` of a caption of which a loop was cut."""
MIN_REPEATS = 3
MIN_CHARACTERS = 24
"""Repetitions, and characters that they have together, below which they may be meant: "very very very"."""
_END = re.compile(r"\s|[.,;:!?](?!\w)|[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|.(?=\s)")
"""The last character of a word or sentence."""


def without_loop(text: str) -> str | None:
    """A caption with what is repeated at its end, the last time perhaps in part, there one time; None without a loop.

    Works on characters, so also where words are not apart; of several readings the shortest repeated text counts. Where
    the loop begins like the words before it end, what stays ends with a word or sentence: "a van man", not "a van ma".
    """
    text = text.rstrip()
    for period in range(1, len(text) // MIN_REPEATS + 1):
        same = 0
        while same + period < len(text) and text[-1 - same] == text[-1 - same - period]:
            same += 1
        if same + period >= max(MIN_REPEATS * period, MIN_CHARACTERS):
            ends = range(len(text) - same, len(text) - same + period)
            whole = (n for n in ends if _END.match(text, n - 1))
            return text[: next(whole, ends[0])].rstrip(" ,;:-\n")
    return None
