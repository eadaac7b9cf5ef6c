"""Rows of `mmspec bench --json` and of the studies: one dictionary per result; keys of older versions renamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

ResultRow: TypeAlias = dict[str, Any]
"""One result: numbers, texts, lists of them and the run, by key; JSON can represent it."""

RENAMED_KEYS = {
    "rest_ms": "overhead_ms",
    "rest_s": "overhead_s",
    "kept_at_depth": "acceptance_by_depth",
    "visual": "num_visual_tokens",
    "visual_kept": "num_compressed_tokens",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
    "lengths": "accept_length_hist",
    "plain_calls": "fallback_calls",
    "fallback": "fallback_reason",
    "first_seed": "scene_seed",
}
"""{key of an older version: key now}."""


def current_keys(row: Mapping[str, Any]) -> ResultRow:
    """A row with the keys of this version; a key that is current already wins over its old spelling."""
    renamed = {RENAMED_KEYS.get(key, key): value for key, value in row.items() if key in RENAMED_KEYS}
    return renamed | {key: value for key, value in row.items() if key not in RENAMED_KEYS}


def num_drafter_tokens(row: Mapping[str, Any]) -> float:
    """Visual tokens of a row that the drafter sees: those after compression, or all."""
    return float(row["num_visual_tokens"] if row["num_compressed_tokens"] is None else row["num_compressed_tokens"])


__all__ = ["RENAMED_KEYS", "ResultRow", "current_keys", "num_drafter_tokens"]
