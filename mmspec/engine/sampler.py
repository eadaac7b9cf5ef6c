"""Logits to the picked token: processors on each node's own history, noise per output column.

The pick is `argmax(scores)`, or when sampling `argmax(probs / e_c)` with `e_c ~ Exp(1)` of shape [B, V], drawn once per
output column, in order, from the generator that transformers samples with: exactly what `torch.multinomial(probs, 1)`
computes. So the picked token depends on the seed, the column and the history, never on the tree.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from mmspec.engine.tree import DraftTree

_STATELESS_NAMES = (
    "EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper "
    "SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "TypicalLogitsWarper"
)
_HISTORY_NAMES = (
    "ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor "
    "NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor "
    "SuppressTokensAtBeginLogitsProcessor"
)
STATELESS_PROCESSORS = frozenset(getattr(hf, name) for name in _STATELESS_NAMES.split() if hasattr(hf, name))
"""Processors that look at the scores of one row only: run on all nodes at once. Exact types, no subclasses."""
HISTORY_PROCESSORS = frozenset(getattr(hf, name) for name in _HISTORY_NAMES.split() if hasattr(hf, name))
"""Processors that are pure functions of one row's (history, scores): run per node, on the node's own history."""


_GENERATORS = threading.Lock()
"""Held while noise is drawn, so that calls in several threads do not tear each other's draws."""
_MOVES = [0]
"""How often a `Noise` has moved a generator, of all calls in all threads."""


class SamplingNoise:
    """The exponential noise of the columns in flight, with a snapshot of the generator behind each.

    Attributes:
        live: True while columns must be drawn exactly when transformers would draw them, by its own calls, because user
            code draws from the same generator.
        left: the generator's state when it was last used here.
        lent: a drafter of someone else's is at work; what it draws is no concern of ours (see `RngGuard`).
        moves: how often it has moved the generator itself.
        shared: someone else drew in between, say a call in another thread. Then nothing is ever put back, or that call
            and this one would be given the same noise; which call gets which is open, as it is with transformers.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device, window: int) -> None:
        self.generator = default_generator(device)
        self.window = window
        self.immediate = self.rng_contended = self.in_foreign_code = False
        self.initial_state = self.last_state = self.generator.get_state()
        self._ring = torch.empty(window, batch, vocab, device=device, dtype=torch.float32)
        self._snapshots: dict[int, Tensor] = {}
        self.num_rng_updates = 0
        self._drawn = 0  # columns drawn so far
        self._floor = 0  # columns below it may be forgotten
        self._rows = torch.arange(batch, device=device)[:, None]

    def draw(self, until: int) -> None:
        """Make sure that columns below `until` are drawn."""
        if until <= self._drawn:
            return
        with _GENERATORS:
            self._set_state(self.state_after(self._drawn - 1))
            self._count_update()
            while self._drawn < until:
                self._ring[self._drawn % self.window].exponential_(1, generator=self.generator)
                self._snapshots[self._drawn] = self.generator.get_state()
                self._drawn += 1
            self.last_state = self._snapshots[self._drawn - 1]

    def at(self, columns: Tensor) -> Tensor:
        """[B, N] int64 columns -> [B, N, V] noise: row b of the draw of that column.

        Columns beyond those drawn give noise of no meaning: nodes there are never emitted.
        """
        return self._ring[columns % self.window, self._rows]

    def lookahead(self, lengths: Sequence[int], depth: int, horizon: int) -> Tensor:
        """[B, depth, V] noise of the next `depth` columns of rows that have emitted `lengths` tokens, for drafters."""
        if self.immediate:  # nobody may look ahead, and nobody is asked to draft
            return torch.ones(len(lengths), depth, self._ring.shape[2], device=self._ring.device)
        self.draw(min(horizon, max(lengths) + depth))
        columns = torch.tensor(lengths, device=self._ring.device)[:, None] + torch.arange(
            depth, device=self._ring.device
        )
        return self.at(columns.clamp(max=self._drawn - 1))

    def column(self, column: int) -> Tensor:
        """[B, 1, V] noise of one column for all rows, without a copy."""
        return self._ring[column % self.window][:, None]

    def state_after(self, column: int) -> Tensor:
        """The generator's state after drawing `column`; -1 is the state before the first."""
        return self._snapshots[column] if column >= 0 else self.initial_state

    def restore_rng(self, column: int) -> None:
        """Put the generator where transformers would leave it after `column`."""
        with _GENERATORS:
            self._set_state(self.state_after(column))

    def rng_changed(self) -> bool:
        """Whether someone has drawn since the generator was last used here."""
        return not torch.equal(self.generator.get_state(), self.last_state)

    def release(self, below: int) -> None:
        """Forget the snapshots of columns that can no longer be the last."""
        for column in range(self._floor, below):
            self._snapshots.pop(column, None)
        self._floor = max(self._floor, below)

    def disable_lookahead(self, column: int) -> None:
        """Stop looking ahead: from now on transformers' own calls draw, as if `column` had been drawn last.

        If user code drew after that column, the generator stands where it must; else it is put there.
        """
        if not self.immediate and not self.rng_changed():
            self.restore_rng(column)
        self.immediate = True

    def _count_update(self) -> None:
        _MOVES[0] += 1
        self.num_rng_updates += 1

    def _set_state(self, state: Tensor) -> None:
        """Move the generator, unless someone else has used it."""
        self.rng_contended = self.rng_contended or (not self.in_foreign_code and self.rng_changed())
        if not self.rng_contended:
            self._count_update()
            self.generator.set_state(state)
            self.last_state = state


class RngGuard:
    """Context in which whatever is drawn from the default generators of `devices` is undone.

    Unless another call of mmspec has drawn meanwhile, in another thread: then it is not known who moved the generator,
    and putting it back would give that call the same noise twice.

    Attributes:
        drew: whether anything was drawn here.
    """

    def __init__(self, *devices: torch.device, noise: SamplingNoise | None = None) -> None:
        """
        Args:
            noise: noise that may be drawn within, and stays drawn.
        """
        self._noise = noise
        self._generators = [default_generator(device) for device in dict.fromkeys(devices)]
        self.rng_was_used = False

    def __enter__(self) -> RngGuard:
        self._others = self._moves_of_others()
        self._states = [generator.get_state() for generator in self._generators]
        if self._noise is not None:
            self._noise.in_foreign_code = True
        return self

    def __exit__(self, *error: object) -> None:
        noise = self._noise
        if noise is not None:
            noise.in_foreign_code = False
        if self._moves_of_others() != self._others:
            return
        for generator, state in zip(self._generators, self._states, strict=True):
            if noise is not None and not noise.immediate and generator.device == noise.generator.device:
                state = noise.last_state
            if not torch.equal(generator.get_state(), state):
                self.rng_was_used = True
                generator.set_state(state)

    def _moves_of_others(self) -> int:
        return _MOVES[0] - (0 if self._noise is None else self._noise.num_rng_updates)


class TreeSampler:
    """Picks a token at every node of a tree from the target's processed distribution there."""

    def __init__(self, processors: Sequence[Any], noise: SamplingNoise | None) -> None:
        """
        Args:
            processors: the list that transformers built for this call, in its order. noise: None for greedy.
        """
        self.processors = processors
        self.noise = noise

    @property
    def unknown_processors(self) -> list[str]:
        """Processors that can only be called as transformers calls them: once per column on the whole batch."""
        return unknown(self.processors)

    @property
    def nan_message(self) -> str:
        """What to say where the pick means nothing: when sampling, the words of `torch.multinomial`."""
        if self.noise is None:
            return "the model's scores are nan"
        return "probability tensor contains either `inf`, `nan` or element < 0"

    def sample(
        self,
        logits: Tensor,
        tree: DraftTree,
        sequences: Tensor,
        num_emitted: Sequence[int],
        prompt_length: int,
        noise_end: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        Args:
            logits: [B, N, V] float32 on the sampling device. tree: the sealed tree they belong to.
            sequences: [B, >= base + max(lengths)] int64, prompt and emitted tokens of each row.
            lengths: tokens emitted per row. base: prompt length, pads counted.
            horizon: columns whose noise is needed are below it (`OutputBuffer.horizon`).

        Returns:
            picks [B, N] int64, processed scores [B, N, V] float32, and [B, N] bool True where the pick means nothing
            (nan, or nothing left with a probability), or None where plain decoding would pick the same or has failed.
        """
        level = tree.num_nodes == 1 and len(set(num_emitted)) == 1  # all rows at the same column, as in transformers
        if level:
            whole = sequences.shape[1] == prompt_length + num_emitted[0]  # then processors may write into it
            scores = self._process_step(
                logits, sequences if whole else sequences[:, : prompt_length + num_emitted[0]].contiguous()
            )
        else:
            scores = self._process(logits, tree, sequences, num_emitted, prompt_length)
        if self.noise is None:
            picks = scores.argmax(-1)
            # Nan may have come from a guess that nobody would ever have made.
            return picks, scores, None if level else scores.gather(-1, picks[:, :, None])[:, :, 0].isnan()
        if self.noise.immediate:
            assert level
            return torch.multinomial(torch.softmax(scores[:, 0], dim=-1), num_samples=1), scores, None
        self.noise.draw(noise_end)  # after the processors: that is where transformers draws
        if level:
            noise = self.noise.column(num_emitted[0])
        else:
            assert tree.depths is not None
            noise = self.noise.at(torch.tensor(num_emitted, device=logits.device)[:, None] + tree.depths)
        best = torch.softmax(scores, dim=-1).div_(noise).max(-1)
        return best.indices, scores, best.values.isnan()

    def _process_step(self, logits: Tensor, history: Tensor) -> Tensor:
        """As transformers does it: the whole list on [B, L] and [B, V]."""
        if not self.processors:
            return logits
        if self.unknown_processors:
            return self.processors(history, logits[:, 0])[:, None]  # type: ignore[operator]
        scores = logits[:, 0]
        for processor in self.processors:
            scores = processor(history, scores)
        return scores[:, None]

    def _process(self, logits: Tensor, tree: DraftTree, sequences: Tensor, lengths: Sequence[int], base: int) -> Tensor:
        if not self.processors:
            return logits
        batch, nodes, vocab = logits.shape
        scores = logits.reshape(batch * nodes, vocab)
        groups: list[tuple[Tensor, Tensor, Tensor]] | None = None
        for processor in self.processors:
            if type(processor) in STATELESS_PROCESSORS:
                scores = processor(sequences[:, :0], scores)
                continue
            if groups is None:
                groups = _histories(tree, sequences, lengths, base)
            scores = scores.clone()
            for flat, rows, history in groups:
                scores[flat] = _for_rows(processor, rows)(history, scores[flat])
        return scores.reshape(batch, nodes, vocab)


def unknown(processors: Sequence[Any]) -> list[str]:
    """Names of processors that are none of transformers' own pure ones: user code, which may do anything."""
    return [
        type(p).__name__
        for p in processors
        if type(p) not in STATELESS_PROCESSORS and type(p) not in HISTORY_PROCESSORS
    ]


def _histories(
    tree: DraftTree, sequences: Tensor, lengths: Sequence[int], base: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Nodes grouped by the length of their history: (flat node index [G], row [G], history [G, L]), HF-shaped."""
    assert tree.depths is not None
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    depths, valid = tree.depths.tolist(), tree.valid.tolist()
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, length in enumerate(lengths):
        for node in range(tree.num_nodes):
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
        flat = torch.tensor([row * tree.num_nodes + node for row, node in members], device=sequences.device)
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
