"""`verify`: from the logits of the nodes to what is emitted, part by part; and what the host reads of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.accept import accept_path
from mmspec.engine.output import OutputBuffer
from mmspec.engine.round_plan import RowState
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.target import VerifyResult


@dataclass(frozen=True)
class Verified:
    """What a round emits.

    Attributes:
        result: accepted nodes and emitted tokens.
        hidden_states: {index: [B, N, D]} of the nodes; of a `DraftPart` those at the accepted nodes, at index 0.
        scores: [B, N, V] float32 processed scores: logits after the processors (`scores` in what transformers returns);
            None of a recorded round.
        logits: [B, N, V] float32 raw logits; None of a recorded round.
        committed: of a recorded round, which has the accepted nodes in the KV cache: what `follow_part` takes.
        kept: of a `DraftPart`, what the drafter keeps.
    """

    result: VerifyResult
    hidden_states: Mapping[int, Tensor]
    scores: Tensor | None = None
    logits: Tensor | None = None
    committed: tuple[Tensor, ...] | None = None
    kept: tuple[Tensor, ...] = ()


def verify(
    output: OutputBuffer,
    sampler: TreeSampler,
    tree: DraftTree,
    scored: tuple[Tensor, Mapping[int, Tensor]],
    rows: RowState,
    top_k: int = 0,
) -> Verified:
    """Sample an id at every node, accept the matching path, and copy the result to the host in one transfer.

    Args:
        output: of the call.
        sampler: of the call.
        tree: the sanitized tree that was scored.
        scored: [B, N, V] the target's logits, and the hidden states.
        rows: the rows before this round.
        top_k: ids of the largest logits of each node that the result holds.

    Raises:
        RuntimeError: no id can be sampled at an accepted node.
    """
    logits, hidden_states = scored
    output.reserve(tree.num_nodes)
    sequences = output.sequences
    raw_logits = logits.to(device=sequences.device, dtype=torch.float32)
    if output.stepwise:  # processors may be user code, which reads and writes the ids and the logits
        raw_logits = raw_logits.clone() if raw_logits.is_inference() else raw_logits
        output.hooks.before_user_code(output.steps)
        sequences = output.user_input_ids()
    sampled_ids, scores, is_nan = sampler.sample(
        raw_logits,
        tree,
        sequences,
        rows.num_emitted,
        output.prompt_length,
        output.noise_end(tree.num_nodes),
        rows.on_device.num_emitted,
    )
    _, _, max_emit, finished = rows.on_device
    if output.stepwise:
        output.apply_user_edits()
    if finished is not None:  # the pad id replaces every sampled id
        sampled_ids = torch.where(finished[:, None], output.pad_token_id, sampled_ids)
    parts = accept_path(tree, sampled_ids, max_emit, output.stop_ids, finished)
    reader = RoundReader(
        tree.num_nodes, tree.num_nodes, min(top_k, raw_logits.shape[-1]), is_nan is not None, tree.num_nodes == 1
    )
    read = reader.pack(parts, tree, is_nan, raw_logits)
    result, has_nan = reader.read(read, tree, rows.max_emit, parts)
    if has_nan:
        raise RuntimeError(sampler.nan_message)
    return Verified(result, hidden_states, scores, raw_logits)


def confirm(output: OutputBuffer, sampler: TreeSampler, logits: Tensor) -> bool:
    """Make the calls of the coming step, whose tokens are drafted, and correct them; whether drafting must end.

    Args:
        output: of the call.
        sampler: that calls the user's processors.
        logits: [B, V] float32 of the step.

    Raises:
        Exception: of the processors, at the step at which transformers raises it.
    """
    noise, step = sampler.noise, output.steps
    output.hooks.before_user_code(step)
    if noise is not None:
        noise.claim(step - 1)
    scores = sampler.process_step(logits[:, None], output.user_input_ids())
    has_drawn = noise is not None and not noise.rng_contended and noise.rng_changed()
    if noise is not None and has_drawn:
        noise.disable_lookahead(step - 1)
    ids, scores, is_nan = sampler.sample_step(scores, step, step + 1)
    if is_nan is not None and is_nan.any():
        raise RuntimeError(sampler.nan_message)
    edited = output.apply_user_edits()
    return output.correct(ids[:, 0].tolist(), scores[:, 0]) or edited or has_drawn


@dataclass(frozen=True)
class RoundReader:
    """What the host reads of a round, as one tensor [B, n] int64, so that it waits once.

    Attributes:
        num_nodes: N.
        max_steps: A, tokens that a row emits at most.
        top_k: ids of the largest logits of each node that are read.
        has_nan: whether flags of nan are read.
        is_step: whether N is 1 and the host knows what is accepted, so that only the tokens are read.
    """

    num_nodes: int
    max_steps: int
    top_k: int = 0
    has_nan: bool = True
    is_step: bool = False

    def pack(
        self, parts: tuple[Tensor, Tensor, Tensor], tree: DraftTree, is_nan: Tensor | None, logits: Tensor
    ) -> Tensor:
        """Columns: counts, tree sizes, A tokens, A nodes, A flags of nan, and N ids and N * k ids for `top_k`.

        Args:
            parts: path, counts and tokens of `accept_path`.
            tree: the scored tree.
            is_nan: [B, N] bool, for `has_nan`.
            logits: [B, N, V], for `top_k`.
        """
        path, counts, tokens = parts
        columns = [tokens]
        if not self.is_step:
            sizes = tree.node_mask.sum(1, keepdim=True)
            columns = [counts[:, None], sizes, resize(tokens, self.max_steps), resize(path, self.max_steps)]
        if self.has_nan:
            assert is_nan is not None
            columns.append(resize(is_nan.gather(1, path), self.max_steps))
        if self.top_k:
            columns += [torch.where(tree.node_mask, tree.tokens, -1), logits.topk(self.top_k).indices.flatten(1)]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def read(
        self, read: Tensor, tree: DraftTree, limits: Sequence[int], parts: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[VerifyResult, bool]:
        """The result on the host, and whether an emitted id is that of nan. Waits for the device.

        Args:
            read: of `pack`.
            tree: the scored tree.
            limits: `max_emit` of each row.
            parts: path, counts and tokens on the device; None to take them from `read`.
        """
        steps, rows = self.max_steps, read.tolist()
        if self.is_step:
            rows = [[min(1, limit), 1, row[0], 0, *row[1:]] for row, limit in zip(rows, limits, strict=True)]
        if parts is None:
            parts = read[:, 2 + steps : 2 + 2 * steps], read[:, 0], read[:, 2 : 2 + steps]
        counts, ends = [row[0] for row in rows], 2 + 2 * steps
        first = ends + (steps if self.has_nan else 0)
        top = [row[first:] for row in rows] if self.top_k else None
        result = VerifyResult(
            tree=tree,
            path=parts[0],
            counts=parts[1],
            tokens=parts[2],
            emitted_ids=[row[2 : 2 + count] for row, count in zip(rows, counts, strict=True)],
            accepted_nodes=[row[2 + steps : 2 + steps + count] for row, count in zip(rows, counts, strict=True)],
            tree_sizes=[row[1] for row in rows],
            scored_ids=None if top is None else [row[: self.num_nodes] for row in top],
            top_ids=None if top is None else [_split(row[self.num_nodes :], self.num_nodes) for row in top],
        )
        has_nan = self.has_nan and any(any(row[ends : ends + n]) for row, n in zip(rows, counts, strict=True))
        return result, has_nan


def resize(rows: Tensor, width: int) -> Tensor:
    """[B, width]: the columns of `rows` [B, n], cut or padded with 0."""
    missing = width - rows.shape[1]
    if missing == 0:
        return rows
    return functional.pad(rows, (0, missing)) if missing > 0 else rows[:, :width]


def _split(flat: list[int], num_parts: int) -> list[list[int]]:
    """A list cut into `num_parts` lists of equal length."""
    size = len(flat) // num_parts
    return [flat[i : i + size] for i in range(0, len(flat), size)]
