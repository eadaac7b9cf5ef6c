"""Captioning by drafter, batch size and dtype against `generate` in batches, interleaved in one process.

    OMP_NUM_THREADS=1 python tests/helpers/job_batches.py --rounds 4
    python tests/helpers/job_batches.py --wall --batches 8,32 --dtypes float32,bfloat16 --systems auto,none --rounds 7

In every round all systems caption the same 32 new pictures of the scenes model in rotating order, and their captions
are compared with those of `generate` (plain transformers, the same batches). The times are processor time, for machines
that are shared, or with `--wall` seconds. The table at the end has images a second, ratios to `generate` within a round
(medians and range), captions that differ, and the idle share: rows of a batch that have ended, of all rows of all
forwards after the prompts'. A job that gave their places to other pictures could save that share of the decoding at
most. A system is a drafter, with `-mkl` behind it for prompts without oneDNN.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median

from PIL import Image

import mmspec
from mmspec.app.caption.command import build_captioner
from mmspec.app.caption.config import PROMPT, CaptionConfig, ProcessInfo
from mmspec.app.modeling.captioner import Caption, Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.patching import KEY

GENERATE = "generate"
PICTURES = 32


@dataclass
class JobSystem:
    """A way to caption.

    Attributes:
        name: GENERATE, or a drafter.
        batch: rows of a batch.
        seconds: of its rounds.
        num_different: captions that are not those of `generate`.
        idle, forwards: row-forwards of rows that had ended, and of all rows.
    """

    name: str
    captioner: Captioner
    batch: int
    seconds: list[float] = field(default_factory=list)
    num_different: int = 0
    idle: int = 0
    forwards: int = 0

    def run(self, images: Sequence[Image.Image], clock: Callable[[], float]) -> list[str]:
        """Captions of the pictures; times them."""
        captions: list[Caption] = []
        start = clock()
        for first in range(0, len(images), self.batch):
            batch = images[first : first + self.batch]
            with mmspec.disabled(self.captioner.model) if self.name == GENERATE else nullcontext():
                found = self.captioner.caption(batch, [PROMPT] * len(batch), 0)
            captions += found
            rounds = [one.n_new_tokens - 1 if self.name == GENERATE else one.n_rounds for one in found]
            self.forwards += max(rounds) * len(rounds)
            self.idle += max(rounds) * len(rounds) - sum(rounds)
        self.seconds.append(clock() - start)
        return [one.caption for one in captions]

    def row(self, base: JobSystem) -> str:
        """The row of the table; the first round warms up."""
        rate = PICTURES / median(self.seconds[1:])
        ratios = sorted(plain / own for plain, own in zip(base.seconds[1:], self.seconds[1:], strict=True))
        cells = [self.name, str(self.batch), f"{rate:.2f}", f"{median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"]
        idle = f"{self.idle / self.forwards:.0%}" if self.forwards else "-"
        return "| " + " | ".join([*cells, str(self.num_different), idle]) + " |"


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


def compare(systems: Sequence[JobSystem], num_rounds: int, clock: Callable[[], float]) -> None:
    """Run the rounds, after one that warms up."""
    plain = {one.batch: one for one in systems if one.name == GENERATE}
    for number in range(num_rounds + 1):
        images = [render_scene(generate_scene(900_000 + number * PICTURES + i)) for i in range(PICTURES)]
        turn = number % len(systems)
        captions = [(one, one.run(images, clock)) for one in (*systems[turn:], *systems[:turn])]
        expected = {one.batch: texts for one, texts in captions if one is plain[one.batch]}
        for one, texts in captions:
            one.num_different += sum(mine != other for mine, other in zip(texts, expected[one.batch], strict=True))
        seconds = ", ".join(f"{one.name} {one.batch}: {one.seconds[-1]:.2f}" for one in systems)
        print(f"round {number}: {seconds} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="after one that warms up")
    parser.add_argument("--systems", default="none-mkl,none,auto")
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--wall", action="store_true", help="seconds, not processor time: for idle machines")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.process_time
    for dtype in args.dtypes.split(","):
        systems = build_systems(args.systems.split(","), list(map(int, args.batches.split(","))), dtype)
        compare(systems, args.rounds, clock)
        plain = {one.batch: one for one in systems if one.name == GENERATE}
        print(f"\n{dtype}, {PICTURES * (args.rounds + 1)} pictures, images a second of {clock.__name__}\n")
        print("| system | batch | images/s | x generate | other captions | idle |\n|---|---|---|---|---|---|")
        print("\n".join(one.row(plain[one.batch]) for one in systems), flush=True)


if __name__ == "__main__":
    main()
