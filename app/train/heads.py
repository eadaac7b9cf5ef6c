"""The networks of `mmspec train`: which drafters can be trained, their shapes, their fresh or trained weights."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """A drafter that can be trained: its rule for visual tokens, its kind, and the shape that is its own.

    Attributes:
        block: tokens of a pass. ffn, inner, chain: what of the width `--ffn` the feed-forward, the spreading part and
            the chain have.
    """

    rule: str
    kind: str = "eagle"
    block: int = 1
    ffn: float = 1.0
    inner: float = 0.0
    chain: float = 0.0


RECIPES = {
    "msd": Recipe("decoupled"),
    "eagle": Recipe("coupled"),
    "eagle-blind": Recipe("placeholder"),
    "eagle-textual": Recipe("text_only"),
    "flash": Recipe("decoupled", "flash", 5, 0.0, 1.0, 0.25),
    "flash-free": Recipe("decoupled", "flash", 5, 0.0, 1.0),
    "parallel": Recipe("decoupled", "parallel", 5, 1.0, 0.5),
    "parallel-free": Recipe("decoupled", "parallel", 5),
    "falcon": Recipe("decoupled", "falcon", 2),
}
"""Drafters that can be trained."""


def parts_of(args: argparse.Namespace, name: str, config: Any, teacher: Any) -> tuple[Any, Any]:
    """(head, compressor or None) of a drafter to be trained: fresh, or with the weights that `--start-from` names.

    Raises:
        UsageError: what is asked for cannot be.
    """
    try:
        if args.start_from is None:
            recipe, kept = RECIPES[name], None
            head = new_head(shaped(config, recipe, args.block), args.seed, recipe.kind)
        else:
            head, kept = old_head(args, name, teacher)
        return head, compressor_of(args, config.hidden_size, kept)
    except ValueError as error:
        raise UsageError(f"--drafter {name}: {error}") from error


def config_of(model: Any, ffn: int | None) -> Any:
    """A head of the target's own shape."""
    from mmspec.drafters.eagle.head import HeadConfig

    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    return HeadConfig(
        hidden_size=text.hidden_size,
        intermediate_size=ffn or text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocab_size=text.vocab_size,
        head_dim=getattr(text, "head_dim", None) or 0,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )


def shaped(config: Any, recipe: Recipe, block: int | None) -> Any:
    """The shape of a drafter: of a head of the target's shape, what is its own changed."""
    block = block if block and recipe.kind != "eagle" else recipe.block
    width = config.intermediate_size
    inner, chain = round(recipe.inner * width), round(recipe.chain * width)
    return replace(
        config,
        intermediate_size=round(recipe.ffn * width),
        block_size=block,
        block_ffn_size=inner,
        markov_rank=chain,
    )


def new_head(config: Any, seed: int, kind: str = "eagle") -> Any:
    """Fresh weights, the same for every drafter of a run; torch's generators stay as they are."""
    import torch

    from mmspec.drafters.architectures import ARCHITECTURES

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ARCHITECTURES[kind].head(config)


def old_head(args: argparse.Namespace, name: str, teacher: Any) -> tuple[Any, Any]:
    """The weights to go on from: of the drafter of that name in a run's folder, or of the one drafter that is named.

    With it, as in `checkpoint.Made`, the compressor that was trained with it, or None.

    Raises:
        UsageError: there are none. ValueError: they are of another kind or shape, for another target, or damaged.
    """
    from mmspec.drafters.checkpoints.format import CONFIG_NAME, load_head
    from mmspec.drafters.registry import bundled_drafters

    recipe = RECIPES[name]
    place = Path(bundled_drafters().get(args.start_from, args.start_from))
    if (place / name / CONFIG_NAME).is_file():
        place /= name
    elif len(args.drafter) > 1:
        raise UsageError(f"--start-from {place}: there is no {name}/{CONFIG_NAME} in it")
    try:
        head, made = load_head(place)
    except FileNotFoundError as error:
        raise UsageError(f"--start-from {args.start_from}: {error}") from error
    text = teacher.model.config.get_text_config(decoder=True)
    made.check_target(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=teacher.family.num_layers,
        tokenizer=teacher.fingerprint,
    )
    wanted: dict[str, tuple[object, object]] = {"kind": (recipe.kind, made.architecture)}
    wanted |= {"rule": (args.rule or recipe.rule, made.visual_mode)}
    wanted |= {} if args.ffn is None else {"ffn": (round((recipe.ffn or recipe.inner) * args.ffn), ffn_of(head))}
    wanted |= {} if args.block is None else {"block": (args.block, head.config.block_size)}
    wrong = [f"{what} {there} (wanted: {here})" for what, (here, there) in wanted.items() if here != there]
    if wrong:
        raise ValueError(f"{place} is another drafter: {', '.join(wrong)}")
    return head.train(), made.compressor


def ffn_of(head: Any) -> int:
    """What `--ffn` has made of a head."""
    width: int = head.config.intermediate_size or head.config.block_ffn_size
    return width


def compressor_of(args: argparse.Namespace, hidden_size: int, kept: Any) -> Any:
    """What `--compressor` asks for, if anything: with the weights that came with the head, else fresh.

    Args:
        kept: as in `checkpoint.Made`.

    Raises:
        ValueError: weights of another compressor came with the head, and would be lost.
    """
    from mmspec.vision.registry import parse, restored

    if kept is None or not kept[1]:
        return None if args.compressor is None else new_compressor(args.compressor, hidden_size, args.seed)
    facts, weights = kept
    if args.compressor is None or parse(args.compressor) != (facts["name"], facts["tokens"]):
        raise ValueError(
            f"{args.start_from} was trained with --compressor {facts['name']}:{facts['tokens']} (wanted: "
            f"{args.compressor or 'none'}): ask for the same, or start from another drafter"
        )
    return restored(facts, weights, hidden_size).train()  # type: ignore[attr-defined]


def new_compressor(text: str, hidden_size: int, seed: int) -> Any:
    """Fresh weights; torch's generators stay as they are."""
    import torch

    from mmspec.vision.registry import new

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return new(text, hidden_size)


def kept_of(compressor: Any) -> Any:
    """What a checkpoint keeps of a compressor."""
    if compressor is None:
        return None
    weights = compressor.state_dict() if hasattr(compressor, "state_dict") else {}
    return {"name": compressor.name, "tokens": compressor.tokens}, weights


__all__ = ["RECIPES", "config_of", "kept_of", "new_compressor", "new_head", "parts_of"]
