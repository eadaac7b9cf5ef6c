"""Versions of this package and of what it stands on, without importing any of it."""

from __future__ import annotations

import functools
import subprocess
from importlib import metadata
from pathlib import Path


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


@functools.cache
def commit() -> str | None:
    """The commit that this package runs from, "-dirty" behind it if files were changed; None if it is no checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", *words]
        done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else we are only installed inside someone's checkout
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


__all__ = ["commit", "mmspec_version", "version"]
