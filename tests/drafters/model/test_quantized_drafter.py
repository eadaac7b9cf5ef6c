"""A copy of the target in few bits drafts for it: exact, like its model, and never more than it can pay for."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import tiny_models as tiny
import torch
from forced_drafts import choose_all, planned
from spies import spy_on
from torch import Tensor, nn

import mmspec
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.drafters.model.self_drafter import QuantizedDrafter, SelfDrafter
from mmspec.drafters.ngram.output_ngrams import text_ngrams
from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Economy
from mmspec.economy.tables import Seconds
from mmspec.patching import patch_state
from mmspec.targets import quantised_copy as module
from mmspec.targets.quantised_copy import QuantisedCopy

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="needs the C kernel")
FAMILIES = ("llava", "qwen2_5_vl", "gemma3")


def _model(family: str = "llava", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = tiny.build_model(tiny.ModelSpec(family=family, layers=4, calm=True, **options)).to(dtype)
    model.generation_config.eos_token_id = None
    return model


def _generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(0)
    output: Tensor = model.generate(**inputs, max_new_tokens=20, **options)
    return output


def _copy(model: Any) -> QuantisedCopy:
    (found,) = patch_state(model).adapter.__dict__["_quantised_copies"].values()
    assert isinstance(found, QuantisedCopy)
    return found


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 8.5 / 32), (torch.bfloat16, 8.5 / 16)])
def test_what_a_copy_reads_is_expected_from_its_bytes(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is made, of the most bits that it may have; then as it is."""
    found = spy_on(monkeypatch, QuantizedDrafter, "prior", lambda prior, *_: prior[1])
    model = _model(dtype=dtype)
    inputs = tiny.build_inputs(model, seed=1)
    _generate(mmspec.patch(model, "arbitrated"), inputs)
    assert found[:2] == pytest.approx([share, share / 2], rel=0.05), "all layers, and half of them"
    found.clear()
    _generate(mmspec.patch(mmspec.unpatch(model), "quantized"), inputs)
    copied = _copy(model)
    read = sum(model.get_submodule(name).weight.nbytes for name in copied.layers)
    assert found[0] == pytest.approx(copied.nbytes / read, rel=0.01)


@pytest.mark.every(2)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_guide_changes_no_draft(sample: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the copy drafts is the same whether it scores one token at a time or guesses by n-grams too."""
    monkeypatch.setattr(Chooser, "choose_size", choose_all)
    monkeypatch.setattr(Chooser, "plan", planned(levels=6))
    monkeypatch.setattr(Seconds, "get", lambda self, what, rows, size: 1 + 0.1 * size)  # not measured
    model = _model("qwen2_5_vl")
    inputs = tiny.build_inputs(model, seed=3, batch=batch)
    plain = _generate(model, inputs, do_sample=sample, temperature=0.3)
    drafter, num_forwards, num_tokens = QuantizedDrafter(8, guide=text_ngrams()), 0, 0

    class Twice(QuantizedDrafter):
        """Drafts with and without its guide."""

        def propose(self, state: Any, max_nodes: int, active: Any) -> Any:
            nonlocal num_forwards, num_tokens
            guide, self.guide = self.guide, None
            alone = super().propose(state, 7, active)
            self.guide = guide
            chains = CKernel.chain

            def count_in_c(kernel: Any, *args: Any) -> int:
                nonlocal num_forwards
                num_forwards += chains(kernel, *args)
                return num_forwards

            with monkeypatch.context() as patched:
                patched.setattr(CKernel, "chain", count_in_c)
                guided = super().propose(state, 7, active)
            num_tokens += state.prompt.chooser.levels
            for one, other in zip(_paths(alone), _paths(guided), strict=True):
                assert one == other
            return guided

    drafter.__class__ = Twice
    mmspec.patch(model, drafter=drafter)
    for _ in range(2):  # the second call finds the first one's successors
        assert torch.equal(plain, _generate(model, inputs, do_sample=sample, temperature=0.3))
    saved = 0.9 if batch == 1 else 1.01  # rows of a batch take no guesses
    assert 0 < num_forwards < saved * num_tokens


def _paths(tree: Any) -> list[set[tuple[int, ...]]]:
    """The paths of each row's tree from the root, as tokens."""
    rows = []
    for tokens, parents, mask in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.node_mask.tolist(), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]) if mask[node] else ())
        rows.append(set(paths))
    return rows


@pytest.mark.parametrize("batch", [1, 3])
def test_a_copy_is_an_arm_once_it_can_pay(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    inputs = tiny.build_inputs(model, seed=3, batch=batch)
    plain = _generate(model, inputs, do_sample=True)
    mmspec.patch(model, drafter="auto")
    copies = patch_state(model).adapter.__dict__
    monkeypatch.setattr(Economy, "make_s", lambda self, rows: float("inf"))
    assert torch.equal(plain, _generate(model, inputs, do_sample=True))
    assert not copies.get("_quantised_copies"), "short answers do not pay for a copy"
    assert "a copy in few bits" in str(mmspec.stats(model, last=True))
    monkeypatch.setattr(Economy, "make_s", lambda self, rows: 0.0)
    monkeypatch.setattr(Chooser, "plan", planned(last=True))
    assert torch.equal(plain, _generate(model, inputs, do_sample=True))
    assert copies["_quantised_copies"][0].layers and mmspec.stats(model, last=True).num_accepted_tokens > 0
    assert mmspec.stats(model, last=True).waits_for is None


def test_no_memory_for_a_copy_leaves_the_other_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Economy, "make_s", lambda self, rows: 0.0)
    monkeypatch.setattr(module, "free_bytes", lambda: 1000)
    model = _model()
    inputs = tiny.build_inputs(model, seed=3)
    plain = _generate(model, inputs, do_sample=False)
    mmspec.patch(model, drafter="auto")
    for _ in range(2):
        assert torch.equal(plain, _generate(model, inputs, do_sample=False))
    assert module.num_copied_weights(patch_state(model).adapter) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_in_half_precision(dtype: torch.dtype) -> None:
    model = _model(dtype=dtype)
    mmspec.patch(model, drafter="quantized", tree_size=4, deterministic=True)
    for seed in range(3, 7):  # of one prompt some two dozen tokens are drafted: whether half are accepted is chance
        inputs = tiny.build_inputs(model, seed=seed)
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        first = _generate(model, inputs, do_sample=False)
        assert torch.equal(first, _generate(model, inputs, do_sample=False))
    stats = mmspec.stats(model)
    assert stats.num_accepted_tokens >= 0.5 * stats.num_draft_tokens > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [QuantizedDrafter, SelfDrafter])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_draft_leaves_in_the_cache_is_never_read(
    kind: type[SelfDrafter], backend: str, batch: int, monkeypatch: Any, caplog: Any
) -> None:
    """Of a draft longer than the tree that is scored, in rows of several lengths, nothing overwrites the end."""
    model = _model()
    inputs = tiny.build_inputs(model, seed=3, batch=batch)
    plain = _generate(model, inputs, do_sample=True)
    num_planted = 0

    def close_chain(self: SelfDrafter, state: Any, chain: Any) -> None:
        nonlocal num_planted
        buffer, first = chain.target.buffer, chain.target.prompt_length
        with torch.inference_mode():
            for row, (length, end) in enumerate(zip(state.cached_lengths, buffer.seq_lens, strict=True)):
                for ((keys, values),) in buffer.layers:
                    keys[row, :, first + length : end] = float("nan")
                    values[row, :, first + length : end] = float("inf")
        num_planted += len(set(state.cached_lengths)) > 1 or batch == 1
        close(self, state, chain)

    def propose(self: SelfDrafter, state: Any, max_nodes: int, active: Any) -> Any:
        return whole(self, state, 9, active).trim(max_nodes)

    close, whole = SelfDrafter.close_chain, SelfDrafter.propose
    monkeypatch.setattr(SelfDrafter, "close_chain", close_chain)
    monkeypatch.setattr(SelfDrafter, "propose", propose)
    drafter = kind(layers=(0, 1, 2))
    drafter.top_k = 1
    mmspec.patch(model, drafter=drafter, tree_size=4, backend=backend)
    assert torch.equal(plain, _generate(model, inputs, do_sample=True)) and num_planted
    assert not caplog.records, "nan ends the drafting of a call, with a warning"


@pytest.mark.parametrize(("limit", "least", "bits"), [(10**9, 1.1, {8}), (10**9, 0.0, {4, 8}), (0, 1.1, {4, 8})])
def test_the_copy_depends_on_the_weights_alone_and_is_freed(
    limit: int, least: float, bits: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models have 4 bits but for the LM head, small ones if these agree with the model, else 8."""
    monkeypatch.setattr(module, "FEW_WEIGHTS", limit)
    monkeypatch.setattr(module, "MIN_AGREEMENT", least)
    model, random_state = _model(), torch.get_rng_state()
    mmspec.patch(model.train(), drafter="quantized", deterministic=True)
    first = {name: one.weight.data for name, one in _copy(model).layers.items()}
    assert torch.equal(torch.get_rng_state(), random_state) and len(first) == 4 * 7 + 1
    assert {one.weight.bits for one in _copy(model).layers.values()} == bits
    alive = weakref.ref(_copy(model))
    mmspec.unpatch(model.eval())
    assert alive() is None, "at once: not when cycles are collected"
    mmspec.patch(model, drafter="quantized")
    _generate(model, tiny.build_inputs(model, seed=1))
    assert all(torch.equal(first[name], one.weight.data) for name, one in _copy(model).layers.items())
    twin = copy.deepcopy(model)
    _generate(twin, tiny.build_inputs(twin, seed=1))
    assert _copy(twin).model is twin and _copy(model).model is model


def test_weights_of_too_few_bits_are_freed_before_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both would be in memory; the head has 8 bits in both copies, and is made once."""
    monkeypatch.setattr(module, "MIN_AGREEMENT", 1.1)
    quantise, made, counts = QuantisedCopy._quantise, list[weakref.ref[Tensor]](), list[int]()

    def watched(self: QuantisedCopy, *args: Any) -> Any:
        gc.collect()
        assert not any(one() is not None for one in made)
        found = quantise(self, *args)
        counts.append(len(found))
        made.extend(weakref.ref(one.data) for one in found.values() if one.bits == 4)  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(QuantisedCopy, "_quantise", watched)
    mmspec.patch(_model(), drafter="quantized")
    assert len(made) == 4 * 7 and counts == [4 * 7 + 1, 4 * 7]


def test_changed_weights_are_copied_anew_and_in_the_end_not_at_all(caplog: Any, monkeypatch: Any) -> None:
    caplog.set_level(logging.INFO, "mmspec")
    model = mmspec.patch(_model(), drafter="quantized", tree_size=4)
    inputs = tiny.build_inputs(model, seed=1)
    weight = model.model.language_model.layers[1].mlp.up_proj.weight
    changes = [
        lambda: weight.data.mul_(1.25),  # as an adapter is merged: no version counter counts it
        lambda: weight.detach()[0].zero_(),
        lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach() * 1.25)),
    ]
    for change in changes:
        before = _copy(model).layers
        with torch.no_grad():
            change()
        _generate(model, inputs)
        assert _copy(model).layers and _copy(model).layers is not before
        assert "made anew" in caplog.messages[-1]
        _generate(model, inputs)
        assert len([message for message in caplog.messages if "made anew" in message]) == changes.index(change) + 1
    weight.data.mul_(1.25)
    num_drafted = mmspec.stats(model).num_draft_tokens
    _generate(model, inputs)
    assert not _copy(model).layers and "copy of them is off" in caplog.messages[-1]
    _generate(model, inputs)
    assert mmspec.stats(model).num_draft_tokens == num_drafted


def test_a_copy_that_cannot_be_made_is_refused(monkeypatch: Any) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "free_bytes", lambda: 1000)
        with pytest.raises(ValueError, match=r"must be free; free are 0 MiB.*hybrid"):
            mmspec.patch(_model(), drafter="quantized")
    with monkeypatch.context() as patched:
        patched.setattr(module, "quantise", _out_of_memory)
        with pytest.raises(ValueError, match=r"cannot copy the weights.*not enough memory.*hybrid"):
            mmspec.patch(_model(), drafter="quantized")
    with monkeypatch.context() as patched:
        patched.setattr(module, "load_kernel", lambda: None)
        with pytest.raises(ValueError, match="needs the C kernel"):
            mmspec.patch(_model(), drafter="quantized")
    model = _model()
    for layer in model.model.language_model.layers:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, projection, _Packed(getattr(layer.mlp, projection)))
    with pytest.raises(ValueError, match=r"quantised already"):
        mmspec.patch(model, drafter="quantized")
    with pytest.raises(ValueError, match="runs on a CPU; the model is on cuda"):
        module.kernel_for(torch.device("cuda"))
    with pytest.raises(ValueError, match="bits must be 4, 8 or None; got 3"):
        QuantizedDrafter(3)


def _made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return _model()


def _with_replaced_forwards() -> Any:
    """As a library for offloading leaves it."""
    model = _model()
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.forward = layer.forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_made_in_inference_mode, "made under torch.inference_mode"),
        (_with_replaced_forwards, "in layers whose forward was replaced"),
        (lambda: _model(dtype=torch.float64), "in float64"),
        (lambda: tiny.build_model(tiny.ModelSpec("qwen3_moe", layers=4)), "experts"),
    ],
)
def test_the_reason_is_that_of_most_weights(build: Any, reason: str) -> None:
    model = build()
    with pytest.raises(
        ValueError, match=rf"\d+% of the decoder of {type(model).__name__}: .*{reason}.*hybrid"
    ) as error:
        mmspec.patch(model, drafter="quantized")
    assert len(str(error.value)) <= 300


def _out_of_memory(*args: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


class _Packed(nn.Linear):
    """A linear layer of another class, as quantisers of other libraries have."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.load_state_dict(layer.state_dict())
