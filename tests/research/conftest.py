"""Shared by the tests of research."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _decoders(warm_decoders: None) -> None:
    """Benches of this process take the same decoders."""
