"""Damaged and hostile images, clips and manifests by the thousand: each is read, or refused in one line.

`MMSPEC_CORPUS` says how many inputs the slow run takes in all.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus_media as corpus
import pytest
from corpus_media import CANARY, OpenWatcher, watch_folder

from mmspec.app.errors import UsageError
from mmspec.app.io.images import ImageError, load_image
from mmspec.app.io.sources import collect_items
from mmspec.app.io.videos import load_video
from mmspec.vision.video.decoder_pool import DecoderPool

Make = Callable[..., tuple[str, bytes]]
MANY = int(os.environ.get("MMSPEC_CORPUS", "10000"))
HANGS_S = 60.0
MEMORY = 1_000_000_000


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[OpenWatcher]:
    with watch_folder(tmp_path) as watch:
        yield watch


class Run:
    """Inputs of one kind, one after the other, and what came of them."""

    def __init__(self, folder: Path, watch: OpenWatcher) -> None:
        self.folder, self.watch, self.isolated = folder, watch, DecoderPool(timeout_s=30)
        for number in range(3):  # what manifests name
            (folder / f"{number}.png").write_bytes(corpus.valid_images()["a.png"])
        self.outcomes, self.slowest, self.memory = Counter[str](), 0.0, 0

    def one(self, make: Make, seed: int) -> None:
        """Make an input, read it, and look at what happened."""
        port, canary = self.watch.port, str(self.folder / CANARY)
        name, content = make(seed) if make is corpus.make_manifest else make(seed, canary, port)
        file = self.folder / name
        file.write_bytes(content)
        self.watch.opened_files()
        began, outcome = time.monotonic(), "read"
        try:
            if make is corpus.make_manifest:
                collect_items([str(file)], self.folder)
            elif make is corpus.make_video:
                load_video(file, 3, isolated=self.isolated)
            else:
                load_image(file if seed % 2 else content, isolated=self.isolated)
        except (ImageError, UsageError) as error:
            outcome = getattr(error, "kind", "UsageError")
            wrong = [] if "\n" not in str(error) and len(str(error)) < 20_000 else [str(error)]
            assert not wrong, f"seed {seed}: the message is one line"
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.outcomes[outcome] += 1
        assert self.slowest < HANGS_S, f"seed {seed} took {self.slowest:.0f} s"
        assert self.watch.opened_files() <= {name}, f"seed {seed}"
        file.unlink()
        for child in list(self.isolated._all):
            self.memory = max(self.memory, high_water(child._process.pid))

    def figures(self) -> str:
        """Check what is of all inputs together, and say how they went."""
        assert not self.watch.connections()
        self.isolated.close()
        assert self.memory < MEMORY
        return f"slowest {self.slowest:.1f} s, {self.memory / 1e6:.0f} MB, {dict(self.outcomes.most_common())}"


def high_water(pid: int) -> int:
    """The most memory that a process had, in bytes; 0 where it is not known."""
    if sys.platform != "linux":
        return 0
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it is gone
        return 0
    return max((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), default=0)


MAKERS: list[Make] = [corpus.make_image, corpus.make_video, corpus.make_manifest]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__))
def test_a_sample_of_each(make: Make, watch: OpenWatcher, tmp_path: Path) -> None:
    run = _all(make, range(150), watch, tmp_path)
    assert len(run.outcomes) > 1, "some are read, some are not"
    print(run.figures())


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__))
def test_many_of_each(make: Make, watch: OpenWatcher, tmp_path: Path) -> None:
    """`MANY` over the three doors."""
    print(make.__name__, _all(make, range(1000, 1000 + -(-MANY // 3)), watch, tmp_path).figures())


def _all(make: Make, seeds: range, watch: OpenWatcher, folder: Path) -> Run:
    run = Run(folder, watch)
    for seed in seeds:
        run.one(make, seed)
    return run
