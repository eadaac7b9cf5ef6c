"""`mmspec cache`: what mmspec has measured and kept on this machine, listed or deleted."""

from __future__ import annotations

import argparse

EPILOG = """\
what is stored
  In $MMSPEC_CACHE, else $XDG_CACHE_HOME/mmspec or ~/.cache/mmspec: in `costs` measured times of rounds, numbers only;
  in `copies` copies of models in 4 or 8 bits that a drafter was asked to keep. No text, no images, no ids. `clear`
  deletes all of them; measuring and copying then start anew.

examples
  mmspec cache list
  mmspec cache clear
"""


DESCRIPTION = "List or delete measured costs and copies of models here."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("action", choices=("list", "clear"), help="what to do")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.economy.store import cost_files, cost_folder
    from mmspec.targets.saved_copy import copy_files, copy_folder

    costs, copies = cost_files(), copy_files()
    if args.action == "clear":
        for folder, paths in ((cost_folder(), costs), (copy_folder(), copies)):
            for path in paths:
                path.unlink(missing_ok=True)
            print(f"{len(paths)} files deleted in {folder}")
        return 0
    print(f"{len(costs)} files of measured costs in {cost_folder()}")
    mib = sum(path.stat().st_size for path in copies) / 2**20
    print(f"{len(copies)} files of copies of models, {mib:.0f} MiB, in {copy_folder()}")
    return 0
