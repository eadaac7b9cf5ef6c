"""Recorded rounds: the same tokens as plain `generate`, replayed on other prompts; and when nothing is recorded."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
import zoo
from recorded_rounds import (
    SPEC,
    HostCounter,
    build_drafter,
    build_inputs,
    build_model,
    fails_later,
    generate,
    patched,
    recording,
    wrong,
)
from recorders import record_nothing, record_trace, trace
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.backend import recorder_for
from mmspec.engine.graph import CudaGraphRecorder, Recorder, Replay, StaticFunction
from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache, commit_nodes, length_bucket
from mmspec.engine.tree import root_only
from mmspec.engine.tree_cache import CACHE_ARGUMENT, TreeCache
from mmspec.patching import patch_state
from mmspec.targets.forward import CallTensors, NodeForward
from mmspec.targets.hf import HFTarget
from mmspec.targets.registry import find_adapter

DRAFTERS = ("none", "lookup", "leaning-coupled", "leaning-flash")
"""`coupled` is MSD."""


# --- the cache --------------------------------------------------------------------------------------------------------


def test_length_buckets() -> None:
    buckets = sorted({length_bucket(length) for length in range(1, 4097)})
    assert buckets == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(length <= length_bucket(length) for length in range(1, 4097))
    assert all(bucket % 16 == 0 for bucket in buckets), "the alignment of masks"


@pytest.mark.parametrize("batch", [1, 3])
def test_a_packed_cache_equals_a_growing_one(batch: int) -> None:
    """A prompt, random trees written as in a recorded function, and cuts; keys and values of two shapes."""
    rng = torch.Generator().manual_seed(batch)
    packed, growing = RaggedKVCache(batch, 256), RaggedKVCache(batch, 256)
    sizes = [(4, 4), (4, 4), (4, 6)]

    def random_parts(n: int, layer: int) -> list[Tensor]:
        return [torch.randn(batch, 2, n, size, generator=rng) for size in sizes[layer]]

    for layer in range(3):
        parts = random_parts(5, layer)
        for cache in (packed, growing):
            if layer == 0:
                cache.begin_forward(5)
            cache.write(layer, *parts)
    packed.advance(5)
    growing.advance(5)
    assert packed.pack(512) and not packed.pack(512), "moved once"
    assert len(packed.groups) == 3, "two layers of one shape, and keys and values of the third"
    for step in range(12):
        nodes = (1, 4, 8)[step % 3]
        growing.begin_forward(nodes)
        packed.begin_forward(nodes)
        view = RecordedKVCache(packed.layers, packed.lengths_on(torch.device("cpu")), 256)
        view.begin_forward(nodes)
        for layer in range(3):
            parts = random_parts(nodes, layer)
            growing.write(layer, *parts)
            for found, new in zip(view.write(layer, *parts), parts, strict=True):
                assert found.shape[2] == 256
                for row, length in enumerate(growing.seq_lens):
                    assert torch.equal(found[row, :, length : length + nodes], new[row])
        rows = [[0, *range(2, 2 + (row + step) % (nodes - 1))] if nodes > 1 else [0] for row in range(batch)]
        rows[-1] = [] if step == 5 and batch > 1 else rows[-1]
        path = torch.tensor([row + [0] * (nodes - len(row)) for row in rows])
        counts = torch.tensor([len(row) for row in rows])
        packed.keep_path(path, counts, rows)
        growing.keep_path(path, counts, rows)
        if step % 4 == 3:
            cut = [length - 1 for length in growing.seq_lens]
            packed.crop(cut)
            growing.crop(cut)
        assert packed.groups and packed.seq_lens == growing.seq_lens
        assert packed.seq_lens == packed.lengths_on(torch.device("cpu")).tolist()
        for layer, row in ((layer, row) for layer in range(3) for row in range(batch)):
            length = growing.seq_lens[row]
            for a, b in zip(packed.read(layer, length), growing.read(layer, length), strict=True):
                assert torch.equal(a[row], b[row])
    packed.zero_tail()
    assert not any(group[:, :, 0, :, packed.seq_lens[0] :].any() for group in packed.groups)
    packed.reset()
    assert not any(group.any() for group in packed.groups) and packed.seq_lens == [0] * batch


def test_nan_of_a_rejected_node_does_not_spread() -> None:
    """A masked position contributes 0 * value."""
    cache = RaggedKVCache(1, 256)
    cache.begin_forward(2)
    cache.write(0, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    cache.advance(2)
    cache.pack(256)
    nodes = torch.ones(1, 1, 4, 4)
    nodes[:, :, 2:] = torch.nan
    cache.begin_forward(4)
    cache.write(0, nodes, nodes)
    cache.keep_path(torch.tensor([[0, 1, 2, 3]]), torch.tensor([2]), [[0, 1]])
    assert cache.seq_lens == [4] and cache.groups[0].isfinite().all()


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_recording_replayed_on_other_prompts_is_plain_generate(drafter: str, batch: int, sampled: bool) -> None:
    """Recorded in the first call and replayed in the others: a value that became a constant would be wrong there. Whole
    rounds have their own tests."""
    model = build_model()
    prompts = [build_inputs(model, seed, batch) for seed in range(3)]
    plain = [generate(model, inputs, sampled, repetition_penalty=1.1) for inputs in prompts]
    with (
        recording(record_trace) as recorder,
        patched(model, build_drafter(drafter), tree_size=8),
        mock.patch("mmspec.engine.loop.can_record_rounds", return_value=False),
    ):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, sampled, repetition_penalty=1.1), expected)
        stats = mmspec.stats(model)
    assert recorder.recordings == 1 and recorder.replays > 20, "one shape: one recording"
    assert stats.num_accepted_tokens > 0 or drafter in ("none", "lookup")
    assert not stats.fallback_calls


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl", "paligemma", "mistral3", "smolvlm", "qwen3"])
def test_model_types(family: str) -> None:
    """Several position axes, token types, and layers with windows."""
    spec = tiny.ModelSpec(family)
    model = build_model(spec)
    prompts = [build_inputs(model, seed, 2) for seed in range(2)]
    plain = [generate(model, inputs, False) for inputs in prompts]
    with recording(record_trace) as recorder, patched(model, build_drafter("leaning-coupled", spec), tree_size=8):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, False), expected)
    assert recorder.replays > 0


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed: int) -> None:
    """Random calls with the cache of recorded rounds, user code and all; what cannot be recorded included."""
    with recording(record_nothing):
        result = fuzz.run_seed(seed)
    assert not result.differences, result.report()


def test_the_fuzz_uses_recorded_rounds() -> None:
    with recording(record_nothing) as recorder:
        for seed in range(8):
            fuzz.run_seed(seed)
    assert recorder.replays > 20


def test_a_text_that_grows_beyond_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.targets.lanes.RESERVED_TOKENS", 0)
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False, max_new_tokens=300)
    with recording(record_nothing) as recorder, patched(model, "lookup", tree_size=4):
        assert torch.equal(generate(model, inputs, False, max_new_tokens=300), expected)
    assert recorder.recordings == 2


def test_within_inference_mode() -> None:
    """The same recording serves calls within and without it."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    with recording(record_trace) as recorder, patched(model, "lookup", tree_size=4):
        with torch.inference_mode():
            assert torch.equal(generate(model, inputs, True), expected)
        assert torch.equal(generate(model, inputs, True), expected)
        with torch.inference_mode():
            assert torch.equal(generate(model, inputs, True), expected)
    assert recorder.recordings == 1 and recorder.replays > 20


def test_the_returned_cache() -> None:
    """It is the caller's: a copy, which the next call does not change."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    with recording(record_nothing), patched(model, "lookup", tree_size=4):
        out = model.generate(**inputs, **options)
        copied = copy.deepcopy(out.past_key_values)
        model.generate(**build_inputs(model, 1, 2), **options)
    for ours, theirs, before in zip(
        out.past_key_values.layers, plain.past_key_values.layers, copied.layers, strict=True
    ):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.keys, before.keys)


# --- proofs without a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm"])
def test_a_round_on_the_meta_device_reads_and_makes_nothing(family: str) -> None:
    model = build_model(tiny.ModelSpec(family)).to("meta")
    text = model.config.get_text_config()
    heads_, size = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    batch, nodes, bucket = 2, 8, 256

    def meta(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    call = CallTensors(meta(batch, 1), meta(1), 300, meta(batch, 384, dtype=torch.bool), {})
    layers = [(meta(2, batch, heads_, 384, size, dtype=model.dtype),)] * text.num_hidden_layers
    tree = root_only(batch, "meta").pad(nodes)
    forward = NodeForward(find_adapter(model), {"use_cache": True, "logits_to_keep": 0})
    lengths, path, counts = meta(batch), meta(batch, nodes), meta(batch)
    with torch.no_grad(), HostCounter() as counter:
        cache = RecordedKVCache(layers, lengths, bucket)
        cache.begin_forward(nodes)
        tree_cache = TreeCache(cache, text.num_hidden_layers)
        logits, first, last = forward(tree, cache, call, (0, text.num_hidden_layers), tree_cache)
        commit_nodes([torch.empty(3, *layers[0][0].shape, device="meta")], lengths, path, counts)
    assert counter.counts == {"reads": 0, "made": 0}
    assert logits.shape == (batch, nodes, text.vocab_size) and first.shape == last.shape


def test_no_value_becomes_a_constant() -> None:
    """`make_fx` on real tensors would turn what the host reads into a constant without a word."""

    def multiply(state: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs * state.sum().item(),)

    def branch(state: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs if bool(state.sum() > 0) else -inputs,)

    state = torch.ones(2)
    replay = record_trace(multiply, [state], [torch.ones(2)])
    state.fill_(3.0)
    assert replay([torch.ones(2)])[0].tolist() == [6.0, 6.0]
    with pytest.raises(Exception, match="data-dependent"):
        trace(branch, [state], [torch.ones(2)])


# --- when nothing is recorded -----------------------------------------------------------------------------------------


def test_what_is_recorded_by_default() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert recorder_for(cuda, "auto", False) is recorder_for(cuda, "recorded", True) is CudaGraphRecorder
    assert recorder_for(cuda, "auto", True) is None, "half precision is rounded differently"
    assert not any(recorder_for(cpu, backend, False) for backend in ("auto", "recorded", "torch", "c"))
    assert not any(recorder_for(cuda, backend, False) for backend in ("torch", "c"))


def test_on_a_cpu_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with patched(model, "none", tree_size=1, backend="recorded"):
        assert all(torch.equal(generate(model, inputs, False), expected) for _ in range(2))
        assert not patch_state(model).lanes._lanes
    found = [record.message for record in caplog.records if "backend='recorded'" in record.message]
    assert len(found) == 1 and "runs eager (nothing records on cpu)" in found[0]


def broken(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose compiler is missing."""
    raise OSError("no compiler")


@pytest.mark.parametrize("recorder", [broken, wrong, fails_later])
def test_a_failure_costs_speed_only(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    with recording(recorder) as counting, patched(model, "lookup", tree_size=4), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(generate(model, inputs, True), expected)
    assert counting.recordings == 2, "whole rounds and forwards alone, neither tried again"
    assert len([record for record in caplog.records if "not recorded" in record.message]) == 1


def change_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)


def change_dtype(model: PreTrainedModel) -> None:
    model.to(torch.float64)


def change_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def change_module(model: PreTrainedModel) -> None:
    model.get_decoder().layers[0].mlp.act_fn = torch.nn.ReLU().eval()


@pytest.mark.parametrize("change", [change_weight, change_dtype, change_attention, change_module])
def test_a_changed_model_is_recorded_anew(change: Callable[[PreTrainedModel], None]) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    with recording(record_trace) as recorder, patched(model, "none"):
        generate(model, inputs, False)
        change(model)
        with mmspec.disabled(model):
            expected = generate(model, inputs, False)
        assert torch.equal(generate(model, inputs, False), expected)
    assert recorder.recordings == 2


def test_calls_that_are_not_recorded() -> None:
    """A cache of the user, and a user's hook."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, patched(model, "lookup", tree_size=4):
        assert torch.equal(generate(model, inputs, False, **{CACHE_ARGUMENT: DynamicCache()}), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model, inputs, False)
        handle = model.get_decoder().layers[0].register_forward_hook(lambda module, args, output: None)
        assert torch.equal(generate(model, inputs, False), expected)
        handle.remove()
        assert recorder.recordings == 0
        assert torch.equal(generate(model, inputs, False), expected) and recorder.recordings == 1


class Changing(BaseStreamer):
    """Changes a model after the fifth token."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change
        self.num_puts = 0

    def put(self, value: Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 6:  # the prompt comes first
            self.change()

    def end(self) -> None:
        """Nothing is kept."""


def _steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.flip(-1)


def _replace_module(model: Any) -> None:
    layer = model.get_decoder().layers[1]
    layer.mlp = copy.deepcopy(layer.mlp)
    layer.mlp.down_proj.weight.data.neg_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.get_decoder().layers[0].mlp.register_forward_hook(_steer),
    "forward": lambda model: setattr(model.get_decoder().norm, "forward", lambda states: states.flip(-1)),
    "constant": lambda model: setattr(model.get_decoder().layers[0].self_attn, "scaling", 3.0),
    "weight": lambda model: setattr(model.get_decoder().norm, "weight", nn.Parameter(torch.arange(SPEC.hidden) / 9)),
    "module": _replace_module,
    "bits": lambda model: model.get_output_embeddings().weight.data.neg_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_streamer_that_changes_the_model_is_seen_by_the_next_round(change: str) -> None:
    """Rounds of one token, so that the next forward is that of plain decoding."""
    plain_model = build_model()
    model, inputs = copy.deepcopy(plain_model), build_inputs(plain_model, 0, 1)
    unchanged = generate(plain_model, inputs, False)
    expected = generate(plain_model, inputs, False, streamer=Changing(lambda: CHANGES[change](plain_model)))
    assert not torch.equal(expected, unchanged)
    with recording(record_trace) as counting, patched(model, "none", tree_size=1):
        found = generate(model, inputs, False, streamer=Changing(lambda: CHANGES[change](model)))
    assert torch.equal(found, expected) and counting.replays > 3
    assert counting.replays < 10 or change == "bits", "a graph reads weights where they lie"


@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3", "qwen3_moe", "lfm2", "gpt_oss"])
def test_models_with_unusual_layers(family: str) -> None:
    """Layers of several shapes or with a state, keys and values of different size, experts chosen by value."""
    model = build_model(tiny.ModelSpec(family))
    inputs = tiny.build_inputs(model, 0, 1, padding="none")
    expected = generate(model, inputs, False)
    with recording(record_trace), patched(model, "lookup", tree_size=4):
        assert torch.equal(generate(model, inputs, False), expected)
        assert torch.equal(generate(model, inputs, False), expected)


def test_two_threads() -> None:
    """The second call does not wait for the first: it runs as without recordings."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    found: list[bool] = []
    inner = threading.Thread(target=lambda: found.append(torch.equal(generate(model, inputs, False), expected)))
    score = HFTarget.score_part

    def score_beside_another_call(self: HFTarget, *args: Any) -> Any:
        if not inner.ident:
            inner.start()
            inner.join()
        return score(self, *args)

    with recording(record_nothing) as recorder, patched(model, "lookup", tree_size=4):
        with mock.patch.object(HFTarget, "score_part", score_beside_another_call):
            assert torch.equal(generate(model, inputs, False), expected)
        assert found == [True] and recorder.recordings == 1
        assert torch.equal(generate(model, inputs, False), expected), "the lane is free again"


def test_a_call_that_raises_returns_the_lane() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, patched(model, "lookup", tree_size=4):
        with (
            mock.patch.object(HFTarget, "follow_part", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            generate(model, inputs, False)
        assert torch.equal(generate(model, inputs, False), expected) and recorder.replays > 5


def test_shapes_of_the_zoo_are_known() -> None:
    assert {"gemma3", "gemma4", "deepseek_v3", "qwen3_moe", "lfm2"} <= set(zoo.ROWS)
