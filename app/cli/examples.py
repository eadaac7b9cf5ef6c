"""`mmspec examples`: its options. What it does is in `mmspec.app.examples`; imports nothing heavy at start."""

from __future__ import annotations

import argparse

from mmspec.app.caption.command import COMPRESSOR_HELP, MODEL_HELP, positive_int
from mmspec.app.caption.config import DEFAULT_MODEL

EPILOG = """\
examples
  mmspec examples                                        the bundled images and videos, by the bundled model
  mmspec examples photo.jpg --model llava-hf/llava-1.5-7b-hf

exit code
  0 all texts identical, 1 a difference, 2 wrong usage
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "examples",
        parents=[common],
        help="caption the bundled examples, plain and speculative, and print both texts",
        description="Caption images and videos with plain generate and with mmspec, in turn; print both texts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="images, videos, folders (default: the bundled examples)")
    add("--model", default=DEFAULT_MODEL, metavar="M", help=f"{MODEL_HELP}; default {DEFAULT_MODEL}")
    add("--drafter", default="auto", metavar="D", help="drafter (default auto)")
    add("--compressor", default=None, metavar="C", help=COMPRESSOR_HELP)
    add("--max-new-tokens", type=positive_int, default=160, metavar="N", help="per text (default 160)")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.app.examples import ExampleConfig
    from mmspec.app.examples import run as run_examples

    config = ExampleConfig(tuple(args.paths), args.model, args.drafter, args.compressor, args.max_new_tokens)
    return run_examples(config)


__all__ = ["add_parser", "run"]
