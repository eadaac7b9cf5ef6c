"""One draft of `ChainDrafter`: a model decodes a chain per row, itself guided by a second drafter or not.

The rounds are those of the decode loop in small: a tree, one forward over its nodes, the next id at every node, and
`accept_path`. With a guide (`Drafter`) the tree is that of the guide, so that one forward may decode several
tokens; without one it is the last token of each row. The guide never changes what is drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.rerank import LEVEL_PENALTY, NodePool, next_log_probs
from mmspec.economy.chooser import Chooser
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import DraftTree, root_only, sanitize
from mmspec.engine.verify import accept_path
from mmspec.interfaces import Drafter, DraftTarget, Prompt, VerifyResult


@dataclass(frozen=True)
class DraftRule:
    """What the drafted ids depend on besides the model.

    Attributes:
        prompt: of the call.
        logit_bias: [V] float32, -inf for ids that must not be drafted, else 0.
        top_k: likeliest ids of each step that become nodes.
        length: largest number of tokens of a chain.
        log_noise: [B, length, V] logarithm of the noise that samples the next tokens; None for greedy decoding.
    """

    prompt: Prompt
    logit_bias: Tensor
    top_k: int
    length: int
    log_noise: Tensor | None

    def log_probs(self, logits: Tensor, positions: Tensor) -> Tensor:
        """[B, N, V] log probabilities of the ids at so many (int64 [B, N]) tokens behind the output."""
        vocab_size = len(self.logit_bias)
        logits = logits[..., :vocab_size].to(self.logit_bias.device, torch.float32)
        if missing := vocab_size - logits.shape[-1]:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        noise = self.log_noise
        if noise is not None:
            index = positions.clamp(max=self.length - 1)[..., None].expand(-1, -1, vocab_size)
            noise = noise.gather(1, index)
        return next_log_probs(logits + self.logit_bias, self.prompt.temperature, noise)


class Guide:
    """A drafter that drafts for the model that drafts."""

    def __init__(
        self,
        drafter: Drafter,
        state: Any,
        chooser: Chooser,
        rule: DraftRule,
        active: Sequence[bool],
    ) -> None:
        """
        Args:
            drafter: the guide.
            state: of the call.
            chooser: chooses the size of its trees by the costs of the model's forwards.
            rule: of the draft.
            active: rows to draft for.
        """
        self.drafter, self.state, self.chooser = drafter, state, chooser
        self._active = list(active)
        self._draftable = rule.logit_bias == 0
        stop_ids = sorted(rule.prompt.stop_ids)
        self._stop_ids = torch.tensor(stop_ids, device=rule.logit_bias.device) if stop_ids else None
        self._started = self._drafted = 0.0

    def tree(self, root_ids: Tensor, max_tokens: int) -> DraftTree:
        """Sanitized tree of the coming forward, which may decode `max_tokens` of each row."""
        chooser, num_active = self.chooser, sum(self._active)
        self._started = time.perf_counter()
        draft = None
        if max_tokens > 1 and chooser.plan():
            draft = self.drafter.propose(self.state, chooser.max_tree_size, self._active)
            draft = draft.trim(chooser.max_tree_size)
            size = chooser.choose_size(draft, num_active, num_active * (max_tokens - 1))
            draft = draft.trim(size).pad(size)
        self._drafted = time.perf_counter()
        if draft is None:
            return root_only(len(root_ids), root_ids.device, root_ids)
        return sanitize(draft, root_ids, self._draftable, self._stop_ids)

    def follow(self, result: VerifyResult) -> None:
        """Move behind what the model decoded."""
        scored = time.perf_counter()
        self.drafter.follow(self.state, result)
        accepted = [max(0, len(ids) - 1) for ids, on in zip(result.emitted_ids, self._active, strict=True) if on]
        self.chooser.record(
            result.tree.num_nodes,
            draft_s=self._drafted - self._started,
            score_s=scored - self._drafted,
            overhead_s=time.perf_counter() - scored,
            num_accepted=accepted,
        )


class ChainDraft:
    """A draft in progress.

    Attributes:
        pool: the nodes so far.
        path_log_probs: [B, 1] log probability of each row's chain.
        read_ids: [B, 1] ids of the chain that the model has read, in order; complete without a guide. -1 in rows that
            are not active.
    """

    def __init__(self, target: DraftTarget, rule: DraftRule, active: Sequence[bool], guide: Guide | None) -> None:
        """
        Args:
            target: the model behind its cache.
            rule: of the draft.
            active: rows to draft for.
            guide: drafts for the model; None for one token in each forward.
        """
        device, batch = rule.logit_bias.device, len(active)
        self.pool = NodePool()
        self.path_log_probs = torch.zeros(batch, 1, device=device)
        self.read_ids: list[Tensor] = []
        self._target, self._rule, self._guide, self._active = target, rule, guide, active
        self._ends = torch.full((batch, 1), -1, device=device)  # node at the end of each row's chain
        self._lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self._host_lengths = [0] * batch
        self._last_ids = torch.zeros(batch, dtype=torch.long, device=device)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest chain."""
        return max(self._host_lengths)

    @property
    def is_complete(self) -> bool:
        """Whether the chains of all active rows are as long as they may be."""
        lengths = zip(self._host_lengths, self._active, strict=True)
        return all(length >= self._rule.length for length, on in lengths if on)

    def begin(self, unread: Sequence[Sequence[int]]) -> None:
        """The first forward: over what each row has not read, the last emitted token at the end."""
        device, counts = self._lengths.device, [len(ids) for ids in unread]
        if max(counts) == 1:
            self._last_ids = from_host([ids[0] if ids else 0 for ids in unread], device)
            self._round()
            return
        tokens = from_host([[*ids, *[0] * (max(counts) - len(ids))] for ids in unread], device)
        logits = score_unread(self._target, tokens, counts).to(device)[:, None]
        tree = root_only(len(counts), device)
        self._add(tree, *self._best(logits, tree), is_committed=True)

    def go_on(self) -> None:
        """A further forward."""
        read = self._last_ids[:, None]
        if not all(self._active):  # what rows that have ended hold is nothing that the model has read
            read = read.masked_fill(~from_host(self._active, read.device)[:, None], -1)
        self.read_ids.append(read)
        self._round()

    def _round(self) -> None:
        guide, rule = self._guide, self._rule
        if guide is None:
            tree = root_only(len(self._last_ids), self._last_ids.device, self._last_ids)
        else:
            shortest = min(length for length, on in zip(self._host_lengths, self._active, strict=True) if on)
            tree = guide.tree(self._last_ids, rule.length - shortest)
        logits = self._target.score(tree, (), self._active)[0]
        self._add(tree, *self._best(logits, tree))

    def _best(self, logits: Tensor, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """[B, N, k] log probabilities and ids of the likeliest next tokens at every node."""
        assert tree.depths is not None
        log_probs = self._rule.log_probs(logits, self._lengths[:, None] + tree.depths)
        found = log_probs.topk(min(self._rule.top_k, log_probs.shape[-1]))
        return found.values, found.indices

    def _add(self, tree: DraftTree, log_probs: Tensor, ids: Tensor, is_committed: bool = False) -> None:
        """Accept, commit, and append the nodes of the accepted steps."""
        path, counts, tokens = accept_path(tree, ids[..., 0], self._rule.length - self._lengths)
        result = self._result(tree, path, counts, tokens)
        if not is_committed:
            self._target.commit(result)
        rows = torch.arange(len(path), device=path.device)
        host_counts = [len(row) for row in result.accepted_nodes]
        for step in range(max(host_counts)):
            node, is_on = path[:, step], (step < counts)[:, None]
            step_log_probs = self.path_log_probs + log_probs[rows, node] - LEVEL_PENALTY
            first = self.pool.num_nodes
            parents = self._ends.expand(-1, ids.shape[-1])
            self.pool.add(ids[rows, node], step_log_probs.masked_fill(~is_on, float("-inf")), parents)
            self.path_log_probs = torch.where(is_on, step_log_probs[:, :1], self.path_log_probs)
            self._ends = torch.where(is_on, first, self._ends)
            self._last_ids = torch.where(is_on[:, 0], tokens[:, step], self._last_ids)
        self._lengths = self._lengths + counts
        self._host_lengths = [length + count for length, count in zip(self._host_lengths, host_counts, strict=True)]
        if self._guide is not None:
            self._guide.follow(result)

    def _result(self, tree: DraftTree, path: Tensor, counts: Tensor, tokens: Tensor) -> VerifyResult:
        """The result of a round; without a guide every row has accepted its root, which no copy to the host tells."""
        if self._guide is None:
            return VerifyResult(tree, path, counts, tokens, [], [[0]] * len(path))
        numbers = counts.tolist()
        nodes, ids = ([row[:count] for row, count in zip(one.tolist(), numbers, strict=True)] for one in (path, tokens))
        return VerifyResult(tree, path, counts, tokens, ids, nodes)


def score_unread(target: DraftTarget, tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """Feed tokens and commit them.

    Args:
        target: the model behind its cache.
        tokens: [B, n] int64, padded on the right.
        counts: number of valid tokens of each row.

    Returns:
        [B, V] logits behind the last valid token of each row.
    """
    batch, n = tokens.shape
    device = tokens.device
    index = torch.arange(n, device=device)
    on_device = from_host(counts, device)
    causal = (index[:, None] >= index).expand(batch, n, n)
    tree = DraftTree(
        tokens=tokens,
        parents=(index - 1).expand(batch, n),
        node_mask=index < on_device[:, None],
        ancestor_mask=causal,
        depths=index.expand(batch, n),
    )
    logits, _ = target.score(tree, (), [count > 0 for count in counts])
    nodes = [list(range(count)) for count in counts]
    target.commit(VerifyResult(tree, index.expand(batch, n), on_device, tokens, [], nodes))
    last = (on_device - 1).clamp(min=0).to(logits.device)
    return logits[torch.arange(batch, device=logits.device), last]
