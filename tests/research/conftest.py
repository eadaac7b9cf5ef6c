"""Shared by the tests of research."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest


@pytest.fixture
def shared_decoders(decoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches of this process take the same decoders."""
    monkeypatch.setattr("research.bench.session.DecoderPool", lambda: nullcontext(decoders))
