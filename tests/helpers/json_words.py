"""A tiny model that can write JSON: most tokenizers can, that of the random model cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmspec.app.modeling import random_models


def needs_packages() -> None:
    """Skip the test where the extra `json` is not installed."""
    pytest.importorskip("xgrammar", reason="the extra json is not installed")
    pytest.importorskip("jsonschema", reason="the extra json is not installed")


def write_signs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the tiny model have tokens for the signs of JSON, in a copy of its files."""
    copy = Path(shutil.copytree(random_models.FOLDER, folder / "tiny with signs"))
    file, signs = copy / "tokenizer.json", [*'{}[]":,0123456789', "Ġ"]
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    words = [one for one in tokenizer["model"]["vocab"] if one not in signs]
    total = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {one: id for id, one in enumerate(words[: total - len(signs)] + signs)}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    monkeypatch.setattr(random_models, "FOLDER", copy)
