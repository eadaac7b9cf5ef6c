"""Fixtures of the drafters' tests."""

from __future__ import annotations

import pytest
from fake_target import FakeTarget, build_fake_target


@pytest.fixture
def target() -> FakeTarget:
    """A target without a model: embeddings, and hidden states for every position of some texts."""
    return build_fake_target()
