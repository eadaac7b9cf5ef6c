"""The `mmspec` command: which sub-commands there are, and how errors end. Imports nothing heavy before it must."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from mmspec.app.bench import command as bench
from mmspec.app.caption import command as caption
from mmspec.app.cli import env
from mmspec.app.errors import UsageError, one_line
from mmspec.app.train import command as train
from mmspec.app.ui import command as demo
from mmspec.app.versions import mmspec_version

EPILOG = """\
start here
  mmspec caption photos/ --model llava-hf/llava-1.5-7b-hf --out captions.jsonl
  mmspec caption photos/ --compare                       no download: the small model that ships, for drawn scenes
  mmspec demo                                            pages in a browser, plain and sped up side by side
  mmspec bench                                           how fast that is, against plain generate
  mmspec COMMAND --help                                  all about one command

exit code: 0 all fine, 1 some rows failed, 2 wrong usage, 130 interrupted
"""


class CommandParser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mmspec: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    top = CommandParser(
        prog="mmspec",
        description="Speculative decoding for Hugging Face vision-language models. Same tokens, sooner.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"mmspec {mmspec_version()}")
    top.add_argument("--debug", action="store_true", help="show tracebacks")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for room in (caption, demo, bench, train, env):
        room.add_parser(commands, common)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(given)
    args.command = shlex.join(["mmspec", *given])
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _report_error(args.debug, "interrupted; a job with --out goes on where it was when run again", 130)
    except UsageError as error:
        return _report_error(args.debug, str(error), 2)
    except BrokenPipeError:  # the reader of our standard output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report_error(args.debug, f"{type(error).__name__}: {one_line(error)} (--debug shows where)", 1)


def _report_error(debug: bool, message: str, code: int) -> int:
    """One line, or inside an exception handler with --debug the whole story."""
    if debug:
        import traceback

        traceback.print_exc()
    print(f"mmspec: error: {' '.join(message.split())}", file=sys.stderr)
    return code


__all__ = ["build_parser", "main"]
