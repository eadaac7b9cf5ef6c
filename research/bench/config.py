"""Settings of `research.bench`, resolved and validated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.caption.option_fields import PROMPT
from mmspec.app.cli.arguments import source_options
from mmspec.app.errors import UsageError
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.arguments import config_from_args

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions

MAX_TREE_SIZE = 64
"""`MAX_NODES` of mmspec.engine.tree, which is too slow to import here."""
DEFAULT_ROUNDS = 41
"""Each ratio is a median of so many."""
DEFAULT_PROCESSES = 5
"""Of the toy world, whose model is loaded in no time: each has its share of the rounds."""
DEFAULT_MINUTES = 3
"""Of measuring, where neither rounds nor minutes are given."""


@dataclass(frozen=True)
class BenchConfig:
    """What is measured.

    Attributes:
        model: hub id, folder or built-in name. dtype, device: of the model.
        drafters: specs as `research.bench.drafter_specs.parse_spec` reads them.
        nodes: size of every tree; None lets the controller choose.
        batch_sizes: rows per call, one series of measurements for each.
        prompt_tokens: lengths that prompts are padded to; empty for prompts as they are.
        task: scenes task; None for images with one prompt.
        scene_seed: of the first scene, with `task`. count: scenes; None for `repeats` batches.
        new_tokens: per row; a maximum with `task`, exact without.
        temperature: 0 is greedy. seed: of prompts, images and sampling. repeats: rounds after the warm-up, at most.
        minutes: after which no round but the first seven begins; None for no limit. processes: that share the rounds.
        images: paths of images; empty for synthetic ones. source: how they are read. prompt: text before the padding.
    """

    model: str
    dtype: str
    device: str
    drafters: tuple[str, ...]
    nodes: int | None
    batch_sizes: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    task: str | None
    scene_seed: int | None
    count: int | None
    new_tokens: int
    temperature: float
    seed: int
    repeats: int
    minutes: int | None
    processes: int
    images: tuple[str, ...]
    source: SourceOptions
    prompt: str

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchConfig:
        """Fill in defaults that depend on other options.

        Raises:
            UsageError: options that exclude each other, or a value out of range.
        """
        image_options = {"--images": args.images, "--prompt": args.prompt, "--prompt-tokens": args.prompt_tokens}
        used = [name for name, value in image_options.items() if value]
        task = "describe" if args.task is None and args.model == SCENES_MODEL and not used else args.task
        if task is not None and used:
            raise UsageError(f"--task brings images and questions of its own; leave out {used[0]}")
        if task is not None and args.count is not None and args.count < max(args.batch_sizes):
            raise UsageError(f"--count {args.count} does not fill a batch of {max(args.batch_sizes)}")
        if task is None and (args.scene_seed is not None or args.count is not None):
            raise UsageError("--scene-seed and --count go with --task")
        if args.overview and (args.processes or 1) > 1:
            raise UsageError("--overview measures in one process; leave --processes out")
        if args.overview and (task != "describe" or args.model != SCENES_MODEL):
            raise UsageError("--overview has tasks of its own, of the toy world: leave --model, --task and images out")
        if args.nodes is not None and args.nodes > MAX_TREE_SIZE:
            raise UsageError(f"--nodes is 1 to {MAX_TREE_SIZE}, the root included; got {args.nodes}")
        new_tokens = args.new_tokens or (160 if task else 64)
        if new_tokens < 2:
            raise UsageError(f"--new-tokens must be 2 or more, or there is nothing to decode; got {new_tokens}")
        is_default = args.repeats is None and args.count is None
        scene_seed = FIRST_HELD_OUT_SEED if task and args.scene_seed is None else args.scene_seed
        return config_from_args(
            cls,
            args,
            prompt_tokens=tuple(args.prompt_tokens or ()),
            task=task,
            scene_seed=scene_seed,
            new_tokens=new_tokens,
            repeats=args.repeats or DEFAULT_ROUNDS,
            minutes=args.minutes or (DEFAULT_MINUTES if is_default else None),
            processes=args.processes or (DEFAULT_PROCESSES if is_default and args.model == SCENES_MODEL else 1),
            prompt=args.prompt or PROMPT,
            source=source_options(args),
        )

    def rounds_of(self, batch: int) -> int:
        """Rounds at a batch size, at most, the warm-up not included."""
        return self.count // batch if self.count else self.repeats
