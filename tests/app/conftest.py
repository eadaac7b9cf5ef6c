"""Shared by the tests of commands."""

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
    """Caption jobs of this process take the same decoders, which start in most of a second each."""
    monkeypatch.setattr("mmspec.app.caption.job.DecoderPool", lambda: nullcontext(_decoders))
