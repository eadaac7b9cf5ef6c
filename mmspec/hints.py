"""What messages suggest: names that may have been meant, and the command that installs an optional package."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that this package was imported from: a clone, or a folder of installed packages."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'lookup'?" for a name that resembles a known one, else ""."""
    lowered = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def looks_like_path(name: str) -> bool:
    """Whether a name can only be that of a folder: it starts at the root, at home or at a dot, or has two slashes."""
    parts = name.replace("\\", "/").split("/")
    return len(parts) > 1 and (parts[0] in ("", ".", "..", "~") or len(parts) > 2 or parts[-1] == "")


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra of this package, which no registry has.

    In a clone the clone is named; otherwise the packages themselves are, from the metadata of the installation.
    """
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "mmspec").is_dir():
        here = os.path.realpath(os.curdir) == str(ROOT)
        target = f".[{extra}]" if here else f"{ROOT}[{extra}]"
        return f"pip install -e {_quoted(target)}"
    return "pip install " + " ".join(map(_quoted, extra_packages(extra)))


def _quoted(text: str) -> str:
    quoted = shlex.quote(text)
    return quoted if quoted != text else f"'{text}'"


def extra_packages(extra: str) -> list[str]:
    """The requirements of an extra, as the metadata of the installed package lists them, without those of mmspec."""
    from packaging.requirements import Requirement

    found: dict[str, None] = {}
    for line in metadata.requires("mmspec") or ():
        requirement = Requirement(line)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "mmspec":
            found |= dict.fromkeys(one for other in sorted(requirement.extras) for one in extra_packages(other))
        else:
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            found[f"{requirement.name}{extras}{requirement.specifier}"] = None
    return list(found)
