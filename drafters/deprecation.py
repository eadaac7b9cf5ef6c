"""Former names of a module's members and arguments: accepted for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562) for its former names.

    Args:
        module: `__name__` of the module.
        names: former name -> full current name, "package.module.name".
    """

    def resolve(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        location, _, current = names[name].rpartition(".")
        warnings.warn(f"{module}.{name} is now {names[name]}; import that.", DeprecationWarning, stacklevel=2)
        return getattr(import_module(location), current)

    return resolve


def warn_former_argument(former: str, current: str) -> None:
    """Warn that a function was called with the former name of an argument."""
    warnings.warn(f"{former}= is now called {current}=; pass that.", DeprecationWarning, stacklevel=3)


__all__ = ["former_names", "warn_former_argument"]
