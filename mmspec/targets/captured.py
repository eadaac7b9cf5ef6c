"""`CapturedTarget`: an `HFTarget` whose `score` is recorded once for each shape and replayed in every later round.

`StaticRound` is the recorded function. `Lane` holds the tensors at fixed addresses and the recordings for a number of
rows; `CapturePool` lends a lane to one call at a time. Whatever is unusual (`CapturePool.reason`) is decoded by
`HFTarget`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmspec.engine.graph import CudaGraphRecorder, Recorder, record_compiled, record_frozen
from mmspec.engine.recordings import Recordings, WeightWatch, recordable_mode
from mmspec.engine.static_cache import (
    MAX_NODES,
    RESERVED_TOKENS,
    StaticKVCache,
    StaticLayoutError,
    commit_path,
    length_bucket,
)
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import VerifyResult
from mmspec.interfaces.fused import ScorePart
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import HFTarget
from mmspec.targets.module_scan import ModuleScan
from mmspec.targets.static_round import StaticRound

MAX_LENGTH = 1 << 15
"""Longest call, prompt and new tokens, that a lane is allocated for."""
ROUND = "round"
"""Owner of the recorded rounds in `Recordings`."""
MAX_LANES = 2
"""Lanes (numbers of rows) that stay allocated per model."""
PLAIN_CODE = ("transformers.", "torch.nn.")
"""Packages whose modules have no switches that change a forward without changing a weight."""
AUTO_DEVICE_TYPES = frozenset({"cuda"})
"""Types of devices on which `compile="auto"` records, after a check (`mmspec.control.device_check`). On a CPU compiling
takes long."""


class Lane:
    """What is recorded for one model and number of rows. Used by one call at a time.

    Attributes:
        recordings: the recorded rounds, and the drafts of heads.
        kv_cache: the keys and values.
        lock: held by the call that uses the lane.
    """

    def __init__(self, recordings: Recordings, kv_cache: StaticKVCache) -> None:
        self.recordings = recordings
        self.kv_cache = kv_cache
        self.lock = threading.Lock()
        self._state: list[Tensor] = []

    @property
    def state(self) -> list[Tensor]:
        """The tensors at fixed addresses: arguments of `StaticRound.__call__`, all but the last three."""
        assert self.kv_cache.lengths is not None
        return [self.kv_cache.lengths, *self._state, *self.kv_cache.layers]

    def set_state(self, values: Sequence[Tensor]) -> None:
        """Copy a call's values into the state. If their shapes differ from the last call's, recordings are dropped."""
        layout = [(value.shape, value.dtype) for value in values]
        if layout == [(tensor.shape, tensor.dtype) for tensor in self._state]:
            for tensor, value in zip(self._state, values, strict=True):
                tensor.copy_(value)
        else:
            self.recordings.clear()  # whole rounds, whose owners are their drafters, read the state too
            with torch.inference_mode(False):
                self._state = [value.clone(memory_format=torch.contiguous_format) for value in values]

    def run(self, function: StaticRound, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`Recordings.run` of a round; `inputs` are its last three arguments."""
        key = inputs[0].shape[1], function.bucket, function.hidden_state_indices, function.constants
        return self.recordings.run(ROUND, key, function, self.state, inputs)


class CapturePool:
    """The lanes of one patched model.

    Attributes:
        failure: why nothing is recorded for the model in its present state; None if something may be.
        recorder: creates the recorder of every lane; None for that of the device and of the option `compile`.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """
        Args:
            warn: logs a message once.
        """
        self.failure: str | None = None
        self.recorder: Callable[[], Recorder] | None = None
        self._warn = warn
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, str], Lane] = {}  # last used at the end
        self._watch = WeightWatch()

    def reason(self, adapter: ModelAdapter, modules: ModuleScan, cache: Any, max_length: int) -> str | None:
        """Why a call is not recorded, or None.

        Args:
            adapter: of the model.
            modules: result of the scan over its modules.
            cache: KV cache of the call.
            max_length: largest length of a row.
        """
        if adapter.is_recurrent or adapter.layer_types != {"full_attention"}:
            return "layers without keys and values, or with a sliding window"
        if adapter.num_cache_layers != adapter.num_layers:
            return "layers that share keys and values"
        if not modules.can_use_inference_mode or modules.foreign or modules.hook is not None:
            return "quantised, offloaded or replaced modules"
        if not all(type(module).__module__.startswith(PLAIN_CODE) for module in adapter.text_model.modules()):
            return "modules of other packages, which may switch their forward"
        if getattr(cache, "_is_user_defined", False) or cache.get_seq_length():
            return "past_key_values that was passed to generate"
        if max_length > MAX_LENGTH:
            return f"a length limit beyond {MAX_LENGTH}"
        device = adapter.model.device
        if len({parameter.device for parameter in adapter.model.parameters()}) > 1 or device.type == "meta":
            return "weights on several devices"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        return None

    @contextmanager
    def lease(
        self, adapter: ModelAdapter, batch: int, max_length: int, recorder: Callable[[], Recorder] | None
    ) -> Iterator[Lane | None]:
        """Context with a lane for one call; None if another call uses it, or if recording failed before.

        Args:
            adapter: of the model.
            batch: B.
            max_length: largest length of a row.
            recorder: creates the recorder of a new lane; None for no lane.
        """
        lane = None if recorder is None else self._find_lane(adapter, batch, max_length, recorder)
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
        text = error if isinstance(error, str) else f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        with self._lock:
            self.failure = text
            self._lanes.clear()
        self._warn(f"rounds are not recorded, but run as before ({text})")

    def _find_lane(
        self, adapter: ModelAdapter, batch: int, max_length: int, recorder: Callable[[], Recorder]
    ) -> Lane | None:
        """The lane, locked; None if there is none to use."""
        with self._lock:
            self._drop_stale(adapter, frozen=recorder in _CPU_RECORDERS)
            if self.failure is not None:
                return None
            key = batch, recorder.__name__
            lane = self._lanes.pop(key, None)
            capacity = length_bucket(max_length + MAX_NODES)
            if lane is None or (lane.kv_cache.capacity < capacity and not lane.lock.locked()):
                is_frozen = recorder in _CPU_RECORDERS
                recordings = Recordings(recorder(), capacity, self._warn, is_frozen)
                lane = Lane(recordings, StaticKVCache(batch, capacity, adapter.num_layers))
            self._lanes[key] = lane
            for old in list(self._lanes)[:-MAX_LANES]:
                del self._lanes[old]
            is_large_enough = lane.kv_cache.capacity >= capacity
            return lane if is_large_enough and lane.lock.acquire(blocking=False) else None

    def _drop_stale(self, adapter: ModelAdapter, frozen: bool) -> None:
        """Drop all recordings if the model's weights, buffers, modules or config changed since.

        Args:
            adapter: of the model.
            frozen: recordings contain copies of the weights, so that edits in place must be noticed too.
        """
        config = adapter.model.config.to_json_string(use_diff=False)
        modules = [id(module) for module in adapter.model.modules()]
        if self._watch.changed(decoder_tensors(adapter), frozen, (modules, config, adapter.attention)):
            self._lanes.clear()
            self.failure = None


class CapturedTarget(HFTarget):
    """Implements `mmspec.interfaces.Target` with recorded rounds."""

    def __init__(self, *args: Any, lane: Lane, pool: CapturePool, **kwargs: Any) -> None:
        """As `HFTarget`, with a lane of `CapturePool.lease` and its pool."""
        self._lane = lane
        self._pool = pool
        self._rounds: dict[tuple[int, tuple[int, ...]], StaticRound] = {}
        super().__init__(*args, **kwargs)
        self._mode = recordable_mode
        self.recordings = lane.recordings

    def score(self, tree: DraftTree, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """See `mmspec.interfaces.Target.score`."""
        tree = tree.to(self.device)
        assert tree.ancestor_mask is not None and tree.depths is not None
        self._lane.kv_cache.begin_tree(tree.num_nodes)
        self._lane.kv_cache.lengths_on(self.device)
        function = self._round(tuple(hidden_state_indices))
        inputs = (tree.tokens, tree.depths, tree.ancestor_mask)
        with self._mode():
            outputs = None
            if self._pool.failure is None:
                try:
                    outputs = self._lane.run(function, inputs)
                except Exception as error:  # of the compiler, the capture or the replay: only speed is lost
                    self._pool.fail(error)
            if outputs is None:
                outputs = function(*self._lane.state, *inputs)
        logits, *hidden_states = outputs
        return logits, dict(zip(hidden_state_indices, hidden_states, strict=True))

    def score_part(self, num_nodes: int, hidden_state_indices: Sequence[int]) -> ScorePart | None:
        """See `mmspec.interfaces.fused.FusableTarget`."""
        kv_cache, function = self._lane.kv_cache, self._round(tuple(hidden_state_indices))
        if self._pool.failure is not None or kv_cache.data is None:
            return None

        def score(state: Sequence[Tensor], lengths: Tensor, tree: DraftTree) -> tuple[Tensor, ...]:
            assert tree.ancestor_mask is not None and tree.depths is not None
            return function(lengths, *state[1:], tree.tokens, tree.depths, tree.ancestor_mask)

        def commit(state: Sequence[Tensor], lengths: Tensor, path: Tensor, counts: Tensor) -> None:
            commit_path(state[0], lengths, path, counts, num_nodes)

        key = num_nodes, function.bucket, function.hidden_state_indices, function.constants
        return ScorePart(key, [kv_cache.data, *self._lane.state[1:]], kv_cache.seq_lens, score, commit)

    def commit_part(self, counts: Sequence[int]) -> None:
        """See `mmspec.interfaces.fused.FusableTarget`."""
        kv_cache = self._lane.kv_cache
        kv_cache.seq_lens = [length + count for length, count in zip(kv_cache.seq_lens, counts, strict=True)]

    def commit(self, result: VerifyResult) -> None:
        """See `mmspec.interfaces.Target.commit`."""
        with self._mode():
            self._lane.kv_cache.keep_path(result.path, result.counts, result.accepted_nodes)

    def _new_buffer(self, batch: int) -> StaticKVCache:
        return self._lane.kv_cache

    def _prepare_rounds(self) -> None:
        """Copy the call's values into the lane's state."""
        super()._prepare_rounds()
        tensors = [name for name, value in self._template.items() if isinstance(value, Tensor)]
        if tensors:  # a recording would repeat those of its call
            raise StaticLayoutError(f"{tensors[0]}, an input of every round that is a tensor")
        batch = self.input_ids.shape[0]
        padding = torch.ones(batch, self._lane.kv_cache.capacity, dtype=torch.bool, device=self.device)
        if self._padding is not None:
            padding[:, : self._padding.shape[1]] = self._padding
        position_base = self._prompt_last_position - self.prompt_length + 1
        max_position = torch.tensor([self.prompt_length - 1 + self.max_new_tokens], device=self.device)
        self._lane.set_state([padding, position_base, max_position, *self._token_types.values()])

    def _round(self, hidden_state_indices: tuple[int, ...]) -> StaticRound:
        min_length = self.prompt_length + min(self.max_new_tokens, RESERVED_TOKENS)
        key = self._lane.kv_cache.bucket(min_length), hidden_state_indices
        if key not in self._rounds:
            self._rounds[key] = StaticRound(self.model, self._template, list(self._token_types), *key)
        return self._rounds[key]


def recorder_for(device: torch.device, compile: bool | str, native: bool = True) -> Callable[[], Recorder] | None:
    """Creates the recorder for a device, or None if rounds are not to be recorded.

    Args:
        device: of the model.
        compile: the option of `patch`: True records, "auto" only on `AUTO_DEVICE_TYPES` (which the caller checks).
        native: on a CPU, linear layers may run in our own kernel.
    """
    if compile is False or (compile == "auto" and device.type not in AUTO_DEVICE_TYPES):
        return None
    if device.type == "cuda":
        return CudaGraphRecorder
    if device.type != "cpu":
        return None
    return _compiled_recorder if native else _frozen_recorder


def decoder_tensors(adapter: ModelAdapter) -> Iterator[Tensor]:
    """Parameters and buffers that a round reads."""
    seen: set[int] = set()
    for module in (adapter.text_model, adapter.model.get_input_embeddings(), adapter.model.get_output_embeddings()):
        for tensor in () if module is None else (*module.parameters(), *module.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _compiled_recorder() -> Recorder:
    return record_compiled


def _frozen_recorder() -> Recorder:
    return record_frozen


_CPU_RECORDERS = (_compiled_recorder, _frozen_recorder)
"""Those whose recordings may contain copies of weights."""


__all__ = ["CapturePool", "CapturedTarget", "Lane", "recorder_for"]
