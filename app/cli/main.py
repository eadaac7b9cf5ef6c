"""The `mmspec` command: its sub-commands, and the exit code of each error. Imports nothing heavy at start."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mmspec.app import examples
from mmspec.app.caption import command as caption
from mmspec.app.cli import cache, env
from mmspec.app.compare import command as compare
from mmspec.app.errors import EXIT_IO_ERROR, OutputError, UsageError, explain_write, find_write_error, one_line
from mmspec.app.export import command as export
from mmspec.app.train import command as train
from mmspec.app.ui import command as demo
from mmspec.app.versions import mmspec_version
from mmspec.hints import did_you_mean
from mmspec.messages import printable

EPILOG = """\
start here
  mmspec caption photos/ --model llava-hf/llava-1.5-7b-hf --out captions.jsonl
  mmspec examples                                        no download: a small bundled model on its own drawn images
  mmspec demo                                            the same in a browser: plain and speculative side by side
  mmspec compare --model M --image I                     which drafter for your model: one line each
  mmspec COMMAND --help                                  options of one command

exit code
  0 success, 1 rows failed or text differed, 2 wrong usage,
  74 output cannot be written (disk full, read-only, size limit), 130 interrupted
"""
COMMANDS = {
    "caption": (caption, "caption images and videos; resumable"),
    "examples": (examples, "caption the bundled examples, plain and speculative, and print both texts"),
    "demo": (demo, "a chat in a browser: mmspec's answer, and plain generate's beside it"),
    "compare": (compare, "compare drafters on your model and image"),
    "train": (train, "train a drafter for a model"),
    "export": (export, "write a draft head for vLLM or SGLang"),
    "cache": (cache, "list or delete measured costs"),
    "env": (env, "versions and devices, for bug reports"),
}
"""Name -> its module, with `DESCRIPTION`, `EPILOG` (a text, or what makes it when the help is shown), `add_options` and
`run`, which returns the exit code; and what the list of commands says of it."""
REMOVED = {"bench": "mmspec compare, or python -m research.bench in a clone of the repository"}
"""Commands of before, and what to use instead."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, exit code 2, with the name that a misspelt one resembles."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"mmspec: error: {message} (see {self.prog} --help)") + "\n")

    def format_help(self) -> str:
        """As the method of argparse; an `epilog` that is a function is called."""
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As the method of argparse, which checks commands and choices."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if isinstance(action, argparse._SubParsersAction) and value in REMOVED:
                self.error(f"{value} is no command any more: use {REMOVED[value]}")
            raise argparse.ArgumentError(
                action, f"{error.message}{did_you_mean(str(value), map(str, action.choices or ()))}"
            ) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the method of argparse; an option that is unknown here, or `goes_with` others, is an error."""
        found, rest = super().parse_known_args(args, namespace)
        unknown = next((one for one in rest if one.startswith("-")), None)
        if unknown is not None:
            name = unknown.partition("=")[0]
            if (successor := getattr(self, "removed", {}).get(name)) is not None:
                self.error(f"{name} is no option any more: use {successor}")
            options = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(f"unknown option {name}{did_you_mean(name, options)}")
        for action in self._actions:
            others, holds = getattr(action, "goes_with", ("", None))
            if holds is not None and getattr(found, action.dest) != action.default and not holds(found):
                self.error(f"{action.option_strings[0]} goes with {others}")
        return found, rest


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all sub-commands."""
    top = CommandParser(
        prog="mmspec",
        description="Speculative decoding for Hugging Face vision-language models. The tokens of generate, faster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"mmspec {mmspec_version()}")
    top.add_argument("--debug", action="store_true", help="print tracebacks")
    common = CommandParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="print tracebacks")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, (module, help_) in COMMANDS.items():
        parser = commands.add_parser(
            name,
            parents=[common],
            help=help_,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=module.run)
        module.add_options(parser)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; `sys.argv[1:]` by default.

    Returns:
        The exit code: see `EPILOG`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.command = shlex.join(["mmspec", *arguments])
    return run_command(args)


def run_command(args: argparse.Namespace) -> int:
    """Carry out `args.run`; an error is one line on standard error. Returns the exit code."""
    try:
        code: int = args.run(args)
        with explain_write("standard output"):
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _report_error(args.debug, "interrupted: a job with --out continues when it is run again", 130)
    except UsageError as error:
        return _report_error(args.debug, str(error), 2)
    except BrokenPipeError:  # the reader of standard output has ended, as in `| head`
        _discard_stdout()
        return 1
    except OutputError as error:
        return _report_output_error(args.debug, error)
    except Exception as error:
        if (failed_write := find_write_error(error)) is not None:
            return _report_output_error(args.debug, failed_write)
        return _report_error(args.debug, f"{type(error).__name__}: {one_line(error)} (--debug shows the traceback)", 1)


def _report_output_error(debug: bool, error: OutputError) -> int:
    """Report a failed write; if standard output is what failed, discard what is buffered for it."""
    try:
        sys.stdout.flush()
    except OSError as stdout_error:
        error = OutputError("standard output", stdout_error)
        _discard_stdout()
    return _report_error(debug, str(error), EXIT_IO_ERROR)


def _discard_stdout() -> None:
    """Send what is still buffered for standard output to the null device, so that the exit of Python is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(debug: bool, message: str, code: int) -> int:
    """Print one line, after the traceback of the current exception with --debug; returns `code`."""
    if debug:
        import traceback

        print(printable(traceback.format_exc(), lines=True), file=sys.stderr)
    print(printable(f"mmspec: error: {' '.join(message.split())}"), file=sys.stderr)
    return code
