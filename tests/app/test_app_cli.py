"""The command line itself: help, errors, exit codes, `env`, `examples`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmspec.app.cli import main as cli
from mmspec.app.errors import UsageError, one_line


def test_help_of_every_command(capsys: Any) -> None:
    for args, expected in (
        (["--help"], "start here"),
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


def test_wrong_usage_is_one_line(capsys: Any) -> None:
    for args in (
        [],
        ["dance"],
        ["caption", "x", "--model"],
        ["compare", "--model", "tiny", "--new-tokens", "0"],
        ["bench", "--model", "tiny"],
    ):
        with pytest.raises(SystemExit) as exited:
            cli.main(args)
        err = capsys.readouterr().err
        assert exited.value.code == 2 and err.startswith("mmspec: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("env --drafter msd", "--model"),
        ("train --out run --draft-layers 2", "--drafter draft-lm"),
        ("train --out run --drafter msd,eagle3 --block 4", "drafters of several tokens per forward"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(command: str, others: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(command.split())
    assert exited.value.code == 2
    option = [word for word in command.split() if word.startswith("--")][-1]
    assert f"{option} goes with {others}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "caption x --format parquet --rows-per-shard 7",
        "caption x --ray --actors 2",
        "train --out run --drafter msd,flash --block 4",
        "train --out run --drafter draft-lm --draft-layers 2",
    ],
)
def test_with_what_it_is_for_it_is_not(command: str) -> None:
    cli.build_parser().parse_args(command.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("caption x --model tiny --format parquet", "--format parquet writes a folder of shards: give --out FOLDER"),
        ("caption x --model tiny --overwrite", "--overwrite and --retry-errors need --out FILE"),
        ("caption x --model tiny --fields foo", "--fields: no column 'foo'"),
        ("caption x --model tiny --top-k 5", "--top-k is for sampling"),
        ("caption x --model tiny --num-captions 3", "--num-captions 3 without sampling"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(
    command: str, message: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("rest", [[], ["--help"], ["--shape", "tiny"]])
def test_a_removed_command_names_its_successor(rest: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", *rest])
    assert exited.value.code == 2
    assert "bench is no command any more: use mmspec compare, or python -m research.bench" in capsys.readouterr().err


def test_no_names_are_no_list_of_names(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--drafters", " , "])
    assert "must be names separated by commas" in capsys.readouterr().err


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


@pytest.mark.parametrize("args", [["photo.jpg"], ["photo.jpg", "--compare"], ["photo.jpg", "--out", "x.jsonl"]])
def test_caption_needs_a_model(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Without one it must not describe photographs by the toy model."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30)).save("photo.jpg")
    assert cli.main(["caption", *args]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--model llava-hf/llava-1.5-7b-hf" in err and "--model scenes" in err
    assert [file.name for file in tmp_path.iterdir()] == ["photo.jpg"]


def test_exit_codes_are_documented(capsys: Any) -> None:
    for args in (["--help"], ["caption", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(args)
        assert "74 output cannot be written (disk full, read-only, size limit)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["captoin", "a.png"], "did you mean 'caption'?"),
        (["compar"], "did you mean 'compare'?"),
        (
            ["caption", "a.png", "--model", "tiny", "--formt", "parquet"],
            "unknown option --formt; did you mean '--format'?",
        ),
        (["caption", "a.png", "--model", "tiny", "--format", "parqet"], "did you mean 'parquet'?"),
        (["caption", "a.png", "--model", "tiny", "--xyzzy=3"], "unknown option --xyzzy (see"),
        (["caption", "a.png", "--model", "tiny", "--drafter", "hybird"], "did you mean 'hybrid'?"),
        (["caption", "a.png", "--model", "tiny", "--drafter", "./gone"], "'./gone': no such folder"),
    ],
)
def test_misspelt_names_are_guessed(args: list[str], expected: str, capsys: Any) -> None:
    try:
        code = cli.main(args)
    except SystemExit as error:
        code = int(error.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and expected in err and err.count("\n") == 1


def test_env_prints_the_versions_of_a_machine_where_the_model_does_not_load(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["env", "--model", str(tmp_path / "gone")]) == 2
    captured = capsys.readouterr()
    assert "torch:" in captured.out and "transformers:" in captured.out and "no such folder" in captured.err
