"""The networks of `mmspec train`: shapes of heads, initial or trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmspec.app.errors import UsageError
from mmspec.app.train.config import TrainOptions
from mmspec.drafters.checkpoints.format import CONFIG_NAME, load_head, read_metadata
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.registry import HeadMethod, Recipe, TrainSizes, find_method, recipes
from mmspec.drafters.registry import bundled_drafters
from mmspec.drafters.training.batch import DraftModel
from mmspec.resolve import check_grids, target_info
from mmspec.vision.registry import compressor_config, init_compressor, load_compressor, parse_compressor


def train_mode(options: TrainOptions, recipe: Recipe, head: Any) -> str:
    """How visual tokens enter a head in training: as asked for, else as in its family, else as in its recipe."""
    return options.visual_mode or next(iter(head.visual_modes), recipe.visual_mode)


def build_draft_model(options: TrainOptions, name: str, config: Any, teacher: Any) -> DraftModel:
    """A drafter to be trained, on the target's device: fresh, or with the weights that `--start-from` names.

    Raises:
        UsageError: a size is invalid, the compressor needs grids that are unknown, or `--start-from` does not fit.
    """
    method, recipe = recipes()[name]
    try:
        if options.start_from is None:
            stored, draft_ids = None, None
            sizes = TrainSizes(
                teacher.adapter.num_layers, options.block, options.layers, options.head_layers, options.draft_vocab
            )
            if method.is_of_target:
                head = method.head_of_target(target_info(teacher.adapter, teacher.tokenizer), sizes)
            else:
                head = init_head(method.train_config(config, recipe, sizes), options.seed, method)
        else:
            head, stored, draft_ids = load_start_head(options, name, teacher)
        if options.visual_mode and head.visual_modes and options.visual_mode not in (*head.visual_modes, "mixed"):
            modes = ", ".join((*head.visual_modes, "mixed"))
            raise ValueError(f"--set visual_mode must be one of {modes} for this head; got {options.visual_mode}")
        compressor = build_train_compressor(options, config.hidden_size, stored)
        if compressor is not None and head.config.hidden_state_layers:
            raise ValueError("--compressor is for heads that read one hidden state; this one reads several")
        if compressor is not None:
            check_grids(compressor, teacher.adapter)
    except ValueError as error:
        raise UsageError(f"--drafter {name}: {error}") from error
    device = teacher.model.device
    draft_model = DraftModel(head, train_mode(options, recipe, head), method.name, compressor).to(device)
    if draft_ids is not None:
        draft_model.draft_ids = draft_ids.to(device)
    return draft_model


def target_head_config(model: Any, ffn: int | None) -> Any:
    """A head with the shape of the target's last decoder layer, dense where that has experts.

    Args:
        model: the target.
        ffn: intermediate size; None for that of the target.
    """
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the context fresh weights are those of the seed, the same for every drafter of a run."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def init_head(config: Any, seed: int, method: HeadMethod) -> Any:
    """A head with fresh weights."""
    with seeded(seed):
        return method.classes().head(config)


def load_start_head(options: TrainOptions, name: str, teacher: Any) -> tuple[Any, Any, Any]:
    """The head of `--start-from`, a folder of a run (its drafter of that name) or of one drafter.

    Returns:
        The head, the compressor that was trained with it as in `HeadMetadata`, or None, and its draft vocabulary, or
        None.

    Raises:
        UsageError: there is none.
        ValueError: it has another architecture or shape, is for another target, or is damaged.
    """
    if options.start_from is None:
        raise ValueError("load_start_head needs --start-from")
    folder = Path(bundled_drafters().get(options.start_from, options.start_from))
    if (folder / name / CONFIG_NAME).is_file():
        folder /= name
    elif len(options.drafter) > 1:
        raise UsageError(f"--start-from {folder}: there is no {name}/{CONFIG_NAME} in it")
    target = target_info(teacher.adapter, teacher.tokenizer)
    try:
        metadata = read_metadata(folder)
        if find_method(metadata.architecture).is_of_target:
            drafter: Any = load_trained(folder, target)
            head, metadata = drafter.head.trainable_copy(), replace(metadata, draft_ids=drafter.draft_ids)
        else:
            head, metadata = load_head(folder, metadata)
    except FileNotFoundError as error:
        raise UsageError(f"--start-from {options.start_from}: {error}") from error
    metadata.check_target(target)
    differences = _start_differences(options, name, head, metadata)
    if differences:
        raise ValueError(f"{folder} is another drafter: {', '.join(differences)}")
    return head.train(), metadata.compressor, metadata.draft_ids


def _start_differences(options: TrainOptions, name: str, head: Any, metadata: Any) -> list[str]:
    """What differs between a loaded head and the drafter to be trained."""
    method, recipe = recipes()[name]
    pairs: dict[str, tuple[object, object]] = {
        "architecture": (method.name, metadata.architecture),
        "visual mode": (DraftModel(head, train_mode(options, recipe, head)).drafting_mode, metadata.visual_mode),
    }
    if options.ffn is not None:
        width, scale = next(((width, scale) for width, scale in recipe.scales.items() if scale), ("", 0.0))
        pairs["ffn"] = (round(scale * options.ffn), getattr(head.config, width, 0))
    if options.block is not None:
        pairs["block"] = (options.block, head.config.block_size)
    return [f"{key} {found} (wanted: {wanted})" for key, (wanted, found) in pairs.items() if wanted != found]


def build_train_compressor(options: TrainOptions, hidden_size: int, stored: Any) -> Any:
    """The compressor of `--compressor`, or None: with the weights that are stored with the head, else fresh.

    Args:
        options: of the run.
        hidden_size: of the target.
        stored: `HeadMetadata.compressor` of the head of `--start-from`, or None.

    Raises:
        ValueError: the head was trained with another compressor, whose weights would be lost.
    """
    if stored is None or not stored[1]:
        with seeded(options.seed):
            return None if options.compressor is None else init_compressor(options.compressor, hidden_size)
    config, weights = stored
    if options.compressor is None or parse_compressor(options.compressor) != (config["name"], config["max_tokens"]):
        raise ValueError(
            f"{options.start_from} was trained with --compressor {config['name']}:{config['max_tokens']} (wanted: "
            f"{options.compressor or 'none'}): pass the same, or start from another drafter"
        )
    return load_compressor(config, weights, hidden_size).train()  # type: ignore[attr-defined]


def compressor_state(compressor: Any) -> Any:
    """A compressor as in `HeadMetadata`, or None."""
    if compressor is None:
        return None
    weights = compressor.state_dict() if hasattr(compressor, "state_dict") else {}
    return compressor_config(compressor), weights
