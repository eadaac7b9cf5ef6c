"""Captions as Parquet shards and WebDataset archives: what loads them, kills at every byte, ranks, retries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from job_rows import check_widths, rows_of
from PIL import Image
from test_app_jobs import Fake

from mmspec.app.caption.command import build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.errors import UsageError
from mmspec.app.io.images import load_image
from mmspec.app.io.output import Finished

pytestmark = pytest.mark.usefixtures("shared_decoders")

FORMATS = ("parquet", "webdataset")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten pictures, 10 to 19 wide, the fourth of them broken; decoded in this process, for many short jobs."""
    monkeypatch.setattr("mmspec.app.caption.executor.decode_item", lambda item, *rest: load_image(item.path))
    (tmp_path / "p").mkdir()
    for number in range(10):
        Image.new("RGB", (10 + number, 8)).save(tmp_path / "p" / f"{number}.png")
    (tmp_path / "p" / "3.png").write_bytes(b"no")
    return tmp_path


@pytest.fixture(params=FORMATS)
def shard_format(request: pytest.FixtureRequest) -> str:
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="optional: mmspec[data]")
    return str(request.param)


def job(folder: Path, name: str, fake: Fake | None = None, process: ProcessInfo | None = None, **options: Any) -> int:
    process = process or ProcessInfo()
    base = {"paths": (str(folder / "p"),), "model": "m", "out": str(folder / "out"), "batch_size": 2}
    config = CaptionConfig(**(base | {"format": name, "rows_per_shard": 4} | options))

    def load() -> Fake:
        assert fake is not None, "the model was loaded although there was nothing to do"
        return fake

    return CaptionJob(config, build_output(config, process), LocalExecutor(config, load, process)).run()


def rows(folder: Path) -> list[dict[str, Any]]:
    check_widths(folder / "out")
    return rows_of(folder / "out")


def is_complete(found: Sequence[dict[str, Any]]) -> bool:
    captions = [(row["caption"] or "error").split()[0] for row in found]
    return captions == [str(10 + i) if i != 3 else "error" for i in range(10)]


def test_shards_hold_every_row_once(folder: Path, shard_format: str) -> None:
    assert job(folder, shard_format, Fake()) == 1
    assert is_complete(rows(folder))
    suffix = {"parquet": "parquet", "webdataset": "tar"}[shard_format]
    assert len(list((folder / "out").glob(f"part-*.{suffix}"))) == 3 and not list((folder / "out").glob(".open*"))
    before = {path: path.read_bytes() for path in (folder / "out").iterdir()}
    assert job(folder, shard_format) == 1
    assert {path: path.read_bytes() for path in (folder / "out").iterdir()} == before


def test_a_job_that_dies_anywhere_is_completed(folder: Path, shard_format: str) -> None:
    for dies_at in range(10, 20):
        shutil.rmtree(folder / "out", ignore_errors=True)

        def die(widths: list[int], at: int = dies_at) -> None:
            if at in widths:
                raise SystemExit

        with pytest.raises(SystemExit):
            job(folder, shard_format, Fake(die) if dies_at != 13 else Fake(lambda widths: die([13])))
        assert job(folder, shard_format, Fake()) == 1
        assert is_complete(rows(folder)), dies_at


def test_a_growing_shard_is_cut_at_any_byte(folder: Path, shard_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGKILL: the growing shard is left where it was, and holds any number of bytes."""
    with monkeypatch.context() as patch:
        patch.setattr("mmspec.app.io.shards.ShardedOutput._end_shard", lambda self: None)
        job(folder, shard_format, Fake(), rows_per_shard=100)
    (growing,) = (folder / "out").glob(".open*")
    data = growing.read_bytes()
    others = {path: path.read_bytes() for path in (folder / "out").glob("*.errors.jsonl")}
    for cut in {*range(0, len(data), len(data) // 13), len(data)}:
        shutil.rmtree(folder / "out")
        (folder / "out").mkdir()
        for path, text in others.items():
            path.write_bytes(text[: len(text) * cut // len(data)])
        growing.write_bytes(data[:cut])
        with pytest.raises(UsageError, match=r"no _mmspec\.meta\.json|no caption job wrote"):
            job(folder, shard_format, Fake(), rows_per_shard=100)
        fingerprint = CaptionConfig((), "m").fingerprint(1)
        (folder / "out" / "_mmspec.meta.json").write_text(json.dumps({"settings": fingerprint}))
        assert job(folder, shard_format, Fake(), rows_per_shard=100) == 1
        assert is_complete(rows(folder)), cut


def test_retried_errors_and_refusals(folder: Path, shard_format: str) -> None:
    job(folder, shard_format, Fake())
    with pytest.raises(UsageError, match="prompt None"):
        job(folder, shard_format, Fake(), prompt="x")
    Image.new("RGB", (13, 8)).save(folder / "p" / "3.png")
    fake = Fake()
    assert job(folder, shard_format, fake, retry_errors=True) == 0 and [13] in [call[-1:] for call in fake.calls]
    assert [row["caption"].split()[0] for row in rows(folder)] == [str(10 + i) for i in range(10)]
    assert job(folder, shard_format, Fake(), overwrite=True, prompt="x") == 0
    assert {row["caption"].split()[1] for row in rows(folder)} == {"x"}


def test_ranks_have_shards_of_their_own(folder: Path, shard_format: str) -> None:
    def die(widths: list[int]) -> None:
        if 16 in widths:
            raise SystemExit

    with pytest.raises(SystemExit):
        job(folder, shard_format, Fake(die), ProcessInfo(0, 2))
    assert job(folder, shard_format, Fake(), ProcessInfo(1, 2)) == 0, "the other rank has not finished"
    assert job(folder, shard_format, Fake(), ProcessInfo(0, 2)) == 1
    assert is_complete(rows(folder))
    assert job(folder, shard_format, None, ProcessInfo(2, 3)) == 1 and job(folder, shard_format) == 1


def test_two_jobs_cannot_write_one_folder(folder: Path, shard_format: str) -> None:
    def again(widths: list[int]) -> None:
        with pytest.raises(UsageError, match="another job is writing"):
            job(folder, shard_format, Fake())

    assert job(folder, shard_format, Fake(again)) == 1


def test_a_file_or_foreign_shards_are_refused(folder: Path, shard_format: str) -> None:
    (folder / "out").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        job(folder, shard_format, Fake())
    (folder / "out").unlink()
    (folder / "out").mkdir()
    (folder / "out" / f"mine.{'tar' if shard_format == 'webdataset' else 'parquet'}").write_text("x")
    with pytest.raises(UsageError, match="no caption job wrote"):
        job(folder, shard_format, Fake())


def test_equal_states_share_one_object() -> None:
    row = {"id": "a.png", "file_name": "a.png", "prompt_sha1": "a", "error": None}
    assert Finished.of(row) is Finished.of(dict(row))


def test_datasets_loads_the_shards(folder: Path, shard_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    job(folder, shard_format, Fake())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    suffix = {"parquet": "parquet", "webdataset": "tar"}[shard_format]
    loaded = datasets.load_dataset(
        shard_format, data_files=str(folder / "out" / f"*.{suffix}"), split="train", cache_dir=str(folder / "cache")
    )
    if shard_format == "parquet":
        assert loaded.num_rows == 10 and loaded["index"] == list(range(10))
    else:
        assert [sample["png"].width for sample in loaded] == [10 + i for i in range(10) if i != 3]
        assert [sample["txt"].split()[0] for sample in loaded] == [str(10 + i) for i in range(10) if i != 3]


def test_webdataset_loads_the_archives(folder: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="optional")
    job(folder, "webdataset", Fake())
    shards = sorted(map(str, (folder / "out").glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png", "txt", "json"))
    assert [(picture.width, row["index"]) for picture, _, row in samples] == [(10 + i, i) for i in range(10) if i != 3]
