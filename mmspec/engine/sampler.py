"""`TreeSampler`: from logits to a sampled id at every node of a draft tree.

Logits processors get each node's own history (prompt, emitted tokens, path in the tree). The sampled id is
`argmax(scores)`, or when sampling `argmax(probs / noise)` with the noise of the node's output step
(`mmspec.engine.rng`), which is what `torch.multinomial(probs, 1)` computes. It depends on the seed, the step and the
history, never on the tree.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from mmspec.cpu.interception import operators_are_intercepted
from mmspec.engine.constrained_draft import constrain
from mmspec.engine.constraints import Constraint, is_declared, is_incremental
from mmspec.engine.host_copy import from_host
from mmspec.engine.private_copy import copied_if_small, private_copy
from mmspec.engine.rng import SamplingNoise
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
"""Processors that read only the scores of one row: called once on all nodes. Exact types, no subclasses."""
HISTORY_PROCESSORS = frozenset(getattr(hf, name) for name in _HISTORY_NAMES.split() if hasattr(hf, name))
"""Processors that are pure functions of one row's (history, scores): called per group of nodes."""
RECORDABLE_PROCESSORS = frozenset(
    (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
)
"""Those of `STATELESS_PROCESSORS` that may be part of a recorded function; so may one repetition penalty."""


class NodeGroup(NamedTuple):
    """Nodes whose histories have the same length.

    Attributes:
        flat_index: [G] int64, row * N + node.
        rows: [G] int64, row of each node in the batch.
        history: [G, L] int64, `input_ids` as transformers would pass them at this node.
    """

    flat_index: Tensor
    rows: Tensor
    history: Tensor


class RoundHistory(NamedTuple):
    """What processors read of the rows before a round, as tensors.

    Attributes:
        sequences: [B, S] int64, prompt and emitted tokens of each row, and whatever else behind them.
        lengths: [B] int64, how many of them each row has.
        ignored: [B] int64, how many of the first do not count (pads); None as the processor says.
    """

    sequences: Tensor
    lengths: Tensor
    ignored: Tensor | None = None


class TreeSampler:
    """Samples an id at every node of a tree from the target's processed distribution there."""

    def __init__(self, processors: Sequence[Any], noise: SamplingNoise | None, own: TreeSampler | None = None) -> None:
        """
        Args:
            processors: the `LogitsProcessorList` that transformers built for this call.
            noise: the call's noise, None for greedy decoding.
            own: see the property; None if that is this one.
        """
        self.processors = processors
        self.noise = noise
        self._own = own

    @property
    def own(self) -> TreeSampler:
        """The sampler that calls the user's objects, one step at a time."""
        return self._own or self  # kept as an attribute it would be a cycle: an interrupted call's noise would live on

    @property
    def unknown_processors(self) -> list[str]:
        """Processors that can only be called as transformers calls them: once per step, on the whole batch."""
        return [type(one).__name__ for one in user_code(self.processors) if not is_prefix_processor(one)]

    @property
    def constraints(self) -> list[Constraint]:
        """The prefix processors, as they are called at nodes."""
        return [one for one in self.processors if isinstance(one, Constraint)]

    def constrained(self, batch: int, vocab: int) -> TreeSampler:
        """The sampler that calls copies of the prefix processors at nodes; itself if there are none."""
        if not any(map(is_prefix_processor, self.processors)):
            return self
        return TreeSampler(
            [
                Constraint(_view_maker(one, batch), is_incremental(one), batch, vocab)
                if is_prefix_processor(one)
                else one
                for one in self.processors
            ],
            self.noise,
            self,
        )

    def constrain(self, tree: DraftTree, sequences: Tensor, lengths: Sequence[int], limit: int) -> DraftTree:
        """`mmspec.engine.constrained_draft.constrain`, for these processors."""
        return constrain(tree, self.constraints, sequences, lengths, limit)

    @property
    def can_fail_at_padding(self) -> bool:
        """Whether the probabilities of a row that has ended may be nan, where transformers raises.

        The penalty of an end token that is forbidden from then on, whose score is the lowest, overflows.
        """
        return self.noise is not None and any(type(one) is hf.ExponentialDecayLengthPenalty for one in self.processors)

    @property
    def nan_message(self) -> str:
        """Error message where no id can be sampled; when sampling, the message of `torch.multinomial`."""
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
        first_step: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample an id at every node.

        Args:
            logits: [B, N, V] float32 on the sampling device.
            tree: the sanitized tree that was scored.
            sequences: [B, >= prompt_length + max(num_emitted)] int64, prompt and emitted tokens of each row.
            num_emitted: emitted tokens of each row.
            prompt_length: length of the prompt, pads included.
            noise_end: only the noise of steps below it is drawn (`OutputBuffer.noise_end`).
            first_step: [B] int64, `num_emitted` on the sampling device; copied from the host if None.

        Returns:
            sampled_ids [B, N] int64, processed scores [B, N, V] float32, and is_nan [B, N] bool, True where the
            probabilities are nan, so that no id can be sampled. `is_nan` is None where transformers samples the same
            id or raises the error itself.
        """
        if tree.num_nodes == 1 and len(set(num_emitted)) == 1:  # all rows at the same step, as in transformers
            return self._sample_step(logits, sequences, num_emitted[0], prompt_length, noise_end)
        if first_step is None:
            first_step = from_host(num_emitted, logits.device)
        noise = None
        if self.noise is not None:
            assert tree.depths is not None and not self.noise.immediate
            self.noise.draw(noise_end)
            noise = self.noise.read((first_step[:, None] + tree.depths) % self.noise.window)
        return self.sample_nodes(logits, tree, noise, RoundHistory(sequences, prompt_length + first_step))

    def sample_nodes(
        self, logits: Tensor, tree: DraftTree, noise: Tensor | None, history: RoundHistory | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`sample` as a function of tensors; it reads no value on the host where there is a `recording_key`.

        Args:
            logits: [B, N, V] float32.
            tree: the sanitized tree that was scored.
            noise: [B, N, V] of each node's output step; None for greedy decoding.
            history: the rows before the round; may be None unless `reads_history`.
        """
        scores = self._process_nodes(logits, tree, history)
        if noise is not None:
            return _sample_with_noise(scores, noise)
        # The loop raises only for nan at an emitted node: nan after a wrong draft token is no error.
        sampled_ids = likeliest(scores)
        return sampled_ids, scores, scores.gather(-1, sampled_ids[:, :, None])[:, :, 0].isnan()

    @property
    def recording_key(self) -> Hashable | None:
        """What a recording of `sample_nodes` depends on; None if it must not be recorded."""
        others = [p for p in self.processors if type(p) is not hf.RepetitionPenaltyLogitsProcessor]
        if any(type(p) not in RECORDABLE_PROCESSORS for p in others) or len(self.processors) > len(others) + 1:
            return None
        settings = [
            (type(p).__name__, *sorted(vars(p).items())) if p in others else ("repetition", p.penalty)
            for p in self.processors
        ]
        return repr((settings, self.noise is None))

    @property
    def reads_history(self) -> bool:
        """Whether there is a repetition penalty."""
        return any(type(p) is hf.RepetitionPenaltyLogitsProcessor for p in self.processors)

    def ignored_lengths(self, batch: int) -> list[int]:
        """First positions of each row that the repetition penalty ignores. Waits for the device."""
        found = [p.prompt_ignore_length for p in self.processors if type(p) is hf.RepetitionPenaltyLogitsProcessor]
        ignored = found[0] if found and found[0] is not None else 0
        return [ignored] * batch if isinstance(ignored, int) else ignored.tolist()

    def _sample_step(
        self, logits: Tensor, sequences: Tensor, step: int, prompt_length: int, noise_end: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`sample` for one node per row, all rows at the same step: the calls that transformers makes."""
        length = prompt_length + step
        # The buffer itself if it has the right length: processors may write into it (`OutputBuffer.user_input_ids`).
        history = sequences if sequences.shape[1] == length else sequences[:, :length].contiguous()
        scores = self.process_step(logits, history)
        return self.sample_step(scores, step, noise_end)

    def sample_step(self, scores: Tensor, step: int, noise_end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """`sample` from processed scores [B, 1, V] of one step."""
        if self.noise is None:
            return likeliest(scores), scores, None
        if self.noise.immediate:
            return torch.multinomial(torch.softmax(scores[:, 0], dim=-1), num_samples=1), scores, None
        return _sample_with_noise(scores, self.noise.ahead([step] * len(scores), 1, noise_end))

    def process_step(self, logits: Tensor, history: Tensor) -> Tensor:
        """Processed scores [B, 1, V]: the whole list on `input_ids` [B, L] and scores [B, V]."""
        if not self.processors:
            return logits
        if user_code(self.processors):
            return self.processors(history, logits[:, 0])[:, None]  # type: ignore[operator]
        scores = logits[:, 0]
        for processor in self.processors:
            scores = processor(history, scores)
        return scores[:, None]

    def _process_nodes(self, logits: Tensor, tree: DraftTree, history: RoundHistory | None) -> Tensor:
        """Processed scores [B, N, V], each node with its own history."""
        if not self.processors:
            return logits
        batch, num_nodes, vocab = logits.shape
        scores = logits.reshape(batch * num_nodes, vocab)
        groups: list[NodeGroup] | None = None
        for processor in self.processors:
            if type(processor) in STATELESS_PROCESSORS:
                scores = processor(scores, scores)  # it does not read the ids
                continue
            assert history is not None
            if isinstance(processor, Constraint):
                lengths = history.lengths.tolist()
                scores = processor.apply(scores.reshape(logits.shape), tree, history.sequences, lengths).flatten(0, 1)
                continue
            if type(processor) is hf.RepetitionPenaltyLogitsProcessor:
                view = _with_ignored(processor, history.ignored, scores.device)
                scores = _penalize_repetition(view, scores.reshape(logits.shape), tree, history).flatten(0, 1)
                continue
            if groups is None:
                groups = _group_nodes(tree, history.sequences, history.lengths.tolist(), 0)
            scores = scores.clone()
            for group in groups:
                flat_index = group.flat_index
                scores[flat_index] = _for_rows(processor, group.rows)(group.history, scores[flat_index])
        return scores.reshape(batch, num_nodes, vocab)


def likeliest(scores: Tensor) -> Tensor:
    """`scores.argmax(-1)`; on a CPU by numpy, which takes a tenth of torch's time. Both take the first of equals."""
    is_plain = type(scores) is Tensor and scores.is_cpu and scores.dtype is torch.float32 and not scores.requires_grad
    if not is_plain or torch.compiler.is_compiling() or operators_are_intercepted():
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))


def user_code(processors: Sequence[Any]) -> list[Any]:
    """The processors that are not known as pure, which may have any side effect."""
    known = STATELESS_PROCESSORS | HISTORY_PROCESSORS | {Constraint}
    return [one for one in processors if type(one) not in known]


def is_prefix_processor(processor: Any) -> bool:
    """Whether it is one by its class (`mmspec.engine.constraints`)."""
    return type(processor) is hf.PrefixConstrainedLogitsProcessor or is_declared(processor)


def _view_maker(processor: Any, batch: int) -> Callable[[int], Any]:
    """Makes for a row a copy of a prefix processor that is called with this row alone."""
    if is_incremental(processor):

        def view(row: int) -> Any:
            copied = private_copy(processor)
            if len(getattr(copied, "compiled_grammars", ())) == batch > 1:  # of xgrammar, one per row
                copied.compiled_grammars = [copied.compiled_grammars[row]]
            return copied

        return view
    if type(processor) is not hf.PrefixConstrainedLogitsProcessor:
        shared = copied_if_small(processor)
        return lambda row: shared
    allowed, beams = copied_if_small(processor._prefix_allowed_tokens_fn), processor._num_beams
    return lambda row: hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // beams, ids), 1)


def _sample_with_noise(scores: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sampled_ids, scores, is_nan) of scores [B, N, V] with noise [B, N or 1, V], as `torch.multinomial` computes."""
    best = torch.softmax(scores, dim=-1).div_(noise).max(-1)
    return best.indices, scores, best.values.isnan()


def _group_nodes(tree: DraftTree, sequences: Tensor, num_emitted: Sequence[int], prompt_length: int) -> list[NodeGroup]:
    """The nodes of all rows, padding excluded, grouped by the length of their histories, with these histories."""
    assert tree.depths is not None
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    depths, node_mask = tree.depths.tolist(), tree.node_mask.tolist()
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, emitted in enumerate(num_emitted):
        for node in range(tree.num_nodes):
            if node_mask[row][node]:
                members[emitted + depths[row][node]].append((row, node))
    groups = []
    for length, nodes in members.items():
        rows = from_host([row for row, _ in nodes], sequences.device)
        history = sequences[rows, : prompt_length + length]
        for index, (row, node) in enumerate(nodes):
            path = []
            while node > 0:
                path.append(tokens[row][node])
                node = parents[row][node]
            if path:
                history[index, -len(path) :] = from_host(path[::-1], history.device)
        flat_index = from_host([row * tree.num_nodes + node for row, node in nodes], sequences.device)
        groups.append(NodeGroup(flat_index, rows, history))
    return groups


def _penalize_repetition(processor: Any, scores: Tensor, tree: DraftTree, history: RoundHistory) -> Tensor:
    """`RepetitionPenaltyLogitsProcessor` at all nodes at once, by the arithmetic of transformers.

    Args:
        processor: the processor; `prompt_ignore_length` is an int, None, or one number per row.
        scores: [B, N, V].
        tree: the sanitized tree.
        history: the rows before the round.
    """
    assert tree.ancestor_mask is not None and tree.depths is not None
    sequences, lengths, _ = history
    batch, num_nodes, vocab = scores.shape
    first = processor.prompt_ignore_length
    first = first[:, None] if isinstance(first, Tensor) else first or 0  # earlier positions do not count
    position = torch.arange(sequences.shape[1], device=scores.device)
    is_history = (position >= first) & (position < lengths[:, None])
    seen = torch.zeros(batch, vocab + 1, dtype=torch.bool, device=scores.device)  # the last column is dropped
    seen.scatter_(1, torch.where(is_history, sequences, vocab).clamp(max=vocab), True)
    is_path = (tree.depths > 0) & (lengths[:, None] + tree.depths - 1 >= first)
    path_ids = torch.where(tree.ancestor_mask & is_path[:, None], tree.tokens[:, None], vocab).clamp(max=vocab)
    seen = seen[:, None].repeat(1, num_nodes, 1).scatter_(2, path_ids, True)[..., :vocab]
    penalized = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where(seen, penalized, scores)


def _with_ignored(processor: Any, ignored: Tensor | None, device: torch.device) -> Any:
    """The repetition penalty with these numbers of ignored positions [B]; None for its own."""
    if ignored is None:
        own = processor.prompt_ignore_length
        return _for_rows(processor, torch.arange(len(own), device=device)) if isinstance(own, Tensor) else processor
    view = copy.copy(processor)
    view.prompt_ignore_length = ignored
    return view


def _for_rows(processor: Any, rows: Tensor) -> Any:
    """The processor for some rows of the batch: the repetition penalty stores the number of left pads per row."""
    ignore_lengths = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignore_lengths, Tensor):
        return processor
    view = copy.copy(processor)
    view.prompt_ignore_length = ignore_lengths.to(rows.device)[rows]
    return view
