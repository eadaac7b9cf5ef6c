"""Old spellings of command line flags: hidden from the help, accepted with one warning for one release."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any


class DeprecatedFlag(argparse.Action):
    """Stores the value under the destination of the new flag and prints one line that names it."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, new_flag: str, **options: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
        self.new_flag = new_flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """See `argparse.Action`."""
        print(f"mmspec: {option_string} is deprecated; use {self.new_flag}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def add_renamed(
    parser: argparse._ActionsContainer,
    flag: str,
    old_flag: str,
    *,
    type: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Add an option with one value under `flag`, and its deprecated spelling `old_flag`."""
    action = parser.add_argument(flag, type=type, choices=choices, **options)
    parser.add_argument(old_flag, action=DeprecatedFlag, dest=action.dest, new_flag=flag, type=type, choices=choices)


__all__ = ["DeprecatedFlag", "add_renamed"]
