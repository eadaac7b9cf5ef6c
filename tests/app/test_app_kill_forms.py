"""SIGKILL at random moments, for each form of output, side-cars included: nothing is lost, nothing twice, nothing torn.

Processes are forked from this one, which has imported everything; captions come from a stand-in.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import NAMES, SHARDS, good, job, run_with_kills, written
from job_rows import check_widths
from PIL import Image

NUM_PICTURES, NUM_KILLS = 48, 2


@pytest.mark.every(2)
@pytest.mark.parametrize("form", list(NAMES))
def test_a_killed_job_is_completed(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    monkeypatch.chdir(tmp_path)
    Path("p").mkdir()
    for number in range(NUM_PICTURES):
        Image.new("RGB", (10 + number, 8)).save(f"p/{number:02}.png")
    options: dict[str, Any] = {"batch_size": 4, "rows_per_shard": 20, "progress": False, "threads": 2}
    run_with_kills(lambda fake: job(form, fake, **options).run(), random.Random(form), NUM_KILLS, NUM_PICTURES // 3, 0)
    assert good(form) == {f"{number:02}": f"{10 + number} x" for number in range(NUM_PICTURES)}
    assert not [
        name for name in written() if ".part" in name or ".open" in name or name.endswith((".job", ".job.json"))
    ]
    if form in SHARDS:
        check_widths(Path("o"))
