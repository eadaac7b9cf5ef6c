"""Prefix processors: logits processors that add to a row's scores what depends on its ids so far alone, as grammars do.

A copy of each is called at the nodes of a draft tree, on zeros: what it adds there filters the draft before it is
scored, and is added to the scores of the nodes. The user's own object is called once per step, as transformers does,
and has the last word (`mmspec.engine.verifier.confirm`): one that depends on more is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmspec.engine.draws import ForbidDraws
from mmspec.engine.private_copy import private_copy
from mmspec.engine.tree import DraftTree

C = TypeVar("C", bound=type)
INCREMENTAL_CLASSES = frozenset(
    {
        "xgrammar.contrib.hf.LogitsProcessor",
        "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor",
        "outlines.backends.xgrammar.XGrammarLogitsProcessor",
    }
)
"""Prefix processors that keep a state per row and read the last id alone: copied at each node."""
_REGISTERED: set[type] = set()


def register_prefix_processor(cls: C) -> C:
    """Declare a class of logits processors as prefix processors, so that calls with them draft. Also as a decorator.

    What `processor(input_ids [n, L], scores [n, V])` adds to a row's scores (`-inf` forbids) may depend on the row's
    ids alone: not on the scores, other rows, earlier calls or random numbers. If it has a method `fork()`, copies of it
    are called with one id more each time, so it may keep a state. The output is that of `generate` in any case; after a
    result that depends on more, or an error, the call goes on without drafts.

    Args:
        cls: the class itself; subclasses are declared by themselves.

    Raises:
        TypeError: no class whose objects can be called.
    """
    if not (isinstance(cls, type) and "__call__" in {name for base in cls.__mro__ for name in vars(base)}):
        raise TypeError(f"a prefix processor must be a class with __call__(input_ids, scores); got {cls!r:.100}.")
    _REGISTERED.add(cls)
    return cls


def is_incremental(processor: Any) -> bool:
    """Whether it keeps a state that each call moves on by one id."""
    kind = type(processor)
    known = f"{kind.__module__}.{kind.__qualname__}" in INCREMENTAL_CLASSES
    return known or (kind in _REGISTERED and hasattr(processor, "fork"))


def is_declared(processor: Any) -> bool:
    """Whether it is a prefix processor by its class."""
    return type(processor) in _REGISTERED or is_incremental(processor)


class PrefixNode:
    """What a constraint adds after a prefix.

    Attributes:
        view: the copy after its call there.
        bias: [V] float32, or bool where it adds -inf and nothing else.
        error: of the call, or None.
        children: by token.
    """

    def __init__(self, view: Any, bias: Tensor | None, error: Exception | None = None) -> None:
        self.view, self.bias, self.error = view, bias, error
        self.children: dict[int, PrefixNode] = {}

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        if self.bias is None or not 0 <= token < len(self.bias):
            return False
        return not bool(self._forbidden(self.bias[token]))

    @cached_property
    def num_allowed(self) -> int:
        """How many tokens may follow; 0 after an error."""
        return 0 if self.bias is None else len(self.bias) - int(self._forbidden(self.bias).count_nonzero())

    @property
    def is_narrow(self) -> bool:
        """Whether few tokens may follow."""
        return self.bias is not None and self.num_allowed * 16 <= len(self.bias)

    @property
    def forced(self) -> int | None:
        """The one token that may follow, or None if there are more."""
        if self.bias is None or self.num_allowed != 1:
            return None
        return int((~self._forbidden(self.bias)).nonzero())

    @staticmethod
    def _forbidden(bias: Tensor) -> Tensor:
        return bias if bias.dtype == torch.bool else bias.isneginf()

    @property
    def forced_text(self) -> str:
        """The text that must follow, as xgrammar knows it; empty for other processors."""
        matchers = getattr(self.view, "matchers", None) or getattr(self.view, "_matchers", None)
        matcher = matchers[0] if matchers else None
        find = getattr(matcher, "find_jump_forward_string", None)
        return "" if matcher is None or find is None or matcher.is_terminated() else str(find())


class Constraint:
    """A prefix processor at the nodes of trees, by copies of it.

    Attributes:
        is_ended: whether a row has ended: nothing is computed for it.
        encode: the ids of a text, to draft what a grammar forces; none where no tokenizer is known.
        stop_ids: ids behind which nothing is drafted.
    """

    def __init__(self, make_view: Callable[[int], Any], is_incremental: bool, batch: int, vocab: int) -> None:
        """
        Args:
            make_view: a copy of the processor for a row, which is called with this row alone.
            is_incremental: whether it is to be copied for each call.
            batch: B.
            vocab: V.
        """
        self._make_view, self._is_incremental, self._vocab = make_view, is_incremental, vocab
        self._roots: list[PrefixNode | None] = [None] * batch
        self._lengths = [0] * batch
        self.is_ended: Callable[[int], bool] = lambda row: False
        self.encode: Callable[[str], Sequence[int]] = lambda text: ()
        self.stop_ids: frozenset[int] = frozenset()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] of one node per row, after a history [B, L]."""
        return self.apply(scores[:, None], None, history, [history.shape[1]] * len(history))[:, 0]

    def root(self, row: int, sequences: Tensor, length: int) -> PrefixNode:
        """What holds after the first `length` ids of a row; they continue those of the call before."""
        node = self._roots[row]
        if node is None or self._lengths[row] > length:
            node = self._evaluate(lambda: self._make_view(row), sequences[row, :length])
        else:
            for end in range(self._lengths[row] + 1, length + 1):
                node = self.child(node, int(sequences[row, end - 1]), sequences[row, : end - 1])
        self._roots[row], self._lengths[row] = node, length
        return node

    def child(self, node: PrefixNode, token: int, history: Tensor) -> PrefixNode:
        """What holds after one token more than the history [L] of a node."""
        if token not in node.children:
            ids = torch.cat([history, history.new_tensor([token])])
            node.children[token] = self._evaluate(lambda: self._next_view(node), ids) if node.error is None else node
        return node.children[token]

    def apply(self, scores: Tensor, tree: DraftTree | None, sequences: Tensor, lengths: Sequence[int]) -> Tensor:
        """Scores [B, N, V] of all nodes; nan where the processor raises at a draft.

        Raises:
            Exception: of the processor at the root of a row.
        """
        scores = scores.clone()
        tokens, parents, masks = on_host(tree) if tree is not None else ([[0]], [[0]], [[True]])
        for row, length in enumerate(lengths):
            if self.is_ended(row):
                continue
            root = self.root(row, sequences, length)
            if root.error is not None:
                raise root.error
            found: dict[int, tuple[PrefixNode, Tensor]] = {0: (root, sequences[row, :length])}
            for index in range(scores.shape[1]):
                if index and masks[row][index] and parents[row][index] in found:
                    found[index] = self._below(found[parents[row][index]], tokens[row][index])
                if index in found:
                    _add(scores[row, index], found[index][0].bias)
        return scores

    def _below(self, above: tuple[PrefixNode, Tensor], token: int) -> tuple[PrefixNode, Tensor]:
        """A node and its history, below another."""
        node, history = above
        return self.child(node, token, history), torch.cat([history, history.new_tensor([token])])

    def _next_view(self, node: PrefixNode) -> Any:
        return private_copy(node.view) if self._is_incremental else node.view

    def _evaluate(self, make_view: Callable[[], Any], ids: Tensor) -> PrefixNode:
        """What a copy [L] of the ids of a row gives; the copy of the processor is made where errors are caught."""
        try:
            view = make_view()
            zeros = torch.zeros(1, self._vocab, device=ids.device)
            with ForbidDraws():
                added = view(ids[None].clone(), zeros)
            if added.shape != zeros.shape:
                raise ValueError(f"{type(view).__name__} returned scores {list(added.shape)} for {list(zeros.shape)}")
        except Exception as error:
            return PrefixNode(None, None, error)
        bias = added[0].float()
        forbidden = bias.isneginf()
        has_more = bool(bias.count_nonzero() > forbidden.count_nonzero())  # what is nan is neither
        return PrefixNode(view, bias if has_more else forbidden)


def on_host(tree: DraftTree) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    """Tokens, parents and mask of the nodes of each row."""
    return tree.tokens.tolist(), tree.parents.tolist(), tree.node_mask.tolist()


def sum_of_biases(nodes: Sequence[PrefixNode]) -> Tensor:
    """[V] float32 that all constraints add at a place where none fails."""
    biases = [node.bias for node in nodes if node.bias is not None]
    total = torch.zeros(len(biases[0]), device=biases[0].device)
    for bias in biases:
        _add(total, bias)
    return total


def _add(scores: Tensor, bias: Tensor | None) -> None:
    """Add to the scores [V] of a node what a constraint adds, in place; nan for an error."""
    if bias is None:
        scores.fill_(torch.nan)
    elif bias.dtype == torch.bool:
        scores.masked_fill_(bias.to(scores.device), -torch.inf)
    else:
        scores += bias.to(scores.device)
