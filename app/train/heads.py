"""The networks of `mmspec train`: recipes of drafters, shapes of heads, initial or trained weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.train.config import TrainOptions


@dataclass(frozen=True)
class HeadRecipe:
    """Architecture and shape of a drafter that can be trained.

    Attributes:
        visual_mode: how visual tokens enter the head (`mmspec.drafters.eagle.visual_inputs`).
        architecture: key of `mmspec.drafters.architectures.ARCHITECTURES`.
        block_size: tokens per pass.
        ffn_scale: intermediate size of the feed-forward, as a share of `--ffn`.
        block_ffn_scale: intermediate size of the block feed-forward (FLASH), as a share of `--ffn`.
        markov_scale: rank of the Markov head (FLASH), as a share of `--ffn`.
    """

    visual_mode: str
    architecture: str = "eagle"
    block_size: int = 1
    ffn_scale: float = 1.0
    block_ffn_scale: float = 0.0
    markov_scale: float = 0.0


RECIPES = {
    "msd": HeadRecipe("decoupled"),
    "eagle": HeadRecipe("coupled"),
    "eagle-blind": HeadRecipe("placeholder"),
    "eagle-textual": HeadRecipe("text_only"),
    "flash": HeadRecipe("decoupled", "flash", 5, 0.0, 1.0, 0.25),
    "flash-free": HeadRecipe("decoupled", "flash", 5, 0.0, 1.0),
    "parallel": HeadRecipe("decoupled", "parallel", 5, 1.0, 0.5),
    "parallel-free": HeadRecipe("decoupled", "parallel", 5),
    "falcon": HeadRecipe("decoupled", "falcon", 2),
}
"""Drafters that can be trained."""


def build_parts(options: TrainOptions, name: str, config: Any, teacher: Any) -> tuple[Any, Any]:
    """(head, compressor or None) of a drafter to be trained: fresh, or with the weights that `--start-from` names.

    Raises:
        UsageError: what is asked for cannot be.
    """
    try:
        if options.start_from is None:
            recipe, kept = RECIPES[name], None
            head = init_head(resize_config(config, recipe, options.block), options.seed, recipe.architecture)
        else:
            head, kept = load_head(options, name, teacher)
        return head, build_compressor(options, config.hidden_size, kept)
    except ValueError as error:
        raise UsageError(f"--drafter {name}: {error}") from error


def target_head_config(model: Any, ffn: int | None) -> Any:
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


def resize_config(config: Any, recipe: HeadRecipe, block: int | None) -> Any:
    """The head config of a recipe: the target's shape with the sizes of the recipe."""
    block = block if block and recipe.architecture != "eagle" else recipe.block_size
    width = config.intermediate_size
    return replace(
        config,
        intermediate_size=round(recipe.ffn_scale * width),
        block_size=block,
        block_ffn_size=round(recipe.block_ffn_scale * width),
        markov_rank=round(recipe.markov_scale * width),
    )


def init_head(config: Any, seed: int, kind: str = "eagle") -> Any:
    """Fresh weights, the same for every drafter of a run; torch's generators stay as they are."""
    import torch

    from mmspec.drafters.architectures import ARCHITECTURES

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ARCHITECTURES[kind].head(config)


def load_head(options: TrainOptions, name: str, teacher: Any) -> tuple[Any, Any]:
    """The weights to go on from: of the drafter of that name in a run's folder, or of the one drafter that is named.

    With it, as in `HeadMetadata`, the compressor that was trained with it, or None.

    Raises:
        UsageError: there are none. ValueError: they are of another kind or shape, for another target, or damaged.
    """
    from mmspec.drafters.checkpoints.format import CONFIG_NAME, load_head
    from mmspec.drafters.registry import bundled_drafters

    if options.start_from is None:
        raise ValueError("load_head needs --start-from")
    recipe = RECIPES[name]
    assert options.start_from is not None
    place = Path(bundled_drafters().get(options.start_from, options.start_from))
    if (place / name / CONFIG_NAME).is_file():
        place /= name
    elif len(options.drafter) > 1:
        raise UsageError(f"--start-from {place}: there is no {name}/{CONFIG_NAME} in it")
    try:
        head, made = load_head(place)
    except FileNotFoundError as error:
        raise UsageError(f"--start-from {options.start_from}: {error}") from error
    text = teacher.model.config.get_text_config(decoder=True)
    made.check_target(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=teacher.adapter.num_layers,
        tokenizer=teacher.fingerprint,
    )
    wanted: dict[str, tuple[object, object]] = {"kind": (recipe.architecture, made.architecture)}
    wanted |= {"rule": (options.visual_mode or recipe.visual_mode, made.visual_mode)}
    wanted |= (
        {}
        if options.ffn is None
        else {"ffn": (round((recipe.ffn_scale or recipe.block_ffn_scale) * options.ffn), ffn_width(head))}
    )
    wanted |= {} if options.block is None else {"block": (options.block, head.config.block_size)}
    wrong = [f"{what} {there} (wanted: {here})" for what, (here, there) in wanted.items() if here != there]
    if wrong:
        raise ValueError(f"{place} is another drafter: {', '.join(wrong)}")
    return head.train(), made.compressor


def ffn_width(head: Any) -> int:
    """Intermediate size of a head, the value that `--ffn` sets."""
    width: int = head.config.intermediate_size or head.config.block_ffn_size
    return width


def build_compressor(options: TrainOptions, hidden_size: int, kept: Any) -> Any:
    """What `--compressor` asks for, if anything: with the weights that came with the head, else fresh.

    Args:
        kept: as in `HeadMetadata`.

    Raises:
        ValueError: weights of another compressor came with the head, and would be lost.
    """
    from mmspec.vision.registry import config_size, load_compressor, parse_compressor

    if kept is None or not kept[1]:
        return None if options.compressor is None else init_compressor(options.compressor, hidden_size, options.seed)
    facts, weights = kept
    if options.compressor is None or parse_compressor(options.compressor) != (facts["name"], config_size(facts)):
        raise ValueError(
            f"{options.start_from} was trained with --compressor {facts['name']}:{config_size(facts)} (wanted: "
            f"{options.compressor or 'none'}): ask for the same, or start from another drafter"
        )
    return load_compressor(facts, weights, hidden_size).train()  # type: ignore[attr-defined]


def init_compressor(text: str, hidden_size: int, seed: int) -> Any:
    """Fresh weights; torch's generators stay as they are."""
    import torch

    from mmspec.vision.registry import init_compressor

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return init_compressor(text, hidden_size)


def compressor_state(compressor: Any) -> Any:
    """What a checkpoint keeps of a compressor."""
    from mmspec.vision.registry import compressor_config

    if compressor is None:
        return None
    weights = compressor.state_dict() if hasattr(compressor, "state_dict") else {}
    return compressor_config(compressor), weights


__all__ = ["RECIPES", "build_parts", "compressor_state", "init_compressor", "init_head", "target_head_config"]
