"""`Lane`: what recorded functions of a model and number of rows share, and `LanePool`, which lends one to a call.

A lane has the tensors at fixed addresses (keys and values, recurrent states, what forwards read besides the nodes) and
the recordings. Whatever is unusual (`mmspec.backend`) runs eager.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mmspec.engine.graph import Recorder
from mmspec.engine.kv_cache import RESERVED_TOKENS, RaggedKVCache, RecordedKVCache, commit_nodes, length_bucket
from mmspec.engine.recordings import Recordings, WrittenPlace
from mmspec.engine.revision import Revision
from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.engine.tree_cache import VALUES_START_AS_KEYS, TreeCache
from mmspec.forks import new_lock
from mmspec.interfaces.round import ROUND, ScorePart
from mmspec.targets.forward import CallTensors, NodeForward
from mmspec.targets.recurrent_states import RecurrentStates, StateLog

MAX_LENGTH = 1 << 15
"""Longest call, prompt and new tokens, that a lane is allocated for."""
MAX_LANES = 2
"""Lanes (numbers of rows) that stay allocated per model."""


class UnrecordableCallError(ValueError):
    """A call whose rounds cannot be functions of tensors."""


class Lane:
    """What is recorded for one model and number of rows. Used by one call at a time.

    Attributes:
        recordings: the recorded functions of rounds, and the drafts of heads.
        kv_cache: the keys and values.
        lock: held by the call that uses the lane.
    """

    def __init__(self, pool: LanePool, recorder: Recorder, batch: int, capacity: int) -> None:
        self._pool = pool
        self.recordings = Recordings(recorder, capacity, pool.warn)
        self.kv_cache = RaggedKVCache(batch, capacity, VALUES_START_AS_KEYS)
        self.lock = threading.Lock()  # held while user code runs, which may fork
        self._call: CallTensors | None = None
        self._states: RecurrentStates | None = None  # of the call
        self._state_tensors: list[Tensor] = []  # theirs
        self._logs: dict[Hashable, StateLog] = {}  # what the forward of each key logs, without data
        self._min_length = 0

    @property
    def has_failed(self) -> bool:
        """Whether nothing is recorded any more, until the model changes."""
        return self._pool.failure is not None

    def begin_call(
        self,
        forward: NodeForward,
        call: CallTensors,
        prompt_length: int,
        max_new_tokens: int,
        states: RecurrentStates | None,
    ) -> None:
        """Take over a call after its prompt: keys, values, states, and what else forwards read, to fixed addresses.

        If they cannot stay where those of the last call were, recordings are dropped.

        Raises:
            UnrecordableCallError: an input of every round is a tensor, which a recording would repeat.
        """
        if varying := [name for name, value in forward.template.items() if isinstance(value, Tensor)]:
            raise UnrecordableCallError(f"{varying[0]}, an input of every round that is a tensor")
        padding = torch.ones(len(self.kv_cache.seq_lens), self.recordings.capacity, dtype=torch.bool)
        padding = padding.to(call.max_position.device)
        if call.padding is not None:
            padding[:, : call.padding.shape[1]] = call.padding
        call = replace(call, padding=padding)
        new = [*call.tensors(), *([] if states is None else states.tensors)]
        fixed = [] if self._call is None else [*self._call.tensors(), *self._state_tensors]
        if self.kv_cache.pack(self.recordings.capacity) or _layout(new) != _layout(fixed):
            self.recordings.clear()
            with torch.inference_mode(False):
                fixed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in new]
        else:
            for tensor, value in zip(fixed, new, strict=True):
                tensor.copy_(value)
        self._call = call.over(fixed[: len(call.tensors())])
        self._state_tensors = fixed[len(call.tensors()) :]
        self._states = states
        if states is not None:
            states.move_to(self._state_tensors)
        self._min_length = prompt_length + min(max_new_tokens, RESERVED_TOKENS)

    def score_part(self, forward: NodeForward, num_nodes: int, hidden_state_indices: Sequence[int]) -> ScorePart | None:
        """The forward over trees of `num_nodes` nodes, and the commit of what is accepted, as functions of tensors.

        None where an eager forward (of another dtype, under autocast) has moved the keys and values.
        """
        kv_cache, call, recurrent = self.kv_cache, self._call, self._states
        assert call is not None, "begin_call comes first"
        if kv_cache.written_layers and not kv_cache.groups:
            return None
        indices = tuple(hidden_state_indices)
        bucket = min(length_bucket(max(self._min_length, *kv_cache.seq_lens) + num_nodes), self.recordings.capacity)
        key = num_nodes, bucket, indices, forward.constants, call.position_limit
        layers, groups, state_tensors = kv_cache.layers, kv_cache.groups, self._state_tensors
        num_parts = [len(parts) for parts in layers]
        sizes = [len(call.tensors()), len(state_tensors), sum(num_parts), len(groups)]

        def score(state: Sequence[Tensor], lengths: Tensor, tree: DraftTree) -> tuple[Tensor, ...]:
            fixed, states, keys_values, _ = _split(state, sizes)
            rest = iter(keys_values)
            cache = RecordedKVCache([tuple(next(rest) for _ in range(n)) for n in num_parts], lengths, bucket)
            cache.begin_forward(num_nodes)
            tree_cache = TreeCache(cache, forward.adapter.num_layers)
            arguments = tree, cache, call.over(fixed), indices, tree_cache
            if recurrent is None:
                return forward(*arguments)
            with recurrent.logged_over(tree_cache, states) as log:
                outputs = forward(*arguments)
            if key not in self._logs:  # a recording runs first as it is
                self._logs[key] = log.without_data()
            return *outputs, *log.tensors()

        def commit(
            state: Sequence[Tensor], lengths: Tensor, path: Tensor, counts: Tensor, logged: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            _, states, _, groups = _split(state, sizes)
            commit_nodes(groups, lengths, path, counts)
            if recurrent is None:
                return ()
            new = self._logs[key].over(states, logged).after(counts, num_nodes, range(num_nodes + 1))
            return tuple(one.clone() if one is old else one for one, old in zip(new, states, strict=True))

        def places(state: Sequence[Tensor], lengths: Tensor) -> list[WrittenPlace]:
            positions = lengths[:, None] + torch.arange(num_nodes, device=lengths.device)
            return [WrittenPlace(group, positions) for group in _split(state, sizes)[-1]]

        state = [*call.tensors(), *state_tensors, *(part for parts in layers for part in parts), *groups]
        lengths, num_kept = kv_cache.seq_lens, len(state_tensors)
        return ScorePart(key, state, lengths, indices, score, commit, places, recurrent is not None, num_kept)

    def replay(self, part: ScorePart, lengths: Tensor, tree: DraftTree) -> tuple[Tensor, ...] | None:
        """Outputs of a recorded forward over a sanitized tree, within `recordable_mode`; None after a failure."""
        assert tree.depths is not None and tree.ancestor_mask is not None
        inputs = [lengths, tree.tokens, tree.parents, tree.node_mask, tree.ancestor_mask, tree.depths]
        try:
            outputs = self.recordings.run(ROUND, ("score", part.key), part, part.state, inputs)
        except Exception as error:  # of the compiler, the capture or the replay: only speed is lost
            self._pool.fail(error)
            return None
        end = 1 + len(part.hidden_state_indices)
        if self._states is not None:
            self._states.log = self._logs[part.key].over(self._state_tensors, outputs[end:])
        return outputs[:end]


class LanePool:
    """The lanes of one patched model.

    Attributes:
        failure: why nothing is recorded for the model in its present state; None if something may be.
        warn: logs a message once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.failure: str | None = None
        self.warn = warn
        self._lock = new_lock()
        self._lanes: dict[tuple[int, str], Lane] = {}  # last used at the end
        self._revision: Revision | None = None  # of the model when it was last recorded

    @contextmanager
    def lease(
        self, revision: Revision, batch: int, max_length: int, recorder: Callable[[], Recorder] | None
    ) -> Iterator[Lane | None]:
        """Context with a lane for one call; None if another call uses it, or if recording failed before.

        Args:
            revision: of the model.
            batch: B.
            max_length: largest length of a row.
            recorder: creates the recorder of a new lane; None for no lane.
        """
        lane = None if recorder is None else self._find_lane(revision, batch, max_length, recorder)
        if lane is None:
            yield None
            return
        try:
            lane.kv_cache.reset()
            yield lane
        finally:
            lane.lock.release()

    def fail(self, error: BaseException | str) -> None:
        """Record nothing any more, until the model changes. Logs one line."""
        lines = str(error).strip().splitlines()
        text = error if isinstance(error, str) else f"{type(error).__name__}: {''.join(lines[:1])}"
        with self._lock:
            self.failure = text
            self._lanes.clear()
        self.warn(f"rounds are not recorded, but run as before ({text})")

    def _find_lane(
        self, revision: Revision, batch: int, max_length: int, recorder: Callable[[], Recorder]
    ) -> Lane | None:
        """The lane, locked; None if there is none to use."""
        with self._lock:
            if self._revision is not revision:  # recordings repeat what the model was
                self._lanes.clear()
                self.failure, self._revision = None, revision
            if self.failure is not None:
                return None
            key = batch, recorder.__name__
            lane = self._lanes.pop(key, None)
            capacity = length_bucket(max_length + BUCKETS[-1])
            if lane is None or (lane.recordings.capacity < capacity and not lane.lock.locked()):
                lane = Lane(self, recorder(), batch, capacity)
            self._lanes[key] = lane
            for old in list(self._lanes)[:-MAX_LANES]:
                del self._lanes[old]
            is_large_enough = lane.recordings.capacity >= capacity
            return lane if is_large_enough and lane.lock.acquire(blocking=False) else None


def _layout(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    """Parts of these sizes, one after another."""
    ends = list(accumulate(sizes))
    return [tensors[end - size : end] for end, size in zip(ends, sizes, strict=True)]
