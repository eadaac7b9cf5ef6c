"""`mmspec cache`: what mmspec has measured and kept on this machine, listed or deleted."""

from __future__ import annotations

import argparse

EPILOG = """\
what is stored
  In $MMSPEC_CACHE, else $XDG_CACHE_HOME/mmspec or ~/.cache/mmspec: in `costs` measured times of rounds, numbers only.
  No text, no images, no ids. `clear` deletes all of them; measuring then starts anew.

examples
  mmspec cache list
  mmspec cache clear
"""


DESCRIPTION = "List or delete measured costs."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("action", choices=("list", "clear"), help="what to do")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.economy.store import cost_files, cost_folder

    costs = cost_files()
    if args.action == "list":
        print(f"{len(costs)} files of measured costs in {cost_folder()}")
        return 0
    for path in costs:
        path.unlink(missing_ok=True)
    print(f"{len(costs)} files deleted in {cost_folder()}")
    return 0
