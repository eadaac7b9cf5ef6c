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
from mmspec.drafters.block.block_tree import best
from mmspec.drafters.block.flash import BlockDrafter
from mmspec.drafters.eagle.drafter import Layered, State
from mmspec.drafters.eagle.head import Attend, EagleHead, HeadConfig
from mmspec.engine.gather import gather_rows
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree


class FalconHead(EagleHead):
    """EAGLE's head; `block` says how far each of its outputs looks ahead."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.block < 2:
            raise ValueError(f"a Falcon head has at least 2 tokens a pass; got {config.block}.")


class FalconDrafter(BlockDrafter):
    """Drafts with a `FalconHead`: up to `passes` blocks, `width` of each followed.

    `State.more` is [B, 2 k - 1, D]: the outputs of the last k rows, then the last k - 1 input rows. The layer's keys
    hang on its inputs alone, so when the grid moves on the rows of the last block are asked again, not read again.
    """

    head: FalconHead

    def __init__(self, head: FalconHead, rule: str = "decoupled", *, passes: int = 3, **more: Any) -> None:
        super().__init__(head, rule, **more)
        if self.size != head.config.block:
            raise ValueError(
                f"a Falcon head looks {head.config.block} places ahead, no other block fits; got {self.size}."
            )
        if passes < 1:
            raise ValueError(f"passes must be at least 1; got {passes}.")
        self.depth, self.reach = DepthController(passes, steps_per_level=self.size), passes * self.size

    def _read(self, state: State, rows: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Read, and ask the rows of the newest block."""
        buffer, k, (batch, n, hidden) = state.buffer, self.size, rows.shape
        kept = rows.new_zeros(batch, k - 1, hidden) if state.more is None else state.more[:, k:]
        lengths, given = torch.tensor([buffer.seq_lens, counts], device=rows.device)[..., None]
        places = (lengths + given)[..., None]
        both = torch.cat((kept, rows), dim=1)
        buffer.begin_forward(n)
        # Positions of the rows before: where the text goes on evenly, as it does at the end of every prompt.
        back = torch.arange(1 - k, 0, device=rows.device) + (torch.tensor(state.places, device=rows.device)[:, None])
        cos, sin = self._angles(state, torch.cat((back.clamp(min=0), positions), dim=1))
        mask = torch.arange(buffer.kv_len, device=rows.device) < places
        newest = (given - 1).clamp(min=0) + torch.arange(k, device=rows.device)
        prompt = not any(buffer.seq_lens)  # of which the newest block alone is asked
        out = self.head(both, cos, sin, _asking(buffer, mask, k - 1), newest if prompt else None)
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]
        out = out if prompt else gather_rows(out, newest)
        fresh = torch.cat((out, gather_rows(both, newest)[:, 1:]), dim=1)
        state.more = fresh if state.more is None else torch.where(given[..., None] == 0, state.more, fresh)
        state.last = state.more[:, k - 1]

    def features(self, state: State) -> Tensor:
        """Outputs of the newest block."""
        assert state.more is not None
        return state.more[:, : self.size]

    def _tree(self, state: State, budget: int, depth: int) -> DraftTree:
        """Block by block: behind the likeliest paths through a block the next is drafted (Falcon, section 3.3)."""
        k, slots = self.size, min(self.size, budget - 1)
        if slots < k:
            return super()._tree(state, budget, 1)
        (batch, hidden), device = state.last.shape, state.last.device
        table, noise = self.table(state, budget, k), self._noise(state, depth * k)
        width = min(self._followed(device), len(table.full))
        descent = Layered(self, state, width, each=k)
        features, reached = self.features(state)[:, None], state.last.new_zeros(batch, 1, dtype=torch.float32)
        beam = torch.full((batch, 1), -1, device=device)
        pool, made, count = [], 0, len(table.parent)
        for level in range(depth):
            ahead = None if noise is None else noise[:, None, level * k : (level + 1) * k]
            tokens, totals, looked = table.offers(self._likely(state, self.scores(state, features), ahead), reached)
            follows = beam.shape[1]
            start = made + count * torch.arange(follows, device=device)[:, None]
            parents = torch.where(table.parent < 0, beam[..., None], start + table.parent)
            pool.append((tokens.flatten(1), totals.flatten(1), parents.flatten(1)))
            if level == depth - 1:
                break
            reached, chosen = totals[..., table.full].flatten(1).topk(width)
            source, path = chosen // len(table.full), chosen % len(table.full)
            beam, made = made + source * count + table.full[path], made + follows * count
            said = looked.gather(1, source[..., None].expand(-1, -1, looked.shape[-1])).gather(2, table.tokens[path])
            behind = features.gather(1, source[..., None, None].expand(-1, -1, k, hidden))
            if level:
                descent.follow(source[..., None])
            embedded = self._embed(state, said.flatten(1)).to(behind.dtype)
            out = descent.step(level + 1, embedded, behind.flatten(1, 2))
            features = out.unflatten(1, (width, k))
        descent.close()
        return best(state.ids, *(torch.cat(parts, dim=1) for parts in zip(*pool, strict=True)), nodes=budget)


def _asking(buffer: RaggedKVCache, mask: Tensor, old: int) -> Attend:
    """Attention of all rows to what the buffer holds and the rows that are new; the first `old` only ask."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared = queries.shape[1] != keys.shape[1]
        keys, values = buffer.write(0, keys[:, :, old:], values[:, :, old:])
        return functional.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=shared)

    return attend


__all__ = ["FalconDrafter", "FalconHead"]
