"""Shared by the tests of research."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from mmspec.vision.video.decoder_pool import DecoderPool


@pytest.fixture(scope="session")
def _decoders() -> Iterator[DecoderPool]:
    with DecoderPool() as pool:
        yield pool


@pytest.fixture
def shared_decoders(_decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches of this process take the same decoders, which start in most of a second each."""
    monkeypatch.setattr("research.bench.session.DecoderPool", lambda: nullcontext(_decoders))
