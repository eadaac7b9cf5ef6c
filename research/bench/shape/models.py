"""Language models of a given shape with random weights, whose next token is known: the successor of the last one.

All products are those of the shape, on dense random weights. The output embedding of token t + 1 is the input embedding
of token t, and the layers add little to the embedding that they read, so the largest logit is that of the successor by
a wide margin, in half precision too. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mmspec.app.errors import UsageError
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead
from mmspec.interfaces import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_STD = 0.02
RESIDUAL_STD = 0.0004
RESIDUAL_NAMES = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
"""Of the projections that add to the residual stream: the embedding, of unit variance, must prevail."""
DRAFT_DEPTH = 5
FLASH_BLOCK = 5


@dataclass(frozen=True)
class TextShape:
    """Shape of a text model.

    Attributes:
        model_type: of transformers.
        others: as in the config of transformers; `config` has those that not all model types have.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def _kinds(kind: str, attention: Collection[int], num_layers: int, other: str = "full_attention") -> list[str]:
    """`layer_types` with another kind at some layers."""
    return [other if index in attention else kind for index in range(num_layers)]


TEXT_SHAPES = {
    "tiny": TextShape("llama", 64, 128, 2, 4, 2, 512),
    "smollm2-135m": TextShape("llama", 576, 1536, 30, 9, 3, 49152, 100000.0, tie_word_embeddings=True),
    "smolvlm-500m": TextShape("llama", 960, 2560, 32, 15, 5, 49280, 100000.0),
    "smolvlm2-2.2b": TextShape("llama", 2048, 8192, 24, 32, 32, 49280, 130000.0),
    "llava-onevision-0.5b": TextShape("qwen2", 896, 4864, 24, 14, 2, 151936, 1e6, tie_word_embeddings=True),
    "qwen3-vl-2b": TextShape("qwen3", 2048, 6144, 28, 16, 8, 151936, 5e6, head_dim=128, tie_word_embeddings=True),
    "qwen3.5-0.8b": TextShape(
        *("qwen3_5_text", 1024, 3584, 24, 8, 2, 248320, 1e7),
        head_dim=256,
        tie_word_embeddings=True,
        config={
            "layer_types": _kinds("linear_attention", range(3, 24, 4), 24),
            "linear_num_value_heads": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "lfm2-1.2b": TextShape(
        *("lfm2", 2048, 8192, 16, 32, 8, 65536, 1e6),
        tie_word_embeddings=True,
        config={"layer_types": _kinds("conv", (2, 5, 8, 10, 12, 14), 16), "block_auto_adjust_ff_dim": False},
    ),
    "gemma4-e2b": TextShape(
        *("gemma4_text", 1536, 6144, 35, 8, 1, 262144, 1e6),
        head_dim=256,
        tie_word_embeddings=True,
        config={
            "layer_types": _kinds("sliding_attention", range(4, 35, 5), 35),
            "global_head_dim": 512,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "rope_parameters": None,
        },
    ),
    "llava-1.5-7b": TextShape("llama", 4096, 11008, 32, 32, 32, 32064),
    "qwen2.5-vl-7b": TextShape("qwen2", 3584, 18944, 28, 28, 4, 152064, 1000000.0),
}
"""The text models of vision-language models, of two language models, and one for tests. Not the vision towers, which do
not decode. Where embeddings are tied, our model has the head apart all the same (`init_successor_weights`), read once a
round as the tied one is."""


def find_shape(name: str) -> TextShape:
    """The shape of a name, in any case.

    Raises:
        UsageError: an unknown name.
    """
    if name.lower() not in TEXT_SHAPES:
        raise UsageError(f"--shape is one of {', '.join(TEXT_SHAPES)}; got {name!r}")
    return TEXT_SHAPES[name.lower()]


def config_fields(shape: TextShape) -> dict[str, Any]:
    """Arguments of the config of transformers, without those that it chooses itself."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    fields: dict[str, Any] = {**vars(shape), "rope_parameters": rope, **shape.config}
    apart = ("model_type", "rope_theta", "config")
    return {key: value for key, value in fields.items() if key not in apart and value is not None}


def build_shape_model(shape: TextShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """The model, made on its device, in eval mode; no end token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config_fields(shape) | {"tie_word_embeddings": False}
    config = AutoConfig.for_model(shape.model_type, **fields)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        init_successor_weights(model)
    ids = model.generation_config
    ids.pad_token_id, ids.eos_token_id, ids.bos_token_id = 0, None, None
    return model.eval()


@torch.no_grad()
def init_successor_weights(model: PreTrainedModel) -> None:
    """Draw the weights from torch's generator."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0, RESIDUAL_STD if name.endswith(RESIDUAL_NAMES) else WEIGHT_STD)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    table.normal_()
    head.copy_(table.roll(1, 0) * table.shape[1] ** -0.5)


def build_shape_drafter(
    name: str, shape: TextShape, dtype: torch.dtype, device: torch.device, tree_size: int
) -> Drafter:
    """A draft head of the shape with random weights: "msd" (one decoder layer, `DRAFT_DEPTH` passes) or "flash" (one).

    Raises:
        UsageError: another name.
    """
    config = EagleConfig(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.vocab_size,
        rope_theta=shape.rope_theta,
    )
    layers = shape.num_hidden_layers
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(1)
        if name == "msd":
            head = EagleHead(config).to(dtype).eval()
            return EagleDrafter(
                head, "decoupled", num_layers=layers, max_depth=DRAFT_DEPTH, top_k=min(10, tree_size - 1)
            )
        if name == "flash":
            ffn, rank = shape.hidden_size // 2, max(8, shape.hidden_size // 16)
            sizes = {"block_size": FLASH_BLOCK, "block_ffn_size": ffn, "markov_rank": rank}
            block = FlashConfig.of(config, intermediate_size=0, **sizes)
            return FlashDrafter(FlashHead(block).to(dtype).eval(), "decoupled", num_layers=layers)
    raise UsageError(f"--drafters with --shape are none, oracle, msd and flash; got {name!r}")
