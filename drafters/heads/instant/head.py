"""The network of instant heads: k features of the next k positions from the target's last hidden state.

Medusa (arXiv 2401.10774) predicts the next tokens by independent residual blocks on the last hidden state. Here the
heads also read the token that the target has just picked, which is the root of the draft (as Hydra's do,
arXiv 2402.05109), share one projection, and are joined by a `MarkovHead`. There is no attention and no KV cache, so the
head has no prompt to process. Each position is a linear map of fixed random features at the start (an extreme learning
machine), which is fitted in closed form (`mmspec.drafters.heads.instant.fit`); gradient steps then train all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.markov import MarkovHead
from mmspec.drafters.heads.instant.config import InstantConfig
from mmspec.engine.draws import PrivateDraws

MAX_FULL_RANK = 1024
"""Largest hidden size whose positions have a linear map of full rank; larger ones get `LARGE_WIDTH` features."""
LARGE_WIDTH = 1024
BLOCK_SIZE = 4
MAX_MARKOV_RANK = 128


class InstantHead(DraftHead):
    """Features of [embedding of the root ; hidden state before it], of which every position has a linear map.

    A position starts as the identity of the hidden state.
    """

    config: InstantConfig

    def __init__(self, config: InstantConfig) -> None:
        super().__init__(config)
        if config.block_ffn_size < 1:
            raise ValueError(f"an instant head needs block_ffn_size of at least 1; got {config.block_ffn_size}.")
        num_inputs = 2 * config.hidden_size
        self.fc = nn.Linear(num_inputs, config.intermediate_size + config.block_ffn_size, bias=False)
        self.num_features = (config.intermediate_size or num_inputs) + config.block_ffn_size
        self.block_proj = nn.Linear(self.num_features, config.block_size * config.hidden_size, bias=False)
        nn.init.normal_(self.fc.weight, std=2 * num_inputs**-0.5)
        nn.init.zeros_(self.block_proj.weight)
        self.markov_head = MarkovHead(config, config.markov_rank) if config.markov_rank else None

    def features(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., F] features of embeddings of the next tokens and the hidden states before them, both [..., D]."""
        inputs = torch.cat((_normalize(inputs_embeds), _normalize(hidden_states)), dim=-1)
        projected = self.fc(inputs)
        if not (rank := self.config.intermediate_size):
            return torch.cat((inputs, functional.silu(projected)), dim=-1)
        return torch.cat((projected[..., :rank], functional.silu(projected[..., rank:])), dim=-1)

    def block_features(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., k, D] features of the k positions after the root."""
        offsets: Tensor = self.block_proj(self.features(inputs_embeds, hidden_states))
        return hidden_states[..., None, :] + offsets.unflatten(-1, (self.config.block_size, -1))


def instant_config(hidden_size: int, vocab_size: int, block_size: int = BLOCK_SIZE) -> InstantConfig:
    """The shape of an instant head for a target of this size."""
    is_large = hidden_size > MAX_FULL_RANK
    return InstantConfig(
        hidden_size=hidden_size,
        intermediate_size=LARGE_WIDTH if is_large else 0,
        num_attention_heads=1,  # the head has none; its config needs a number
        num_key_value_heads=1,
        vocab_size=vocab_size,
        block_size=block_size,
        block_ffn_size=LARGE_WIDTH if is_large else 2 * hidden_size,
        markov_rank=min(MAX_MARKOV_RANK, max(1, hidden_size // 4)),
    )


def init_instant_head(config: InstantConfig, seed: int = 0) -> InstantHead:
    """A head with the features of a seed; torch's generators stay as they are."""
    with PrivateDraws(seed):
        return InstantHead(config).requires_grad_(False).eval()


def _normalize(vectors: Tensor) -> Tensor:
    """[..., D] scaled to a root mean square of 1."""
    return functional.rms_norm(vectors, vectors.shape[-1:])
