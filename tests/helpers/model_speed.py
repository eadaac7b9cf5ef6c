"""The drafter `none` against plain `generate` on a tiny model of each tested type: is our loop ever the slower one?

`python tests/helpers/model_speed.py` (about ten minutes, idle) prints plain over ours, the lowest first, of the
medians of processor time on one thread; it ends with 1 if one is below `--least`. `--family` names some types.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import fuzz as fuzz
import tiny_models as tiny
import zoo

import mmspec

WARM_UP = 2
"""Calls of each kind that are not counted."""


def measure(family: str, tokens: int, repeats: int) -> tuple[float, str]:
    """(seconds of plain `generate` over those of ours, why transformers decoded alone or "")."""
    model = tiny.build_model(tiny.ModelSpec(family))
    needs_image = zoo.FAMILIES[family].needs_image
    given = tiny.build_inputs(model, 1, 1, images=[int(needs_image)], padding="none")
    options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    spent: dict[bool, list[float]] = {False: [], True: []}
    with fuzz.patch_model(model, "none"):
        for repeat in range(WARM_UP + repeats):
            for patched in (False, True):  # in turn
                start = time.process_time()
                model.generate(**given, **options, mmspec={"enabled": patched})
                spent[patched] += [time.process_time() - start] if repeat >= WARM_UP else []
        reason = mmspec.stats(model).fallback_reason or ""
    return median(spent[False]) / median(spent[True]), reason


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", help="only these model types")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a call")
    parser.add_argument("--repeats", type=int, default=7, help="calls of each kind")
    parser.add_argument("--least", type=float, default=1.0, help="ratio below which the command fails")
    args = parser.parse_args(argv)
    found = []
    for family in args.family or [*tiny.FAMILIES, *zoo.ROWS]:
        found.append((*measure(family, args.tokens, args.repeats), family))
        print(f"{family}: {found[-1][0]:.2f} {found[-1][1]}", file=sys.stderr, flush=True)
    print("| model type | plain / ours | decoded by transformers alone |\n|---|---|---|")
    for ratio, reason, family in sorted(found):
        print(f"| `{family}` | {ratio:.2f} | {reason or '-'} |")
    return int(min(found)[0] < args.least)


if __name__ == "__main__":
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    fuzz.init_worker()
    raise SystemExit(main())
