"""The draft head of EAGLE-3: it reads three hidden states and has a norm, an LM head and a vocabulary of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.head import AttentionFn, DraftHead, RMSNorm
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleConfig
from mmspec.interfaces import SharedEmbeddings


@dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Shape of an `Eagle3Head`.

    Attributes:
        norm_before_residual: whether the residual is the normalised hidden state.
        norm_before_fc: whether the hidden states are normalised before `fc`, all as one vector.
        fc_norm: whether each of them is (EAGLE-3.1).
        norm_output: whether the state that is carried on is the layer's output after the norm (EAGLE-3.1).
        target_hidden_size: size of the hidden states that `fc` reads, if it is not D; 0 if it is.
        num_hidden_layers: decoder layers; those after the first read the output of the one below alone.
        sliding_windows: positions that each layer sees, its own included; 0 for all; empty for no windows.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: int = 0
    num_hidden_layers: int = 1
    sliding_windows: tuple[int, ...] = ()

    @property
    def is_layered(self) -> bool:
        """Whether it has several layers, or windows."""
        return self.num_hidden_layers > 1 or any(self.sliding_windows)


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """Hidden states that EAGLE-3 heads read unless they name others: 2, N // 2 and N - 3, as vLLM counts them."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class LayeredAttention(CachedAttention):
    """Attention of all layers (speculators 0.7), each over its own keys; those after the first are ordinary ones.

    Attributes:
        windows: positions that each layer sees, its own included; 0 for all; empty for no windows.
        distances: [B, n or 1, keys] int64, how many positions each key is behind a query.
    """

    windows: tuple[int, ...] = ()
    distances: Tensor | None = None

    def of_layer(self, layer: int) -> CachedAttention:
        """Attention of one layer."""
        mask, window = self.mask, self.windows[layer] if self.windows else 0
        if window:
            assert self.distances is not None and mask is not None
            mask = mask & (self.distances < window)[:, None]
        return CachedAttention(self.kv_cache, mask, layer=layer)


class Eagle3Layer(DecoderLayer):
    """A layer that reads [embedding ; hidden state], each normalised."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def read_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`; of inputs [B, n, 2 D]."""
        assert self.input_norm is not None
        embeds, state = inputs.chunk(2, dim=-1)
        normed_state = self.hidden_norm(state)
        normed = torch.cat((self.input_norm(embeds), normed_state), dim=-1)
        return normed, normed_state if self.config.norm_before_residual else state


class Eagle3Head(DraftHead):
    """EAGLE-3 (arXiv 2503.01840): three hidden states of the target, and a norm, LM head and vocabulary of its own.

    The state that is carried from level to level is the layer's output before that norm, but for `norm_output`.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        """
        Args:
            config: with `draft_vocab_size`.

        Raises:
            ValueError: it is missing.
        """
        if not config.draft_vocab_size:
            raise ValueError(f"an EAGLE-3 head needs a draft_vocab_size of at least 1; got {config.draft_vocab_size}.")
        super().__init__(config)
        num_states, size = len(config.hidden_state_layers) or 3, config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(num_states * size, config.hidden_size, bias=False)
        self.input_norm = RMSNorm(num_states * size, config.rms_norm_eps) if config.norm_before_fc else None
        norms = num_states if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(norms)) if norms else None
        further = (DecoderLayer(replace(config, input_norm=True)) for _ in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList((Eagle3Layer(config), *further))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def layer(self) -> Eagle3Layer:
        """The first layer, which reads embeddings too."""
        first = self.layers[0]
        assert isinstance(first, Eagle3Layer)
        return first

    def hidden_state_indices(self, num_layers: int) -> tuple[int, ...]:
        return self.config.hidden_state_layers or eagle3_layers(num_layers)

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., 2 D] embedding and state, concatenated; `fc` reduces the target's states, not the head's own."""
        is_own = hidden_states.shape[-1] == self.config.hidden_size
        return torch.cat((inputs_embeds, hidden_states if is_own else self.reduce(hidden_states)), dim=-1)

    def reduce(self, hidden_states: Tensor) -> Tensor:
        """[..., D] of the target's states [..., S * D]."""
        if self.fc_norm is not None:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        reduced: Tensor = self.fc(hidden_states)
        return reduced

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        outputs = inputs
        for index, layer in enumerate(self.layers):
            own = attend.of_layer(index) if isinstance(attend, LayeredAttention) else attend
            outputs = layer(outputs, cos, sin, own, query_index)
        return self.norm(outputs) if self.config.norm_output else outputs

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """None: its own LM head covers its own vocabulary."""
        return None

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """[..., V'] logits of its own LM head."""
        logits: Tensor = self.lm_head(hidden_states if self.config.norm_output else self.norm(hidden_states))
        return logits
