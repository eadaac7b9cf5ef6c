"""The options of `mmspec train`, each described in its field: argparse, the help and the settings of `--set` derive."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.cli import arguments as common
from mmspec.app.cli.options import REQUIRED, described, option, read_settings
from mmspec.app.errors import UsageError
from mmspec.app.io.table_options import TableOptions
from mmspec.drafters.heads.registry import recipes

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions

VISUAL_MODES = ("decoupled", "coupled", "placeholder", "text_only")
"""Keys of mmspec.drafters.heads.base.visual_inputs.VISUAL_MODES, which is too slow to import here."""
LOSSES = ("ce", "kl", "tv", "lk", "lk-mix", "path")
"""Keys of mmspec.drafters.training.distribution_losses.DISTRIBUTION_LOSSES, as `VISUAL_MODES`."""
_WHAT, _HOW, _SET = "what", "how", ""
"""Groups of the help; what is in the last is a setting: `--set NAME=VALUE`."""


def parse_drafters(text: str) -> tuple[str, ...]:
    """Comma-separated drafters."""
    names = common.split_commas(text)
    for name in names:
        if name == "draft-lm":
            raise argparse.ArgumentTypeError(
                "draft-lm is not trained any more: patch takes any small model, drafter=FOLDER"
            )
        if name not in recipes():
            raise argparse.ArgumentTypeError(f"unknown drafter {name!r}; known are {', '.join(recipes())}")
    return tuple(dict.fromkeys(names))


def parse_layers(text: str) -> tuple[int, ...]:
    """Comma-separated indices of hidden states."""
    return tuple(common.non_negative_int(part) for part in common.split_commas(text))


def compressor_spec(text: str) -> str:
    """NAME:N, a compressor and the number of tokens that it keeps."""
    from mmspec.vision.registry import parse_compressor

    try:
        parse_compressor(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _number(default: int | None, help: str, group: str = _SET, letter: str = "N") -> Any:
    """An option that is a whole number above 0."""
    return option(default, help, group, parse=common.positive_int, metavar=letter)


def _real(default: float | None, help: str, group: str = _SET, letter: str = "W") -> Any:
    return option(default, help, group, parse=float, metavar=letter)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TableOptions):
    """The options of one run; `command` is the command line, for provenance.json."""

    command: str = ""
    target: str = option(
        common.DEFAULT_MODEL, f"{common.MODEL_HELP}; default {common.DEFAULT_MODEL}", _WHAT, metavar="M"
    )
    dtype: str = option("auto", common.DTYPE_HELP, _WHAT, choices=common.DTYPES)
    device: str = option("auto", common.DEVICE_HELP, _WHAT, metavar="DEV")
    drafter: tuple[str, ...] = option(
        ("msd",), "names of the list below (default msd)", _WHAT, parse=parse_drafters, metavar="D,D"
    )
    data: tuple[str, ...] = option((), "as `mmspec caption` reads them", _WHAT, metavar="PATH", many="+")
    out: Path = option(REQUIRED, "folder of the run", _WHAT, parse=common.output_path, metavar="FOLDER")  # noqa: RUF009
    prompt: str | None = option(
        None, "of rows of --data without their own (default: as mmspec caption)", _WHAT, metavar="TEXT"
    )

    max_new_tokens: int = _number(160, "maximum length of an answer in tokens (default 160)", _HOW)
    steps: int = _number(None, "default 1000", _HOW)
    batch_size: int = _number(16, "sequences per step (default 16)", _HOW)
    lr: float = _real(None, "highest learning rate (default 1e-3; mtp 1e-4)", _HOW, "R")
    loss: str = option(
        "ce",
        "loss on the logits (default ce): ce and kl fit the target's distribution; tv, lk, lk-mix and path follow the "
        "probability that draft tokens are accepted",
        _HOW,
        choices=LOSSES,
    )
    compressor: str | None = option(
        None, "compress visual tokens to N (latent:64)", _HOW, parse=compressor_spec, metavar="NAME:N"
    )
    start_from: str | None = option(
        None, "trained weights: a folder of a run or drafter, or a name", _HOW, metavar="FOLDER"
    )
    evaluate: int = option(
        24, "requests to measure tau on (default 24; 0 none)", _HOW, parse=common.non_negative_int, metavar="N"
    )
    seed: int = option(
        0, "of initial weights and of the order of samples (default 0)", _HOW, parse=common.parse_seed, metavar="N"
    )
    minutes: float = _real(math.inf, "stop after this long; run again to go on", _HOW, "T")
    progress: bool | None = option(None, "bar (default: on a terminal, else lines)", _HOW)

    cache_gib: float = _real(4.0, "host memory for the target's hidden states, in GiB (4)")
    ttt_steps: int = _number(
        3, "training-time-test steps: forwards per batch, all but the first on the head's own outputs (3)"
    )
    text_first: bool = option(False, "MSD's schedule: text alone for half the steps, then more images", _SET)
    ffn: int | None = _number(None, "intermediate size (that of the target)")
    block: int | None = _number(None, "tokens per forward (flash: 5, falcon: 2)", letter="K")
    visual_mode: str | None = option(
        None, "how visual tokens enter the head (as the drafter's)", _SET, choices=(*VISUAL_MODES, "mixed")
    )
    head_layers: int = _number(1, "decoder layers of a dspark, dflash2 or lilicorr head (1)")
    layers: tuple[int, ...] | None = option(
        None,
        "hidden states that the head reads, 0 to all (2,N/2,N-3; dspark, dflash2 and lilicorr also N-1)",
        _SET,
        parse=parse_layers,
    )
    draft_vocab: int | None = _number(None, "draft vocabulary: the N most frequent ids of the answers (all)")

    @property
    def source(self) -> SourceOptions:
        """How `data` is read."""
        return common.source_options(self)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainOptions:
        """The parsed command line. Steps that are not given are the largest default of the drafters, the learning rate
        is the lowest.

        Raises:
            UsageError: a setting that there is not, or that does not go with the others.
        """
        known = described(cls)
        values = {name: getattr(args, name) for name, one in known.items() if one.group}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        values |= read_settings(cls, args.set or ())
        chosen = [recipes()[name][1] for name in values["drafter"]]
        values["steps"] = values["steps"] or max(recipe.steps for recipe in chosen)
        values["lr"] = values["lr"] or min(recipe.learning_rate for recipe in chosen)
        options = cls(**values, command=getattr(args, "command", ""))
        if options.block is not None and not any(recipe.block_size > 1 for recipe in chosen):
            raise UsageError("--set block goes with drafters of several tokens per forward")
        return options
