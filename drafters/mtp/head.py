"""`MTPHead`: the head in the target's checkpoint as an `DraftHead`, so that it drafts by the same code.

Its output is z, the state before the output norm (`mmspec.interfaces.own_head`): `logits` norms it, and the drafter
norms it before it reads it again.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import AttentionFn, DraftHead
from mmspec.drafters.heads.base.visual_inputs import DraftInputs
from mmspec.drafters.mtp.vocabulary import RowCache
from mmspec.drafters.training.batch import PackedQueries, TrainBatch
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache, rollout_loss
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import HeadCache, OwnHead, SharedEmbeddings


class MTPHead(DraftHead):
    """`fc` over two normed inputs and a decoder layer of the target's class.

    Attributes:
        files: how it is stored.
        zeroes_first: see `OwnHead`.
    """

    lm_head: Tensor | None

    def __init__(self, parts: OwnHead) -> None:
        section = parts.mrope_section
        shape = (parts.hidden_size, 0, 1, 1, parts.vocab_size)
        super().__init__(HeadConfig(*shape, mrope_section=section, rotary_dim=2 * sum(section)))
        self.files, self.zeroes_first = parts.files, parts.zeroes_first
        self.visual_modes = parts.visual_modes
        self.window = parts.window
        self._rotary_embedding = parts.rotary_embedding
        self.fc = cast(nn.Linear, parts.fc)
        self.embedding_norm = parts.embedding_norm
        self.hidden_norm = parts.hidden_norm
        self.block = parts.block
        self.output_norm = parts.output_norm
        self.row_cache = RowCache()
        self.register_buffer("lm_head", parts.lm_head, persistent=False)  # not trained: as large as the vocabulary

    def prepare(self, inputs: DraftInputs) -> DraftInputs:
        """See `DraftHead`; families whose first row reads no embedding get zeros there."""
        if not self.zeroes_first or inputs.position_ids is None:
            return inputs
        is_first = (inputs.position_ids == 0)[..., None]
        zeroed = inputs.next_embeds.masked_fill(is_first, 0)
        return replace(inputs, next_embeds=zeroed, visual_mask=inputs.visual_mask & ~is_first[..., 0])

    def carried(self, outputs: Tensor) -> Tensor:
        carried: Tensor = self.output_norm(outputs)
        return carried

    def stored_tensors(self) -> dict[str, Tensor]:
        """Its weights as its checkpoint has them: experts one by one where they were."""
        stored, own = dict[str, Tensor](), self.state_dict()
        for part, names in self.files.tensors.items():
            value = own[part].detach()
            pieces = (value,) if len(names) == 1 else value.reshape(-1, value.shape[-1]).chunk(len(names))
            stored |= {name: piece.contiguous() for name, piece in zip(names, pieces, strict=True)}
        return stored

    def trainable_copy(self) -> MTPHead:
        """A float32 copy of the weights, with gradients; an LM head of its own is shared."""
        shared = {id(part): part for part in (self.lm_head, self.files)}
        twin = copy.deepcopy(self, shared)
        weights = {name: value.detach().float().clone() for name, value in self.state_dict().items()}
        twin.load_state_dict(weights, assign=True)
        return twin.requires_grad_(True)

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] inputs of the block."""
        parts = (self.embedding_norm(inputs_embeds), self.hidden_norm(hidden_states))
        fused: Tensor = self.fc(torch.cat(parts, dim=-1))
        return fused

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """See `DecoderLayer.forward`. Rows of a prompt (`query_index`) see all rows before them, pads come behind."""
        attention = cast("CachedAttention", attend)  # the attention itself is the target's
        mask = attention.mask if query_index is None else None
        num_keys = attention.kv_cache.kv_len
        if mask is None and self.window is not None and num_keys > self.window:
            mask = whole_mask(inputs.shape[1], num_keys, inputs.device)
        outputs = self.run_block(inputs, cos[:, 0], sin[:, 0], mask, attention)
        return outputs if query_index is None else gather_rows(outputs, query_index)

    def run_block(self, inputs: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache) -> Tensor:
        """See `OwnHead.block`; within the window of the block."""
        visible = mask if mask is None or self.window is None else last_visible(mask, self.window)
        outputs: Tensor = self.block(inputs, cos, sin, visible, cache)
        return outputs

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        if (own := self.lm_head) is not None:
            return self.row_cache.rows(own, draft_ids, lambda ids: own[ids])
        weight = getattr(shared_embeddings.lm_head, "weight", None)
        known = weight if isinstance(weight, Tensor) and weight.device.type != "meta" else None
        return self.row_cache.rows(known, draft_ids, shared_embeddings.lm_head_rows)

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """See `DraftHead.logits`; of states before the output norm."""
        rows = self.lm_head if draft_lm_head is None else draft_lm_head
        return shared_embeddings.logits(self.output_norm(hidden_states), rows)

    def rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [n, d], of position ids [n], as the target computes them."""
        cos, sin = self._rotary_embedding(position_ids[None], dtype)
        return cos[0], sin[0]

    def rotate(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, n, d], of position ids [B, n] or [3, B, n]."""
        return self._rotary_embedding(position_ids, dtype)

    def multi_axis_rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, n, d], of position ids [3, B, n]."""
        return self.rotate(position_ids, dtype)


def whole_mask(n: int, num_keys: int, device: torch.device) -> Tensor:
    """[1, 1, n, keys] bool where there was no mask: a causal prompt, or one row that attends to all keys."""
    return torch.ones(n, num_keys, dtype=torch.bool, device=device).tril(num_keys - n)[None, None]


def last_visible(mask: Tensor, window: int) -> Tensor:
    """The last `window` keys that a row sees: it sees a text without gaps, in order, wherever the keys lie.

    Args:
        mask: [..., keys] bool.
        window: rows that a row attends to, its own included.
    """
    rank = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (rank <= window)


class MTPRollout(RolloutCache):
    """A rollout, a `mmspec.interfaces.HeadCache`: keys and values of all positions, then of each step."""

    head: MTPHead

    def __init__(self, head: MTPHead, batch: TrainBatch, packed: PackedQueries) -> None:
        super().__init__(head, packed)
        self.positions = packed.data.position_ids  # [B, n], or [3, B, n] where the target counts on several axes
        if head.config.mrope_section and batch.position_ids is not None:
            axes = batch.position_ids.movedim(1, 0)
            self.positions = axes.gather(2, self.positions.expand(len(axes), -1, -1))
        self.mask = packed.causal_mask[:, None]

    def forward(self, inputs: Tensor, offset: int = 0) -> Tensor:
        head, index, n = self.head, self.packed.query_index, inputs.shape[1]
        rotary = head.rotate(self.positions + offset, inputs.dtype)
        if not self.keys:
            causal = torch.ones(n, n, dtype=torch.bool, device=inputs.device).tril()[None, None]
            self.positions = self.positions.gather(-1, index.expand(*self.positions.shape[:-1], -1))
            return gather_rows(head.run_block(inputs, *rotary, causal, self), index)
        own = torch.eye(n, dtype=torch.bool, device=inputs.device).expand(len(inputs), 1, -1, -1)
        self.mask = torch.cat((self.mask, own), dim=-1)
        return head.run_block(inputs, *rotary, self.mask, self)

    def update(self, keys: Tensor, values: Tensor, *others: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `HeadCache`."""
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def mtp_loss(given: LossInputs) -> LossAndMetrics:
    """Logits of the tokens ahead, over a rollout on its own outputs; results as those of `eagle_loss`.

    The hidden states have no loss: the head's outputs are read through its own norm.
    """
    packed = PackedQueries(given.aligned())
    return rollout_loss(given, MTPRollout(given.draft_model.head, given.batch, packed), has_own_lm_head=True)
