"""A hub that does not answer, and model folders that are not there: one line within seconds, with what to do."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.modeling.load import load_model, load_text_model
from mmspec.app.modeling.random_models import random_model
from mmspec.drafters import hub
from mmspec.drafters.registry import build_drafter
from research.synthetic_images import write_images

MAX_SECONDS = 10.0
assert hub.PROBE_TIMEOUT_S < hub.MAX_PROBE_S < MAX_SECONDS, "tests wait for less"


@pytest.fixture(params=["closed port", "accepts and never answers", "answers 503"])
def dead_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a hub on this machine that serves nothing."""
    import threading

    from huggingface_hub import constants

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if request.param != "closed port":
            server.listen(50)
        if request.param == "answers 503":
            threading.Thread(target=_answer_503, args=(server,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.5)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield address


def _answer_503(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_a_hub_that_does_not_answer_is_reported_in_time(
    dead_hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "in", 1)
    start = time.monotonic()
    assert main(["caption", str(tmp_path / "in"), "--model", "no-owner/no-model"]) == 2
    assert time.monotonic() - start < MAX_SECONDS
    err = capsys.readouterr().err
    assert f"the hub at {dead_hub} cannot be reached" in err and "HF_HUB_OFFLINE=1" in err
    assert err.count("\n") == 2, "loading ..., and the error"


def test_a_drafter_on_that_hub_too(dead_hub: str) -> None:
    start = time.monotonic()
    with pytest.raises(OSError, match="cannot be reached"):
        build_drafter("no-owner/no-drafter")
    assert time.monotonic() - start < MAX_SECONDS


def test_local_folders_need_no_hub(dead_hub: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for part in random_model("tiny"):
        part.save_pretrained(folder)
    start = time.monotonic()
    load_model(str(folder))
    assert time.monotonic() - start < 4


def test_a_probe_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that never answers blocks inside the system library, where no timeout of the client counts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "MAX_PROBE_S", 0.2)
    monkeypatch.setattr(hub, "_probe", lambda endpoint: time.sleep(5))
    start = time.monotonic()
    assert "no answer within" in (hub.unreachable_reason() or "")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "name",
    ["./nosuch", "../nosuch/model", "/no/such/model", "~/nosuch", "models/llava/7b", "nosuch/", ".\\nosuch", " "],
)
def test_a_model_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        load_model(name)


def test_a_model_that_is_a_file_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: name the folder"):
        load_model(str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


ADVICE = (
    "name a folder",
    "huggingface.co",
    "pip install",
    "there is no folder",
    "a hub id is",
    "name the folder",
    "did you mean",
)


@pytest.mark.parametrize("name", ["x.gguf", "owner/x.gguf", "owner/missing.gguf", "./owner/x.gguf", "a/b/c.gguf"])
def test_a_gguf_gets_one_advice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None about folders where a file is meant, nor the other way round."""
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    for file in ("x.gguf", "owner/x.gguf"):
        Path(file).write_bytes(b"GGUF" + bytes(60))
    for load, advice in ((load_model, ["name a folder"]), (load_text_model, [])):
        with pytest.raises(UsageError) as failed:
            load(name)
        said = str(failed.value)
        assert [one for one in ADVICE if one in said] == advice and name in said and said.isprintable()
        assert len(said) <= 300
