"""`ModelAdapter`: what mmspec depends on in a model, read from its config and modules.

Serves any decoder-only model. Where the visual tokens of a family stand is in `mmspec.vision.grids`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.engine.tree_cache import stored_layers
from mmspec.interfaces import SharedEmbeddings
from mmspec.targets.module_scan import callable_name, decoder_module, is_library_code, scan_modules
from mmspec.vision.grids.layout import VisualLayout
from mmspec.vision.grids.registry import VISUAL_LAYOUTS

TREE_ATTENTION_KERNELS = ("sdpa", "eager")
"""Attention implementations that accept a separate mask per node."""
STATIC_ROPE_TYPES = frozenset(("default", "axial", "mrope", "linear", "llama3", "yarn", "proportional", "ntk_alpha"))
"""Rotary scalings whose frequencies do not depend on the positions of a forward."""
RECURRENT_LAYER_TYPES = frozenset(("linear_attention", "conv"))
"""Layer types with a state instead of keys and values. They are decoded in chains (`RecurrentTarget`)."""
ONE_MASK_TYPES = frozenset(("paligemma",))
"""Model types whose `forward` builds the masks of all layer types from one `attention_mask`."""
RESPONSE_TOKEN_TYPES = {"paligemma": 1}
"""{model type: `token_type_ids` of a response} where it is not 0, which is PaliGemma's bidirectional prefix."""
_MEDIA_TOKEN_KEYS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


class ModelAdapter:
    """Properties of one model. One object per patched model, without per-call state.

    Attributes:
        model: the transformers model.
        media_token_ids: ids of the image and video placeholders.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        ids = (getattr(model.config, key, None) for key in _MEDIA_TOKEN_KEYS)
        self.media_token_ids = tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))

    @property
    def model_type(self) -> str:
        """`config.model_type` of the whole model."""
        return str(self.model.config.model_type)

    @property
    def layout(self) -> VisualLayout:
        """Grids of the visual tokens. Made at each use, since `model` of a copied adapter is replaced."""
        return VISUAL_LAYOUTS.get(self.model_type, VisualLayout)(self.model)

    @property
    def accepts_mask_per_layer_type(self) -> bool:
        """Whether `forward` accepts {layer type: mask}. Without it a model with full and sliding layers is served up to
        the length of its window."""
        return self.model_type not in ONE_MASK_TYPES

    @property
    def has_window_masks(self) -> bool:
        """Whether the text model masks what is outside of a window. One that does not (Moshi, whose config has a
        window, which caches follow) is served up to its length."""
        names = ("create_sliding_window_causal_mask", "create_masks_for_generate")
        modules = (
            vars(sys.modules[one.__module__]) for one in type(self.text_model).__mro__ if one.__module__ in sys.modules
        )
        return any(name in module for module in modules for name in names)

    @property
    def padded_ids(self) -> list[int]:
        """Placeholders that the model embeds as its padding token."""
        names = (*_MEDIA_TOKEN_KEYS, "audio_token_id") if self.model_type.startswith("gemma4") else ()
        ids = (getattr(self.model.config, name, None) for name in names)
        return [one for one in ids if isinstance(one, int)] if self.text_config.pad_token_id is not None else []

    @property
    def response_token_type(self) -> int:
        """`token_type_ids` of a response."""
        return RESPONSE_TOKEN_TYPES.get(self.model_type, 0)

    @property
    def text_config(self) -> Any:
        """Config of the text model. Read at each use, since `model` of a copied adapter is replaced."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the text model. Read at each use, since users may cut a model."""
        return int(self.text_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V of the text model. Read at each use, since users may resize it."""
        return int(self.text_config.vocab_size)

    @property
    def text_model(self) -> Any:
        """The decoder module, or the whole model where transformers does not name one."""
        return decoder_module(self.model)

    @cached_property
    def adds_between_layers(self) -> bool:
        """Whether visual features are added to what decoder layers return (deepstack)."""
        return "deepstack" in self.model.config.to_json_string(use_diff=False)

    @property
    def num_cache_layers(self) -> int:
        """Layers that store keys and values: fewer than `num_layers` where layers share them."""
        return len(stored_layers(DynamicCache(config=self.text_config)))

    @property
    def num_positions(self) -> int | None:
        """Number of position ids that the model is made for; behind them some have no embedding. None if unknown."""
        number = getattr(self.text_config, "max_position_embeddings", None)
        return number if isinstance(number, int) and number > 0 else None

    @property
    def attention(self) -> str:
        """Attention implementation of the text model. Read at each use, since users may switch it."""
        return str(self.text_config._attn_implementation)

    @property
    def sliding_window(self) -> int | None:
        """Window of the sliding-window layers, in positions, or None. Read at each use, since users may change it."""
        return _attention_windows(self._mask_config)[0]

    @property
    def layer_types(self) -> frozenset[str]:
        """Attention types of the decoder layers, as transformers names them. Read at each use."""
        return _attention_windows(self._mask_config)[1]

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state, so that only chains can be scored."""
        return bool(self.layer_types & RECURRENT_LAYER_TYPES)

    @property
    def _mask_config(self) -> Any:
        """The config that the text model builds its masks from: its own, which may differ from the whole model's."""
        text_model = self.text_model
        own = getattr(text_model, "config", None)
        return self.text_config if own is None or text_model is self.model else own

    @property
    def num_embeddings(self) -> int:
        """Number of ids that have an input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def shared_embeddings(self) -> SharedEmbeddings:
        """The embeddings that draft heads share, with the scales and caps that the model applies around them."""
        text = self.text_config
        softcap = getattr(text, "final_logit_softcapping", None)
        return SharedEmbeddings(
            self.model.get_input_embeddings(),
            self.model.get_output_embeddings(),
            embed_scale=float(getattr(text, "embedding_multiplier", None) or 1.0),
            logit_scale=_logit_scale(self.model_type, text),
            # `Gemma3ForConditionalGeneration` does not apply it.
            logit_softcap=None if softcap is None or self.model_type == "gemma3" else float(softcap),
        )

    def unsupported_reason(self) -> str | None:
        """Why the model in its present state cannot be decoded exactly in trees; None if it can."""
        if self.model.config.is_encoder_decoder:
            return "an encoder-decoder model"
        if getattr(self.model, "_is_stateful", False) and not self.is_recurrent:
            return "a stateful model"
        if any(getattr(self.text_config, name, None) for name in ("cross_attention_layers", "cross_layer_interval")):
            return "cross-attention layers (their keys and values are those of the images)"
        if unknown := self.layer_types - {"full_attention", "sliding_attention", *RECURRENT_LAYER_TYPES}:
            return f"layers of type {', '.join(sorted(unknown))}"
        if scaling := _rope_types(self.text_config, self.text_model) - STATIC_ROPE_TYPES:
            return f"rope_type={min(scaling)!r} (its frequencies depend on the longest position of a forward)"
        if _share_a_place(getattr(self.text_model, "layers", ())):
            return "decoder layers with the same layer_idx (the keys and values of both are in one place of the cache)"
        if self.attention not in TREE_ATTENTION_KERNELS:
            return f"attn_implementation={self.attention!r} of the text model (it cannot take a mask per node)"
        kernel = ALL_ATTENTION_FUNCTIONS.get(self.attention)  # none for "eager", a function beside each model
        if kernel is not None and not is_library_code(kernel):
            return f"attn_implementation={self.attention!r} replaced by {callable_name(kernel)}"
        return None

    def traits(self) -> dict[str, str]:
        """{trait: value} of what decoding in trees depends on, for messages and `mmspec env --model`."""
        window = self.sliding_window
        layers = ", ".join(sorted(self.layer_types))
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        axes = ", several position axes" if "mrope_section" in str(rope) else ""
        return {
            "model type": self.model_type,
            "grids": type(self.layout).__name__ if self.layout.has_grids else "not known",
            "layers": f"{self.num_layers} of {layers}" + (f" (window {window})" if "sliding" in layers else ""),
            "rope": ", ".join(sorted(_rope_types(self.text_config))) + axes,
            "attention": self.attention,
            "placeholders": ", ".join(map(str, self.media_token_ids)) or "none (a text model)",
        }

    def can_use_inference_mode(self) -> bool:
        """Whether no tensor created in a forward outlives it, so that forwards may run in inference mode.

        Inference mode saves about a tenth of the time of launch-bound steps, but its tensors can never be trained
        with. Quantised or offloaded weights, replaced forwards and user hooks may store such tensors.
        """
        return scan_modules(self.model).can_use_inference_mode


def _logit_scale(model_type: str, text_config: Any) -> float:
    """Factor that a model applies to the outputs of its LM head; the same setting is read in different ways."""
    scaling = float(getattr(text_config, "logits_scaling", None) or 1.0)
    if model_type.startswith("granite"):
        return 1.0 / scaling
    if model_type.startswith("hyperclovax"):
        return scaling
    if model_type.startswith("cohere") and model_type != "cohere2_vision":
        return float(getattr(text_config, "logit_scale", None) or 1.0)
    return 1.0


def _share_a_place(layers: Iterable[nn.Module]) -> bool:
    """Whether two decoder layers are the same module, or copies with one `layer_idx`."""
    found = []
    for layer in layers:
        attributes = (part.__dict__ for part in (layer, *layer._modules.values()) if part is not None)
        found.append(next((one["layer_idx"] for one in attributes if one.get("layer_idx") is not None), None))
    numbers = [number for number in found if number is not None]
    return len(set(numbers)) < len(numbers)


def _rope_types(text_config: Any, text_model: Any = None) -> set[str]:
    """Rotary scalings of a text model; some models have one per layer type."""
    if getattr(getattr(text_model, "rotary_emb", None), "rope_type", None) == "ntk_alpha":
        return {"ntk_alpha"}  # of HunYuan, a constant factor; the configs of its checkpoints call it "dynamic"
    rope = getattr(text_config, "rope_parameters", None) or {}
    parameters = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(one.get("rope_type", one.get("type", "default"))) for one in parameters}


def _attention_windows(text_config: Any) -> tuple[int | None, frozenset[str]]:
    """(sliding window or None, attention types of the layers) of a text model."""
    window = getattr(text_config, "sliding_window", None)
    types = getattr(text_config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window is not None else "full_attention"]
    if getattr(text_config, "attention_chunk_size", None) is not None and "chunked_attention" not in types:
        types = [*types, "chunked_attention"]
    return window, frozenset(types)
