"""One draft of `ChainDrafter` in torch: a model decodes a chain per row, one token in each forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.chain_types import ChainRequest
from mmspec.drafters.rerank import LEVEL_PENALTY, NodePool, next_log_probs
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import DraftTarget, Prompt, VerifyResult


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

    def log_probs(self, logits: Tensor, step: int) -> Tensor:
        """[B, V] log probabilities of the ids at so many tokens behind the output, of logits [B, V]."""
        vocab_size = len(self.logit_bias)
        logits = logits[:, :vocab_size].to(self.logit_bias.device, torch.float32)
        if missing := vocab_size - logits.shape[-1]:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        noise = None if self.log_noise is None else self.log_noise[:, step]
        return next_log_probs(logits + self.logit_bias, self.prompt.temperature, noise)

    def request(self, unread: Sequence[Sequence[int]], max_nodes: int, **values: Any) -> ChainRequest:
        """The draft for C, of what each row has not read; `values` are further fields."""
        further: dict[str, Any] = {"min_prob": 0.0, "stop_ids": (), **values}
        return ChainRequest(
            unread=unread,
            length=self.length,
            top_k=self.top_k,
            max_nodes=max_nodes,
            logit_bias=self.logit_bias,
            log_noise=self.log_noise,
            temperature=1.0 if self.log_noise is None else float(self.prompt.temperature),
            level_penalty=LEVEL_PENALTY,
            **further,
        )


class ChainDraft:
    """A draft in progress.

    Attributes:
        pool: the nodes so far.
        num_tokens: of each row's chain.
        path_log_probs: [B, 1] log probability of each row's chain.
        read_ids: [B, 1] ids of the chain that the model has read, in order; -1 in rows that are not active.
    """

    def __init__(self, target: DraftTarget, rule: DraftRule, active: Sequence[bool]) -> None:
        """
        Args:
            target: the model behind its cache.
            rule: of the draft.
            active: rows to draft for.
        """
        device, batch = rule.logit_bias.device, len(active)
        self.pool, self.num_tokens = NodePool(), 0
        self.path_log_probs = torch.zeros(batch, 1, device=device)
        self.read_ids: list[Tensor] = []
        self._target, self._rule, self._active = target, rule, active
        self._end = -1  # node at the end of each row's chain
        self._last_ids = torch.zeros(batch, dtype=torch.long, device=device)

    @property
    def is_complete(self) -> bool:
        """Whether the chains are as long as they may be."""
        return self.num_tokens >= self._rule.length

    def begin(self, unread: Sequence[Sequence[int]]) -> None:
        """The first forward: over what each row has not read, the last emitted token at the end."""
        device, counts = self._last_ids.device, [len(ids) for ids in unread]
        if max(counts) == 1:
            self._last_ids = from_host([ids[0] if ids else 0 for ids in unread], device)
            self._step()
            return
        tokens = from_host([[*ids, *[0] * (max(counts) - len(ids))] for ids in unread], device)
        self._add(score_unread(self._target, tokens, counts).to(device))

    def go_on(self) -> None:
        """A further forward."""
        read = self._last_ids[:, None]
        if not all(self._active):  # what rows that have ended hold is nothing that the model has read
            read = read.masked_fill(~from_host(self._active, read.device)[:, None], -1)
        self.read_ids.append(read)
        self._step()

    def _step(self) -> None:
        """Score the last token of each row, and commit it."""
        batch = len(self._last_ids)
        tree = root_only(batch, self._last_ids.device, self._last_ids)
        logits = self._target.score(tree, (), self._active)[0]
        path, counts = torch.zeros_like(tree.tokens), torch.ones_like(self._last_ids)
        self._target.commit(VerifyResult(tree, path, counts, tree.tokens, [], [[0]] * batch))
        self._add(logits[:, 0])

    def _add(self, logits: Tensor) -> None:
        """Append the nodes of a step, of logits [B, V]."""
        log_probs = self._rule.log_probs(logits, self.num_tokens)
        found = log_probs.topk(min(self._rule.top_k, log_probs.shape[-1]))
        step_log_probs = self.path_log_probs + found.values - LEVEL_PENALTY
        first = self.pool.num_nodes
        self.pool.add(found.indices, step_log_probs, torch.full_like(found.indices, self._end))
        self.path_log_probs, self._last_ids = step_log_probs[:, :1], found.indices[:, 0]
        self._end, self.num_tokens = first, self.num_tokens + 1


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


def draft_under_rules(
    target: DraftTarget, unread: Sequence[int], rule: DraftRule, min_prob: float, max_nodes: int
) -> tuple[DraftTree, int] | None:
    """A chain of one row under `Prompt.rules`, step by step, as each rule depends on the tokens before it.

    Tokens that must follow are read with the next step, in one forward.

    Args:
        target: the model, which drafts in C.
        unread: ids that it has not read yet.
        rule: of the draft; its length counts forwards, if nothing is sampled.
        min_prob: the chain ends behind a token that is reached with a smaller probability.
        max_nodes: size of the tree, the root included.

    Returns:
        The tree and the number of forwards; None if it does not draft in C.
    """
    rules, pool, path, num_steps, log_prob, end = rule.prompt.rules, NodePool(), list[int](), 0, 0.0, -1
    assert rules is not None
    unread, limit = list(unread), max_nodes - 1 if rule.log_noise is None else rule.length
    while len(path) < limit and num_steps < rule.length:
        forced, bias = rules(path)
        for token in forced[: limit - len(path)]:
            log_prob -= LEVEL_PENALTY
            pool.add(torch.tensor([[token]]), torch.tensor([[log_prob]]), torch.tensor([[end]]))
            end = pool.num_nodes - 1
        unread, path = [*unread, *forced], [*path, *forced]
        if bias is None or len(path) >= limit:
            break
        step_noise = None if rule.log_noise is None else rule.log_noise[:, len(path) : len(path) + 1]
        request = rule.request([unread], 1 + rule.top_k)
        request = replace(request, length=1, logit_bias=rule.logit_bias + bias, log_noise=step_noise)
        drafted = target.draft_chain(request)
        if drafted is None:
            if not num_steps:
                return None
            break
        tokens, log_probs = drafted.tree.tokens[:, 1:], drafted.tree.scores[:, 1:].log() + log_prob  # type: ignore[index]
        pool.add(tokens, log_probs, torch.full_like(tokens, end))
        end, num_steps, log_prob = pool.num_nodes - tokens.shape[1], num_steps + 1, float(log_probs[0, 0])
        unread = [int(tokens[0, 0])]
        path += unread
        if not math.exp(log_prob) > min_prob or unread[0] in rule.prompt.stop_ids:
            break
    return (pool.select(None, max_nodes) if pool.num_nodes else root_only(1, rule.logit_bias.device)), num_steps
