"""SIGKILL at random moments, for each form of output, side-cars included: nothing is lost, nothing twice, nothing torn.

Processes are forked from this one, which has imported everything; captions come from a stand-in.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_rows import check_widths, rows_of
from PIL import Image
from test_app_kills_inputs import Counted

from mmspec.app.caption.command import build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.io.sidecars import PICTURES_FILE

NUM_PICTURES, NUM_KILLS = 48, 2


def run(folder: Path, options: dict[str, Any], number: Any) -> None:
    config = CaptionConfig(
        (str(folder / "p"),), "m", batch_size=4, rows_per_shard=20, progress=False, threads=2, prompt="x", **options
    )
    CaptionJob(config, build_output(config, ProcessInfo()), LocalExecutor(config, lambda: Counted(number))).run()


def read_rows(name: str) -> Callable[[Path], list[tuple[str, str]]]:
    def read(folder: Path) -> list[tuple[str, str]]:
        check_widths(folder / name)
        return [(row["file_name"], row["caption"]) for row in rows_of(folder / name)]

    return read


def read_texts(where: str) -> Callable[[Path], list[tuple[str, str]]]:
    def read(folder: Path) -> list[tuple[str, str]]:
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != PICTURES_FILE]
        assert not [file for file in files if file.suffix not in (".png", ".txt")]
        return [(f"p/{file.stem}.png", file.read_text()) for file in (folder / where).glob("*.txt")]

    return read


FORMS: dict[str, tuple[dict[str, Any], Callable[[Path], list[tuple[str, str]]]]] = {
    "jsonl": ({"out": "out.jsonl"}, read_rows("out.jsonl")),
    "parquet": ({"out": "out", "format": "parquet"}, read_rows("out")),
    "webdataset": ({"out": "out", "format": "webdataset"}, read_rows("out")),
    "texts beside": ({"format": "txt"}, read_texts("p")),
    "texts in a folder": ({"out": "out", "format": "txt"}, read_texts("out")),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_job_is_completed(form: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for number in range(NUM_PICTURES):
        Image.new("RGB", (10 + number, 8)).save(tmp_path / "p" / f"{number:02}.png")
    options, read = FORMS[form]
    options = options | ({"out": str(tmp_path / options["out"])} if "out" in options else {})
    fork, rng = multiprocessing.get_context("fork"), random.Random(form)
    number = fork.Value("i", 0)
    for kill in range(NUM_KILLS + 1):
        job = fork.Process(target=run, args=(tmp_path, options, number))
        job.start()
        target = number.value + rng.randint(1, NUM_PICTURES // 3)
        while job.is_alive() and (kill == NUM_KILLS or number.value < target):
            time.sleep(0.001)
        if kill < NUM_KILLS:
            assert job.is_alive(), "the job ended before it was killed"
            job.kill()
        job.join()
    assert job.exitcode == 0
    expected = [(f"p/{number:02}.png", f"{10 + number} x") for number in range(NUM_PICTURES)]
    found = sorted((f"p/{Path(name).name}", caption) for name, caption in read(tmp_path))
    assert found == expected
