"""The draft head: one decoder layer on [embedding of the next token ; state of the target], as in EAGLE.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and MSD (arXiv 2505.14260) are this network with the same weights' names; what
differs is which rows it reads (`drafters.rules`). Embedding and output head are the target's own, never copied. Knows
nothing of trees, prompts or targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import SharedEmbeddings

MAX_BLOCK_SIZE = 16
"""Tokens of a pass at most: longer drafts are never kept, and tables of paths grow with it."""
AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([B, H, n, d] queries, [B, H', n, d] keys and values of the same rows) -> [B, H, n, d] what was seen."""


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head.

    Attributes:
        hidden_size: D of the target. vocab_size: V of the target.
        bias: of `fc`. qkv_bias: of the attention. input_norm: whether the layer norms its input (EAGLE's does not).
        intermediate_size: of the feed-forward; 0 for a layer of attention alone.
        block: tokens of one pass; 1 for a head that says one. inner: width of what spreads them, if something does.
        chain: width of what a word does to the scores of the next one of its block; 0 for nothing.
        wide: whether the layer reads embedding and state side by side, each with a norm of its own (EAGLE-3);
            norm_before_residual: then, whether the state goes on normed.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    bias: bool = True
    qkv_bias: bool = False
    input_norm: bool = False
    eagle3_input: bool = False
    norm_before_residual: bool = False
    block_size: int = 1
    block_ffn_size: int = 0
    markov_rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block must be 1 to {MAX_BLOCK_SIZE} tokens a pass; got {self.block_size}.")
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads; got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}."
            )


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows the rows' precision, as under autocast they may differ."""

    def forward(self, rows: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        assert self.weight is not None
        return functional.rms_norm(rows, self.normalized_shape, self.weight.to(rows.dtype), self.eps)


class DecoderLayer(nn.Module):
    """A Llama decoder layer with its projections in one piece each, since small products cost by the call."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        read = 2 * hidden if config.eagle3_input else hidden
        self.qkv_proj = nn.Linear(read, (self.num_heads + 2 * self.num_kv_heads) * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * size, hidden, bias=False)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
            self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
            self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps) if config.input_norm or config.eagle3_input else None
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps) if config.eagle3_input else None

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """[B, n, D] rows in ([B, n, 2 D] if wide), [B, n or m, D] out.

        Args:
            cos, sin: [B or 1, 1, n or 1, d] of the rows' positions.
            ask: [B, m] the rows whose output is wanted; None for all. Of the others only keys and values are computed,
                which is about a third of the work: nobody asks what a prompt's earlier rows would draft.
        """
        if self.hidden_norm is None:
            normed = inputs if self.input_norm is None else self.input_norm(inputs)
        else:
            assert self.input_norm is not None
            embedding, inputs = inputs.chunk(2, dim=-1)
            state = self.hidden_norm(inputs)
            normed = torch.cat((self.input_norm(embedding), state), dim=-1)
            inputs = state if self.config.norm_before_residual else inputs
        if query_index is None:
            mixed = self._split_heads(self.qkv_proj(normed))
            turned, values = mixed.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
            turned = turned * cos + rotate_half(turned) * sin
            queries, keys = turned.split((self.num_heads, self.num_kv_heads), dim=1)
        else:
            inputs = gather_rows(inputs, query_index)
            queries, keys, values = self._project_queries(normed, cos, sin, query_index)
        seen = attend(queries, keys, values)
        inputs = inputs + self.o_proj(seen.transpose(1, 2).flatten(2))
        if not self.has_mlp:
            return inputs
        gate, up = self.gate_up_proj(self.post_norm(inputs)).chunk(2, dim=-1)
        fed: Tensor = self.down_proj(functional.silu(gate) * up)
        return inputs + fed

    def _split_heads(self, projected: Tensor) -> Tensor:
        """[B, n, H * d] -> [B, H, n, d]."""
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _project_queries(self, normed: Tensor, cos: Tensor, sin: Tensor, ask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the rows asked, keys and values of all."""
        size, weight, bias = self.num_heads * self.config.head_dim, self.qkv_proj.weight, self.qkv_proj.bias
        queries = functional.linear(gather_rows(normed, ask), weight[:size], None if bias is None else bias[:size])
        rest = functional.linear(normed, weight[size:], None if bias is None else bias[size:])
        keys, values = self._split_heads(rest).chunk(2, dim=1)
        turn = [
            gather_rows(part.expand(len(normed), -1, normed.shape[1], -1)[:, 0], ask)[:, None] for part in (cos, sin)
        ]
        turned = self._split_heads(queries)
        return turned * turn[0] + rotate_half(turned) * turn[1], keys * cos + rotate_half(keys) * sin, values


def rotate_half(vectors: Tensor) -> Tensor:
    """The half turn of rotary positions, [..., d]: (a, b) -> (-b, a)."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class EagleHead(nn.Module):
    """`fc` and one layer. Its output stands for the target's state after the final norm, one position on."""

    compresses_visual_tokens: bool = False
    """Whether the head compresses visual tokens itself (ViSpec)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layer = DecoderLayer(config)

    def hidden_state_indices(self, num_layers: int) -> tuple[int, ...]:
        """Which states of a target of so many layers it reads (`mmspec.interfaces.DrafterRequirements`)."""
        return (num_layers,)

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """[V', D] what `logits` needs to speak of these ids only."""
        return shared_embeddings.lm_head_rows(draft_ids)

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """[..., V'] logits of what follows. rows: [V', D] of the target's head, if not all of it."""
        said: Tensor = (
            shared_embeddings.lm_head(hidden_states)
            if draft_lm_head is None
            else functional.linear(hidden_states, draft_lm_head)
        )
        return said

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] input rows of text: the next token's embedding with the state before it (embedding first)."""
        fused: Tensor = self.fc(torch.cat((inputs_embeds, hidden_states), dim=-1))
        return fused

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """See `Layer.forward`."""
        out: Tensor = self.layer(inputs, cos, sin, attend, query_index)
        return out

    def rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions [...]: [..., d] each, by Llama's rule."""
        size = self.config.head_dim
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device) / size
        angle = position_ids[..., None].float() * self.config.rope_theta**-steps
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


class Eagle3Head(EagleHead):
    """EAGLE-3 (arXiv 2503.01840): three states of the target, joined; a norm, a head and a vocabulary of its own.

    What it carries from step to step is the layer's output before that norm.
    """

    def __init__(self, config: HeadConfig, draft_vocab_size: int, target_size: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.fc = nn.Linear(3 * target_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)

    def hidden_state_indices(self, num_layers: int) -> tuple[int, ...]:
        """The inputs of layers 2, N // 2 and N - 3."""
        return (2, num_layers // 2, num_layers - 3)

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., 2 D]: embedding beside state; the target's states are joined first, its own are taken as they are."""
        own = hidden_states if hidden_states.shape[-1] == self.config.hidden_size else self.fc(hidden_states)
        return torch.cat((inputs_embeds, own), dim=-1)

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """Nothing: its own head speaks of its own vocabulary."""
        return None

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """[..., V'] by its own head."""
        said: Tensor = self.lm_head(self.norm(hidden_states))
        return said


# --- names of the published weights -----------------------------------------------------------------------------------

FUSED_PROJECTIONS = {
    "layers.0.self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "layers.0.mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
RENAMED_MODULES = {
    "fc": "fc",
    "layer.o_proj": "layers.0.self_attn.o_proj",
    "layer.down_proj": "layers.0.mlp.down_proj",
    "layer.input_norm": "layers.0.input_layernorm",
    "layer.post_norm": "layers.0.post_attention_layernorm",
}


def to_eagle_state_dict(head: EagleHead) -> dict[str, Tensor]:
    """The weights under the names of the EAGLE and MSD code, one tensor per projection."""
    config, result = head.config, dict[str, Tensor]()
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"qkv_proj": [heads, kv, kv], "gate_up_proj": [config.intermediate_size] * 2}
    for name, value in head.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in RENAMED_MODULES or not module.startswith(
            "layer."
        ):  # what other kinds of head add keeps its own name
            result[f"{RENAMED_MODULES[module]}.{kind}" if module in RENAMED_MODULES else name] = value
            continue
        joined = module.removeprefix("layer.")
        whole = next(name for name in FUSED_PROJECTIONS if name.endswith(joined))
        for part, piece in zip(FUSED_PROJECTIONS[whole], value.split(sizes[joined]), strict=True):
            result[f"{whole.removesuffix(joined)}{part}.{kind}"] = piece.contiguous()
    return result


def from_eagle_state_dict(
    config: HeadConfig, weights: Mapping[str, Tensor], make: Callable[[HeadConfig], EagleHead] | None = None
) -> dict[str, Tensor]:
    """The other way: a state dict for `EagleHead`, or for the kind of head that `make` makes.

    Raises:
        ValueError: names the tensors that are missing, too many, of another shape, or not finite.
    """
    with torch.device("meta"):
        empty = (make or EagleHead)(config)
    expected = {name: value.shape for name, value in to_eagle_state_dict(empty).items()}
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or extra:
        what = "lacks" if missing else "has what it should not have:"
        raise ValueError(f"a draft head {what} {', '.join((missing or extra)[:4])}.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for this config; got {list(weights[name].shape)}.")
        if not torch.isfinite(weights[name]).all():
            raise ValueError(f"{name} holds values that are not finite.")
    result = {}
    for name in empty.state_dict():
        module, _, kind = name.rpartition(".")
        if module in RENAMED_MODULES or not module.startswith("layer."):
            result[name] = weights[f"{RENAMED_MODULES[module]}.{kind}" if module in RENAMED_MODULES else name]
        else:
            joined = module.removeprefix("layer.")
            whole = next(name for name in FUSED_PROJECTIONS if name.endswith(joined))
            parts = [weights[f"{whole.removesuffix(joined)}{part}.{kind}"] for part in FUSED_PROJECTIONS[whole]]
            result[name] = torch.cat(parts)
    return result


def parse_head_config(values: Mapping[str, Any]) -> HeadConfig:
    """A `HeadConfig` from the keys of a published `config.json`; unknown keys are left alone.

    Raises:
        ValueError: a value of another kind than its key, or one that is needed and not there.
    """
    fields = HeadConfig.__dataclass_fields__
    known = {name: values[name] for name in fields if values.get(name) is not None}
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    for name, value in known.items():
        wanted = fields[name].type  # its name, as annotations are not evaluated
        if type(value).__name__ not in {"float": ("float", "int")}.get(str(wanted), (wanted,)):
            raise ValueError(f"a draft head's {name} is of type {wanted}; got {value!r}.")
    try:
        return HeadConfig(**known)
    except TypeError as error:
        raise ValueError(f"a draft head's config lacks something: {error}") from error


__all__ = [
    "AttentionFn",
    "Eagle3Head",
    "EagleHead",
    "HeadConfig",
    "DecoderLayer",
    "parse_head_config",
    "from_published",
    "gather_rows",
    "to_eagle_state_dict",
    "rotate_half",
]
