"""Falcon (arXiv 2412.12639): k tokens from every pass, and several passes, each over the blocks of the one before.

Rows are cut into blocks of k; a row sees its whole block and all before it, and says what comes k places on. The grid
of blocks ends where the text ends, so the newest block is always full. Here `fc` joins embedding and state as in EAGLE,
in place of the paper's LSTM, whose released code never carries a state from row to row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.control.depth import DepthController
from mmspec.drafters.block.block_tree import select_nodes
from mmspec.drafters.block.flash import BlockDrafter
from mmspec.drafters.eagle.drafter import AutoregressiveExpander, EagleState
from mmspec.drafters.eagle.head import AttentionFn, EagleHead, HeadConfig
from mmspec.engine.gather import gather_rows
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree


class FalconHead(EagleHead):
    """EAGLE's head; `block` says how far each of its outputs looks ahead."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.block_size < 2:
            raise ValueError(f"a Falcon head has at least 2 tokens a pass; got {config.block_size}.")


class FalconDrafter(BlockDrafter):
    """Drafts with a `FalconHead`: up to `passes` blocks, `width` of each followed.

    `State.more` is [B, 2 k - 1, D]: the outputs of the last k rows, then the last k - 1 input rows. The layer's keys
    hang on its inputs alone, so when the grid moves on the rows of the last block are asked again, not read again.
    """

    head: FalconHead

    def __init__(self, head: FalconHead, visual_mode: str = "decoupled", *, passes: int = 3, **more: Any) -> None:
        super().__init__(head, visual_mode, **more)
        if self.block_size != head.config.block_size:
            raise ValueError(
                f"a Falcon head looks {head.config.block_size} places ahead, no other block fits; got {self.block_size}."
            )
        if passes < 1:
            raise ValueError(f"passes must be at least 1; got {passes}.")
        self.depth, self.reach = DepthController(passes, steps_per_level=self.block_size), passes * self.block_size

    def _forward(self, state: EagleState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Read, and ask the rows of the newest block."""
        buffer, k, (batch, n, hidden) = state.kv_cache, self.block_size, inputs.shape
        kept = inputs.new_zeros(batch, k - 1, hidden) if state.extra is None else state.extra[:, k:]
        lengths, given = torch.tensor([buffer.seq_lens, counts], device=inputs.device)[..., None]
        places = (lengths + given)[..., None]
        both = torch.cat((kept, inputs), dim=1)
        buffer.begin_forward(n)
        # Positions of the rows before: where the text goes on evenly, as it does at the end of every prompt.
        back = (
            torch.arange(1 - k, 0, device=inputs.device)
            + (torch.tensor(state.next_positions, device=inputs.device)[:, None])
        )
        cos, sin = self.rotary_embedding(state, torch.cat((back.clamp(min=0), position_ids), dim=1))
        mask = torch.arange(buffer.kv_len, device=inputs.device) < places
        newest = (given - 1).clamp(min=0) + torch.arange(k, device=inputs.device)
        prompt = not any(buffer.seq_lens)  # of which the newest block alone is asked
        out = self.head(both, cos, sin, _query_only_attention(buffer, mask, k - 1), newest if prompt else None)
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]
        out = out if prompt else gather_rows(out, newest)
        fresh = torch.cat((out, gather_rows(both, newest)[:, 1:]), dim=1)
        state.extra = fresh if state.extra is None else torch.where(given[..., None] == 0, state.extra, fresh)
        state.last_hidden = state.extra[:, k - 1]

    def block_features(self, state: EagleState) -> Tensor:
        """Outputs of the newest block."""
        assert state.extra is not None
        return state.extra[:, : self.block_size]

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Block by block: behind the likeliest paths through a block the next is drafted (Falcon, section 3.3)."""
        k, slots = self.block_size, min(self.block_size, max_nodes - 1)
        if slots < k:
            return super()._draft_tree(state, max_nodes, 1)
        (batch, hidden), device = state.last_hidden.shape, state.last_hidden.device
        table, noise = self.path_table(state, max_nodes, k), self._log_noise(state, depth * k)
        width = min(self._num_followed(device), len(table.full_paths))
        descent = AutoregressiveExpander(self, state, width, rows_per_node=k)
        features, reached = (
            self.block_features(state)[:, None],
            state.last_hidden.new_zeros(batch, 1, dtype=torch.float32),
        )
        beam = torch.full((batch, 1), -1, device=device)
        pool, made, count = [], 0, len(table.parents)
        for level in range(depth):
            ahead = None if noise is None else noise[:, None, level * k : (level + 1) * k]
            tokens, totals, looked = table.score_paths(
                self._log_probs(state, self.logits(state, features), ahead), reached
            )
            follows = beam.shape[1]
            start = made + count * torch.arange(follows, device=device)[:, None]
            parents = torch.where(table.parents < 0, beam[..., None], start + table.parents)
            pool.append((tokens.flatten(1), totals.flatten(1), parents.flatten(1)))
            if level == depth - 1:
                break
            reached, chosen = totals[..., table.full_paths].flatten(1).topk(width)
            source, path = chosen // len(table.full_paths), chosen % len(table.full_paths)
            beam, made = made + source * count + table.full_paths[path], made + follows * count
            said = looked.gather(1, source[..., None].expand(-1, -1, looked.shape[-1])).gather(
                2, table.token_indices[path]
            )
            behind = features.gather(1, source[..., None, None].expand(-1, -1, k, hidden))
            if level:
                descent.reorder(source[..., None])
            embedded = self._embed(state, said.flatten(1)).to(behind.dtype)
            out = descent.step(level + 1, embedded, behind.flatten(1, 2))
            features = out.unflatten(1, (width, k))
        descent.close()
        return select_nodes(
            state.draft_ids, *(torch.cat(parts, dim=1) for parts in zip(*pool, strict=True)), num_nodes=max_nodes
        )


def _query_only_attention(buffer: RaggedKVCache, mask: Tensor, old: int) -> AttentionFn:
    """Attention of all rows to what the buffer holds and the rows that are new; the first `old` only ask."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared = queries.shape[1] != keys.shape[1]
        keys, values = buffer.write(0, keys[:, :, old:], values[:, :, old:])
        return functional.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=shared)

    return attend


__all__ = ["FalconDrafter", "FalconHead"]
