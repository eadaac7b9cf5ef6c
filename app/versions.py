"""Versions of this package and of what it stands on, without importing any of it."""

from __future__ import annotations

import functools
from importlib import metadata


def version(package: str) -> str | None:
    """The installed version of `package`, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def mmspec_version() -> str:
    """Our own version; "unknown" when run from a checkout that was never installed."""
    return version("mmspec") or "unknown"


__all__ = ["mmspec_version", "version"]
