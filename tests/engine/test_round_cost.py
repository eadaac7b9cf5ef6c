"""What a round costs besides the model's forward: copies between host and device, and operators of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

import mmspec
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.loop import DecodeLoop
from mmspec.targets.hf import HFTarget

READS: tuple[Callable[..., Any], ...] = (
    Tensor.tolist,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.cpu,
    Tensor.numpy,
    torch.equal,
    torch.nonzero,
    Tensor.nonzero,
)
"""Each waits for the device."""


class TransferCounter(TorchFunctionMode):
    """Counts reads of values by the host, and tensors made from values of the host. On a GPU each is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.writes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_generator_state = func is torch.equal and args[0].dtype == torch.uint8  # always on the host
        self.reads += func in READS and not is_generator_state
        self.writes += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


class OperatorCounter(TorchDispatchMode):
    """Counts aten operators that are not views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_transfers(method: Callable[..., Any]) -> Iterator[list[tuple[int, int]]]:
    """Context that collects (reads, writes) of every call of a method of `DecodeLoop`, the drafter's excluded."""
    found: list[tuple[int, int]] = []

    def counted(self: DecodeLoop, *args: Any, **kwargs: Any) -> Any:
        with TransferCounter() as counter:
            result = method(self, *args, **kwargs)
        found.append((counter.reads, counter.writes))
        return result

    with mock.patch.object(DecodeLoop, method.__name__, counted):
        yield found


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_round_copies_once_to_the_device_and_once_back(batch: int, sampled: bool) -> None:
    """Also with a repetition penalty, which the generation configs of many models set."""
    spec = tiny.ModelSpec("llava")
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, 0, batch, padding="none" if batch == 1 else "left")
    options = {"max_new_tokens": 30, "do_sample": sampled, "repetition_penalty": 1.1}
    drafter = heads.build_drafter("leaning-coupled", spec)
    mmspec.patch(model, drafter, tree_size=8)
    with (
        count_transfers(DecodeLoop.round) as found,
        mock.patch.object(type(drafter), "propose", uncounted(type(drafter).propose)),
        mock.patch.object(type(drafter), "observe", uncounted(type(drafter).observe)),
    ):
        model.generate(**inputs, **options)
    mmspec.unpatch(model)
    assert len(found) > 5
    assert max(reads for reads, _ in found) == 1, found
    assert sum(writes for _, writes in found) <= len(found) + 1, "one round copies the lengths of the cache as well"


def uncounted(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, out of sight of a `TransferCounter`: a drafter may copy as it likes."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args)

    return call


@pytest.mark.parametrize("layers", [2, 8])
def test_a_commit_takes_two_operators_per_layer(layers: int) -> None:
    cache = RaggedKVCache(2, 64)
    cache.seq_lens = [3, 5]
    cache.begin_forward(4)
    for layer in range(layers):
        cache.write(layer, torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8))
    with OperatorCounter() as operators, TransferCounter() as transfers:
        cache.keep_path(torch.tensor([[0, 2, 3, 0], [0, 3, 0, 0]]), torch.tensor([3, 2]), [[0, 2, 3], [0, 3]])
    assert operators.counts["aten::gather"] == operators.counts["aten::scatter_"] == layers
    assert operators.counts.total() <= 2 * layers + 10, operators.counts
    assert transfers.reads == 0 and transfers.writes == 2, "the test's own two tensors"


def test_lengths_are_copied_only_after_a_cut() -> None:
    cache = RaggedKVCache(2, 64)
    cache.seq_lens = [3, 5]
    device = torch.device("cpu")
    first = cache.lengths_on(device)
    cache.begin_forward(4)
    cache.write(0, torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8))
    cache.keep_path(torch.tensor([[0, 2, 3, 0], [0, 3, 0, 0]]), torch.tensor([3, 2]), [[0, 2, 3], [0, 3]])
    with TransferCounter() as transfers:
        cache.crop([10, 10])
        lengths = cache.lengths_on(device)
    assert transfers.writes == 0 and lengths.tolist() == cache.seq_lens == [6, 7] and first.tolist() == [3, 5]
    cache.crop([4, 10])
    assert cache.lengths_on(device).tolist() == cache.seq_lens == [4, 7]


def test_the_repetition_penalty_of_all_nodes_is_one_call() -> None:
    """Not a call per node, and no history is read on the host."""
    spec = tiny.ModelSpec("llava")
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, 0, 1, padding="none")
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False, repetition_penalty=1.3)
    mmspec.patch(model, heads.build_drafter("leaning-coupled", spec), tree_size=8)
    processor = RepetitionPenaltyLogitsProcessor
    with mock.patch.object(processor, "__call__", autospec=True, side_effect=processor.__call__) as calls:
        out = model.generate(**inputs, max_new_tokens=20, do_sample=False, repetition_penalty=1.3)
    mmspec.unpatch(model)
    assert torch.equal(out, plain) and calls.call_count == 1, "for the first token"


def test_score_reads_nothing() -> None:
    """The target's part of a round: no value is read, and nothing is copied to the device."""
    spec = tiny.ModelSpec("llava")
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, 0, 3, padding="left")
    found = []
    score = HFTarget.score

    def counted(self: HFTarget, *args: Any) -> Any:
        with TransferCounter() as counter:
            outputs = score(self, *args)
        found.append((counter.reads, counter.writes))
        return outputs

    mmspec.patch(model, "lookup", tree_size=8)
    with mock.patch.object(HFTarget, "score", counted):
        model.generate(**inputs, max_new_tokens=20, do_sample=False)
    mmspec.unpatch(model)
    assert len(found) > 3 and set(found[1:]) == {(0, 0)}, found
