"""The study of a target's own copy runs, and counts what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.cpu.c_kernel import load_kernel
from research.studies import copies

pytestmark = pytest.mark.research


@pytest.mark.skipif(load_kernel() is None, reason="needs the C kernel")
def test_a_target_and_its_copies(tmp_path: Path) -> None:
    lines: list[str] = []
    file = tmp_path / "copies.json"
    arguments = ["--count", "1", "--repeats", "1", "--new-tokens", "12", "--json", str(file)]
    assert copies.main(["--target", "scenes", *arguments], lines.append) == 0
    report = json.loads(file.read_text())
    few, many = report["making"]
    assert (few["bits"], many["bits"]) == copies.BITS
    assert 0.2 < few["share"] < many["share"] < 0.6 and few["peak_share"] > 0
    drafting = {one["name"]: one for one in report["drafting"]}
    assert all(one["num_identical"] == len(one["ms"]) == 1 for one in drafting.values())
    assert drafting["none"]["drafted"] == 0 and drafting["none"]["rounds"] == 11
    assert len(lines) == 2 and "| 4 bits |" in lines[1]
