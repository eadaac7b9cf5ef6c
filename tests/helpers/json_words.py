"""A tiny model that can write JSON: most tokenizers can, that of the random model cannot."""

from __future__ import annotations

import pytest

from mmspec.app.modeling import random_models


def needs_packages() -> None:
    """Skip the test where the extra `json` is not installed."""
    pytest.importorskip("xgrammar", reason="the extra json is not installed")
    pytest.importorskip("jsonschema", reason="the extra json is not installed")


def write_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny model have tokens for the signs of JSON."""
    original, signs = random_models.build_vocabulary, [*'{}[]":,0123456789', "Ġ"]
    monkeypatch.setattr(
        random_models,
        "build_vocabulary",
        lambda: [one for one in original() if one not in signs][: -len(signs)] + signs,
    )
