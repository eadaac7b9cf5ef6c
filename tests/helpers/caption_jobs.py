"""Caption jobs with a stand-in for the model, for each form of output, in the working folder."""

from __future__ import annotations

import csv
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from job_rows import rows_of
from PIL import Image

from mmspec.app.caption.command import build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.io.images import load_image
from mmspec.app.modeling.captioner import Caption, ComparisonTotals, Provenance

NAMES = {"jsonl": "c.jsonl", "csv": "c.csv", "parquet": "o", "webdataset": "o", "txt": "-", "texts": "t"}
"""Outputs by form; texts: text files in a folder, txt: beside the pictures."""
SHARDS, TEXTS = ("parquet", "webdataset"), ("txt", "texts")


class Killed(BaseException):
    """As SIGKILL: nothing after it runs in the job."""


@dataclass
class Fake:
    """Captions that name the picture's width (so that a mix-up shows), the prompt and the batch's seed."""

    before: Callable[[list[int]], None] = lambda widths: None
    calls: list[list[int]] = field(default_factory=list)
    comparison: ComparisonTotals = field(default_factory=ComparisonTotals)
    dtype: str = "float32"
    acceptance: float = 0.5
    sampled: bool = False
    provenance: Provenance = field(default_factory=Provenance)

    def count_tokens(self, width: int, height: int) -> int | None:
        return None

    def caption(
        self, images: Sequence[Image.Image], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> list[Caption]:
        widths = [image.width for image in images]
        self.calls.append(widths)
        self.before(widths)
        tail = f" {seed}" if self.sampled else ""
        flags = compare or [False] * len(widths)
        return [
            Caption(f"{w} {p}{tail}", 9, 5, 4, 1.0, 0.1, 0.01, "eos", True if on else None)
            for w, p, on in zip(widths, prompts, flags, strict=True)
        ]


def kill_after(batches: int) -> Fake:
    def before(widths: list[int]) -> None:
        if len(fake.calls) > batches:
            raise Killed

    fake = Fake(before=before)
    return fake


class Counted(Fake):
    """Captions that count themselves for the parent process; also of clips."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self._number = number

    def caption(self, images: Any, prompts: Sequence[str], *rest: Any) -> Any:
        with self._number.get_lock():
            self._number.value += len(images)
        first = [image if isinstance(image, Image.Image) else image.frames[0] for image in images]
        return super().caption(first, prompts, *rest)


def run_with_kills(run: Callable[[Fake], Any], rng: random.Random, num_kills: int, most: int, pause_s: float) -> None:
    """Processes, forked from this one, that run a job one after the other. Each but the last is killed by SIGKILL after
    1 to `most` more captions, and 0 to `pause_s` seconds; the last one ends well."""
    fork = multiprocessing.get_context("fork")
    number = fork.Value("i", 0)
    for kill in range(num_kills + 1):
        process = fork.Process(target=run, args=(Counted(number),))
        process.start()
        target = number.value + rng.randint(1, most)
        while process.is_alive() and (kill == num_kills or number.value < target):
            time.sleep(0.001)
        if kill < num_kills:
            time.sleep(rng.uniform(0, pause_s))
            assert process.is_alive(), "the job ended before it was killed"
            process.kill()
        process.join()
    assert process.exitcode == 0


def run_config(config: CaptionConfig, captioner: Any = None) -> int:
    """The exit code of a job, with a stand-in for the model or another one."""
    executor = LocalExecutor(config, lambda: captioner or Fake())
    return CaptionJob(config, build_output(config, ProcessInfo()), executor).run()


def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight pictures, 10 to 17 wide, decoded in this process, in the working folder."""
    monkeypatch.setattr("mmspec.app.caption.executor.decode_item", lambda item, *rest: load_image(item.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    for number in range(8):
        draw(number)
    return tmp_path


def draw(number: int, width: int | None = None) -> None:
    """Put the picture of that number where it belongs, or another one."""
    Image.new("RGB", (width or 10 + number, 8)).save(f"p/{number}.png")


def job(
    form: str = "jsonl", fake: Fake | None = None, process: ProcessInfo | None = None, **options: Any
) -> CaptionJob:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    process = process or ProcessInfo()
    base = {"paths": ("p",), "model": "m", "batch_size": 2, "prompt": "x", "out": NAMES[form], "rows_per_shard": 3}
    config = CaptionConfig(**(base | {"format": "txt" if form == "texts" else form} | options))
    return CaptionJob(
        config, build_output(config, process), LocalExecutor(config, lambda: Fake() if fake is None else fake, process)
    )


def captions(form: str) -> dict[str, str | None]:
    """The captions that are written, by the number of their picture; of a row with an error None, or nothing."""
    if form in TEXTS:
        return {path.stem: path.read_text() for path in sorted(Path("p" if form == "txt" else "t").rglob("*.txt"))}
    if form == "csv":
        with Path("c.csv").open(encoding="utf-8-sig", newline="") as stream:
            rows: list[dict[str, Any]] = list(csv.DictReader(stream))
    else:
        rows = rows_of(Path(NAMES[form]))
    assert len({row["id"] for row in rows}) == len(rows)
    return {Path(row["id"]).stem: row["caption"] or None for row in rows}


def expected(prompt: str, *without: int) -> dict[str, str]:
    return {str(number): f"{10 + number} {prompt}" for number in range(8) if number not in without}


def good(form: str) -> dict[str, str]:
    """The captions without rows that have none."""
    return {name: text for name, text in captions(form).items() if text}


def written() -> dict[str, bytes]:
    """All files but the pictures, with their content."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.suffix != ".png"}
