"""What the parsers of several commands share: types of values, options, and checks of parsed values.

Imports nothing heavy at start.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mmspec.app.cli.options import add_described, described
from mmspec.app.errors import UsageError
from mmspec.app.io.table_options import TableOptions

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions

Options: TypeAlias = "argparse._ActionsContainer"
"""A parser or a group of one."""

DEFAULT_MODEL = "scenes"
"""Of the commands that show or measure mmspec: the bundled toy model."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_HELP = "hub id, folder, or bundled: scenes (a toy model of drawn scenes), tiny (random weights)"
MAX_INT, MAX_DIGITS = 2**63 - 1, 30
DRAFTER_HELP = "drafter: a name, folder or hub id (default auto; none: no drafts)"
DTYPE_HELP = "of the model; default auto: the checkpoint's, float32 on a CPU"
DEVICE_HELP = "default auto: the GPU if there is one"
TEMPERATURE_HELP = "0 (default) is greedy"
PROGRESS_HELP = "progress bar (default: on a terminal)"
COMPRESSOR_HELP = "pass fewer visual tokens to the drafter: drop; stride, pool, relevant with :N"


def goes_with(action: argparse.Action, others: str, holds: Callable[[argparse.Namespace], Any]) -> None:
    """Let `CommandParser` refuse an option without what it is for: it would change nothing, and nobody would notice.

    Args:
        action: the option.
        others: the options that it goes with, for the message.
        holds: whether they are there.
    """
    vars(action)["goes_with"] = others, holds


def add_model_option(parser: Options, flag: str = "--model", default: str = DEFAULT_MODEL) -> None:
    """Add the option that names a model."""
    parser.add_argument(flag, default=default, metavar="M", help=f"{MODEL_HELP}; default {default}")


def add_device_options(parser: Options) -> None:
    """Add `--dtype` and `--device` of the model."""
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help=DTYPE_HELP)
    parser.add_argument("--device", default="auto", metavar="DEV", help=DEVICE_HELP)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options about rows of lists, tables and archives."""
    add_described(parser, TableOptions)


def whole_number(rule: str, least: int) -> Callable[[str], int]:
    """The parser of an integer of 64 bits, as generators and columns of rows hold; `rule` says which, for messages."""

    def parse(text: str) -> int:
        digits = text[1:] if least < 0 and text[:1] in ("+", "-") else text
        if not digits.isdecimal() or int(digits[:MAX_DIGITS]) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number{rule}, got {text!r:.80}")
        if len(text) >= MAX_DIGITS or not -MAX_INT <= int(text) <= MAX_INT:
            raise argparse.ArgumentTypeError(f"must be at most {MAX_INT} (64 bits), got {text!r:.80}")
        return int(text)

    return parse


positive_int = whole_number(" above 0", 1)
non_negative_int = whole_number(" of 0 or more", 0)
parse_seed = whole_number("", -MAX_INT)


def real_number(rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """The parser of a finite number; `rule` says of which, for messages."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r:.80}")
        return value

    return parse


parse_temperature = real_number("0 (greedy) or more", lambda value: value >= 0)


def output_name(text: str) -> str:
    """The name of an output, which is a file or folder of this machine."""
    if "://" in text or text.startswith("file:/"):
        raise argparse.ArgumentTypeError(
            f"is a path of this machine, and {text!r:.100} is an address: name a local path, and upload what is written"
        )
    return text


def output_path(text: str) -> Path:
    """The same as a path."""
    return Path(output_name(text))


def split_commas(text: str) -> list[str]:
    """Comma-separated names, at least one; empty ones are left out."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"must be names separated by commas, got {text!r}")
    return names


def source_options(args: object) -> SourceOptions:
    """The options of tables of a namespace, or of a dataclass; names in messages are relative to the current folder."""
    from mmspec.app.io.item import SourceOptions

    return SourceOptions(**{name: getattr(args, name) for name in described(TableOptions)})


def hide_progress_bars(progress: bool | None) -> None:
    """Switch off the progress bars of transformers unless `progress`; None: unless standard error is a terminal."""
    from transformers.utils import logging

    if not (sys.stderr.isatty() if progress is None else progress):
        logging.disable_progress_bar()


def validate_drafter(name: str, compressor: str | None = None) -> None:
    """Refuse an unknown drafter or compressor before anything is loaded.

    Raises:
        UsageError: an unknown name.
    """
    from mmspec.drafters.registry import explain_unknown, is_known_drafter

    if not is_known_drafter(name):
        raise UsageError(explain_unknown(name))
    if compressor is not None:
        from mmspec.vision.registry import TRAINED_GATE, build_compressor

        try:
            if compressor != TRAINED_GATE:
                build_compressor(compressor)
        except ValueError as error:
            raise UsageError(str(error)) from error
