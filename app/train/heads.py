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
        visual_mode: how visual tokens enter the head, a key of `VISUAL_MODES` of
            `mmspec.drafters.heads.base.visual_inputs`, or
            "mixed" (`mmspec.drafters.training.batch.MIXED`).
        architecture: a key of `mmspec.drafters.heads.architectures.ARCHITECTURES`.
        block_size: tokens per forward (`HeadConfig.block_size`); `--block` overrides it.
        ffn_scale: `HeadConfig.intermediate_size` as a multiple of `--ffn`.
        block_ffn_scale: `HeadConfig.block_ffn_size` as a multiple of `--ffn`.
        markov_scale: `HeadConfig.markov_rank` as a multiple of `--ffn`.
        layer_mixture: `HeadConfig.layer_mixture`.
    """

    visual_mode: str
    architecture: str = "eagle"
    block_size: int = 1
    ffn_scale: float = 1.0
    block_ffn_scale: float = 0.0
    markov_scale: float = 0.0
    layer_mixture: bool = False


RECIPES = {
    "msd": HeadRecipe("decoupled"),
    "eagle": HeadRecipe("coupled"),
    "eagle-placeholder": HeadRecipe("placeholder"),
    "eagle-text-only": HeadRecipe("text_only"),
    "eagle3": HeadRecipe("mixed", "eagle3"),
    "flash": HeadRecipe("decoupled", "flash", 5, ffn_scale=0.0, block_ffn_scale=1.0, markov_scale=0.25),
    "flash-free": HeadRecipe("decoupled", "flash", 5, ffn_scale=0.0, block_ffn_scale=1.0),
    "parallel": HeadRecipe("decoupled", "parallel", 5, block_ffn_scale=0.5),
    "parallel-free": HeadRecipe("decoupled", "parallel", 5),
    "dspark": HeadRecipe("coupled", "dspark", 5, markov_scale=0.125),
    "dspark-mixture": HeadRecipe("coupled", "dspark", 5, markov_scale=0.125, layer_mixture=True),
    "falcon": HeadRecipe("decoupled", "falcon", 2),
    "instant": HeadRecipe("text_only", "instant", 4),
}
"""Drafters that can be trained."""


@dataclass(frozen=True)
class HeadParts:
    """What a drafter in training consists of.

    Attributes:
        head: the network.
        compressor: reduces its visual tokens, or None.
        draft_ids: [V'] the draft vocabulary of the weights that `--start-from` names, or None.
    """

    head: Any
    compressor: Any
    draft_ids: Any


def drafting_mode(visual_mode: str) -> str:
    """The visual mode with which a head drafts that was trained with this one."""
    return "coupled" if visual_mode == "mixed" else visual_mode


def build_parts(options: TrainOptions, name: str, config: Any, teacher: Any) -> HeadParts:
    """The parts of a drafter to be trained: fresh, or with the weights that `--start-from` names.

    Raises:
        UsageError: a size is invalid, the compressor needs grids that are unknown, or `--start-from` does not fit.
    """
    from mmspec.drafters.heads.instant.head import InstantHead
    from mmspec.resolve import check_grids

    try:
        if options.start_from is None:
            recipe, stored, draft_ids = RECIPES[name], None, None
            resized = resize_config(config, recipe, options.block)
            resized = add_hidden_states(resized, recipe, options, teacher.adapter.num_layers)
            head = init_head(resized, options.seed, recipe.architecture)
        else:
            head, stored, draft_ids = load_start_head(options, name, teacher)
        compressor = build_train_compressor(options, config.hidden_size, stored)
        if compressor is not None and head.config.hidden_state_layers:
            raise ValueError("--compressor is for heads that read one hidden state; this one reads several")
        if compressor is not None and isinstance(head, InstantHead):
            raise ValueError("--compressor is for heads that read visual tokens; instant heads read none")
        if compressor is not None:
            check_grids(compressor, teacher.adapter)
        return HeadParts(head, compressor, draft_ids)
    except ValueError as error:
        raise UsageError(f"--drafter {name}: {error}") from error


def target_head_config(model: Any, ffn: int | None) -> Any:
    """A head with the shape of the target's last decoder layer, dense where that has experts.

    Args:
        model: the target.
        ffn: intermediate size; None for that of the target.
    """
    from mmspec.drafters.heads.eagle.head import HeadConfig

    text = model.config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", None)  # the sizes of the layers may differ
    layer = layers[len(layers) - 1] if layers else text
    return HeadConfig(
        hidden_size=text.hidden_size,
        intermediate_size=ffn or _intermediate_size(layer),
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
        vocab_size=text.vocab_size,
        head_dim=getattr(layer, "head_dim", None) or 0,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_theta=_rope_theta(text),
    )


def _intermediate_size(layer: Any) -> int:
    """Intermediate size of a layer's feed-forward; of a mixture, what its active experts add up to."""
    size = getattr(layer, "intermediate_size", None)
    if size is None:
        expert = getattr(layer, "moe_intermediate_size", None) or 0
        return expert * (getattr(layer, "num_experts_per_tok", None) or 1) or 4 * layer.hidden_size
    return max(size) if isinstance(size, (list, tuple)) else size


def _rope_theta(text: Any) -> float:
    """Base of the rotary embedding, that of the full attention where the layer types differ; 10000 if unknown."""
    rope = getattr(text, "rope_parameters", None) or {}
    return float(rope.get("full_attention", rope).get("rope_theta", 10000.0))


def resize_config(config: Any, recipe: HeadRecipe, block: int | None) -> Any:
    """The head config of a recipe: the target's shape with the sizes of the recipe."""
    block = block if block and recipe.block_size > 1 else recipe.block_size
    if recipe.architecture == "instant":  # its sizes follow from the target's hidden size
        from mmspec.drafters.heads.instant.head import instant_config

        return instant_config(config.hidden_size, config.vocab_size, block)
    width = config.intermediate_size
    return replace(
        config,
        intermediate_size=round(recipe.ffn_scale * width),
        block_size=block,
        block_ffn_size=round(recipe.block_ffn_scale * width),
        markov_rank=round(recipe.markov_scale * width),
        layer_mixture=recipe.layer_mixture,
    )


def add_hidden_states(config: Any, recipe: HeadRecipe, options: TrainOptions, num_layers: int) -> Any:
    """The config with what heads have that read several hidden states of the target; others unchanged.

    Args:
        config: of the head.
        recipe: of the drafter.
        options: `layers` and `draft_vocab` are used.
        num_layers: decoder layers of the target.

    Raises:
        ValueError: `--layers` for another architecture, of another number than three (EAGLE-3), or not of this target.
    """
    from mmspec.drafters.heads.eagle3.head import eagle3_layers

    if recipe.architecture not in ("eagle3", "dspark"):
        if options.layers is not None:
            raise ValueError("--layers is for heads that read several hidden states; this one reads the last")
        return config
    is_eagle3 = recipe.architecture == "eagle3"
    layers = options.layers or (eagle3_layers(num_layers) + (() if is_eagle3 else (num_layers - 1,)))
    if (is_eagle3 and len(layers) != 3) or min(layers) < 0 or max(layers) > num_layers:
        number = "three" if is_eagle3 else "some"
        raise ValueError(
            f"--layers must be {number} of 0 to {num_layers} for this target; got {','.join(map(str, layers))}"
        )
    if not is_eagle3:
        return replace(config, hidden_state_layers=layers, num_hidden_layers=options.head_layers, confidence_head=True)
    size = min(options.draft_vocab or config.vocab_size, config.vocab_size)
    return replace(config, eagle3_input=True, hidden_state_layers=layers, draft_vocab_size=size)


def init_head(config: Any, seed: int, architecture: str = "eagle") -> Any:
    """Fresh weights, the same for every drafter of a run; torch's generators stay as they are."""
    import torch

    from mmspec.drafters.heads.architectures import ARCHITECTURES

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ARCHITECTURES[architecture].head(config)


def load_start_head(options: TrainOptions, name: str, teacher: Any) -> tuple[Any, Any, Any]:
    """The head of `--start-from`, a folder of a run (its drafter of that name) or of one drafter.

    Returns:
        The head, the compressor that was trained with it as in `HeadMetadata`, or None, and its draft vocabulary, or
        None.

    Raises:
        UsageError: there is none.
        ValueError: it has another architecture or shape, is for another target, or is damaged.
    """
    from mmspec.drafters.checkpoints.format import CONFIG_NAME, load_head
    from mmspec.drafters.registry import bundled_drafters

    if options.start_from is None:
        raise ValueError("load_start_head needs --start-from")
    folder = Path(bundled_drafters().get(options.start_from, options.start_from))
    if (folder / name / CONFIG_NAME).is_file():
        folder /= name
    elif len(options.drafter) > 1:
        raise UsageError(f"--start-from {folder}: there is no {name}/{CONFIG_NAME} in it")
    try:
        head, metadata = load_head(folder)
    except FileNotFoundError as error:
        raise UsageError(f"--start-from {options.start_from}: {error}") from error
    text_config = teacher.model.config.get_text_config(decoder=True)
    metadata.check_target(
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_layers=teacher.adapter.num_layers,
        tokenizer=teacher.fingerprint,
    )
    differences = _start_differences(options, name, head, metadata)
    if differences:
        raise ValueError(f"{folder} is another drafter: {', '.join(differences)}")
    return head.train(), metadata.compressor, metadata.draft_ids


def _start_differences(options: TrainOptions, name: str, head: Any, metadata: Any) -> list[str]:
    """What differs between a loaded head and the drafter to be trained."""
    recipe = RECIPES[name]
    pairs: dict[str, tuple[object, object]] = {
        "architecture": (recipe.architecture, metadata.architecture),
        "visual mode": (drafting_mode(options.visual_mode or recipe.visual_mode), metadata.visual_mode),
    }
    if options.ffn is not None:
        pairs["ffn"] = (round((recipe.ffn_scale or recipe.block_ffn_scale) * options.ffn), ffn_width(head))
    if options.block is not None:
        pairs["block"] = (options.block, head.config.block_size)
    return [f"{key} {found} (wanted: {wanted})" for key, (wanted, found) in pairs.items() if wanted != found]


def ffn_width(head: Any) -> int:
    """Intermediate size of a head, the value that `--ffn` sets."""
    width: int = head.config.intermediate_size or head.config.block_ffn_size
    return width


def build_train_compressor(options: TrainOptions, hidden_size: int, stored: Any) -> Any:
    """The compressor of `--compressor`, or None: with the weights that are stored with the head, else fresh.

    Args:
        options: of the run.
        hidden_size: of the target.
        stored: `HeadMetadata.compressor` of the head of `--start-from`, or None.

    Raises:
        ValueError: the head was trained with another compressor, whose weights would be lost.
    """
    from mmspec.vision.registry import load_compressor, parse_compressor

    if stored is None or not stored[1]:
        return None if options.compressor is None else seeded_compressor(options.compressor, hidden_size, options.seed)
    config, weights = stored
    if options.compressor is None or parse_compressor(options.compressor) != (config["name"], config["max_tokens"]):
        raise ValueError(
            f"{options.start_from} was trained with --compressor {config['name']}:{config['max_tokens']} (wanted: "
            f"{options.compressor or 'none'}): pass the same, or start from another drafter"
        )
    return load_compressor(config, weights, hidden_size).train()  # type: ignore[attr-defined]


def seeded_compressor(spec: str, hidden_size: int, seed: int) -> Any:
    """A compressor with fresh weights; torch's generators stay as they are."""
    import torch

    from mmspec.vision.registry import init_compressor

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return init_compressor(spec, hidden_size)


def compressor_state(compressor: Any) -> Any:
    """A compressor as in `HeadMetadata`, or None."""
    from mmspec.vision.registry import compressor_config

    if compressor is None:
        return None
    weights = compressor.state_dict() if hasattr(compressor, "state_dict") else {}
    return compressor_config(compressor), weights
