"""What published layouts of several methods share: draft vocabulary, hidden states, windows, keys of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.checkpoints.rope import LAYER_TYPES
from mmspec.interfaces import TargetInfo

HEAD_MAX_POSITIONS = 1 << 17
"""`max_position_embeddings` of a head: RoPE has no limit, engines ask for one."""


def take_draft_ids(weights: dict[str, Tensor], vocab_size: int, target: TargetInfo) -> Tensor | None:
    """[V'] int64 target ids of the draft vocabulary; None for all.

    They come from its offsets `d2t`, and are checked against the mask `t2d`; both are taken out of the weights.

    Raises:
        ValueError: they are missing, of another size, or contradict each other.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if vocab_size < target.vocab_size and d2t is None:
        raise ValueError(f"draft_vocab_size is {vocab_size} of {target.vocab_size}, but the map d2t is missing.")
    if d2t is not None and d2t.shape != (vocab_size,):
        raise ValueError(f"d2t must be [{vocab_size}], as draft_vocab_size says; got {list(d2t.shape)}.")
    ids = torch.arange(vocab_size) if d2t is None else torch.arange(vocab_size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ValueError(f"d2t leads to id {int(ids.max())}; the target has {target.vocab_size}.")
    if t2d is not None and (t2d.dim() != 1 or int(t2d.sum()) != len(ids.unique()) or not bool(t2d[ids].all())):
        raise ValueError("t2d and d2t name different ids.")
    return None if d2t is None else ids


def hidden_state_indices(named: Mapping[str, tuple[Any, int]], target: TargetInfo) -> tuple[int, ...]:
    """The hidden states that a head reads, by the first key that names some; () if none does.

    Args:
        named: {key: (its value, what is added to each index)}: engines that count hidden states as transformers does
            read keys with 0, those that count the outputs of layers keys with 1.
        target: facts about the target.

    Raises:
        ValueError: the target has no such hidden state.
    """
    for key, (layers, offset) in named.items():
        if not layers:
            continue
        indices = tuple(layer + offset for layer in layers)
        if min(indices) < 0 or max(indices) > target.num_layers:
            raise ValueError(
                f"{key} {list(layers)} are not all layers of this target, which has 0 to {target.num_layers}."
            )
        return indices
    return ()


def sliding_layers(types: Any, num_layers: int) -> list[bool]:
    """Whether each layer has a window, by `layer_types`.

    Raises:
        ValueError: they are of other layers.
    """
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must be one of {', '.join(LAYER_TYPES)} for each of {num_layers} layers; got {types!r:.80}."
        )
    return [kind == LAYER_TYPES[1] for kind in types]


def layer_windows(window: Any, slides: Sequence[bool]) -> tuple[int, ...]:
    """Positions that each layer sees, 0 for all; () if none `slides`.

    Raises:
        ValueError: the window is no number of positions.
    """
    if not any(slides):
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window must be a number of positions for layers with windows; got {window!r}.")
    return tuple(window if flag else 0 for flag in slides)


def draft_vocabulary_tensors(draft_ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """`d2t`, the offset of each draft id to its target id, and `t2d`, the mask of those ids; empty for all ids."""
    if draft_ids is None:
        return {}
    ids = draft_ids.cpu()
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def speculators_section(algorithm: str, num_tokens: int, target: TargetInfo) -> dict[str, Any]:
    """`speculators_config`: how the head is meant to be used, and for which target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target.name or None, "architectures": []},
    }


def layer_keys(config: Any, target: TargetInfo, model_type: str) -> dict[str, Any]:
    """The keys of the layers of a head, as transformers names them for the models of a type.

    Args:
        config: of the head, with `num_hidden_layers`.
        target: facts about the target.
        model_type: whose layers those of the head are.
    """
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.qkv_bias,
        "hidden_act": "silu",
        "max_position_embeddings": HEAD_MAX_POSITIONS,
        "tie_word_embeddings": False,
    }
