"""`mmspec compare`: a line for each drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspec.app.cli.main import main


def test_compare_prints_a_line_per_drafter(tmp_path: Path, capsys: Any) -> None:
    args = ["compare", "--model", "tiny", "--drafters", "none,lookup", "--new-tokens", "6"]
    assert main(args) == 0
    heading, none, lookup = capsys.readouterr().out.splitlines()
    assert heading.split() == ["drafter", "identical", "tau", "x", "decode", "x", "whole"]
    assert none.split()[:3] == ["none", "yes", "1.00"] and lookup.startswith("lookup")
    (tmp_path / "no.png").write_bytes(b"x")
    assert main([*args, "--image", str(tmp_path / "no.png")]) == 2
    assert "--image" in capsys.readouterr().err
    assert main(["compare", "--drafters", "magic"]) == 2


def test_a_drafter_that_fails_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compare", "--model", "tiny", "--drafters", "msd,none,none+pool:4", "--new-tokens", "6"]
    assert main(args) == 1
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["msd", "none", "none+pool:4"]
    assert "failed: " in rows[0] and all(" yes " in row for row in rows[1:])
