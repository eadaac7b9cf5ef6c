"""The command line itself: help, errors, exit codes, `env`, `examples`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.cli import main as cli
from mmspec.app.errors import UsageError, one_line
from mmspec.app.train.config import TrainOptions

EXIT_74 = "74 output cannot be written (disk full, read-only, size limit)"


def test_help_of_every_command(capsys: Any) -> None:
    for args, expected in (
        (["--help"], "start here"),
        (["--help"], EXIT_74),
        (["caption", "--help"], EXIT_74),
        (["caption", "--help"], "resuming"),
        (["compare", "--help"], "one image and one question"),
        (["train", "--help"], "answers.jsonl"),
        (["examples", "--help"], "bundled examples"),
        (["env", "--help"], "bug reports"),
    ):
        with pytest.raises(SystemExit) as exited:
            cli.main(args)
        assert exited.value.code == 0
        assert expected in capsys.readouterr().out


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    """What `mmspec/__init__.py` imports is its own affair: only what the command line adds is looked at."""
    code = (
        "import mmspec, sys; before = set(sys.modules); import mmspec.app.cli.main; print(*set(sys.modules) - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, check=True
    )
    tops = {name.split(".")[0] for name in run.stdout.split()}
    assert not tops & {"torch", "transformers", "PIL", "numpy", "matplotlib", "tqdm"}


@pytest.mark.parametrize(
    "command",
    [
        "caption x --format parquet --rows-per-shard 7",
        "caption x --ray --actors 2",
        "train --out run --drafter msd,flash --set block=4",
    ],
)
def test_with_what_it_is_for_it_is_not(command: str) -> None:
    args = cli.build_parser().parse_args(command.split())
    if command.startswith("train"):
        assert TrainOptions.from_args(args).block == 4


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UsageError("no such\nthing"), 2, "mmspec: error: no such thing\n"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero (--debug shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_code_of_each_error(
    error: BaseException, code: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("mmspec.app.cli.env.run", fail)
    assert cli.main(["env"]) == code
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err
    for args in (["env", "--debug"], ["--debug", "env"]):
        assert cli.main(args) == code
        assert "Traceback" in capsys.readouterr().err


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(MemoryError()) == "MemoryError"
    assert len(one_line(ValueError("x" * 999))) == 300


def test_env_names_versions_and_no_paths(capsys: Any) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "transformers:" in out and "llava" in out and "lookup" in out
    assert str(Path.home()) not in out


def test_env_prints_the_versions_of_a_machine_where_the_model_does_not_load(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["env", "--model", str(tmp_path / "gone")]) == 2
    captured = capsys.readouterr()
    assert "torch:" in captured.out and "transformers:" in captured.out and "no folder with a model" in captured.err
