"""The table of limits in SECURITY.md is what the code enforces.

A row is `| what | value | `module.CONSTANT` |`: a new limit is one row there, and no change here.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SECURITY = Path(__file__).parent.parent / "SECURITY.md"
ROW = re.compile(r"\| (?P<what>[^|]+) \| (?P<value>[^|]+) \| `(?P<module>mmspec[\w.]*)\.(?P<name>\w+)` \|")


def limits() -> list[tuple[str, str, str, str]]:
    """What is limited, the value as text, the module and the name of the constant, of each row."""
    text = SECURITY.read_text()
    table = re.search(r"^### Limits\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert table, "SECURITY.md has a section Limits"
    lines = [line for line in table[1].splitlines() if line.startswith("| ") and "Constant" not in line]
    rows = [ROW.fullmatch(line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows, strict=True) if not row]
    return [(row["what"], row["value"], row["module"], row["name"]) for row in rows if row]


def number(value: str) -> float:
    """ "256 MiB" in bytes, "20 s" in seconds, "8,192 characters" as it is."""
    found = re.match(r"([\d,.]+)(?: ([A-Za-z]+))?", value)
    assert found, value
    return float(found[1].replace(",", "")) * UNITS.get(found[2] or "", 1)


@pytest.mark.parametrize(("what", "value", "module", "name"), limits())
def test_limit(what: str, value: str, module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) == number(value), what


def test_every_limit_has_one_row() -> None:
    names = [(module, name) for _, _, module, name in limits()]
    assert len(set(names)) == len(names) > 10
