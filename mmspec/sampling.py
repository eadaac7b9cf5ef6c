"""Logits to the picked token: processors on each node's own history, noise per output column.

The pick is `argmax(scores)`, or when sampling `argmax(probs / e_c)` with `e_c ~ Exp(1)` of shape [B, V], drawn once per
output column, in order, from the generator that transformers samples with: exactly what `torch.multinomial(probs, 1)`
computes. So the picked token depends on the seed, the column and the history, never on the tree.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from mmspec.tree import DraftTree

_ROWWISE = (
    "EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper "
    "SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "TypicalLogitsWarper"
)
_HISTORY = (
    "ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor "
    "NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor "
    "SuppressTokensAtBeginLogitsProcessor"
)
ROWWISE = frozenset(getattr(hf, name) for name in _ROWWISE.split() if hasattr(hf, name))
"""Processors that look at the scores of one row only: run on all nodes at once. Exact types, no subclasses."""
HISTORY = frozenset(getattr(hf, name) for name in _HISTORY.split() if hasattr(hf, name))
"""Processors that are pure functions of one row's (history, scores): run per node, on the node's own history."""


class Noise:
    """The exponential noise of the columns in flight, with a snapshot of the generator behind each.

    Attributes:
        live: True while columns must be drawn exactly when transformers would draw them (no looking ahead), because
            user code draws from the same generator.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device, window: int) -> None:
        self.generator = default_generator(device)
        self.window = window
        self.live = False
        self.start = self.generator.get_state()
        self._ring = torch.empty(window, batch, vocab, device=device)
        self._snapshots: dict[int, Tensor] = {}
        self._before = self.start
        self._drawn = 0  # columns drawn so far
        self._floor = 0  # columns below it may be forgotten
        self._rows = torch.arange(batch, device=device)[:, None]

    def draw(self, until: int) -> None:
        """Make sure that columns below `until` are drawn."""
        if until > self._drawn and not self.live:
            self.generator.set_state(self.after(self._drawn - 1))
        self._before = self.generator.get_state() if self.live else self.start
        while self._drawn < until:
            self._ring[self._drawn % self.window].exponential_(1, generator=self.generator)
            self._snapshots[self._drawn] = self.generator.get_state()
            self._drawn += 1

    def at(self, columns: Tensor) -> Tensor:
        """[B, N] int64 columns -> [B, N, V] noise: row b of the draw of that column.

        Columns beyond those drawn give noise of no meaning: nodes there are never emitted.
        """
        return self._ring[columns % self.window, self._rows]

    def ahead(self, lengths: Sequence[int], depth: int, horizon: int) -> Tensor:
        """[B, depth, V] noise of the next `depth` columns of rows that have emitted `lengths` tokens, for drafters."""
        if self.live:  # nobody may look ahead, and nobody is asked to draft
            return torch.ones(len(lengths), depth, self._ring.shape[2], device=self._ring.device)
        self.draw(min(horizon, max(lengths) + depth))
        columns = torch.tensor(lengths, device=self._ring.device)[:, None] + torch.arange(
            depth, device=self._ring.device
        )
        return self.at(columns.clamp(max=self._drawn - 1))

    def column(self, column: int) -> Tensor:
        """[B, 1, V] noise of one column for all rows, without a copy."""
        return self._ring[column % self.window][:, None]

    def after(self, column: int) -> Tensor:
        """The generator's state after drawing `column`; -1 is the state before the first."""
        return self._snapshots[column] if column >= 0 else self.start

    def settle(self, column: int) -> None:
        """Put the generator where transformers would leave it after `column`."""
        self.generator.set_state(self.after(column))

    def take_back(self) -> None:
        """Undo the last draw of a live column: transformers refuses bad probabilities before it draws."""
        if self.live:
            self.generator.set_state(self._before)

    def release(self, below: int) -> None:
        """Forget the snapshots of columns that can no longer be the last."""
        for column in range(self._floor, below):
            self._snapshots.pop(column, None)
        self._floor = max(self._floor, below)

    def rebase(self, column: int) -> None:
        """Someone else drew after `column`: forget what was drawn ahead, and stop looking ahead from now on."""
        self._snapshots[column] = self.generator.get_state()
        for ahead in range(column + 1, self._drawn):
            self._snapshots.pop(ahead, None)
        self._drawn = column + 1
        self.live = True


class Picker:
    """Picks a token at every node of a tree from the target's processed distribution there."""

    def __init__(self, processors: Sequence[Any], noise: Noise | None) -> None:
        """
        Args:
            processors: the list that transformers built for this call, in its order. noise: None for greedy.
        """
        self.processors = processors
        self.noise = noise

    @property
    def unknown(self) -> list[str]:
        """Processors that can only be called as transformers calls them: once per column on the whole batch."""
        return [type(p).__name__ for p in self.processors if type(p) not in ROWWISE and type(p) not in HISTORY]

    def refuse(self) -> None:
        """Fail as `torch.multinomial` does where nothing can be sampled."""
        if self.noise is not None:
            self.noise.take_back()
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def pick(
        self, logits: Tensor, tree: DraftTree, sequences: Tensor, lengths: Sequence[int], base: int, horizon: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        Args:
            logits: [B, N, V] float32 on the sampling device. tree: the sealed tree they belong to.
            sequences: [B, >= base + max(lengths)] int64, prompt and emitted tokens of each row.
            lengths: tokens emitted per row. base: prompt length, pads counted.
            horizon: columns whose noise is needed are below it (`ColumnClock.horizon`).

        Returns:
            picks [B, N] int64, processed scores [B, N, V] float32, and [B, N] bool True where no token can be sampled
            (nan, or nothing left with a probability), or None when greedy.
        """
        scores = self._process(logits, tree, sequences, lengths, base)
        if self.noise is None:
            return scores.argmax(-1), scores, None
        self.noise.draw(horizon)  # after the processors: that is where transformers draws
        if tree.nodes == 1 and _level(lengths):
            noise = self.noise.column(lengths[0])
        else:
            assert tree.depths is not None
            noise = self.noise.at(torch.tensor(lengths, device=logits.device)[:, None] + tree.depths)
        best = torch.softmax(scores, dim=-1).div_(noise).max(-1)
        return best.indices, scores, best.values.isnan()

    def _process(self, logits: Tensor, tree: DraftTree, sequences: Tensor, lengths: Sequence[int], base: int) -> Tensor:
        if not self.processors:
            return logits
        batch, nodes, vocab = logits.shape
        if nodes == 1 and _level(lengths):  # all rows at the same column: as transformers does it
            scores, history = logits[:, 0], sequences[:, : base + lengths[0]]
            for processor in self.processors:
                scores = processor(history, scores)
            return scores[:, None]
        scores = logits.reshape(batch * nodes, vocab)
        groups: list[tuple[Tensor, Tensor, Tensor]] | None = None
        for processor in self.processors:
            if type(processor) in ROWWISE:
                scores = processor(sequences[:, :0], scores)
                continue
            if groups is None:
                groups = _histories(tree, sequences, lengths, base)
            scores = scores.clone()
            for flat, rows, history in groups:
                scores[flat] = _for_rows(processor, rows)(history, scores[flat])
        return scores.reshape(batch, nodes, vocab)


def _level(lengths: Sequence[int]) -> bool:
    """Whether all rows are at the same column."""
    return len(set(lengths)) == 1


def _histories(
    tree: DraftTree, sequences: Tensor, lengths: Sequence[int], base: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Nodes grouped by the length of their history: (flat node index [G], row [G], history [G, L]), HF-shaped."""
    assert tree.depths is not None
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    depths, valid = tree.depths.tolist(), tree.valid.tolist()
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, length in enumerate(lengths):
        for node in range(tree.nodes):
            if valid[row][node]:
                groups[length + depths[row][node]].append((row, node))
    result = []
    for length, members in groups.items():
        rows = torch.tensor([row for row, _ in members], device=sequences.device)
        history = sequences[rows, : base + length]
        for place, (row, node) in enumerate(members):
            tail = []
            while node > 0:
                tail.append(tokens[row][node])
                node = parents[row][node]
            if tail:
                history[place, -len(tail) :] = torch.tensor(tail[::-1], device=history.device)
        flat = torch.tensor([row * tree.nodes + node for row, node in members], device=sequences.device)
        result.append((flat, rows, history))
    return result


def _for_rows(processor: Any, rows: Tensor) -> Any:
    """The processor as these rows of the batch see it: the repetition penalty knows each row's left pads."""
    ignore = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignore, Tensor):
        return processor
    view = copy.copy(processor)
    view.prompt_ignore_length = ignore.to(rows.device)[rows]
    return view


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.multinomial` uses on `device` when it is given none."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]
