"""What modules compute for random numbers: norms, activations, routers, scaled embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.targets.c_layers import ROUTER_BIAS, eps_of

PROBED = 64
"""Random numbers that a module is asked about."""


def routing_traits(mlps: Sequence[Any]) -> dict[str, Any] | None:
    """What `DecoderShape` says of experts, with each router asked about random numbers; None if layers differ."""
    found: list[dict[str, Any]] = []
    for mlp in mlps:
        if "experts" not in mlp._modules:
            continue
        weight, count = mlp.gate.weight.detach(), int(mlp.gate.top_k)
        scale = float(getattr(mlp.gate, "routed_scaling_factor", 1.0))
        rows = _random(PROBED, weight.shape[1]).to(weight.dtype)
        with torch.no_grad():
            shares = mlp.gate(rows)[1]
        ordered = shares.sort(-1, descending=True).values
        errors = dict[tuple[bool, ...], float]()
        for names in product((True, False), repeat=3):
            found_shares = scale * _shares(rows, weight, mlp.gate._buffers.get(ROUTER_BIAS), count, *names)
            errors[names] = float((found_shares - ordered).abs().max())
        best = min(errors, key=lambda names: errors[names])
        if not errors[best] <= scale * torch.finfo(shares.dtype).eps:
            return None
        num_experts, _, size = mlp.experts.down_proj.shape
        traits = {"num_experts": num_experts, "expert_size": size, "experts_per_token": count, "share_scale": scale}
        traits |= dict(zip(("rounds_routing", "normalises_shares", "is_sigmoid"), best, strict=True))
        traits["rounds_shares"] = shares.dtype is weight.dtype
        found.append(traits | {"adds_in_type": mlp.experts.config._experts_implementation == "eager"})
    if any(one != found[0] for one in found):
        return None
    return found[0] if found else {}


def _shares(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    rounds_routing: bool,
    normalises_shares: bool,
    is_sigmoid: bool,
) -> Tensor:
    """[n, count] shares of the experts that a router with these traits chooses, the largest first."""
    kind = weight.dtype if rounds_routing else torch.float32
    logits = functional.linear(rows.to(kind), weight.to(kind)).float()
    found = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    chosen = (found if bias is None else found + bias).topk(count).indices
    shares = found.gather(-1, chosen).sort(-1, descending=True).values
    return shares / shares.sum(-1, keepdim=True) if normalises_shares else shares


def _random(*shape: int) -> Tensor:
    """Random numbers that are the same each time, without touching a generator."""
    index = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return ((index * 12.9898).sin() * 43758.5453).frac().mul(4).sub(1).float().view(shape)


def common_norm_traits(norms: Sequence[Any]) -> tuple[float, bool, bool] | None:
    """Those that a norm of each class has; None if they differ."""
    found = {_norm_traits(norm) for norm in {type(norm): norm for norm in norms}.values()}
    return found.pop() if len(found) == 1 else None


def _norm_traits(norm: Any) -> tuple[float, bool, bool] | None:
    """(offset of the weight, whether it rounds before the product and after, whether it subtracts the mean) of a norm
    without bias; None if it is another."""
    weight = norm.weight.detach()
    x = _random(3, len(weight)).to(weight.dtype)
    wide, found = x.float(), list[Tensor]()
    for one in (wide, wide - wide.mean(-1, keepdim=True)):
        found.append(one * torch.rsqrt(one.pow(2).mean(-1, keepdim=True) + eps_of(norm)))
    normed, centred = found
    with torch.no_grad():
        output = norm(x).float()
    candidates = {
        (0.0, True, False): weight * normed.to(x.dtype),
        (1.0, False, False): (normed * (1.0 + weight.float())).to(x.dtype),
        (0.0, False, False): (normed * weight.float()).to(x.dtype),
        (0.0, False, True): (centred * weight.float()).to(x.dtype),
    }
    errors = {traits: float((one.float() - output).abs().sum()) for traits, one in candidates.items()}
    best = min(errors, key=lambda traits: errors[traits])
    return best if errors[best] <= torch.finfo(x.dtype).eps * float(output.abs().sum()) else None


def activation_of(modules: Any) -> str | None:
    """The activation that all modules compute, one of `GATE_ACTIVATIONS`; None if it is another.

    Of no modules the likeliest.
    """
    x = _random(PROBED) * 3
    candidates = {"silu": functional.silu(x), "gelu_tanh": functional.gelu(x, approximate="tanh")}
    candidates["relu_squared"] = functional.relu(x).square()
    with torch.no_grad():
        outputs = [module(x) for module in modules]
    same = [name for name, one in candidates.items() if all(torch.allclose(one, y, atol=1e-6) for y in outputs)]
    return same[0] if len(same) == 1 or not outputs else None


def embed_scale_of(embeddings: Any) -> float | None:
    """Factor that a module of embeddings applies; None if it is none that is known."""
    if not isinstance(embeddings, nn.Embedding) or embeddings.max_norm is not None:
        return None
    if type(embeddings) is nn.Embedding:
        return 1.0
    scale = getattr(embeddings, "embed_scale", None)
    return float(scale.to(embeddings.weight.dtype)) if isinstance(scale, Tensor) and scale.numel() == 1 else None
