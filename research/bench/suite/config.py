"""Settings of `research.bench --suite` and `--peers`, resolved and validated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.arguments import config_from_args
from research.bench.config import DEFAULT_MINUTES

SUITES = ("mmspec", "scenes", "text")
"""A folder of items, the toy world, text tasks."""
SUITE_NEW_TOKENS = {"scenes": 160, "text": 64, "mmspec": 256}
DEFAULT_ITEMS = 42
"""Items of the toy world, in equal parts of its categories."""
SCENE_CATEGORIES = ("describe", "short", "answer")
"""Without clips, whose prefill takes longer than their answers."""


@dataclass(frozen=True)
class SuiteConfig:
    """What is measured.

    Attributes:
        model, dtype, device: of the target. drafters: specs of mmspec's own rows. nodes: size of every tree.
        suite: one of `SUITES`. data: its folder. categories: those to run; empty for all. limit: items of each.
        scene_seed: of the first scene. batch_sizes: rows per call, a series for each.
        new_tokens: of an answer, at most.
        minutes: after which no prompt but the first seven begins; None for no limit.
        peers: names of `PEER_NAMES`. peer_python: interpreters of their environments. assistant: a smaller model.
    """

    model: str
    dtype: str
    device: str
    drafters: tuple[str, ...]
    nodes: int | None
    suite: str
    data: Path | None
    categories: tuple[str, ...]
    limit: int | None
    scene_seed: int
    batch_sizes: tuple[int, ...]
    new_tokens: int
    peers: tuple[str, ...]
    peer_python: tuple[str, ...]
    assistant: str | None
    minutes: int | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SuiteConfig:
        """Fill in defaults that depend on other options.

        Raises:
            UsageError: options that exclude each other.
        """
        unsuited = {"--task": args.task, "--images": args.images, "--prompt": args.prompt, "--count": args.count}
        unsuited |= {"--prompt-tokens": args.prompt_tokens, "--temperature": args.temperature, "--plot": args.plot}
        used = [name for name, value in unsuited.items() if value]
        if used:
            raise UsageError(f"{used[0]} does not go with --suite and --peers, which decode greedily")
        suite = args.suite or ("scenes" if args.model == SCENES_MODEL else None)
        if suite is None:
            raise UsageError(f"--peers needs prompts: --suite {{{','.join(SUITES)}}}")
        if (suite == "mmspec") != (args.data is not None):
            raise UsageError("--suite mmspec and --data FOLDER go together")
        categories = args.categories
        if suite == "scenes" and not categories:
            categories = SCENE_CATEGORIES if args.suite else SCENE_CATEGORIES[:1]
        return config_from_args(
            cls,
            args,
            suite=suite,
            categories=tuple(categories),
            limit=args.limit or (max(1, DEFAULT_ITEMS // len(categories)) if suite == "scenes" else None),
            scene_seed=FIRST_HELD_OUT_SEED if args.scene_seed is None else args.scene_seed,
            minutes=args.minutes or (None if suite == "mmspec" else DEFAULT_MINUTES),
            new_tokens=args.new_tokens or SUITE_NEW_TOKENS[suite],
        )
