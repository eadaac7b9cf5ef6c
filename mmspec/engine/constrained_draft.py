"""A draft under prefix processors: without the nodes that they forbid, and with those that follow from them.

What must follow is drafted for nothing: a token where no other is allowed, or the text that xgrammar knows to follow.
Where few tokens are allowed, as between the parts of JSON, the one that followed the same token before is a good guess.
Both also go on below the nodes of the drafter, which knows nothing of the processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmspec.engine.constraints import Constraint, PrefixNode, on_host, sum_of_biases
from mmspec.engine.tree import BUCKETS, DraftTree, build_tree

GUESS_PROB, LAST_PROB = 0.5, 0.25
"""What is assumed of a token that followed before where few are allowed, and of the last of a text that must follow."""
MIN_PATH_PROB = 0.1
"""Nothing is added below a less likely node."""
GUESS_WINDOW = 256
"""Ids in which it is looked for."""


def constrain(
    tree: DraftTree, constraints: Sequence[Constraint], sequences: Tensor, lengths: Sequence[int], limit: int
) -> DraftTree:
    """A draft without the nodes that a constraint forbids or fails at, and with those that follow from it.

    Args:
        tree: of the drafter; its nodes keep their places where none are added.
        constraints: of the call.
        sequences: [B, S] int64, the rows so far.
        lengths: ids of each row.
        limit: largest number of nodes, root included.
    """
    tokens, parents, masks = on_host(tree)
    scores = [[1.0] * tree.num_nodes] * len(lengths) if tree.scores is None else tree.scores.tolist()
    drafts: list[_RowDraft | None] = []
    for row, length in enumerate(lengths):
        if any(one.is_ended(row) for one in constraints):  # what is drafted there is not accepted
            drafts.append(None)
            continue
        root = [one.root(row, sequences, length) for one in constraints]
        draft = _RowDraft(constraints, root, sequences[row, :length], limit)
        for index in range(1, tree.num_nodes):
            node = index, parents[row][index], tokens[row][index], scores[row][index]
            masks[row][index] = masks[row][index] and draft.add(*node)
        draft.complete()
        drafts.append(draft)
    if not any(draft.has_more for draft in drafts if draft is not None):
        node_mask = torch.tensor(masks, device=tree.node_mask.device)
        kept = None if tree.scores is None else tree.scores * node_mask.to(tree.scores.device)
        return DraftTree(tree.tokens, tree.parents, node_mask, kept)
    return build_tree([[] if draft is None else draft.ranked() for draft in drafts], tree.tokens.device)


class DraftRules:
    """What prefix processors let follow a path of drafted ids, for a drafter that draws under them.

    Attributes:
        limit: most ids that are found to follow.
    """

    limit = BUCKETS[-1]

    def __init__(self, constraints: Sequence[Constraint], output: Callable[[], tuple[Tensor, int]]) -> None:
        """
        Args:
            constraints: of the call.
            output: [1, S] int64, its only row so far, and the number of its ids.
        """
        self._constraints, self._output = constraints, output

    def __call__(self, path: Sequence[int]) -> tuple[list[int], Tensor | None]:
        """The ids that must follow a path, and [V] float32 to add to the scores behind these.

        None where nothing may be drafted: behind an end, or where a processor fails.
        """
        if any(one.is_ended(0) for one in self._constraints):
            return [], None
        sequences, length = self._output()
        root = [one.root(0, sequences, length) for one in self._constraints]
        draft = _RowDraft(self._constraints, root, sequences[0, :length], self.limit)
        for index, token in enumerate(path):
            draft.enter(index + 1, index, token, 1.0)
        return draft.forced(len(path))


class _RowDraft:
    """The nodes of a row's draft that its constraints allow, by number; 0 is the root, those added are negative.

    Attributes:
        has_more: whether it has nodes that the drafter did not propose, or rates some higher.
    """

    def __init__(self, constraints: Sequence[Constraint], root: list[PrefixNode], history: Tensor, limit: int) -> None:
        """
        Args:
            constraints: of the call.
            root: what holds at the root, of each.
            history: [L] int64, the row's ids so far.
            limit: largest number of nodes, root included.
        """
        self.has_more = False
        self._constraints, self._limit = constraints, min(limit, BUCKETS[-1])
        self._places = {0: (root, history)}
        self._nodes: dict[int, tuple[int, int, float]] = {}  # (token, parent, probability given the parent)
        self._children: dict[int, dict[int, int]] = {0: {}}  # by token, in the drafter's order
        self._scores = {0: 1.0}  # of the drafter

    def add(self, index: int, parent: int, token: int, score: float) -> bool:
        """Enter a node of the drafter; whether it is allowed."""
        if parent not in self._children or not self._allows(parent, token):
            return False
        self._scores[index] = score
        self.enter(index, parent, token, min(1.0, score / max(self._scores[parent], 1e-6)))
        return True

    def enter(self, index: int, parent: int, token: int, prob: float) -> None:
        """Enter a node, whether it is allowed or not."""
        self._nodes[index], self._children[index] = (token, parent, prob), {}
        self._children[parent].setdefault(token, index)

    def _place(self, index: int) -> tuple[list[PrefixNode], Tensor]:
        """What holds at a node, and the ids up to it; found where it is asked for."""
        if index not in self._places:
            token, parent, _ = self._nodes[index]
            nodes, history = self._place(parent)
            below = [one.child(node, token, history) for one, node in zip(self._constraints, nodes, strict=True)]
            self._places[index] = below, torch.cat([history, history.new_tensor([token])])
        return self._places[index]

    def _allows(self, index: int, token: int) -> bool:
        return all(node.allows(token) for node in self._place(index)[0])

    def complete(self) -> None:
        """Go down the likeliest path, and add what must follow there or probably does."""
        index, text, path_prob = 0, list[int](), 1.0
        for _ in range(self._limit - 1):
            token, prob, text = self._next(index, text)
            path_prob *= prob
            if token is None or path_prob < MIN_PATH_PROB or not self._allows(index, token):
                return
            below = self._children[index].get(token)
            if below is None:
                below, self.has_more = -1 - len(self._nodes), True
                self.enter(below, index, token, prob)
            elif prob > self._nodes[below][2]:
                self.has_more, self._nodes[below] = True, (token, index, prob)
            if any(token in one.stop_ids for one in self._constraints):
                return
            index = below

    def forced(self, index: int) -> tuple[list[int], Tensor | None]:
        """See `DraftRules`; nodes are added for the ids."""
        ids, text = list[int](), list[int]()
        while True:
            nodes = self._place(index)[0]
            if any(node.bias is None for node in nodes):
                return ids, None
            token, prob, text = self._next(index, text)
            if token is None or prob < 1 or len(ids) == self._limit or not self._allows(index, token):
                return ids, sum_of_biases(nodes)
            self.enter(index + 1, index, token, 1.0)
            ids, index = [*ids, token], index + 1
            if any(token in one.stop_ids for one in self._constraints):
                return ids, None

    def _next(self, index: int, text: list[int]) -> tuple[int | None, float, list[int]]:
        """(token, probability) after a node, and what is left of a text that must follow, in its usual tokens."""
        nodes, _ = self._place(index)
        if not text:
            texts = ((one, node.forced_text) for one, node in zip(self._constraints, nodes, strict=True))
            text = next((list(one.encode(found)) for one, found in texts if found), [])
        forced = next((token for node in nodes if (token := node.forced) is not None), None)
        if forced is not None or len(text) > 1:
            token = text[0] if forced is None else forced
            return token, 1.0, text[1:] if text[:1] == [token] else []
        below = next(iter(self._children[index].values()), None)
        prob = 0.0 if below is None else self._nodes[below][2]
        if prob < GUESS_PROB and (guess := self._guess(index)) is not None:
            return guess, GUESS_PROB, []
        if below is not None:
            return self._nodes[below][0], prob, []
        return (text[0], LAST_PROB, []) if text else (None, 0.0, [])  # it may also be a token that goes beyond the text

    def _guess(self, index: int) -> int | None:
        """Of the tokens that are allowed, where they are few, what last followed the same token, or the last other."""
        nodes, history = self._place(index)
        if not any(node.is_narrow for node in nodes):
            return None
        ids = history[-GUESS_WINDOW:].tolist()
        after = [ids[end] for end in range(len(ids) - 1, 0, -1) if ids[end - 1] == ids[-1]]
        others = (token for token in reversed(ids) if token != ids[-1])
        return next((token for token in (*after, *others) if self._allows(index, token)), None)

    def ranked(self) -> list[tuple[int, int, float]]:
        """(token, parent, probability) of the nodes, the likeliest first."""
        probs = {0: 1.0}
        for index, (_, parent, prob) in self._nodes.items():
            probs[index] = probs[parent] * prob
        order = sorted(self._nodes, key=lambda index: -probs[index])[: self._limit - 1]
        places = {0: 0, **{index: place for place, index in enumerate(order, 1)}}
        return [(self._nodes[index][0], places[self._nodes[index][1]], probs[index]) for index in order]
