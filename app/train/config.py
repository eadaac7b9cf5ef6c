"""Options of `mmspec train`, typed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.cli.arguments import source_options

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions


@dataclass(frozen=True)
class TrainOptions:
    """The options of one run; each field is the flag of the same name (`--max-new-tokens` is `max_new_tokens`).

    Attributes:
        command: the command line, for provenance.json.
        source: how `data` is read.
        drafter: names of recipes that are trained side by side.
        ttt_steps: training-time-test steps, the first included; after it the head reads its own outputs.
        ffn: width of the feed-forward network; None for that of the target.
        block: tokens per forward; None for that of the recipe.
        head_layers: decoder layers of a head that may have several (dspark).
        layers: indices of the target's hidden states that a head reads; None for the default of the recipe.
        visual_mode: how visual tokens enter the head; None for that of the recipe.
        draft_layers: decoder layers of a draft model (draft-lm); None for an eighth of the target's.
        minutes: time limit of one call; the run goes on when the command is repeated.
    """

    command: str
    target: str
    drafter: list[str]
    data: list[str]
    source: SourceOptions
    prompt: str | None
    out: Path
    dtype: str
    device: str
    count: int
    max_new_tokens: int
    steps: int
    batch_size: int
    answer_batch: int | None
    cache_gib: float
    lr: float
    hidden_loss: float
    logits_loss: float
    loss: str
    ttt_steps: int
    text_first: bool
    text_only: bool
    noise: float
    ffn: int | None
    block: int | None
    layers: tuple[int, ...] | None
    head_layers: int
    visual_mode: str | None
    compressor: str | None
    start_from: str | None
    draft_vocab: int | None
    evaluate: int
    seed: int
    minutes: float
    draft_layers: int | None
    progress: bool | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainOptions:
        """The parsed command line."""
        values: dict[str, Any] = {item.name: getattr(args, item.name, "") for item in fields(cls)}
        return cls(**values | {"source": source_options(args)})
