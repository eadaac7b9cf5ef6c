"""Causal text models."""

from __future__ import annotations

from zoo.base import Family

ROWS: tuple[Family, ...] = ()
