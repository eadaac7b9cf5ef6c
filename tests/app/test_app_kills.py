"""SIGKILL at random moments, 12 times in a job of 1,000 pictures: no row is lost or repeated, captions are the same.

Victims: the process that writes ("driver"), one that captions ("actor"), one that decodes ("decoder"), all processes of
the job at once ("all"). With Ray and without. Each test prints one line for research/results.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from research.synthetic_images import draw_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_ITEMS, NUM_KILLS = 1000, 12
VARYING = ("seconds", "ttft_s", "n_rounds", "tau", "drafter")
TITLES = {"actor": ("ray::CaptionWorker",), "decoder": ("mmspec.vision.video.decode_worker",)}
"""What the command line of a victim contains."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(NUM_ITEMS):
        draw_image(number, (64, 48))[0].save(folder / f"{number:04d}.png")
    return folder


@pytest.fixture(scope="module")
def undisturbed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run = start(pictures, out)
    assert run.wait(timeout=1200) == 0, run.communicate()[1]
    return essence(out)


def start(pictures: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    args = [str(pictures), "--model", "tiny", "--max-new-tokens", "24", "--out", str(out), "--no-progress", *options]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mmspec", "caption", *args],
        env=environ, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def essence(path: Path) -> dict[str, Any]:
    """Rows by id, without what differs from run to run; fails on a repeated id."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "a row is repeated"
    return {row["id"]: {key: value for key, value in row.items() if key not in VARYING} for row in rows}


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(run: subprocess.Popen[str], victim: str) -> bool:
    """Kill one process of that kind, or all; returns whether there was one."""
    root = psutil.Process(run.pid)
    family = root.children(recursive=True)
    if victim in TITLES:
        family = [process for process in family if is_titled(process, TITLES[victim])]
        family = random.sample(family, min(1, len(family)))
    elif victim == "driver":
        family = [root]
    else:
        family = [root, *family]
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return bool(family)


def is_titled(process: psutil.Process, texts: tuple[str, ...]) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(text in line for text in texts)


def wait_for(out: Path, rows: int, run: subprocess.Popen[str]) -> None:
    while run.poll() is None and num_rows(out) < rows:
        time.sleep(0.005)


@pytest.mark.parametrize("options", [(), ("--ray", "--actors", "2")], ids=["one process", "ray"])
@pytest.mark.parametrize("victim", ["driver", "actor", "decoder", "all"])
def test_nothing_is_lost_or_repeated(
    victim: str, options: tuple[str, ...], pictures: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    if options:
        pytest.importorskip("ray", reason="optional: mmspec[ray]")
    elif victim == "actor":
        pytest.skip("without Ray the driver is the actor")
    out, rng, restarts, kills, after = tmp_path / "out.jsonl", random.Random(f"{victim}{options}"), 0, 0, []
    began = time.perf_counter()
    run = start(pictures, out, *options)
    while kills < NUM_KILLS:
        step = (NUM_ITEMS - num_rows(out)) // (NUM_KILLS + 2 - kills)
        wait_for(out, num_rows(out) + rng.randint(1, max(1, step)), run)
        time.sleep(rng.uniform(0, 0.05))
        assert run.poll() is None, f"the job ended after {kills} kills: {run.communicate()[1]}"
        if not kill(run, victim):
            continue
        kills += 1
        after.append(num_rows(out))
        if victim in ("driver", "all"):
            assert run.wait(timeout=120) == -signal.SIGKILL
            run.communicate()
            restarts += 1
            run = start(pictures, out, *options)
    code, errors = run.wait(timeout=1200), run.communicate()[1]
    assert code == 0, errors
    assert essence(out) == undisturbed
    print(f"\n{' '.join(options) or 'one process'}, {kills} kills of {victim} after {after} rows, {restarts} restarts: "
          f"{NUM_ITEMS} rows, 0 lost, 0 repeated, all equal; {time.perf_counter() - began:.0f} s")  # fmt: skip


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """A failed test must not leave its processes."""
    yield
    for process in psutil.Process().children():
        process.kill()
