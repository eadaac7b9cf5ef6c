"""The settings of a caption job, beside its rows: a resumed job cannot mix two kinds of captions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io import jsonl

Settings = Mapping[str, Any]
WEIGHTS = "weights"
"""The setting that identifies the weights of the model; jobs of earlier versions, and of some models, have none."""


def check_settings(metadata: Path, settings: Settings, output: Path) -> None:
    """Compare the settings of rows that exist with those of this job.

    Raises:
        UsageError: they differ, or are missing or damaged.
    """
    advice = "use another --out, or --overwrite"
    if not metadata.exists():
        raise UsageError(f"{output} has rows but no {metadata.name} beside it: {advice}")
    if (old := _read(metadata).get("settings")) is None:
        raise UsageError(f"{metadata} is damaged: {advice}")
    if None not in (old.get(WEIGHTS), settings.get(WEIGHTS)) and old[WEIGHTS] != settings[WEIGHTS]:
        raise UsageError(
            f"{output} has captions of other weights: --model {settings.get('model')} changed since it was written "
            f"({old[WEIGHTS]!r:.16}, now {settings[WEIGHTS]!r:.16}): {advice}"
        )
    different_keys = [
        key for key in sorted(set(old) | set(settings)) if key != WEIGHTS and old.get(key) != settings.get(key)
    ]
    if different_keys:
        changed = ", ".join(f"{key} {old.get(key)!r} (now {settings.get(key)!r})" for key in different_keys)
        raise UsageError(f"{output} was written with {changed}: use the same settings, another --out, or --overwrite")


def is_overwriting(metadata: Path, settings: Settings) -> bool:
    """Whether a job with these settings and --overwrite was stopped: the rows that exist are its own."""
    found = _read(metadata)
    return bool(found.get("overwriting")) and found["settings"] == dict(settings)


def write_settings(metadata: Path, settings: Settings, overwriting: bool = False) -> bool:
    """Write the settings; returns whether they were not there yet.

    Args:
        overwriting: the job has discarded the rows of another and is not finished.
    """
    from mmspec.app.versions import mmspec_version

    values = {"settings": dict(settings), **({"overwriting": True} if overwriting else {})}
    found = _read(metadata)
    if {key: found[key] for key in found if key != "mmspec_version"} == values:
        return False
    text = json.dumps(values | {"mmspec_version": mmspec_version()}, indent=2)
    jsonl.replace_file(metadata, text.encode() + b"\n")
    return True


def _read(metadata: Path) -> dict[str, Any]:
    """What is in the file; {} where there is none, or a damaged one."""
    try:
        found = json.loads(metadata.read_text())
        return found if isinstance(found["settings"], dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
