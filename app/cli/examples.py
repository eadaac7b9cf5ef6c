"""`mmspec examples`: its options. What it does is in `mmspec.app.examples`; imports nothing heavy at start."""

from __future__ import annotations

import argparse

from mmspec.app.cli.arguments import (
    Commands,
    add_command,
    add_device_options,
    add_drafter_options,
    add_model_option,
    add_table_options,
    config_from_args,
    positive_int,
    source_options,
)

EPILOG = """\
examples
  mmspec examples                                        the bundled images and videos, by the bundled model
  mmspec examples photo.jpg --model llava-hf/llava-1.5-7b-hf

exit code
  0 all texts identical, 1 a difference, 2 wrong usage
"""


def add_parser(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        common,
        "examples",
        run,
        help="caption the bundled examples, plain and speculative, and print both texts",
        description="Caption images and videos with plain generate and with mmspec, in turn; print both texts.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="as of `mmspec caption` (default: bundled examples)")
    add_model_option(parser)
    add_drafter_options(parser)
    add_device_options(parser)
    add("--max-new-tokens", type=positive_int, default=160, metavar="N", help="per text (default 160)")
    add("--prompt", default=None, metavar="TEXT", help="of rows without their own (default: as mmspec caption)")
    add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.app.examples import ExampleConfig, run_examples

    return run_examples(config_from_args(ExampleConfig, args, source=source_options(args)))
