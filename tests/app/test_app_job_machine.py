"""What surrounds a caption job: variables that a launcher left, a machine that lacks something, batches of Ray."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from caption_jobs import Fake, captions, expected, job, make_folder
from input_table import line
from PIL import Image

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.errors import MachineError, OutputError, UsageError
from mmspec.app.io import decode, tables, web
from mmspec.app.io.images import ImageError, load_image
from mmspec.vision.video.worker_process import DecoderStartError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


@line("RANK and WORLD_SIZE left over from a launcher")
@pytest.mark.parametrize("form", ["jsonl", "webdataset"])
def test_leftover_ranks(form: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for world in (2, 8):
        assert job(form, process=ProcessInfo(0, world)).run() == 0
        where = "c.rank00000.jsonl" if form == "jsonl" else "o"
        err = capsys.readouterr().err
        assert f"rows of process 1 of {world} in {where}, until the other processes have run" in err
        assert "unset RANK and WORLD_SIZE" in err
    assert job(form).run() == 0 and captions(form) == expected("x")  # what it has written is not done again
    assert "4 captioned, 0 failed, 4 skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "4", "RANK": ""},
        {"RANK": "1"},
        {"RANK": "x" * 400},
        {"RANK": "-1", "WORLD_SIZE": "2"},
    ],
)
def test_ranks_of_the_environment(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"RANK.*unset them|unset them.*RANK") as error:
        ProcessInfo.from_env(environ)
    assert len(str(error.value)) <= 300
    for alone in ({"WORLD_SIZE": "1"}, {"WORLD_SIZE": "", "RANK": "", "LOCAL_RANK": ""}, {"RANK": "0"}):
        assert ProcessInfo.from_env(alone) == ProcessInfo() == ProcessInfo.from_env({})
    assert ProcessInfo.from_env({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == ProcessInfo(2, 4, 1)


def read_as(name: str) -> Callable[[list[Any]], Any]:
    import pyarrow as pa

    if name == "pandas":
        import pandas

        return lambda cells: pandas.DataFrame({"image": cells, "q": ["a", None], "caption": ["old", "old"]})
    return lambda cells: pa.table({"image": cells, "q": ["a", None], "caption": ["old", "old"]})


@pytest.mark.parametrize("name", ["pyarrow", "pandas"])
def test_batches_of_the_public_actor(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    from mmspec.app.caption import command
    from mmspec.app.caption.ray_actor import CaptionActor

    monkeypatch.setattr(command, "build_captioner", lambda config, process: Fake())
    monkeypatch.setattr("mmspec.app.caption.ray_actor.load_image", lambda data, *rest: load_image(data))
    actor = CaptionActor("m", prompt_column="q", prompt="x")
    cells = [(folder / "p" / f"{number}.png").read_bytes() for number in (3, 4)]
    found = actor(read_as(name)(cells))
    assert [str(text) for text in found["caption"]] == ["13 a", "14 x"] and len(found["image"]) == 2


@line("a decoder process that does not start, or sends wrong bytes")
@pytest.mark.parametrize("trouble", ["process", "files"])
def test_the_machines_trouble_is_no_bad_picture(trouble: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.app.caption.executor.decode_item", decode.decode_item)

    def load(path: Path, *rest: Any, **options: Any) -> Image.Image:
        if path.name == "5.png":
            if trouble == "process":
                raise DecoderStartError("Resource temporarily unavailable")
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                raise ImageError("Unreadable", "Too many open files") from error
        return load_image(path)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "load_media", load)
        with pytest.raises(OutputError, match=r"(unavailable|open files).*run the same command again") as error:
            job().run()
        assert isinstance(error.value, MachineError) and len(str(error.value)) <= 300
    assert list(captions("jsonl")) == ["0", "1", "2", "3"]  # and no row of an error
    monkeypatch.setattr(decode, "load_media", lambda path, *rest, **options: load_image(path))
    assert job().run() == 0 and captions("jsonl") == expected("x")


@line("a job that was suspended (SIGSTOP, a closed laptop)")
def test_an_address_is_read_again_after_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        attempts.append(0)
        raise TimeoutError

    attempts: list[int] = []
    monkeypatch.setattr(web, "_opener", lambda pace, public: SimpleNamespace(open=fail))
    monkeypatch.setattr(web, "RETRY_WAITS_S", (0.0, 0.0))
    for suspended in (True, False):
        attempts.clear()
        monkeypatch.setattr(web.Pace, "was_suspended", suspended)
        with pytest.raises(ImageError, match="no whole answer"):
            web.fetch("http://example.org/a.png", 10)
        assert len(attempts) == (web.MAX_FETCHES if suspended else 1)


def test_nor_a_bad_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = [(folder / "p" / f"{number}.png").read_bytes() for number in range(2)]
    pq.write_table(pa.table({"image": data}), "t.parquet")

    def fail(*_: Any) -> Any:
        raise DecoderStartError("Resource temporarily unavailable")

    monkeypatch.setattr(tables, "RemoteTable", fail)
    with pytest.raises(MachineError, match="unavailable"):
        job(paths=("t.parquet",)).run()
