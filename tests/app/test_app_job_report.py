"""`mmspec caption --report`: one HTML file that says what a run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspec.app.caption import report as module
from mmspec.app.cli.main import main
from research.synthetic_images import write_images


def caption(folder: Path, *args: object) -> int:
    fixed = ["--model", "tiny", "--max-new-tokens", "4", "--no-progress", "--out", str(folder / "o.jsonl")]
    return main(["caption", str(folder / "p"), *fixed, *map(str, args)])


def test_a_report_says_what_a_run_did(tmp_path: Path, capsys: Any) -> None:
    write_images(tmp_path / "p", 3)
    (tmp_path / "p" / "<b>broken.png").write_bytes(b"no picture")
    report = tmp_path / "r"
    assert caption(tmp_path, "--report", report, "--prefix", "<script>alert(1)</script>") == 1
    assert f"report in {report / 'report.html'}" in capsys.readouterr().err
    page = (report / "report.html").read_text()
    assert [path.name for path in report.iterdir()] == ["report.html"]
    assert page.count("<figure>") == page.count('src="data:image/jpeg;base64,') == 3
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page and "<b>broken" not in page
    assert "1 NotAnImage" in page and "&lt;b&gt;broken.png: " in page
    assert "images/s, " in page and "tokens/s, tau " in page and "3 captioned, 1 failed" in page
    assert "mmspec caption" in page and "default-src 'none'" in page
    assert caption(tmp_path, "--report", report) == 2  # other settings: the report of the other job stays
    assert (report / "report.html").read_text() == page
    assert caption(tmp_path, "--report", report, "--prefix", "<script>alert(1)</script>") == 1  # nothing to do
    assert "<h2>0 captions</h2>" in (report / "report.html").read_text()


def test_a_large_job_shows_its_first_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHOWN_PICTURES", 2)
    write_images(tmp_path / "p", 4)
    assert caption(tmp_path, "--report", tmp_path / "r") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.count("<figure>") == 2 and "2 captions, the first of 4" in page


def test_a_folder_that_cannot_be_is_said_before_the_model(tmp_path: Path, capsys: Any) -> None:
    write_images(tmp_path / "p", 1)
    (tmp_path / "file").write_text("")
    for name, message in (("file", "is a file"), ("none/r", "create it first")):
        assert caption(tmp_path, "--report", tmp_path / name) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "o.jsonl").exists()
