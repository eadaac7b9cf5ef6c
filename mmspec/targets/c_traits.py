"""Reads the traits of a model's decoder from its modules, for the C decoder.

A decoder is a stack of layers of RMSNorm, rotary attention and a gated feed-forward, or experts that are such. Its
modules are found by the names of their parts and distinguished by what they compute for random numbers: how a norm uses
its weight, which activation it is. What is found is a hypothesis, which `mmspec.targets.c_check` tests against the
model's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.decoder import DecoderEnds, RotaryFn
from mmspec.cpu.layers import DecoderShape, LayerWeights
from mmspec.cpu.linear import is_replaced
from mmspec.targets.base import ModelAdapter
from mmspec.targets.forward import takes_one_mask

NORM_NAMES = (
    {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_self_attn_layernorm",
        "post_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
)
"""Norms of a decoder layer: {attribute of `LayerWeights`: name in the layer}, of Llama, Gemma 2 and GLM 4."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
ACTIVATION_NAMES = ("act_fn", "activation_fn")
LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
UNKNOWN_EXPERTS = ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
"""Attributes of a module of experts that must be False."""
PROBED = 64
"""Random numbers that a module is asked about."""


@dataclass(frozen=True)
class DecoderParts:
    """A model's decoder as the compiled one takes it.

    Attributes:
        shape: sizes, constants and traits.
        layers: weights of the layers.
        ends: what is around them.
        rotaries: rotary angles of each layer.
        logit_scale: factor of the logits.
        logit_softcap: their limit by tanh; None for none.
    """

    shape: DecoderShape
    layers: list[LayerWeights]
    ends: DecoderEnds
    rotaries: list[RotaryFn]
    logit_scale: float
    logit_softcap: float | None

    def finish_logits(self, logits: Tensor) -> Tensor:
        """The model's logits from those of the LM head, by the operations of transformers."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_softcap is None:
            return logits
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap


@dataclass(frozen=True)
class Rotary:
    """Rotary angles by a text model's own module. On all axes a text position is the same number.

    Attributes:
        module: of the text model.
        dtype: type in which the model computes them.
        layer_type: argument of modules that have angles for each type of layers; None for others.
        interleaved: two neighbours of a head have the same angle, also where the module gives those of halves.
        shift: added to positions.
    """

    module: nn.Module
    dtype: torch.dtype
    layer_type: str | None
    interleaved: bool = False
    shift: int = 0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        example = torch.empty(0, dtype=self.dtype, device="cpu")
        has_axes = "mrope_section" in str(getattr(getattr(self.module, "config", None), "rope_parameters", ""))
        positions = positions + self.shift
        position_ids = positions.expand(3, 1, -1) if has_axes else positions[None]
        arguments = () if self.layer_type is None else (self.layer_type,)
        with torch.no_grad():
            angles = self.module(example, position_ids, *arguments)
        cos, sin = (part.float().reshape(-1, len(positions), part.shape[-1])[0] for part in angles)
        if self.interleaved and not torch.equal(cos[:, ::2], cos[:, 1::2]):
            half = cos.shape[1] // 2
            cos, sin = (part[:, :half].repeat_interleave(2, -1) for part in (cos, sin))
        return cos.contiguous(), sin.contiguous()


def read_parts(adapter: ModelAdapter, shape: DecoderShape | None = None) -> Iterator[DecoderParts]:
    """What a model's decoder may be, likeliest first; nothing if it is none that the C decoder knows.

    Args:
        adapter: of the model.
        shape: of a former result for the same modules, which is not found out again.
    """
    text_model = adapter.text_model
    layers = list(getattr(text_model, "layers", ()))
    if not layers or set(text_model._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return
    num_layers = {adapter.num_layers, text_model.config.num_hidden_layers}
    if not adapter.layer_types <= LAYER_TYPES or num_layers != {len(layers)}:
        return
    embeddings, lm_head = adapter.model.get_input_embeddings(), adapter.model.get_output_embeddings()
    scale, shared = _embed_scale(embeddings), adapter.shared_embeddings
    weights = [found for layer in layers if (found := _weights(layer)) is not None]
    if scale is None or not _is_plain_linear(lm_head) or len(weights) < len(layers):
        return
    types = _layer_types(adapter, len(layers))
    rotary = text_model.rotary_emb
    takes_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
    rotaries = [Rotary(rotary, embeddings.weight.dtype, one if takes_type else None) for one in types]
    shapes = [shape] if shape is not None else _shapes(adapter, layers, scale * shared.embed_scale, types, rotaries)
    ends = DecoderEnds(embeddings.weight, text_model.norm.weight, lm_head.weight, lm_head.bias)
    for one in shapes:
        own: list[RotaryFn] = [replace(rotary, interleaved=one.interleaved) for rotary in rotaries]
        yield DecoderParts(one, weights, ends, own, shared.logit_scale, shared.logit_softcap)


def _shapes(
    adapter: ModelAdapter, layers: Sequence[Any], embed_scale: float, types: Sequence[str], rotaries: Sequence[Rotary]
) -> list[DecoderShape]:
    """Sizes and traits that all layers share, with each way to rotate that there may be; empty if they share none."""
    config, attention = adapter.text_config, layers[0].self_attn
    norms = [module for layer in layers for module in layer.modules() if _is_norm(module)] + [adapter.text_model.norm]
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, int(attention.head_dim)
    constants: list[set[Any]] = [
        {type(layer) for layer in layers},
        {_eps(norm) for norm in norms},
        {(one.self_attn.head_dim, one.self_attn.scaling, _softcap(one.self_attn)) for one in layers},
    ]
    norm, routing = _common_norm_traits(norms), _routing_traits([layer.mlp for layer in layers])
    activation = _activation({id(part): part for layer in layers for part in _activations(layer.mlp)}.values())
    are_in_order = all(layer.self_attn.layer_idx == index for index, layer in enumerate(layers))
    cos = rotaries[0](torch.arange(8, device="cpu"))[0]
    if norm is None or activation is None or routing is None or any(len(one) != 1 for one in constants):
        return []
    if not are_in_order or heads % kv_heads or cos.shape[1] % 2 or cos.shape[1] > size:
        return []
    window = None if takes_one_mask(adapter) else adapter.sliding_window
    windows = tuple(window if window and one == "sliding_attention" else 0 for one in types)
    found = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=max(_inner_size(layer.mlp) for layer in layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        eps=_eps(norms[-1]),
        scaling=float(attention.scaling),
        activation=activation,
        norm_offset=norm[0],
        rounds_twice=norm[1],
        embed_scale=embed_scale,
        attention_softcap=_softcap(attention),
        eager_attention=adapter.attention == "eager",
        rotary_size=cos.shape[1],
        windows=windows if any(windows) else (),
        **routing,
    )
    is_of_halves = torch.equal(*cos.chunk(2, -1))
    return [found, replace(found, interleaved=True)] if is_of_halves else [replace(found, interleaved=True)]


def _layer_types(adapter: ModelAdapter, num_layers: int) -> list[str]:
    """Attention type of each layer."""
    types = getattr(adapter.text_model.config, "layer_types", None)
    return list(types) if types is not None else [min(adapter.layer_types)] * num_layers


def _weights(layer: Any) -> LayerWeights | None:
    """The weights of a decoder layer; None if it has other parts than are known."""
    names = next((one for one in NORM_NAMES if set(layer._modules) == {"self_attn", "mlp", *one.values()}), None)
    if names is None or not _has_only_modules(layer, layer.self_attn, layer.mlp):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = [name for name in HEAD_NORMS if attention._modules.get(name) is not None]
    if set(attention._modules) - set(HEAD_NORMS) != set(PROJECTIONS) or len(head_norms) not in (0, 2):
        return None
    gated = _gated(mlp) or _experts(mlp)
    projections = [attention._modules[name] for name in PROJECTIONS]
    norms = [layer._modules[name] for name in names.values()] + [attention._modules[name] for name in head_norms]
    if gated is None or not all(map(_is_plain_linear, projections)) or not all(map(_is_norm, norms)):
        return None
    found: dict[str, Any] = dict(gated)
    for name, linear in zip(PROJECTIONS, projections, strict=True):
        part = name.removesuffix("_proj")
        found |= {part: linear.weight, f"{part}_bias": linear.bias}
    found |= {name: attention._modules[name].weight if head_norms else None for name in HEAD_NORMS}
    found |= {name: layer._modules[part].weight for name, part in names.items()}
    return LayerWeights(**found)


def _gated(mlp: Any) -> dict[str, Tensor | None] | None:
    """Weights of a gated feed-forward, whose first projections may be one; None if it is none."""
    names = set(mlp._modules) - set(ACTIVATION_NAMES)
    if len(_activations(mlp)) != 1 or not all(_is_plain_linear(mlp._modules[name]) for name in names):
        return None
    down = {"down": mlp.down_proj.weight, "down_bias": mlp.down_proj.bias} if "down_proj" in names else {}
    if names == {"gate_proj", "up_proj", "down_proj"}:
        gate, up = mlp.gate_proj, mlp.up_proj
        return {"gate": gate.weight, "gate_bias": gate.bias, "up": up.weight, "up_bias": up.bias, **down}
    if names != {"gate_up_proj", "down_proj"}:
        return None
    size, both = mlp.down_proj.in_features, mlp.gate_up_proj
    bias = (None, None) if both.bias is None else (both.bias[:size], both.bias[size:])
    return {"gate": both.weight[:size], "gate_bias": bias[0], "up": both.weight[size:], "up_bias": bias[1], **down}


def _experts(mlp: Any) -> dict[str, Tensor | None] | None:
    """Weights of a feed-forward of experts with a router; None if it is none that is known.

    `mlp.experts` is what transformers' `use_experts_implementation` makes: two tensors with the weights of all experts.
    """
    if set(mlp._modules) != {"gate", "experts"} or not _has_only_modules(mlp):
        return None
    router, experts = mlp.gate, mlp.experts
    is_plain = set(router._parameters) == {"weight"} and not router._buffers and not router._modules
    if not is_plain or set(experts._parameters) != {"gate_up_proj", "down_proj"} or set(experts._modules) != {"act_fn"}:
        return None
    is_known = experts.has_gate and experts.is_concatenated and not experts._buffers
    if not is_known or any(getattr(experts, name, True) for name in UNKNOWN_EXPERTS):
        return None
    if not (experts.gate_up_proj.is_contiguous() and experts.down_proj.is_contiguous()):
        return None
    names = ("gate_bias", "up", "up_bias", "down_bias")
    gate, down = experts.gate_up_proj.flatten(0, 1), experts.down_proj.flatten(0, 1)
    return {"gate": gate, "down": down, "router": router.weight, **dict.fromkeys(names)}


def _routing_traits(mlps: Sequence[Any]) -> dict[str, Any] | None:
    """What `DecoderShape` says of experts, with each router asked about random numbers; None if layers differ."""
    found: list[dict[str, Any]] = []
    for mlp in mlps:
        if "experts" not in mlp._modules:
            continue
        weight, count = mlp.gate.weight.detach(), int(mlp.gate.top_k)
        rows = _random(PROBED, weight.shape[1]).to(weight.dtype)
        with torch.no_grad():
            shares = mlp.gate(rows)[1]
        top = functional.softmax(functional.linear(rows, weight).float(), -1).topk(count).values
        errors = [float((one - shares).abs().max()) for one in (top, top / top.sum(-1, keepdim=True))]
        if not min(errors) <= torch.finfo(shares.dtype).eps:
            return None
        num_experts, _, size = mlp.experts.down_proj.shape
        traits = {"num_experts": num_experts, "expert_size": size, "experts_per_token": count}
        traits |= {"normalises_shares": errors[1] <= errors[0], "rounds_shares": shares.dtype is weight.dtype}
        found.append(traits | {"adds_in_type": mlp.experts.config._experts_implementation == "eager"})
    if any(one != found[0] for one in found):
        return None
    return found[0] if found else {}


def _inner_size(mlp: Any) -> int:
    """Features between the two products of a feed-forward without experts; 0 for others."""
    return 0 if "experts" in mlp._modules else int(mlp.down_proj.in_features)


def _activations(mlp: Any) -> list[nn.Module]:
    owner = mlp._modules.get("experts") or mlp
    return [owner._modules[name] for name in ACTIVATION_NAMES if owner._modules.get(name) is not None]


def _has_only_modules(*parts: nn.Module) -> bool:
    """Whether modules have no parameters or buffers besides those of their parts."""
    return not any(part._parameters or part._buffers for part in parts)


def _is_plain_linear(layer: Any) -> bool:
    """Whether a layer is exactly `nn.Linear`, computed by torch or by `mmspec.cpu.linear`."""
    return type(layer) is nn.Linear and ("forward" not in layer.__dict__ or is_replaced(layer))


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has the parts of an RMSNorm and nothing else."""
    return set(module._parameters) == {"weight"} and not module._modules and _eps(module) is not None


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _softcap(attention: Any) -> float:
    return float(getattr(attention, "attn_logit_softcapping", None) or 0.0)


def _random(*shape: int) -> Tensor:
    """Random numbers that are the same each time, without touching a generator."""
    index = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return ((index * 12.9898).sin() * 43758.5453).frac().mul(4).sub(1).float().view(shape)


def _common_norm_traits(norms: Sequence[Any]) -> tuple[float, bool] | None:
    """Those that a norm of each class has; None if they differ."""
    found = {_norm_traits(norm) for norm in {type(norm): norm for norm in norms}.values()}
    return found.pop() if len(found) == 1 else None


def _norm_traits(norm: Any) -> tuple[float, bool] | None:
    """(offset of the weight, whether it rounds before the product and after) of an RMSNorm; None if it is another."""
    weight = norm.weight.detach()
    x = _random(3, len(weight)).to(weight.dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _eps(norm))
    with torch.no_grad():
        found = norm(x)
    candidates = {(0.0, True): weight * normed.to(x.dtype), (1.0, False): (normed * (1.0 + weight.float())).to(x.dtype)}
    return next((traits for traits, one in candidates.items() if torch.equal(one, found)), None)


def _activation(modules: Any) -> str | None:
    """The activation that all modules compute, one of `GATE_ACTIVATIONS`; None if it is another."""
    x = _random(PROBED) * 3
    candidates = {"silu": functional.silu(x), "gelu_tanh": functional.gelu(x, approximate="tanh")}
    with torch.no_grad():
        outputs = [module(x) for module in modules]
    same = [name for name, one in candidates.items() if all(torch.allclose(one, y, atol=1e-6) for y in outputs)]
    return same[0] if len(same) == 1 else None


def _embed_scale(embeddings: Any) -> float | None:
    """Factor that a module of embeddings applies; None if it is none that is known."""
    if not isinstance(embeddings, nn.Embedding) or embeddings.max_norm is not None:
        return None
    if type(embeddings) is nn.Embedding:
        return 1.0
    scale = getattr(embeddings, "embed_scale", None)
    return float(scale.to(embeddings.weight.dtype)) if isinstance(scale, Tensor) and scale.numel() == 1 else None
