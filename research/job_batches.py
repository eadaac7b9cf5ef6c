"""Captioning by drafter, batch size and dtype against `generate` in batches, interleaved in one process.

    OMP_NUM_THREADS=1 python -m research.job_batches --rounds 4
    python -m research.job_batches --wall --batches 8,32 --dtypes float32,bfloat16 --systems auto,none \\
        --rounds 1 --json research/results/job-batches.json

In every round all systems caption the same new pictures of the scenes model in rotating order, and their captions are
compared with those of `generate` (plain transformers, the same batches). The times are processor time, for machines
that are shared, or with `--wall` seconds. The table at the end has images a second, ratios to `generate` within a round
(medians and range), captions that differ, and two shares: rows that have ended, of all rows of all rounds, and rows
that have ended and are computed all the same, of all rows that are computed. A system is a drafter, with `-mkl` behind
it for prompts without oneDNN, or `-all` for rounds that compute rows that have ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from PIL import Image

import mmspec
from mmspec.app.caption.command import build_captioner
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.option_fields import PROMPT
from mmspec.app.modeling.captioner import Caption, Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.patching import KEY
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.hf import HFTarget
from research.bench.session import provenance

GENERATE = "generate"
HEADER = "| system | batch | images/s | x generate | other captions | rows ended | computed though ended |"


@dataclass
class JobSystem:
    """A way to caption.

    Attributes:
        name: GENERATE, or a drafter.
        batch: rows of a batch.
        seconds: of its rounds.
        num_different: captions that are not those of `generate`.
        rows, ended: rows of all forwards after the prompts', and those of them that had ended.
        computed: rows that these forwards computed.
    """

    name: str
    captioner: Captioner
    batch: int
    seconds: list[float] = field(default_factory=list)
    num_different: int = 0
    rows: int = 0
    ended: int = 0
    computed: int = 0

    def run(self, images: Sequence[Image.Image], clock: Callable[[], float]) -> list[str]:
        """Captions of the pictures; times them."""
        captions: list[Caption] = []
        is_plain = self.name == GENERATE
        start = clock()
        for first in range(0, len(images), self.batch):
            batch = images[first : first + self.batch]
            with (
                mmspec.disabled(self.captioner.model) if is_plain else nullcontext(),
                counted_rows(self.name.endswith("-all")) as computed,
            ):
                found = self.captioner.caption(batch, [PROMPT] * len(batch), 0)
            captions += found
            alive = [one.n_new_tokens - 1 if is_plain else one.n_rounds for one in found]
            self.rows += max(alive) * len(alive)
            self.ended += max(alive) * len(alive) - sum(alive)
            self.computed += max(alive) * len(alive) if is_plain else sum(computed)
        self.seconds.append(clock() - start)
        return [one.caption for one in captions]

    def row(self, base: JobSystem) -> dict[str, Any]:
        """The row of the table; the first round warms up."""
        pairs = zip(base.seconds[1:], self.seconds[1:], strict=True)
        ratios = sorted(plain / own for plain, own in pairs)
        return {
            "system": self.name,
            "batch": self.batch,
            "seconds": self.seconds[1:],
            "speedup": median(ratios),
            "speedup_low": ratios[0],
            "speedup_high": ratios[-1],
            "different": self.num_different,
            "ended_share": self.ended / max(1, self.rows),
            "idle_share": (self.computed - self.rows + self.ended) / max(1, self.computed),
        }


@contextmanager
def counted_rows(computes_all: bool) -> Iterator[list[int]]:
    """The rows that each forward over nodes computes; with `computes_all` those that have ended, too."""
    found: list[int] = []
    score, score_in_c = HFTarget.score, CForwards.score

    def spy(self: HFTarget, tree: Any, indices: Any = (), active: Any = None) -> Any:
        found.append(len(tree.tokens))
        return score(self, tree, indices, None if computes_all else active)

    def spy_in_c(self: CForwards, tree: Any, kv_cache: Any, indices: Any, active: Any = None) -> Any:
        scored = score_in_c(self, tree, kv_cache, indices, active)
        if scored is not None and active is not None:
            found[-1] = sum(active)
        return scored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFTarget, "score", spy)
        patch.setattr(CForwards, "score", spy_in_c)
        yield found


def build_systems(drafters: Sequence[str], batches: Sequence[int], dtype: str) -> list[JobSystem]:
    """`generate` and each drafter, in batches of each size. A model for each drafter."""
    systems = []
    for name in (GENERATE, *drafters):
        drafter, _, kernel = name.partition("-")
        drafter = "none" if name == GENERATE else drafter
        captioner = build_captioner(CaptionConfig((), model="scenes", drafter=drafter, dtype=dtype), ProcessInfo())
        captioner.model.__dict__[KEY].autotuner.has_onednn &= kernel != "mkl"
        systems += [JobSystem(name, captioner, batch) for batch in batches]
    return systems


def compare(systems: Sequence[JobSystem], num_rounds: int, pictures: int, clock: Callable[[], float]) -> None:
    """Run the rounds, after one that warms up."""
    plain = {one.batch: one for one in systems if one.name == GENERATE}
    for number in range(num_rounds + 1):
        images = [render_scene(generate_scene(900_000 + number * pictures + i)) for i in range(pictures)]
        turn = number % len(systems)
        captions = [(one, one.run(images, clock)) for one in (*systems[turn:], *systems[:turn])]
        expected = {one.batch: texts for one, texts in captions if one is plain[one.batch]}
        for one, texts in captions:
            one.num_different += sum(mine != other for mine, other in zip(texts, expected[one.batch], strict=True))
        seconds = ", ".join(f"{one.name} {one.batch}: {one.seconds[-1]:.2f}" for one in systems)
        print(f"round {number}: {seconds} s", flush=True)


def table_line(row: dict[str, Any], pictures: int) -> str:
    """A row as Markdown."""
    speedup = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    shares = (f"{row[name]:.0%}" for name in ("ended_share", "idle_share"))
    cells = [
        row["system"],
        row["batch"],
        f"{pictures / median(row['seconds']):.2f}",
        speedup,
        row["different"],
        *shares,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="after one that warms up")
    parser.add_argument("--pictures", type=int, default=32, help="of a round")
    parser.add_argument("--systems", default="none-mkl,none,auto")
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--wall", action="store_true", help="seconds, not processor time: for idle machines")
    parser.add_argument("--json", type=Path, help="file for the rows of the tables")
    args = parser.parse_args()
    clock, pictures = time.perf_counter if args.wall else time.process_time, args.pictures
    found: list[dict[str, Any]] = []
    for dtype in args.dtypes.split(","):
        systems = build_systems(args.systems.split(","), list(map(int, args.batches.split(","))), dtype)
        compare(systems, args.rounds, pictures, clock)
        plain = {one.batch: one for one in systems if one.name == GENERATE}
        rows = [one.row(plain[one.batch]) for one in systems]
        found += [{"dtype": dtype, **row} for row in rows]
        print(
            f"\n{dtype}, {args.rounds} rounds of {pictures} pictures, images a second of {clock.__name__}\n\n{HEADER}"
        )
        print("|---" * HEADER.count(" | ") + "|---|")
        print("\n".join(table_line(row, pictures) for row in rows), flush=True)
        for one in systems[:: len(plain)]:
            one.captioner.close()
        if args.json:  # of the dtypes so far: a run that is cut keeps them
            run = provenance(shlex.join(["python", *sys.argv]), systems[0].captioner.model.device)
            run |= {"clock": clock.__name__, "pictures": pictures}
            args.json.write_text(json.dumps({"run": run, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
