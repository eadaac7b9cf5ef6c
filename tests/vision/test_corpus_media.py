"""Thousands of damaged and hostile images, videos and manifests: each is read, or refused with a one-line message.

`MMSPEC_CORPUS` sets the total number of inputs of the slow test.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus_media as corpus
import pytest
from collected import collect_items
from corpus_media import CANARY, OpenWatcher, peak_memory, watch_folder

from mmspec.app.errors import UsageError
from mmspec.app.io.images import ImageError, load_image
from mmspec.app.io.videos import load_video
from mmspec.vision.video.decoder_pool import DecoderPool

Generator = Callable[..., tuple[str, bytes]]
NUM_INPUTS = int(os.environ.get("MMSPEC_CORPUS", "10000"))
TIMEOUT_S = 60.0
MAX_MEMORY_BYTES = 1_000_000_000


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[OpenWatcher]:
    with watch_folder(tmp_path) as watcher:
        yield watcher


class Run:
    """Processes inputs of one kind and counts the outcomes."""

    def __init__(self, folder: Path, watcher: OpenWatcher) -> None:
        self.folder, self.watcher, self.pool = folder, watcher, DecoderPool(timeout_s=30)
        for number in range(3):  # the files that manifests name
            (folder / f"{number}.png").write_bytes(corpus.valid_images()["a.png"])
        self.outcomes, self.slowest, self.memory = Counter[str](), 0.0, 0

    def process(self, generate: Generator, seed: int) -> None:
        """Generate an input, read it, and check the outcome."""
        port, canary = self.watcher.port, str(self.folder / CANARY)
        name, content = generate(seed) if generate is corpus.make_manifest else generate(seed, canary, port)
        file = self.folder / name
        file.write_bytes(content)
        self.watcher.opened_files()
        start, outcome = time.monotonic(), "read"
        try:
            if generate is corpus.make_manifest:
                collect_items([str(file)], self.folder)
            elif generate is corpus.make_video:
                load_video(file, 3, isolated=self.pool)
            else:
                load_image(file if seed % 2 else content, isolated=self.pool)
        except (ImageError, UsageError) as error:
            outcome = getattr(error, "kind", "UsageError")
            wrong = [] if "\n" not in str(error) and len(str(error)) < 20_000 else [str(error)]
            assert not wrong, f"seed {seed}: the message is one line"
        self.slowest = max(self.slowest, time.monotonic() - start)
        self.outcomes[outcome] += 1
        assert self.slowest < TIMEOUT_S, f"seed {seed} took {self.slowest:.0f} s"
        assert self.watcher.opened_files() <= {name}, f"seed {seed}"
        file.unlink()
        self.memory = max(self.memory, peak_memory(self.pool._all))

    def summary(self) -> str:
        """Check the totals over all inputs and summarise them."""
        assert not self.watcher.connections()
        self.pool.close()
        assert self.memory < MAX_MEMORY_BYTES
        return f"slowest {self.slowest:.1f} s, {self.memory / 1e6:.0f} MB, {dict(self.outcomes.most_common())}"


GENERATORS: list[Generator] = [corpus.make_image, corpus.make_video, corpus.make_manifest]


@pytest.mark.parametrize("generate", GENERATORS, ids=lambda generate: str(generate.__name__))
def test_sample(generate: Generator, watcher: OpenWatcher, tmp_path: Path) -> None:
    run = _all(generate, range(150), watcher, tmp_path)
    assert len(run.outcomes) > 1, "some are read, some refused"
    print(run.summary())


@pytest.mark.slow
@pytest.mark.parametrize("generate", GENERATORS, ids=lambda generate: str(generate.__name__))
def test_full_corpus(generate: Generator, watcher: OpenWatcher, tmp_path: Path) -> None:
    """`NUM_INPUTS` over the three kinds of inputs."""
    print(generate.__name__, _all(generate, range(1000, 1000 + -(-NUM_INPUTS // 3)), watcher, tmp_path).summary())


def _all(generate: Generator, seeds: range, watcher: OpenWatcher, folder: Path) -> Run:
    run = Run(folder, watcher)
    for seed in seeds:
        run.process(generate, seed)
    return run
