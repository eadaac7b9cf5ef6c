"""Drafters that others have published, from their files: MSD, EAGLE-1/2, ViSpec, EAGLE-3 (flat and `speculators`).

Reads `config.json` and `model.safetensors`, or `pytorch_model.bin` without running what a pickle may hold. Everything
is checked against the target, and what does not fit is named. EAGLE-3 heads can be written in the `speculators` layout.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.checkpoints.format import CONFIG, WEIGHTS, read_config, read_weights, write
from mmspec.drafters.eagle import vispec
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import Eagle3Head, EagleHead, HeadConfig, from_published
from mmspec.interfaces import TargetInfo

PICKLED = "pytorch_model.bin"
KNOWN = {
    "liuhaotian/llava-v1.5-7b": "lucylyn/MSD-LLaVA1.5-7B",
    "liuhaotian/llava-v1.5-13b": "lucylyn/MSD-LLaVA1.5-13B",
    "llava-hf/llava-1.5-7b-hf": "lucylyn/MSD-LLaVA1.5-7B",
    "llava-hf/llava-1.5-13b-hf": "lucylyn/MSD-LLaVA1.5-13B",
    "llava-hf/llava-v1.6-vicuna-7b-hf": "JLKang/ViSpec-llava-v1.6-vicuna-7b-hf",
    "llava-hf/llava-v1.6-vicuna-13b-hf": "JLKang/ViSpec-llava-v1.6-vicuna-13b-hf",
    "Qwen/Qwen2.5-VL-3B-Instruct": "JLKang/ViSpec-Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct": "JLKang/ViSpec-Qwen2.5-VL-7B-Instruct",
}
"""Target -> the drafter that was published for it (hub ids)."""


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, on the CPU.

    Raises:
        FileNotFoundError: neither file is there. ValueError: damaged, or a pickle that holds more than tensors.
    """
    if (folder / WEIGHTS).is_file():
        return read_weights(folder / WEIGHTS)
    file = folder / PICKLED
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds neither {WEIGHTS} nor {PICKLED}.")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is not loaded: it is damaged, or holds more than tensors.") from error
    except (AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file} must hold a dict of tensors.")
    return found


def kind_of(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Which of the layouts it is: `eagle3`, `vispec`, `msd` or `eagle`."""
    if values.get("speculators_model_type", "eagle3") != "eagle3":
        raise ValueError(f"speculators_model_type {values['speculators_model_type']!r} is not supported; eagle3 is.")
    if "speculators_model_type" in values or "d2t" in weights or any(name.startswith("midlayer.") for name in weights):
        return "eagle3"
    if "imadpt.q" in weights:
        return "vispec"
    if "fc.weight" not in weights:
        raise ValueError("these are no weights of a draft head: fc.weight is missing.")
    return "msd" if values.get("model_type") in ("llava", "qwen2_vl") else "eagle"


def published(folder: str | os.PathLike[str], target: TargetInfo) -> EagleDrafter:
    """The drafter in a folder, in the layout in which it was published.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or what is there does not fit the target.
    """
    place = Path(folder)
    values, weights = read_config(place), weights_of(place)
    name = place.name
    try:
        _check_image_token(values, target)
        kind = kind_of(values, weights)
        if kind == "eagle3":
            return _eagle3(values, weights, target, name)
        return _eagle(kind, values, weights, target, name)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _check_image_token(values: Mapping[str, Any], target: TargetInfo) -> None:
    """Refuse a drafter that takes another id for a visual token, where both are told."""
    for name in ("image_token_id", "image_token_index"):
        token = values.get(name)
        if not isinstance(token, int) or token < 0:  # LLaVA's own code writes -200, which is no id
            continue
        if target.media_token_ids and token not in target.media_token_ids:
            its = ", ".join(map(str, target.media_token_ids))
            raise ValueError(f"this drafter was trained with {name} {token}; the target's visual tokens are {its}.")


def _eagle(
    kind: str, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
) -> EagleDrafter:
    config = _config(values, target)
    known = _vocabulary(values, weights, target)
    config = replace(
        config,
        bias="fc.bias" in weights,
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        input_norm="layers.0.input_layernorm.weight" in weights,
    )
    weights = {key: value for key, value in weights.items() if "rotary" not in key and key != "embed_tokens.weight"}
    if kind == "vispec":
        head, plain = vispec.from_weights(config, weights)
        _load(head, from_published(config, plain), weights)
        return vispec.VispecDrafter(head, layers=target.num_layers, name=name, known=known)
    with torch.device("meta"):  # fresh weights would be drawn from the user's generator
        plain_head = EagleHead(config)
    _load(plain_head, from_published(config, weights), {})
    rule = "decoupled" if kind == "msd" else "coupled"
    return EagleDrafter(plain_head, rule, layers=target.num_layers, name=name, known=known)


def _load(head: torch.nn.Module, state: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Put weights into a head; `more` holds those of its own further parts."""
    own = head.state_dict()
    extra = {name: more[name] for name in own if name not in state and name in more}
    for name, value in extra.items():
        if value.shape != own[name].shape or not torch.isfinite(value).all():
            raise ValueError(f"{name} must be finite and {list(own[name].shape)}; got {list(value.shape)}.")
    missing = sorted(set(own) - set(state) - set(extra))
    if missing:
        raise ValueError(f"a draft head lacks {', '.join(missing[:4])}.")
    head.load_state_dict({name: value.float() for name, value in {**state, **extra}.items()}, assign=True)


def _config(values: Mapping[str, Any], target: TargetInfo) -> HeadConfig:
    """The head's shape; its vocabulary is the target's."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in names if not isinstance(values.get(name), int)]
    if missing:
        raise ValueError(f"{CONFIG} lacks {', '.join(missing)}.")
    if values["hidden_size"] != target.hidden_size:
        raise ValueError(
            f"this drafter is for a target of hidden_size {values['hidden_size']}; the target has {target.hidden_size}."
        )
    scaling = values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "mrope"):  # three equal axes come to plain positions
        raise ValueError(f"rope_scaling of type {kind!r} is not supported in a draft head.")
    rope = values.get("rope_parameters") or {}
    theta = values.get("rope_theta") or rope.get("rope_theta") or 10000.0
    return HeadConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        vocab_size=target.vocab_size,
        head_dim=values.get("head_dim") or 0,
        rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
        rope_theta=float(theta),
    )


def _vocabulary(values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo) -> int | None:
    """How many ids the drafter knows, if the target has more (LLaVA: 32,000 of 32,064)."""
    size = values.get("vocab_size") or target.vocab_size
    embedding = weights.get("embed_tokens.weight")
    if embedding is not None and (embedding.dim() != 2 or embedding.shape[1] != values["hidden_size"]):
        raise ValueError(f"embed_tokens.weight must be [V, {values['hidden_size']}]; got {list(embedding.shape)}.")
    if embedding is not None and embedding.shape[0] != size:
        raise ValueError(f"embed_tokens.weight has {embedding.shape[0]} rows; {CONFIG} says vocab_size {size}.")
    if size > target.vocab_size + 64 or size < target.vocab_size - 1024:
        raise ValueError(f"this drafter knows {size} ids, the target {target.vocab_size}: not the same vocabulary.")
    return size if size < target.vocab_size else None


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------

LAYER3 = {
    "self_attn.o_proj": "layer.o_proj",
    "mlp.down_proj": "layer.down_proj",
    "input_layernorm": "layer.input_norm",
    "hidden_norm": "layer.state_norm",
    "post_attention_layernorm": "layer.post_norm",
}
JOINED3 = {
    "layer.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "layer.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def _eagle3(values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str) -> EagleDrafter:
    flat = dict(values.get("transformer_layer_config") or values)
    for option in ("norm_before_fc", "fc_norm", "norm_output"):
        if values.get(option):
            raise ValueError(f"{option} is not supported in an EAGLE-3 head.")
    wanted = values.get("target_hidden_size") or flat.get("hidden_size")
    if wanted != target.hidden_size or flat.get("hidden_size") != target.hidden_size:
        sizes = f"{wanted} (its own: {flat.get('hidden_size')})"
        raise ValueError(f"this drafter is for a target of hidden_size {sizes}; the target has {target.hidden_size}.")
    config = replace(
        _config(flat, target), wide=True, norm_before_residual=bool(values.get("norm_before_residual", False))
    )
    weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    config = replace(config, qkv_bias="layers.0.self_attn.q_proj.bias" in weights)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    weights = {key: value for key, value in weights.items() if "rotary" not in key and key != "embed_tokens.weight"}
    vocab = int(values.get("draft_vocab_size") or flat.get("vocab_size") or target.vocab_size)
    if d2t is not None and d2t.shape != (vocab,):
        raise ValueError(f"d2t must be [{vocab}], as draft_vocab_size says; got {list(d2t.shape)}.")
    ids = torch.arange(vocab) if d2t is None else torch.arange(vocab) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ValueError(f"d2t leads to id {int(ids.max())}; the target has {target.vocab_size}.")
    if t2d is not None and (t2d.dim() != 1 or int(t2d.sum()) != len(ids.unique()) or not bool(t2d[ids].all())):
        raise ValueError("t2d and d2t name different ids.")
    with torch.device("meta"):
        head = Eagle3Head(config, vocab, target.hidden_size)
    _load(head, _state3(head, weights), {})
    taps = values.get("eagle_aux_hidden_state_layer_ids")
    drafter = EagleDrafter(
        head, "coupled", layers=target.num_layers, name=name, draft_ids=None if d2t is None else ids, depth=5
    )
    if taps is not None and tuple(taps) != drafter.taps:
        drafter.tap(tuple(taps), target.num_layers)
    return drafter


def _names3(head: Eagle3Head) -> dict[str, tuple[str, ...]]:
    """Name in our state dict -> the published names that it is joined of."""
    names: dict[str, tuple[str, ...]] = {}
    back = {mine: theirs for theirs, mine in LAYER3.items()}
    for name in head.state_dict():
        module, _, kind = name.rpartition(".")
        if module in JOINED3:
            names[name] = tuple(f"layers.0.{part}.{kind}" for part in JOINED3[module])
        else:
            names[name] = (f"layers.0.{back[module]}.{kind}" if module in back else name,)
    return names


def _sizes3(head: Eagle3Head) -> dict[str, list[int]]:
    config = head.config
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {"layer.qkv_proj": [heads, kv, kv], "layer.gate_up_proj": [config.intermediate_size] * 2}


def _state3(head: Eagle3Head, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, own, sizes = _names3(head), head.state_dict(), _sizes3(head)
    expected = {name for parts in names.values() for name in parts}
    missing, extra = sorted(expected - set(weights)), sorted(set(weights) - expected)
    if missing or extra:
        what = "lacks" if missing else "has what it should not have:"
        raise ValueError(f"an EAGLE-3 head {what} {', '.join((missing or extra)[:4])}.")
    result = {}
    for name, parts in names.items():
        lengths = sizes.get(name.rpartition(".")[0], [own[name].shape[0]])
        for part, length in zip(parts, lengths, strict=True):
            shape = (length, *own[name].shape[1:])
            if weights[part].shape != shape:
                raise ValueError(f"{part} must be {list(shape)}; got {list(weights[part].shape)}.")
            if not torch.isfinite(weights[part]).all():
                raise ValueError(f"{part} holds values that are not finite.")
        result[name] = torch.cat([weights[part] for part in parts])
    return result


def export_speculators(folder: str | os.PathLike[str], drafter: EagleDrafter, target: TargetInfo) -> None:
    """Write an EAGLE-3 head in the `speculators` layout, which serving engines read.

    Raises:
        TypeError: another kind of head; that layout has no place for it.
    """
    head = drafter.head
    if not isinstance(head, Eagle3Head):
        raise TypeError(f"only EAGLE-3 heads go into the speculators layout; this is a {type(head).__name__}.")
    config, sizes = head.config, _sizes3(head)
    weights: dict[str, Tensor] = {}
    for name, parts in _names3(head).items():
        value = head.state_dict()[name].detach().cpu()
        lengths = sizes.get(name.rpartition(".")[0], [value.shape[0]])
        weights |= {part: piece.contiguous() for part, piece in zip(parts, value.split(lengths), strict=True)}
    vocab = head.lm_head.out_features
    if drafter.draft_ids is not None:
        weights["d2t"] = drafter.draft_ids.cpu() - torch.arange(vocab)
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, drafter.draft_ids.cpu(), True)
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocab,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name or None, "architectures": []},
        },
    }
    write(Path(folder), weights, values)


__all__ = ["KNOWN", "export_speculators", "published"]
