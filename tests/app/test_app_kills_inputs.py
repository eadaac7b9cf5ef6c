"""A job of 1,000 rows of all kinds of inputs, killed ten times, in each output format; read back by other tools.

Every input is a caption or an error with a reason, exactly once. Processes are forked from this one, which has imported
everything, and captions come from a stand-in: what is tested is the way of a row from its file to the output.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import random
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caption_jobs import run_config, run_with_kills
from job_rows import check_widths, rows_of
from PIL import Image
from video_files import write_video

from mmspec.app.caption.config import CaptionConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_ROWS, NUM_KILLS = 1000, 10
KINDS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
REASONS = {"AddressNotAllowed", "BadText", "BrokenImage", "BrokenVideo", "DamagedTar", "Empty", "HttpError", "Missing",
           "NotAnImage", "OutsideInput", "TooLarge", "Truncated", "BadCell"}  # fmt: skip


def picture(number: int, kind: str | None = None) -> bytes:
    """A picture of `10 + number % 50` columns."""
    data = io.BytesIO()
    Image.new("RGB", (10 + number % 50, 8), (number % 256, 9, 9)).save(data, kind or KINDS[number % len(KINDS)])
    return data.getvalue()


def write_folder(folder: Path, count: int) -> None:
    """Pictures of all kinds; of ten one is broken, empty, cut, a bomb, or has a name that is not UTF-8."""
    folder.mkdir()
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    for number in range(count):
        name = os.fsencode(folder) + f"/{number:04d}".encode()
        data = picture(number)
        if number % 10 == 3:
            data = [b"no picture", b"", picture(number, "JPEG")[:200], bomb.getvalue(), data][number // 10 % 5]
            name += b"\xff" if number // 10 % 5 == 4 else b""
        Path(os.fsdecode(name + b".png")).write_bytes(data)


def write_archive(path: Path, count: int) -> None:
    """Samples with prompts in JSON, of which some are no text; without an end mark, which is one more row."""
    with tarfile.open(path, "w") as archive:
        for number in range(count - 1):
            prompt = '"\\ud83d ?"' if number % 10 == 1 else "[1]" if number % 10 == 2 else f'"what {number}"'
            data = b"" if number % 10 == 3 else picture(number, "PNG")
            for suffix, content in (("png", data), ("json", f'{{"prompt": {prompt}}}'.encode())):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data + bytes(-len(data) % 512))


def write_table(path: Path, count: int, server: str) -> None:
    """Bytes with hostile names, paths inside and outside, addresses good and bad, and cells that hold nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("a.json", "b.txt", "c.p\0ng", "d." + "é" * 60, None, "e.jpg?w=1")
    cells: list[dict[str, Any] | None] = []
    for number in range(count):
        kinds: Sequence[Callable[[], dict[str, Any] | None]] = (
            lambda n=number: {"bytes": picture(n), "path": names[n % len(names)]},
            lambda n=number: {"bytes": None, "path": f"{server}/{n}?X-Signature={'a' * 300}"},
            lambda n=number: {"bytes": None, "path": f"p/{n % 100 // 10:03d}0.png"},
            lambda n=number: {"bytes": None, "path": f"{server}/{('gone', 'cut')[n % 2]}/{n}"},
            lambda n=number: {"bytes": None, "path": ("../up.png", "/etc/hosts", "x/" * 2000)[n % 3]},
            lambda: None,
        )
        cells.append(kinds[number % len(kinds)]())
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    prompts = ["x" * 70_000 if number % 50 == 0 else None for number in range(count)]
    pq.write_table(pa.table({"image": pa.array(cells, struct), "prompt": prompts}), path, row_group_size=50)


def write_list(path: Path, count: int) -> None:
    """Files of the folder under ids of their own, some of which are no Unicode."""
    with path.open("w") as file:
        for number in range(count):
            row = {"file_name": f"p/{number * 10:04d}.png", "id": f"row {number}" + "\ud83d" * (number % 7 == 0)}
            file.write(json.dumps(row | ({"prompt": "\udcff"} if number % 7 == 1 else {})) + "\n")


def write_clips(folder: Path, count: int) -> None:
    """Short clips, every fourth cut in the middle."""
    folder.mkdir()
    for number in range(count):
        frames = [np.full((48, 64, 3), (shade * 30, number, 0), np.uint8) for shade in range(8)]
        path = write_video(folder / f"{number}.mp4", frames, "mpeg4", format={"movflags": "faststart"})
        if number % 4 == 3:
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])


class _Pictures(http.server.BaseHTTPRequestHandler):
    """A picture; none; or half of one, with the length of a whole."""

    def do_GET(self) -> None:
        number = int("".join(filter(str.isdigit, self.path.partition("?")[0])) or 0)
        data = picture(number)
        self.send_response(404 if "gone" in self.path else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if "cut" in self.path else data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    here = tmp_path_factory.mktemp("inputs")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_folder(here / "p", 400)
        write_archive(here / "a.tar", 260)
        write_table(here / "t.parquet", 280, f"http://127.0.0.1:{server.server_address[1]}")
        write_list(here / "m.jsonl", 40)
        write_clips(here / "clips", 20)
        yield [str(here / name) for name in ("p", "a.tar", "t.parquet", "m.jsonl", "clips")]
        server.shutdown()


@pytest.mark.parametrize("name", ["jsonl", "parquet", "webdataset"])
def test_every_row_is_there_once(name: str, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.io.web.RETRY_WAITS_S", (0.0, 0.0))
    out, rng = tmp_path / ("out.jsonl" if name == "jsonl" else "out"), random.Random(name)
    config = CaptionConfig(
        tuple(inputs), model="m", out=str(out), format=name, batch_size=4, urls="any", prompt_column="prompt",
        rows_per_shard=150, progress=False, threads=2, frames=2,
    )  # fmt: skip
    run_with_kills(lambda captioner: run_config(config, captioner), rng, NUM_KILLS, 90, 0.05)
    check_widths(out)
    rows = rows_of(out)
    assert Counter(Counter(row["id"] for row in rows).values()) == {1: NUM_ROWS}
    assert all((row["caption"] is None) == bool(row["error"]) for row in rows)
    reasons = Counter(row["error"]["type"] for row in rows if row["error"])
    assert set(reasons) <= REASONS and all(row["error"]["message"] for row in rows if row["error"])
    for row in rows:  # no caption of another picture
        if row["caption"] and row["id"].partition("#")[0].endswith(".parquet"):
            assert row["caption"].split()[0] == str(10 + expected_number(row) % 50), row
    print(
        f"\n{name}: {NUM_KILLS} kills, {NUM_ROWS} rows, {NUM_ROWS - reasons.total()} captions, errors {dict(reasons)}"
    )


def expected_number(row: dict[str, Any]) -> int:
    """The number that the picture of a row of the table was drawn from."""
    number = int(row["id"].rpartition("#")[2])
    return number % 100 // 10 * 10 if number % 6 == 2 else number
