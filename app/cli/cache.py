"""`mmspec cache`: what mmspec has learned and measured on this machine, listed or deleted."""

from __future__ import annotations

import argparse
import time

from mmspec.app.cli.arguments import Commands, add_command
from mmspec.messages import printable

EPILOG = """\
what is stored
  Weights of draft heads that have learned online (`mmspec caption`, `patch(model, learn=True)`), one file per
  target and head, nothing else: no text, no images, no ids. The folder is `learned` in $MMSPEC_CACHE, else in
  $XDG_CACHE_HOME/mmspec or ~/.cache/mmspec. Besides, in `costs`, measured times of rounds: numbers only;
  and in `copies`, copies of models in 4 or 8 bits that a drafter was asked to keep. `clear` deletes all of them;
  learning, measuring and copying then start anew.

examples
  mmspec cache list
  mmspec cache clear
"""


def add_parser(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        common,
        "cache",
        run,
        help="learned weights, measured costs, copies of models",
        description="List or delete learned weights, measured costs and copies of models here.",
        epilog=EPILOG,
    )
    parser.add_argument("action", choices=("list", "clear"), help="what to do")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.control.cost_store import cost_files, cost_folder
    from mmspec.learning.store import clear_learned, learned_files, learned_folder
    from mmspec.targets.saved_copy import copy_files, copy_folder

    costs, copies = cost_files(), copy_files()
    if args.action == "clear":
        print(f"{clear_learned()} files deleted in {learned_folder()}")
        for folder, paths in ((cost_folder(), costs), (copy_folder(), copies)):
            for path in paths:
                path.unlink(missing_ok=True)
            print(f"{len(paths)} files deleted in {folder}")
        return 0
    files = list(learned_files())
    for file in files:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.modified))
        print(printable(f"{file.target}  {file.key:<40}  {file.num_bytes / 2**20:8.1f} MiB  {day}"))
    print(f"{len(files)} files in {learned_folder()}")
    print(f"{len(costs)} files of measured costs in {cost_folder()}")
    mib = sum(path.stat().st_size for path in copies) / 2**20
    print(f"{len(copies)} files of copies of models, {mib:.0f} MiB, in {copy_folder()}")
    return 0
