"""Recognises models whose forwards over tree nodes the compiled decoder computes, and feeds it.

A model is recognised by the exact classes of its modules, all of transformers: the whole model, its text model, and
everything in a decoder layer. Whatever differs (hooks, adapters, quantised layers, other dtypes, sliding windows) runs
in the model's own forward, as do prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.copies import WeightCopies
from mmspec.cpu.decoder import DecoderEnds, DecoderInputs, NativeDecoder
from mmspec.cpu.layers import DecoderShape, LayerWeights
from mmspec.cpu.linear import is_replaced
from mmspec.cpu.native import FewRowsKernel
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import ModuleScan, calls_library_code
from mmspec.targets.structure import describe_structure, modules_of_rounds

LAYER_CLASSES = {
    "LlamaModel": "Llama",
    "MistralModel": "Mistral",
    "Qwen2Model": "Qwen2",
    "Qwen3Model": "Qwen3",
    "Qwen2VLTextModel": "Qwen2VL",
    "Qwen2_5_VLTextModel": "Qwen2_5_VL",
}
"""{class of the text model: prefix of the classes in its layers}: RMSNorm, rotary attention, gated feed-forward."""
MLP_CLASSES = {"Qwen2VL": "Qwen2MLP", "Qwen2_5_VL": "Qwen2MLP"}
"""{prefix: class of the feed-forward} where it is not `<prefix>MLP`."""
MODEL_CLASSES = frozenset(
    (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    )
)
"""Models whose forward over text is embedding, text model and LM head, and nothing else."""
SILU_CLASSES = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
WEIGHT_COPIES = WeightCopies()
"""Bfloat16 copies of the weights of models that were loaded in float32; each lives as long as its weight."""
IGNORED_INPUTS = frozenset((CACHE_ARGUMENT, "use_cache", "logits_to_keep", "return_dict", "image_sizes"))
"""Inputs of a round that do not change what such a forward computes."""


@dataclass(frozen=True)
class RoundPositions:
    """Positions of the nodes of a call.

    Attributes:
        prompt_length: positions in the cache after the prefill.
        last: [B, 1] or [axes, B, 1] position ids of the last position of the prompt.
        max_new_tokens: tokens per row whose positions differ; those behind them share the last one.
    """

    prompt_length: int
    last: Tensor
    max_new_tokens: int

    def base(self) -> list[int] | None:
        """Position id of each row's cache position 0 if all positions were text; None if the axes differ."""
        last = self.last
        if last.dim() == 3:
            axes = last[1:] if len(last) == 4 else last  # the first of four is for masks only
            if not bool((axes == axes[:1]).all()):
                return None
            last = axes[0]
        return [int(position) - self.prompt_length + 1 for (position,) in last.tolist()]


class NativeRounds:
    """The forwards over tree nodes of one call, by a `NativeDecoder`.

    Attributes:
        decoder: the compiled decoder.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        position_base: list[int],
        max_position: int,
        modules: Sequence[nn.Module] = (),
        layers: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            decoder: of the model.
            position_base: of `RoundPositions.base`.
            max_position: largest cache position with a position id of its own.
            modules: those of the model's forward, if user code runs during the call and may change them.
            layers: decoder layers of the model that `decoder` has; None for all.
        """
        self.decoder = decoder
        self._position_base = position_base
        self._max_position = max_position
        self._modules = modules
        self._layers = layers
        self._structure = describe_structure(modules)

    def score(
        self, tree: DraftTree, kv_cache: RaggedKVCache, padding: Tensor | None, hidden_state_indices: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """As `Target.score`, after `RaggedKVCache.begin_forward`; None if this forward must run in the model.

        Args:
            tree: the sanitized tree.
            kv_cache: where the nodes' keys and values are written.
            padding: [B, L] bool, False at left pads of the prompt; None without.
            hidden_state_indices: hidden states to return.
        """
        if torch.is_autocast_enabled("cpu") or self._structure != describe_structure(self._modules):
            return None
        caches = kv_cache.common_buffers()
        if caches is None:
            return None
        if self._layers is not None:
            caches = [caches[index] for index in self._layers]
        assert tree.depths is not None and tree.ancestor_mask is not None
        inputs = DecoderInputs(
            tokens=tree.tokens,
            depths=tree.depths,
            ancestor_mask=tree.ancestor_mask,
            lengths=kv_cache.seq_lens,
            position_base=self._position_base,
            max_position=self._max_position,
            padding=padding,
            caches=caches,
        )
        return self.decoder.forward(inputs, hidden_state_indices)

    def restrict(self, layers: Sequence[int]) -> NativeRounds:
        """The same with these decoder layers of the model only."""
        decoder = self.decoder.restrict(layers)
        return NativeRounds(decoder, self._position_base, self._max_position, self._modules, layers)


def native_rounds(
    kernel: FewRowsKernel,
    adapter: ModelAdapter,
    modules: ModuleScan,
    template: Mapping[str, Any],
    positions: RoundPositions,
    runs_user_code: bool,
) -> NativeRounds | None:
    """The compiled forwards of a call; None if the model or the call is not for them.

    Args:
        kernel: the compiled kernel.
        adapter: of the model.
        modules: result of the scan over its modules.
        template: inputs of every round that do not change.
        positions: of the nodes.
        runs_user_code: user code runs during the call.
    """
    if any(value is not None and name not in IGNORED_INPUTS for name, value in template.items()):
        return None
    decoder = find_decoder(kernel, adapter, modules, None if runs_user_code else WEIGHT_COPIES)
    base = positions.base()
    if decoder is None or base is None:
        return None
    changeable = modules_of_rounds(adapter) if runs_user_code else []
    return NativeRounds(decoder, base, positions.prompt_length - 1 + positions.max_new_tokens, changeable)


def find_decoder(
    kernel: FewRowsKernel, adapter: ModelAdapter, modules: ModuleScan, copies: WeightCopies | None = None
) -> NativeDecoder | None:
    """The compiled decoder on the weights of a model, or on their `copies`; None if the model is not recognised."""
    model, text_model = adapter.model, adapter.text_model
    prefix = LAYER_CLASSES.get(_class_name(text_model))
    if prefix is None or _class_name(model) not in MODEL_CLASSES or adapter.layer_types != {"full_attention"}:
        return None
    if modules.hook is not None or modules.foreign or modules.compiled or not modules.can_use_inference_mode:
        return None
    if not all(map(calls_library_code, modules.kinds)):
        return None
    layers = list(text_model.layers)
    embeddings, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if {adapter.num_layers, text_model.config.num_hidden_layers} != {len(layers)}:
        return None
    if not all(_is_known_layer(layer, prefix) for layer in layers):
        return None
    is_known = _class_name(text_model.norm) == f"{prefix}RMSNorm" and _is_plain_linear(lm_head)
    if not is_known or type(embeddings) is not nn.Embedding or embeddings.max_norm is not None:
        return None
    shape = _shape(adapter, layers)
    if shape is None:
        return None
    ends = DecoderEnds(embeddings.weight, text_model.norm.weight, lm_head.weight, lm_head.bias)
    try:
        return NativeDecoder(kernel, shape, list(map(_weights, layers)), ends, _Rotary(text_model.rotary_emb), copies)
    except ValueError:  # weights of other dtypes, devices or shapes
        return None


class _Rotary:
    """Rotary angles by a text model's own module. On all axes a text position is the same number."""

    def __init__(self, rotary_emb: nn.Module) -> None:
        self.rotary_emb = rotary_emb

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `mmspec.cpu.decoder.RotaryFn`."""
        example = torch.empty(0, dtype=torch.float32, device="cpu")
        has_axes = "mrope_section" in str(getattr(getattr(self.rotary_emb, "config", None), "rope_parameters", ""))
        position_ids = positions.expand(3, 1, -1) if has_axes else positions[None]
        with torch.no_grad():
            cos, sin = self.rotary_emb(example, position_ids)
        shape = len(positions), cos.shape[-1]
        return cos.reshape(-1, *shape)[0].contiguous(), sin.reshape(-1, *shape)[0].contiguous()


def _shape(adapter: ModelAdapter, layers: Sequence[nn.Module]) -> DecoderShape | None:
    """Sizes and constants that all layers share; None if they do not share them."""
    config = adapter.text_config
    norms = [module for layer in layers for module in layer.modules() if _class_name(module).endswith("RMSNorm")]
    eps = {float(norm.variance_epsilon) for norm in (*norms, adapter.text_model.norm)}
    attentions: list[Any] = [layer.self_attn for layer in layers]
    constants = {(int(one.head_dim), float(one.scaling)) for one in attentions}
    if len(eps) != 1 or len(constants) != 1 or any(one.layer_idx != i for i, one in enumerate(attentions)):
        return None
    ((head_dim, scaling),) = constants
    if head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        return None
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=eps.pop(),
        scaling=scaling,
    )


def _is_known_layer(layer: Any, prefix: str) -> bool:
    """Whether all modules of a decoder layer are of the expected classes, and nothing else is in it."""
    classes = {
        "self_attn": f"{prefix}Attention",
        "mlp": MLP_CLASSES.get(prefix, f"{prefix}MLP"),
        "input_layernorm": f"{prefix}RMSNorm",
        "post_attention_layernorm": f"{prefix}RMSNorm",
    }
    if _class_name(layer) != f"{prefix}DecoderLayer" or _children(layer) != classes:
        return False
    norms = {name: f"{prefix}RMSNorm" for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)}
    projections = [getattr(layer.self_attn, f"{name}_proj", None) for name in "qkvo"]
    projections += [getattr(layer.mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    attention, mlp = layer.self_attn._modules, layer.mlp._modules
    if not all(map(_is_plain_linear, projections)) or len(attention) != 4 + len(norms) or len(mlp) != 4:
        return False
    is_normed = all(_class_name(attention[name]) == kind for name, kind in norms.items())
    return is_normed and _class_name(layer.mlp.act_fn) in SILU_CLASSES


def _children(module: nn.Module) -> dict[str, str]:
    """{name: class} of the modules in a module."""
    return {name: _class_name(child) for name, child in module._modules.items()}


def _class_name(module: Any) -> str:
    """Name of a model's class in transformers; of any other class, with its module."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else f"{kind.__module__}.{kind.__name__}"


def _is_plain_linear(layer: Any) -> bool:
    """Whether a layer is exactly `nn.Linear`, computed by torch or by `mmspec.cpu.linear`."""
    return type(layer) is nn.Linear and ("forward" not in layer.__dict__ or is_replaced(layer))


def _weights(layer: Any) -> LayerWeights:
    """The weights of a known layer."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        q=attention.q_proj.weight,
        k=attention.k_proj.weight,
        v=attention.v_proj.weight,
        q_bias=attention.q_proj.bias,
        k_bias=attention.k_proj.bias,
        v_bias=attention.v_proj.bias,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=attention.o_proj.weight,
        o_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        gate_bias=mlp.gate_proj.bias,
        up_bias=mlp.up_proj.bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


__all__ = ["NativeRounds", "RoundPositions", "find_decoder", "native_rounds"]
