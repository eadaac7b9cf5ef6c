"""`MTPHead`: the head in the target's checkpoint as an `DraftHead`, so that it drafts by the same code.

Its output is z, the state before the output norm (`mmspec.interfaces.own_head`): `logits` norms it, and the drafter
norms it where the family carries o on.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import AttentionFn, DraftHead
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import OwnHead, SharedEmbeddings


class MTPHead(DraftHead):
    """`fc` over two normed inputs and a decoder layer of the target's class.

    Attributes:
        parts: with the rule of its family; the modules are this module's, too.
    """

    def __init__(self, parts: OwnHead) -> None:
        section = parts.mrope_section
        shape = (parts.hidden_size, 0, 1, 1, parts.vocab_size)
        super().__init__(HeadConfig(*shape, mrope_section=section, rotary_dim=2 * sum(section)))
        self.rule = parts.rule
        self.window = parts.window
        self._rotary_embedding = parts.rotary_embedding
        self.fc = cast(nn.Linear, parts.fc)
        self.embedding_norm = parts.embedding_norm
        self.hidden_norm = parts.hidden_norm
        self.block = parts.block
        self.output_norm = parts.output_norm
        self.lm_head = None if parts.lm_head is None else nn.Parameter(parts.lm_head, requires_grad=False)

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] inputs of the block."""
        parts = (self.embedding_norm(inputs_embeds), self.hidden_norm(hidden_states))
        fused: Tensor = self.fc(torch.cat(parts if self.rule.embedding_first else parts[::-1], dim=-1))
        return fused

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """See `DecoderLayer.forward`. Rows of a prompt (`query_index`) see all rows before them, pads come behind."""
        attention = cast("CachedAttention", attend)  # the attention itself is the target's
        n = inputs.shape[1]
        mask = attention.mask if query_index is None else None
        if self.window is not None:
            if mask is None and n > 1:
                mask = torch.ones(n, n, dtype=torch.bool, device=inputs.device).tril()[None, None]
            mask = last_visible(mask, self.window) if mask is not None else self._last_keys(attention, inputs)
        outputs: Tensor = self.block(inputs, cos[:, 0], sin[:, 0], mask, attention)
        return outputs if query_index is None else gather_rows(outputs, query_index)

    def _last_keys(self, attention: CachedAttention, inputs: Tensor) -> Tensor | None:
        """The mask of one row that attends to all keys, within the window."""
        num_keys = attention.kv_cache.kv_len
        if num_keys <= (self.window or num_keys):
            return None
        return last_visible(torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=inputs.device), self.window or 0)

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        if self.lm_head is None:
            return super().draft_lm_head(shared_embeddings, draft_ids)
        return self.lm_head[draft_ids]

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

    def multi_axis_rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, n, d], of position ids [3, B, n]."""
        return self._rotary_embedding(position_ids, dtype)


def last_visible(mask: Tensor, window: int) -> Tensor:
    """The last `window` keys that a row sees: it sees a text without gaps, in order, wherever the keys lie.

    Args:
        mask: [..., keys] bool.
        window: rows that a row attends to, its own included.
    """
    rank = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (rank <= window)
