"""Prefix processors: logits processors that add to a row's scores what depends on its ids so far alone, as grammars do.

A copy of each is called at the nodes of a draft tree, on zeros: what it adds there filters the draft before it is
scored, and is added to the scores of the nodes. The user's own object is called once per step, as transformers does,
and has the last word (`mmspec.engine.verifier.confirm`): one that depends on more is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmspec.engine.draws import ForbidDraws
from mmspec.engine.private_copy import private_copy
from mmspec.engine.tree import BUCKETS, DraftTree, build_tree

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


class _Node:
    """What a constraint adds after a prefix.

    Attributes:
        view: the copy after its call there.
        bias: [V] float32, or bool where it adds -inf and nothing else.
        error: of the call, or None.
        children: by token.
    """

    def __init__(self, view: Any, bias: Tensor | None, error: Exception | None = None) -> None:
        self.view, self.bias, self.error = view, bias, error
        self.children: dict[int, _Node] = {}

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        if self.bias is None or not 0 <= token < len(self.bias):
            return False
        return not bool(self.bias[token] if self.bias.dtype == torch.bool else self.bias[token].isneginf())

    @property
    def forced(self) -> int | None:
        """The one token that may follow, or None if there are more."""
        if self.bias is None:
            return None
        allowed = ~(self.bias if self.bias.dtype == torch.bool else self.bias.isneginf())
        return int(allowed.nonzero()) if int(allowed.sum()) == 1 else None

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
        self._roots: list[_Node | None] = [None] * batch
        self._lengths = [0] * batch
        self.is_ended: Callable[[int], bool] = lambda row: False
        self.encode: Callable[[str], Sequence[int]] = lambda text: ()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] of one node per row, after a history [B, L]."""
        return self.apply(scores[:, None], None, history, [history.shape[1]] * len(history))[:, 0]

    def root(self, row: int, sequences: Tensor, length: int) -> _Node:
        """What holds after the first `length` ids of a row; they continue those of the call before."""
        node = self._roots[row]
        if node is None or self._lengths[row] > length:
            node = self._evaluate(lambda: self._make_view(row), sequences[row, :length])
        else:
            for end in range(self._lengths[row] + 1, length + 1):
                node = self.child(node, int(sequences[row, end - 1]), sequences[row, : end - 1])
        self._roots[row], self._lengths[row] = node, length
        return node

    def child(self, node: _Node, token: int, history: Tensor) -> _Node:
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
        tokens, parents, masks = _on_host(tree) if tree is not None else ([[0]], [[0]], [[True]])
        for row, length in enumerate(lengths):
            if self.is_ended(row):
                continue
            root = self.root(row, sequences, length)
            if root.error is not None:
                raise root.error
            found: dict[int, tuple[_Node, Tensor]] = {0: (root, sequences[row, :length])}
            for index in range(scores.shape[1]):
                if index and masks[row][index] and parents[row][index] in found:
                    found[index] = self._below(found[parents[row][index]], tokens[row][index])
                if index in found:
                    _add(scores[row, index], found[index][0].bias)
        return scores

    def _below(self, above: tuple[_Node, Tensor], token: int) -> tuple[_Node, Tensor]:
        """A node and its history, below another."""
        node, history = above
        return self.child(node, token, history), torch.cat([history, history.new_tensor([token])])

    def _next_view(self, node: _Node) -> Any:
        return private_copy(node.view) if self._is_incremental else node.view

    def _evaluate(self, make_view: Callable[[], Any], ids: Tensor) -> _Node:
        """What a copy [L] of the ids of a row gives; the copy of the processor is made where errors are caught."""
        try:
            view = make_view()
            zeros = torch.zeros(1, self._vocab, device=ids.device)
            with ForbidDraws():
                added = view(ids[None].clone(), zeros)
            if added.shape != zeros.shape:
                raise ValueError(f"{type(view).__name__} returned scores {list(added.shape)} for {list(zeros.shape)}")
        except Exception as error:
            return _Node(None, None, error)
        bias = added[0].float()
        forbidden = bias.isneginf()
        return _Node(view, bias if bool(((bias != 0) & ~forbidden).any()) else forbidden)


def constrain(
    tree: DraftTree, constraints: Sequence[Constraint], sequences: Tensor, lengths: Sequence[int], limit: int
) -> DraftTree:
    """A draft without the nodes that a constraint forbids or fails at, and with those that are forced.

    Args:
        tree: of the drafter; its nodes keep their places where nothing is forced.
        constraints: of the call.
        sequences: [B, S] int64, the rows so far.
        lengths: ids of each row.
        limit: largest number of nodes, root included.
    """
    tokens, parents, masks = _on_host(tree)
    scores = None if tree.scores is None else tree.scores.tolist()
    chains: list[list[int]] = []
    for row, length in enumerate(lengths):
        if any(one.is_ended(row) for one in constraints):  # what is drafted there is not accepted
            chains.append([])
            continue
        places = {0: ([one.root(row, sequences, length) for one in constraints], sequences[row, :length])}
        for index in range(1, tree.num_nodes):
            above = places.get(parents[row][index]) if masks[row][index] else None
            masks[row][index] = above is not None and all(node.allows(tokens[row][index]) for node in above[0])
            if above is not None and masks[row][index] and index in parents[row]:
                places[index] = _children(constraints, above, tokens[row][index])
        chains.append(_forced_chain(constraints, places[0], limit - 1))
    if not any(chains):
        node_mask = torch.tensor(masks, device=tree.node_mask.device)
        kept = None if tree.scores is None else tree.scores * node_mask.to(tree.scores.device)
        return DraftTree(tree.tokens, tree.parents, node_mask, kept)
    rows = []
    for row, chain in enumerate(chains):
        nodes = [(token, index, 1.0) for index, token in enumerate(chain)]
        known = {(parent, token): index for index, (token, parent, _) in enumerate(nodes, 1)}
        moved = {0: 0}
        for index in range(1, tree.num_nodes):
            parent, token = moved.get(parents[row][index]), tokens[row][index]
            if parent is None or not masks[row][index]:
                continue
            if (parent, token) not in known and len(nodes) < limit - 1:
                nodes.append((token, parent, 0.5 if scores is None else scores[row][index]))
                known[parent, token] = len(nodes)
            if (parent, token) in known:
                moved[index] = known[parent, token]
        rows.append(nodes)
    return build_tree(rows, tree.tokens.device)


def _forced_chain(constraints: Sequence[Constraint], place: tuple[list[_Node], Tensor], limit: int) -> list[int]:
    """Tokens that follow one another because no other is allowed, or no other text."""
    chain: list[int] = []
    pending: list[int] = []  # of a text, in the tokenizer's own way to write it
    while len(chain) < min(limit, BUCKETS[-1] - 1):
        if not pending:
            texts = ((one, node.forced_text) for one, node in zip(constraints, place[0], strict=True))
            pending = next((list(one.encode(text)) for one, text in texts if text), [])
            pending = pending or [token for node in place[0] if (token := node.forced) is not None][:1]
        forced = pending.pop(0) if pending else None
        if forced is None or not all(node.allows(forced) for node in place[0]):
            break
        chain.append(forced)
        place = _children(constraints, place, forced)
    return chain


def _children(
    constraints: Sequence[Constraint], above: tuple[list[_Node], Tensor], token: int
) -> tuple[list[_Node], Tensor]:
    nodes, history = above
    below = [one.child(node, token, history) for one, node in zip(constraints, nodes, strict=True)]
    return below, torch.cat([history, history.new_tensor([token])])


def _on_host(tree: DraftTree) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    return tree.tokens.tolist(), tree.parents.tolist(), tree.node_mask.tolist()


def _add(scores: Tensor, bias: Tensor | None) -> None:
    """Add to the scores [V] of a node what a constraint adds, in place; nan for an error."""
    if bias is None:
        scores.fill_(torch.nan)
    elif bias.dtype == torch.bool:
        scores.masked_fill_(bias.to(scores.device), -torch.inf)
    else:
        scores += bias.to(scores.device)
