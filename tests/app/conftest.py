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
    """Caption jobs and benches of this process take the same decoders, which start in most of a second each."""
    for module in ("mmspec.app.caption.job", "mmspec.app.bench.session"):
        monkeypatch.setattr(f"{module}.DecoderPool", lambda: nullcontext(_decoders))
