"""Caption jobs whose drafter learns: when, what is stored, resuming, several processes on one cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mmspec.app.caption.command import resolve_learning
from mmspec.app.caption.config import CaptionConfig
from mmspec.app.cli.main import main
from mmspec.app.modeling.synthetic_images import write_images
from mmspec.files import CACHE_VARIABLE
from mmspec.learning.budget import LearningBudget
from mmspec.learning.store import learned_files

VARYING = ("seconds", "ttft_s", "n_rounds", "tau", "drafter")
SAYS = "the drafter learns from this job; weights, nothing else, are stored in"
WEIGHTS = {"weight", "bias", "basis", "means", "candidate_ids", "frequencies", "num_examples"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that the time of a call does not limit."""

    def earn(self: LearningBudget, call_s: float) -> None:
        self.earned_s = self.spent_s + 1.0

    monkeypatch.setattr(LearningBudget, "earn", earn)


def caption(folder: Path, name: str, *options: str, tokens: int = 24) -> list[dict[str, Any]]:
    """The rows of a job on the pictures of a folder, without what differs from run to run."""
    out = folder / f"{name}.jsonl"
    arguments = ["--model", "tiny", "--out", str(out), "--max-new-tokens", str(tokens), "--batch-size", "4"]
    assert main(["caption", str(folder / "p"), *arguments, "--no-progress", *options]) == 0
    return essence(out)


def essence(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in VARYING} for row in rows]


@pytest.mark.usefixtures("generous")
def test_a_job_learns_by_default_and_is_resumed_exactly(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "p", 12)
    expected = caption(tmp_path, "plain", "--no-learn")
    assert not (cache / "learned").exists() and SAYS not in capsys.readouterr().err
    assert caption(tmp_path, "learned") == expected
    assert f"{SAYS} {cache}" in capsys.readouterr().err
    (file,) = learned_files()
    with safe_open(file.path, framework="pt") as stored:
        assert set(stored.keys()) == WEIGHTS and set(stored.metadata()) == {"format", "target", "key"}
    stored_bytes = file.path.read_bytes()
    assert not any(word.encode() in stored_bytes for word in expected[0]["caption"].split() if len(word) > 4)
    out = tmp_path / "learned.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]) + lines[5][:30])  # killed in the middle of a batch
    assert caption(tmp_path, "learned") == expected, "with weights that the first run has left"


@pytest.mark.parametrize("options", [("--drafter", "lookup"), ("--drafter", "none"), ("--no-learn",)])
def test_what_does_not_learn(
    tmp_path: Path, cache: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "p", 2)
    caption(tmp_path, "out", *options, tokens=4)
    assert SAYS not in capsys.readouterr().err and not (cache / "learned").exists()


def test_a_drafter_that_cannot_learn_is_refused_if_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "p", 1)
    assert main(["caption", str(tmp_path / "p"), "--model", "tiny", "--drafter", "lookup", "--learn"]) == 2
    assert "learn=True needs a drafter with weights that can be learned" in capsys.readouterr().err


def test_where_a_job_learns_by_default() -> None:
    def config(learn: bool | None, drafter: str = "auto") -> CaptionConfig:
        return CaptionConfig((), "m", drafter=drafter, learn=learn)

    assert resolve_learning(config(None), "cpu") == "auto" and resolve_learning(config(None), "cuda") is False
    assert resolve_learning(config(True), "cuda") == "auto" and resolve_learning(config(False), "cpu") is False
    assert resolve_learning(config(True, "arbitrated"), "cpu") == "auto"
    assert resolve_learning(config(True, "flash"), "cpu") is True and resolve_learning(config(None, "flash"), "cpu")


@pytest.mark.slow
def test_ranks_share_a_cache_folder(tmp_path: Path, cache: Path) -> None:
    """Both read and replace one file; the next job goes on from it."""
    write_images(tmp_path / "p", 160)
    expected = caption(tmp_path, "plain", "--no-learn", tokens=64)
    for name in ("first", "second"):
        arguments = [str(tmp_path / "p"), "--model", "tiny", "--out", str(tmp_path / f"{name}.jsonl"), "--no-progress"]
        arguments += ["--max-new-tokens", "64", "--batch-size", "4"]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "mmspec", "caption", *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"},
                cwd=Path(__file__).parent,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        stderr = [rank.communicate(timeout=240)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], stderr
        assert SAYS in stderr[0] and SAYS not in stderr[1] and not any("ignored" in text for text in stderr), stderr
        assert essence(tmp_path / f"{name}.jsonl") == expected
        (file,) = learned_files()
    assert not list(file.path.parent.glob(".*"))
