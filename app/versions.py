"""Versions of this package and of its dependencies, without importing them."""

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
    """The version of mmspec; "unknown" in a checkout that is not installed."""
    return version("mmspec") or "unknown"


@functools.cache
def commit() -> str | None:
    """The git commit of this package, with "-dirty" if files are changed; None outside of a checkout."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else the package is installed inside another repository
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
