"""What the parsers of the scripts in this folder share, besides `mmspec.app.cli.arguments`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmspec.app.cli.arguments import (
    PROGRESS_HELP,
    TEMPERATURE_HELP,
    Options,
    parse_seed,
    parse_temperature,
    positive_int,
)
from mmspec.app.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ConfigT = TypeVar("ConfigT", bound=DataclassInstance)


def module_parser(module: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`, whose help keeps the lines of both texts."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_sampling_options(parser: Options, seed_of: str = "sampling") -> None:
    """Add `--temperature` and `--seed`; `seed_of` is what the seed determines."""
    add = parser.add_argument
    add("--temperature", type=parse_temperature, default=0.0, metavar="T", help=TEMPERATURE_HELP)
    add("--seed", type=parse_seed, default=0, metavar="N", help=f"of {seed_of} (default 0)")


def add_progress(parser: Options) -> None:
    """Add `--progress` and `--no-progress`; the default is None."""
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=None, help=PROGRESS_HELP)


def add_scene_seed(parser: Options, default: int | None, default_text: str) -> None:
    """Add `--scene-seed`."""
    help_ = f"seed of the first scene (default {default_text})"
    parser.add_argument("--scene-seed", type=parse_seed, default=default, metavar="S", help=help_)


def positive_ints(text: str) -> list[int]:
    """Comma-separated integers above 0."""
    return [positive_int(part.strip()) for part in text.split(",")]


def positive_floats(text: str) -> list[float]:
    """Comma-separated numbers above 0."""
    values = [parse_temperature(part.strip()) for part in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, got {text!r}")
    return values


def config_from_args(config_type: type[ConfigT], args: argparse.Namespace, **values: Any) -> ConfigT:
    """A dataclass whose fields are the flags of the same names; lists become tuples.

    Args:
        values: fields that differ from the flags, or have none.
    """
    found = {field.name: getattr(args, field.name) for field in fields(config_type) if field.name not in values}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return config_type(**found, **values)


def check_writable(file: Path | str) -> None:
    """Refuse a result file that cannot be written, before an hour of measuring.

    Raises:
        UsageError: the file cannot be opened for writing.
    """
    try:
        is_new = not Path(file).exists()
        with Path(file).open("ab"):
            pass
        if is_new:
            Path(file).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
