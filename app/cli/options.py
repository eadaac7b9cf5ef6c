"""Options described once, in the fields of a dataclass: argparse, files of options and the identity of a job derive."""

from __future__ import annotations

import argparse
import json
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.text import read_text
from mmspec.hints import did_you_mean

Decides = Literal["nothing", "always", "if set", "if sampled"]
"""When an option is part of a job's identity."""
MAX_FILE_BYTES = 1 << 20
"""Size of a file of options."""
REQUIRED: Any = MISSING
"""In place of a default: the option has to be given."""
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """What a field says of itself.

    Attributes:
        group: heading in the help of the command; "" for a setting (`read_settings`), which has no flag of its own.
        parse: turns a text into the value, or raises `argparse.ArgumentTypeError`.
        optional: the value that the option has when it stands alone; MISSING: it needs a text, or is a switch.
        many: it may be repeated, or with "+" has several values, and is a tuple.
        in_file: it is written to the file of a job, which can then be run again.
    """

    help: str
    group: str
    default: Any
    parse: Callable[[str], Any]
    metavar: str | None
    choices: tuple[str, ...] | None
    optional: Any
    many: bool | Literal["+"]
    decides: Decides
    in_file: bool

    @property
    def is_switch(self) -> bool:
        """Whether it takes no text: a flag, or with the default None a flag and its opposite."""
        return self.metavar is None and self.choices is None and self.parse is str


def option(
    default: Any,
    help: str,
    group: str,
    *,
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    optional: Any = MISSING,
    many: bool | Literal["+"] = False,
    decides: Decides = "nothing",
    in_file: bool = True,
) -> Any:
    """The field of a dataclass that is an option; see `Option`."""
    described = Option(help, group, default, parse, metavar, choices, optional, many, decides, in_file)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={_KEY: described})
    return field(default=default, metadata={_KEY: described})


def described(source: type) -> dict[str, Option]:
    """The options of a dataclass, by name."""
    found: Iterable[Field[Any]] = sorted(fields(source), key=lambda one: bool(one.kw_only))  # inherited ones last
    return {one.name: one.metadata[_KEY] for one in found if _KEY in one.metadata}


def add_described(
    parser: argparse._ActionsContainer, source: type, *, with_defaults: bool = True, with_settings: bool = False
) -> None:
    """Add the options of a dataclass, in their groups.

    Args:
        with_defaults: what is not given has its default in the namespace; else it is not there.
        with_settings: settings have flags too, which the help does not list.
    """
    groups: dict[str, argparse._ActionsContainer] = {}
    for name, one in described(source).items():
        if not one.group and not with_settings:
            continue
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group) if one.group else parser
        group = groups[one.group]
        help_ = one.help if one.group else argparse.SUPPRESS
        values: dict[str, Any] = {"help": help_, "default": one.default if with_defaults else argparse.SUPPRESS}
        if one.default is REQUIRED:
            values |= {"required": True, "default": None}
        if one.is_switch:
            values["action"] = "store_true" if one.default is False else argparse.BooleanOptionalAction
        elif one.choices is not None:
            values["choices"] = one.choices
        else:
            values |= {"type": one.parse, "metavar": one.metavar}
        if one.many == "+":
            values["nargs"] = "+"
        elif one.many:
            values["action"] = "append"
        if one.optional is not MISSING:
            values |= {"nargs": "?", "const": one.optional}
        group.add_argument(f"--{name.replace('_', '-')}", **values)


def add_settings(parser: argparse.ArgumentParser, source: type, removed: Mapping[str, str] | None = None) -> None:
    """Add `--set`, for the options of a dataclass that have no flag of their own, or none that the help lists.

    Args:
        removed: flags that went, with their successors; flags of settings are added.
    """
    names = [name for name, one in described(source).items() if not one.group]
    help_ = f"settings, listed below: {', '.join(names[:3])}, ..."
    parser.add_argument("--set", nargs="+", action="extend", default=None, metavar="NAME=VALUE", help=help_)
    settings = {f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in names}
    vars(parser)["removed"] = settings | dict(removed or {})


def list_settings(source: type) -> str:
    """The settings of a dataclass with their descriptions, for the end of a help."""
    return list_described((name, one.help) for name, one in described(source).items() if not one.group)


def list_described(helps: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, in two columns."""
    wrapped = ((name, textwrap.wrap(text, width=99)) for name, text in helps)
    return "\n".join(f"  {name:18} " + f"\n{'':21}".join(lines) for name, lines in wrapped)


def read_settings(source: type, texts: Iterable[str]) -> dict[str, Any]:
    """The values of `--set`; a switch may stand alone.

    Raises:
        UsageError: a name that is none, or a value that it does not take.
    """
    known = {name: one for name, one in described(source).items() if not one.group}
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(f"--set {key[:60]} is no setting; they are {', '.join(known)}{did_you_mean(name, known)}")
        is_on = known[name].is_switch and (not equals or value in ("true", "false"))
        found[name] = _value(known[name], value != "false" if is_on else value, f"--set {name}")
    return found


def given(source: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options that a command line without defaults has."""
    found = {name: getattr(args, name) for name in described(source) if hasattr(args, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def read_options(path: str, source: type, positional: str) -> dict[str, Any]:
    """The options of a TOML file: a key for each, named like the flags.

    Args:
        positional: name of the list of what stands on the command line without a flag.

    Raises:
        UsageError: it cannot be read, has a key that is no option, or a value that the option does not take.
    """
    try:
        found = tomllib.loads(read_text(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read --config {path}: {one_line(error, 120)}") from error
    known = described(source)
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name == positional:
            values[name] = _texts(value, f"--config {path}: {key}")
        elif name not in known or not known[name].in_file:
            near = did_you_mean(name, (*known, positional))
            raise UsageError(f"--config {path}: no option {key[:60]!r}{near}; the keys are those of --help")
        else:
            values[name] = _value(known[name], value, f"--config {path}: {key}")
    return values


def _texts(value: Any, where: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where} is a text or a list of texts, got {value!r:.80}")
    return tuple(texts)


def _value(one: Option, value: Any, where: str) -> Any:
    """A value of TOML as the option parses it.

    Raises:
        UsageError: it does not take it.
    """
    if one.is_switch or (one.optional is not MISSING and value is True):
        if not isinstance(value, bool):
            raise UsageError(f"{where} is true or false, got {value!r:.80}")
        return one.optional if one.optional is not MISSING else value
    if isinstance(value, list) and one.default == () and not one.many:  # of a file: its lines
        return _texts(value, where)
    try:
        if one.many:
            return tuple(map(one.parse, _texts(value, where)))
        if isinstance(value, bool | list):
            raise argparse.ArgumentTypeError(f"takes a text or a number, got {value!r:.80}")
        parsed = one.parse(json.dumps(value, default=str) if isinstance(value, dict) else str(value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(f"{where} {one_line(error, 200)}") from error
    if one.choices is not None and parsed not in one.choices:
        raise UsageError(
            f"{where} is one of {', '.join(one.choices)}; got {parsed!r:.60}{did_you_mean(parsed, one.choices)}"
        )
    return parsed


def to_toml(values: Mapping[str, Any]) -> str:
    """A TOML file of options; those that are None are left out, mappings are JSON."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    """A value in TOML, of which texts and lists are those of JSON but for one control character."""
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
