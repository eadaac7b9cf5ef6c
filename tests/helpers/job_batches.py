"""Processor time of captioning by drafter and batch size, interleaved in one process: for machines that are shared.

    OMP_NUM_THREADS=1 python tests/helpers/job_batches.py --rounds 4

In every round all systems caption the same 32 new pictures of the scenes model in rotating order, and their captions
are compared. `simple8` is plain `generate` in batches of 8; `-mkl`: without oneDNN for prompts. Ratios are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

from PIL import Image

import mmspec
from mmspec.app.caption.command import build_captioner
from mmspec.app.caption.config import PROMPT, CaptionConfig, ProcessInfo
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.patching import KEY

SIMPLE = "simple8"
PICTURES = 32


@dataclass
class JobSystem:
    """A way to caption, and the seconds of its rounds."""

    name: str
    captioner: Captioner
    batch: int
    is_plain: bool
    seconds: list[float]

    def run(self, images: Sequence[Image.Image]) -> list[str]:
        """Captions of the pictures; times them."""
        captions = []
        start = time.process_time()
        for first in range(0, len(images), self.batch):
            batch = images[first : first + self.batch]
            with mmspec.disabled(self.captioner.model) if self.is_plain else nullcontext():
                captions += self.captioner.caption(batch, [PROMPT] * len(batch), 0)
        self.seconds.append(time.process_time() - start)
        return [one.caption for one in captions]


def build_system(name: str) -> JobSystem:
    """`simple8`, or DRAFTER-BATCH with `-mkl` behind it, as in `none-16`."""
    is_plain = name == SIMPLE
    drafter, _, rest = ("none-8" if is_plain else name).partition("-")
    batch, _, kernel = rest.partition("-")
    captioner = build_captioner(CaptionConfig((), model="scenes", drafter=drafter), ProcessInfo())
    captioner.model.__dict__[KEY].autotuner.has_onednn &= kernel != "mkl"
    return JobSystem(name, captioner, int(batch), is_plain, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="after one that warms up")
    parser.add_argument("--systems", default="none-8-mkl,none-8,none-16,none-32,auto-8,auto-16,auto-32")
    args = parser.parse_args()
    systems = [build_system(name) for name in (SIMPLE, *args.systems.split(","))]
    for number in range(args.rounds + 1):
        images = [render_scene(generate_scene(900_000 + number * PICTURES + i)) for i in range(PICTURES)]
        turn = number % len(systems)
        captions = {one.name: one.run(images) for one in (*systems[turn:], *systems[:turn])}
        different = [name for name, texts in captions.items() if texts != captions[SIMPLE]]
        seconds = ", ".join(f"{one.name} {one.seconds[-1]:.2f}" for one in systems)
        print(f"round {number}: {seconds} s; other captions: {', '.join(different) or 'none'}", flush=True)
    for one in systems:
        ratios = sorted(base / own for base, own in zip(systems[0].seconds[1:], one.seconds[1:], strict=True))
        print(f"{one.name}: {median(ratios):.2f}x of {SIMPLE} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main()
