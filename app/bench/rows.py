"""Rows of `mmspec bench --json`: current keys, from files of this version or of an older one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "rest_ms": "overhead_ms",
    "rest_s": "overhead_s",
    "kept_at_depth": "acceptance_by_depth",
    "visual_kept": "num_compressed_tokens",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
    "lengths": "accept_length_hist",
    "plain_calls": "fallback_calls",
    "fallback": "fallback_reason",
    "first_seed": "scene_seed",
}
"""{key of an older version: key now}."""


def current_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the keys of this version; a key that is current already wins over its old spelling."""
    renamed = {RENAMED_KEYS.get(key, key): value for key, value in row.items() if key in RENAMED_KEYS}
    return renamed | {key: value for key, value in row.items() if key not in RENAMED_KEYS}


__all__ = ["RENAMED_KEYS", "current_keys"]
