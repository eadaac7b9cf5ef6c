"""State of one `generate` call of a trained drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.cpu.layers import DecoderShape
from mmspec.drafters.rerank import next_log_probs
from mmspec.economy.chooser import Chooser
from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.recordings import Recordings
from mmspec.interfaces import Prompt, SharedEmbeddings, TargetKeys

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.c_draft import CDraft
    from mmspec.drafters.heads.base.recorded import RecordedDraft

KEPT = ("last_hidden", "carry")
"""Tensors of a `DraftState` that a draft reads and replaces; the others it leaves as they are."""


@dataclass
class Pending:
    """Tokens emitted in one round that the head has not processed yet.

    Attributes:
        tokens: [B, A] int64.
        hidden_states: [B, A, S] target hidden states at the position before each token.
        counts: number of tokens of each row; further columns are padding.
        device_counts: [B] int64, the same on a device; None if they are on the host only.
    """

    tokens: Tensor
    hidden_states: Tensor
    counts: list[int]
    device_counts: Tensor | None = None

    def counts_on(self, device: torch.device) -> Tensor:
        """[B] int64 `counts`."""
        if self.device_counts is None:
            self.device_counts = from_host(self.counts, device)
        return self.device_counts.to(device)

    @classmethod
    def concatenate(cls, parts: Sequence[Pending]) -> Pending:
        """Several rounds as one, without the padding in between."""
        if len(parts) == 1:
            return parts[0]
        tokens = torch.cat([part.tokens for part in parts], dim=1)
        hidden_states = torch.cat([part.hidden_states for part in parts], dim=1)
        columns = [list[int]() for _ in parts[0].counts]  # of the tokens of each row
        offset = 0
        for part in parts:
            for row, count in zip(columns, part.counts, strict=True):
                row.extend(range(offset, offset + count))
            offset += part.tokens.shape[1]
        counts = [len(row) for row in columns]
        longest = max(counts)
        index = from_host([row + [0] * (longest - len(row)) for row in columns], tokens.device)
        hidden_states = hidden_states.gather(1, index[..., None].expand(-1, -1, hidden_states.shape[-1]))
        return cls(tokens.gather(1, index), hidden_states, counts)


@dataclass
class DraftState:
    """State of one call; created by `HeadDrafter.begin`. Of its tensors a draft replaces `KEPT`.

    Attributes:
        shared_embeddings: the target's input embedding and LM head.
        kv_cache: keys and values of the head's own layer.
        logit_bias: [V'] float32 of the draft vocabulary, -inf for ids that must not be drafted, else 0.
        prompt: the prompt until the head has processed it, then None.
        next_positions: position id of each row's next input.
        last_hidden: [B, D] the head's output at each row's last input.
        carry: [B, ...] what else a method carries from one draft to the next (DSpark: [B] the last emitted tokens;
            Falcon: its last block; ParallelSpec: [B, k, D] features; ViSpec: [B, D] vectors of the last images); None
            for nothing, or not yet.
        pending: tokens emitted since the head's last forward.
        noise: as in `Prompt`.
        temperature: as in `Prompt`; a scalar tensor in a recorded function.
        cos: [P, d] rotary table, None before the first forward.
        sin: [P, d] rotary table, None before the first forward.
        chooser: as in `Prompt`.
        first_ids: [B] first emitted tokens, None until the target has sampled them.
        active: rows of the last draft, None before the first.
        num_levels: levels of the last draft.
        hidden_size: S, numbers per position that the head reads of the target; 0 before the prompt.
        draft_ids: [V'] int64, target ids of the draft vocabulary; None if it is the target's vocabulary.
        draft_lm_head: [V', D] weights of the LM head for `draft_ids`, or None.
        c_draft: the head in C; None if it runs in its own forward.
        recorded: its recorded drafts, or None.
        recordings: of the call; None if nothing of it is recorded.
        position_offset: [B] int64, `next_positions` less the lengths of the cache, in a recorded function; else None.
        target_keys, c_shape, chains_only: as in `Prompt`.
    """

    shared_embeddings: SharedEmbeddings
    kv_cache: RaggedKVCache
    logit_bias: Tensor
    prompt: Prompt | None
    next_positions: list[int]
    last_hidden: Tensor
    carry: Tensor | None = None
    pending: list[Pending] = field(default_factory=list)
    noise: Callable[[int], Tensor] | None = None
    temperature: float | Tensor = 1.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    chooser: Chooser | None = None
    first_ids: Tensor | None = None
    active: Sequence[bool] | None = None
    num_levels: int = 0
    hidden_size: int = 0
    draft_ids: Tensor | None = None
    draft_lm_head: Tensor | None = None
    c_draft: CDraft | None = None
    recorded: RecordedDraft | None = None
    recordings: Recordings | None = None
    position_offset: Tensor | None = None
    target_keys: TargetKeys | None = None
    c_shape: Callable[[], DecoderShape | None] = lambda: None
    chains_only: Callable[[], bool] = lambda: False

    def kept_tensors(self) -> dict[str, Tensor]:
        """Those of `KEPT` that there are."""
        values = {name: getattr(self, name) for name in KEPT}
        return {name: value for name, value in values.items() if value is not None}

    def first_positions(self) -> Tensor:
        """[B, 1] int64 position id of each row's next input."""
        device = self.last_hidden.device
        if self.position_offset is None:
            return from_host(self.next_positions, device)[:, None]
        return (self.kv_cache.lengths_on(device) + self.position_offset)[:, None]

    def log_noise(self, depth: int) -> Tensor | None:
        """[B, depth, V'] log of the noise with which the next tokens will be sampled; None for greedy decoding."""
        if self.noise is None:
            return None
        noise = self.noise(depth).to(self.last_hidden.device)
        return (noise if self.draft_ids is None else noise[..., self.draft_ids]).log()

    def rotary_table(
        self, size: int, compute: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [P, d] of positions 0 to P - 1, at least `size`, by `DraftHead.rotary_embedding`."""
        if self.cos is None or self.sin is None or self.cos.shape[0] < size:
            table = torch.arange(max(512, size + size // 2), device=self.last_hidden.device)
            self.cos, self.sin = compute(table, self.last_hidden.dtype)
        return self.cos, self.sin

    def log_probs(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """[..., V'] log probability of each next token: of the argmax, or of the sample under the given noise."""
        return next_log_probs(logits, self.temperature, noise)

    def target_ids(self, tokens: Tensor) -> Tensor:
        """[...] int64, target ids of tokens of the draft vocabulary."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens]

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., D] embeddings of tokens of the draft vocabulary."""
        return self.shared_embeddings.embed(self.target_ids(tokens))
