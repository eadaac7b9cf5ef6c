"""Large jobs: a million finished rows are resumed, a hundred thousand rows begin at once, in bounded memory.

Each test prints one line for research/results; only memory is asserted.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from caption_jobs import Fake
from PIL import Image
from test_app_jobs import job

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.io.output import StreamOutput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_ROWS = 1_000_000


def write_job(folder: Path, count: int) -> Path:
    """A manifest and the rows of a finished job of `count` pictures, all but the last."""
    (folder / "p").mkdir()
    Image.new("RGB", (10, 8)).save(folder / "p" / "0.png")
    manifest = folder / "p" / "list.jsonl"
    manifest.write_text('{"file_name": "0.png", "id": "0"}\n')
    job(folder, Fake(), paths=(str(manifest),), model="tiny").run()
    row = json.loads((folder / "out.jsonl").read_text())
    with manifest.open("w") as names, (folder / "out.jsonl").open("w") as rows:
        for number in range(count):
            names.write(f'{{"file_name": "{number:07d}.png", "id": "{number:07d}"}}\n')
            if number < count - 1:
                line = json.dumps(row | {"id": f"{number:07d}", "index": number}) + "\n"
                rows.write(line.replace("p/0.png", f"p/{number:07d}.png"))  # the file that the row is about
    Image.new("RGB", (10, 8)).save(folder / "p" / f"{count - 1:07d}.png")
    Image.new("RGB", (10, 8)).save(folder / "p" / f"{0:07d}.png")
    return manifest


def test_a_million_finished_rows_are_resumed(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, NUM_ROWS)
    code = (
        "import resource, sys, time; from mmspec.app.cli.main import main; began = time.perf_counter(); "
        "code = main(sys.argv[1:]); kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "print(code, time.perf_counter() - began, kib)"
    )
    args = ["caption", str(manifest), "--model", "tiny", "--out", str(tmp_path / "out.jsonl"), "--no-progress"]
    run = subprocess.run(
        [sys.executable, "-c", code, *args, "--max-new-tokens", "128"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    exit_code, seconds, kib = run.stdout.split()
    assert exit_code == "0" and f"{NUM_ROWS - 1} skipped" in run.stderr, run.stderr
    assert int(kib) < 1_000_000, "more than 1 GB"
    assert sum(1 for _ in (tmp_path / "out.jsonl").open("rb")) == NUM_ROWS
    print(f"\n{NUM_ROWS} ids resumed, the last row captioned, in {float(seconds):.0f} s and {int(kib) / 1e6:.2f} GB, "
          "torch included")  # fmt: skip


def test_a_hundred_thousand_rows_begin_at_once(tmp_path: Path) -> None:
    """Of archives `test_many_rows_start_at_once_in_little_memory` measures it."""
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    shard, count = tmp_path / "x.parquet", 100_000
    Image.effect_noise((32, 32), 50).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    schema = pa.schema([("image", pa.binary())])
    with pq.ParquetWriter(shard, schema, use_dictionary=False, compression="none") as writer:
        for _ in range(count // 1000):
            writer.write_table(pa.table({"image": [data] * 1000}, schema=schema))
    began = time.perf_counter()
    first: list[float] = []

    def stop(widths: list[int]) -> None:
        first.append(time.perf_counter() - began)
        raise SystemExit

    config = CaptionConfig((str(shard),), "m", batch_size=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SystemExit):
        CaptionJob(config, StreamOutput(), LocalExecutor(config, lambda: Fake(stop))).run()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500_000, f"{grown} KiB more"
    print(f"\n{count} rows of a table of {shard.stat().st_size >> 20} MiB: the first batch reaches the model after "
          f"{first[0]:.1f} s, {max(0, grown) >> 10} MiB more memory")  # fmt: skip
