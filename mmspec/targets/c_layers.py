"""Reads the weights of decoder layers from their modules, which are found by the names of their parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmspec.cpu.layers import LayerWeights
from mmspec.cpu.linear import is_replaced

NORM_FIELDS = ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")
"""Attributes of `LayerWeights`."""
NORM_NAMES = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    ("input_layernorm", "post_operator_norm", "post_attention_layernorm", "post_ffn_norm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("input_layernorm", "", "", ""),
)
"""Their names in a decoder layer, "" for none, of Llama, Gemma 2, GLM 4, HyperCLOVA X, LFM 3, OLMo 2 and Cohere;
the last has one input for both parts."""
ALIASES = {
    **{"feed_forward": "mlp", "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"},
    **{"out_proj": "o_proj", "embedding_norm": "norm", "fc1": "up_proj", "fc2": "down_proj"},
    **{"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    **{"pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"},
    **{"shared_mlp": "mlp", "input_linear": "gate_up_proj", "output_linear": "down_proj"},
}
"""{name of a part: what others call it}"""
PER_LAYER = {"per_layer_gate": "per_layer_input_gate", "per_layer_out": "per_layer_projection"}
PER_LAYER_NORM = "post_per_layer_input_norm"
WITHOUT_EFFECT = nn.Dropout, nn.Identity
IDLE_NAMES = frozenset(
    (
        *("dropout", "resid_attn_dropout", "resid_mlp_dropout"),
        *("post_norm1", "post_norm2", "post_operator_norm", "post_ffn_norm"),
    )
)
"""Parts that do nothing outside training, or in some models, if they are of `WITHOUT_EFFECT`."""
SIZE_NAMES = (
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
)
"""Attributes of a delta rule, and of a state space."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
ACTIVATION_NAMES = ("act_fn", "activation_fn", "activation")
ROUTER_BIAS = "e_score_correction_bias"
SHARED_NAMES = ("shared_expert", "shared_experts")
UNKNOWN_EXPERTS = ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
"""Attributes of a module of experts that must be False."""


def parts_of(module: Any) -> dict[str, Any]:
    """{name: part} of a module, by one name for what has several; without those that do nothing."""
    kept = {name: part for name, part in module._modules.items() if part is not None}
    idle = {name for name, part in kept.items() if name in IDLE_NAMES and isinstance(part, WITHOUT_EFFECT)}
    return {ALIASES.get(name, name): part for name, part in kept.items() if name not in idle}


def mixer_of(layer: Any) -> Any:
    """Attention of a decoder layer, or what it has in its place."""
    parts = parts_of(layer)
    return next((parts[name] for name in ("self_attn", "conv", "linear_attn", "mamba") if name in parts), None)


def recurrent_sizes(mixer: Any) -> tuple[int, int, int, int]:
    """`DecoderShape.delta_heads` of what is not attention."""
    names = next(names for names in SIZE_NAMES if hasattr(mixer, names[0]))
    heads, value_heads, key_size, value_size = (int(getattr(mixer, name)) for name in names)
    return heads, value_heads, key_size, value_size


def layer_weights(layer: Any) -> LayerWeights | None:
    """The weights of a decoder layer; None if it has other parts than are known."""
    parts, mixer = parts_of(layer), mixer_of(layer)
    found: dict[str, Any] = {"output_scale": layer._buffers.get("layer_scalar")}
    if set(PER_LAYER.values()) <= set(parts):
        found |= {name: parts.pop(part).weight for name, part in PER_LAYER.items() if is_plain_linear(parts[part])}
        found["per_layer_norm"] = parts.pop(PER_LAYER_NORM).weight
        parts.pop("act_fn")
    norms = {name: part for name, part in parts.items() if is_norm(part)}
    names = next((one for one in NORM_NAMES if {*norms} == {*one} - {""}), None)
    others = [part for name, part in parts.items() if name not in norms and name != "mlp"]
    if names is None or mixer is None or "mlp" not in parts or len(others) != 1 or others[0] is not mixer:
        return None
    if layer._parameters or not set(layer._buffers) <= {"layer_scalar"} or not has_only_modules(parts["mlp"]):
        return None
    kinds = {"conv": _short_convolution, "linear_attn": _delta_rule, "mamba": _state_space, "self_attn": _attention}
    mixed = next(read(mixer) for name, read in kinds.items() if name in parts)
    gated = _gated(parts["mlp"]) or _experts(parts["mlp"])
    if mixed is None or gated is None:
        return None
    found |= mixed | gated
    found |= {name: norms[part].weight for name, part in zip(NORM_FIELDS, names, strict=True) if part}
    if len(norms) == 1:
        found["post_norm"] = found["input_norm"]
    return LayerWeights(**found)


def head_norms(mixer: Any, weights: LayerWeights) -> str:
    """`DecoderShape.head_norms` of attention."""
    if weights.q_norm is not None and weights.q_norm.numel() > mixer.head_dim:
        return "all"
    return "rotated" if "query_layernorm" in mixer._modules else "each"


def is_parallel(layer: Any) -> bool:
    """Whether attention and feed-forward of a layer have one norm, and so one input."""
    return sum(map(is_norm, parts_of(layer).values())) == 1


def _attention(attention: Any) -> dict[str, Any] | None:
    """Weights of attention, whose first projections may be one, and which may have no keys and values."""
    parts = parts_of(attention)
    if not has_only_modules(attention) or (parts.keys() & {"v_norm"} and not is_bare_norm(parts["v_norm"])):
        return None
    gate = parts.pop("g_proj", None)
    names = set(parts) - {*HEAD_NORMS, "v_norm"}
    head_norms = {name: parts[name] for name in HEAD_NORMS if name in parts}
    linears = [parts[name] for name in names] + ([] if gate is None else [gate])
    if not all(map(is_plain_linear, linears)) or not all(map(is_norm, head_norms.values())):
        return None
    if gate is not None and gate.bias is not None:
        return None
    found = {"o": parts["o_proj"].weight, "o_bias": parts["o_proj"].bias}
    found |= {name: norm.weight for name, norm in head_norms.items()}
    if gate is not None:
        found["head_gate"] = gate.weight
    if names == {"qkv_proj", "o_proj"}:
        both, size = parts["qkv_proj"], int(attention.head_dim)
        kv_size = int(attention.num_key_value_heads) * size
        sizes = (both.out_features - 2 * kv_size, kv_size, kv_size)
        found |= dict(zip("qkv", both.weight.split(sizes), strict=True))
        if both.bias is not None:
            found |= dict(zip(("q_bias", "k_bias", "v_bias"), both.bias.split(sizes), strict=True))
        return found
    if names == {"q_proj", "k_proj", "o_proj"}:
        parts["v_proj"] = parts["k_proj"]  # values are keys
    elif names not in (set(PROJECTIONS), {"q_proj", "o_proj"}):
        return None
    for name in "qkv":
        if (linear := parts.get(f"{name}_proj")) is not None:
            found |= {name: linear.weight, f"{name}_bias": linear.bias}
    return found


def _mixer_weights(mixer: Any, conv: Any, names: dict[str, str]) -> dict[str, Any] | None:
    """Weights of a convolution over the channels, one by one, and of the projections with these names."""
    parts = parts_of(mixer)
    is_known = type(conv) is nn.Conv1d and conv.groups == conv.in_channels == conv.out_channels
    is_known = is_known and conv.stride == conv.dilation == (1,) and conv.padding_mode == "zeros"
    if not is_known or not all(is_plain_linear(parts[part]) for part in names.values()):
        return None
    biases = {f"{name}_bias": parts[names[name]].bias for name in ("q", "o")}
    weights = {name: parts[part].weight for name, part in names.items()}
    return {**weights, **biases, "conv": conv.weight.squeeze(1), "conv_bias": conv.bias}


def _short_convolution(mixer: Any) -> dict[str, Any] | None:
    parts = parts_of(mixer)
    if set(parts) != {"conv", "in_proj", "o_proj"} or not has_only_modules(mixer):
        return None
    return _mixer_weights(mixer, parts["conv"], {"q": "in_proj", "o": "o_proj"})


def _delta_rule(mixer: Any) -> dict[str, Any] | None:
    """Weights of a gated delta rule whose projections are apart, with a gated norm behind it."""
    parts, names = parts_of(mixer), {"q": "in_proj_qkv", "z": "in_proj_z", "write": "in_proj_b", "decay": "in_proj_a"}
    if set(parts) != {*names.values(), "conv1d", "norm", "o_proj"} or set(mixer._parameters) != {"dt_bias", "A_log"}:
        return None
    if mixer._buffers or not is_norm(parts["norm"]) or getattr(mixer, "activation", None) != "silu":
        return None
    found = _mixer_weights(mixer, parts["conv1d"], names | {"o": "o_proj"})
    rates = {"decay_log": mixer.A_log, "decay_bias": mixer.dt_bias, "mix_scale": parts["norm"].weight}
    return None if found is None else found | rates


def _state_space(mixer: Any) -> dict[str, Any] | None:
    """Weights of Mamba-2, whose first projections are one, with a gated norm behind it."""
    parts = parts_of(mixer)
    if set(parts) - {"act"} != {"in_proj", "conv1d", "norm", "o_proj"} or mixer._buffers or not is_norm(parts["norm"]):
        return None
    if set(mixer._parameters) != {"dt_bias", "A_log", "D"} or getattr(mixer, "activation", None) != "silu":
        return None
    found = _mixer_weights(mixer, parts["conv1d"], {"q": "in_proj", "o": "o_proj"})
    if found is None or found["q_bias"] is not None:
        return None
    width, heads, channels = parts["norm"].weight.numel(), mixer.A_log.numel(), len(found["conv"])
    found |= dict(zip(("z", "q", "decay"), found["q"].split((width, channels, heads)), strict=True))
    rates = {"decay_log": mixer.A_log, "decay_bias": mixer.dt_bias, "skip": mixer.D}
    return found | rates | {"mix_scale": parts["norm"].weight}


def _gated(mlp: Any) -> dict[str, Tensor | None] | None:
    """Weights of a feed-forward, whose first projections may be one, or that has no gate; None if it is none."""
    parts = parts_of(mlp)
    names = set(parts) - set(ACTIVATION_NAMES)
    if not all(is_plain_linear(parts[name]) for name in names):
        return None
    down = {"down": parts["down_proj"].weight, "down_bias": parts["down_proj"].bias} if "down_proj" in names else {}
    if names == {"gate_proj", "up_proj", "down_proj"}:
        gate, up = parts["gate_proj"], parts["up_proj"]
        return {"gate": gate.weight, "gate_bias": gate.bias, "up": up.weight, "up_bias": up.bias, **down}
    if names == {"up_proj", "down_proj"}:
        first = parts["up_proj"]
        return {"gate": first.weight, "gate_bias": first.bias, **down}
    if names != {"gate_up_proj", "down_proj"}:
        return None
    size, both = parts["down_proj"].in_features, parts["gate_up_proj"]
    bias = (None, None) if both.bias is None else (both.bias[:size], both.bias[size:])
    return {"gate": both.weight[:size], "gate_bias": bias[0], "up": both.weight[size:], "up_bias": bias[1], **down}


def _experts(mlp: Any) -> dict[str, Tensor | None] | None:
    """Weights of a feed-forward of experts with a router; None if it is none that is known.

    `mlp.experts` is what transformers' `use_experts_implementation` makes: two tensors with the weights of all experts.
    """
    parts = dict(mlp._modules)
    shared = _shared(shared_expert(mlp), parts.pop("shared_expert_gate", None))
    if shared is None or not has_only_modules(mlp) or {*parts} - {*SHARED_NAMES} != {"gate", "experts"}:
        return None
    router, experts = mlp.gate, mlp.experts
    is_plain = set(router._parameters) == {"weight"} and {*router._buffers} <= {ROUTER_BIAS} and not router._modules
    if not is_plain or set(experts._parameters) != {"gate_up_proj", "down_proj"} or set(experts._modules) != {"act_fn"}:
        return None
    is_known = experts.has_gate and experts.is_concatenated and not experts._buffers
    if not is_known or any(getattr(experts, name, True) for name in UNKNOWN_EXPERTS):
        return None
    if not (experts.gate_up_proj.is_contiguous() and experts.down_proj.is_contiguous()):
        return None
    gate, down = experts.gate_up_proj.flatten(0, 1), experts.down_proj.flatten(0, 1)
    routed = {"router": router.weight, "router_bias": router._buffers.get(ROUTER_BIAS)}
    return {"gate": gate, "down": down, **routed, **shared}


def shared_expert(mlp: Any) -> Any:
    """The expert of a feed-forward of experts that all tokens share, or None."""
    return next((mlp._modules[name] for name in SHARED_NAMES if name in mlp._modules), None)


def _shared(expert: Any, gate: Any) -> dict[str, Tensor | None] | None:
    """Weights of a shared expert and of its gate, of which either may be missing; None if they are others."""
    if expert is None:
        return None if gate is not None else {}
    found = _gated(expert)
    if found is None or any(found.get(name) is not None for name in ("gate_bias", "up_bias", "down_bias")):
        return None
    if gate is not None and (not is_plain_linear(gate) or gate.bias is not None):
        return None
    weights = {f"shared_{name}": found.get(name) for name in ("gate", "up", "down")}
    return weights | {"shared_router": None if gate is None else gate.weight}


def inner_size(mlp: Any) -> int:
    """Features between the two products of a feed-forward without experts; 0 for others."""
    return 0 if "experts" in mlp._modules else int(parts_of(mlp)["down_proj"].in_features)


def activations_of(mlp: Any) -> list[nn.Module]:
    owners = (mlp, mlp._modules.get("experts"), shared_expert(mlp))
    parts = [one._modules for one in owners if one is not None]
    return [part[name] for part in parts for name in ACTIVATION_NAMES if part.get(name) is not None]


def has_only_modules(*parts: nn.Module) -> bool:
    """Whether modules have no parameters or buffers besides those of their parts."""
    return not any(part._parameters or part._buffers for part in parts)


def is_plain_linear(layer: Any) -> bool:
    """Whether a layer is exactly `nn.Linear`, computed by torch or by `mmspec.cpu.linear`."""
    return type(layer) is nn.Linear and ("forward" not in layer.__dict__ or is_replaced(layer))


def is_norm(module: nn.Module) -> bool:
    """Whether a module has the parts of an RMSNorm and nothing else."""
    return set(module._parameters) == {"weight"} and not module._modules and eps_of(module) is not None


def is_bare_norm(module: Any) -> bool:
    """Whether a module is an RMSNorm without a weight."""
    return (
        not (module._parameters or module._modules or module._buffers) and getattr(module, "with_scale", None) is False
    )


def eps_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
