"""The target drafts with some of its own layers, or all: exact, and nothing of the model is changed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import tiny_models as tiny
import torch
import zoo
from forced_drafts import choose_all, planned
from kernels import needs_kernel
from torch import Tensor, nn

import mmspec
from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.model.self_drafter import QuantizedDrafter, SelfDrafter, candidate_layer_sets
from mmspec.economy.chooser import Chooser
from mmspec.targets.draft_model import HFDraftModel
from mmspec.targets.layer_access import layer_access
from mmspec.targets.registry import find_adapter

FAMILIES = ("llava", "qwen2_5_vl", "llava_next", "gemma3", "qwen3_vl")


def _model(family: str = "llava", layers: int = 4) -> Any:
    return tiny.build_model(tiny.ModelSpec(family=family, layers=layers, calm=True))


def _generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(0)
    output: Tensor = model.generate(**inputs, max_new_tokens=20, **options)
    return output


def _own_copy(model: Any) -> ModelDrafter:
    return ModelDrafter(HFDraftModel(copy.deepcopy(model)))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "new_drafter", "backend", "share"),
    [
        pytest.param("llama", _own_copy, "auto", 1.0, id="another model"),
        pytest.param("qwen2_5_vl", lambda model: SelfDrafter(range(4)), "auto", 1.0, id="all layers"),
        pytest.param("qwen2_5_vl", lambda model: QuantizedDrafter(8, range(4)), "auto", 0.8, marks=needs_kernel),
        pytest.param("qwen2_5_vl", lambda model: QuantizedDrafter(8, range(4)), "torch", 0.8, marks=needs_kernel),
    ],
)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_target_itself_drafts_what_it_emits(
    family: str, new_drafter: Any, backend: str, share: float, sample: bool, batch: int
) -> None:
    """Positions, padding, lengths of rows, roll-back and noise are right, or a draft token would be rejected."""
    model = _model(family)
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, seed=3, batch=batch)
    plain = _generate(model, inputs, do_sample=sample, temperature=0.9)
    drafter = new_drafter(model)
    drafter.top_k = 1
    mmspec.patch(model, drafter=drafter, tree_size=4, backend=backend)
    assert torch.equal(plain, _generate(model, inputs, do_sample=sample, temperature=0.9))
    stats = mmspec.stats(model)
    assert stats.num_draft_tokens >= 15 * batch
    # What lies behind the last token is dropped.
    assert stats.num_accepted_tokens >= share * stats.num_draft_tokens - 3 * batch


def test_nothing_of_the_model_changes() -> None:
    model = _model()
    before = {name: (id(module), id(module._modules), list(module._modules)) for name, module in model.named_modules()}
    inputs = tiny.build_inputs(model, seed=1)
    plain = _generate(model, inputs, do_sample=False)
    mmspec.patch(model, drafter="self", tree_size=8)
    assert torch.equal(plain, _generate(model, inputs, do_sample=False))
    assert mmspec.stats(model).num_draft_tokens > 0
    mmspec.unpatch(model)
    assert before == {
        name: (id(module), id(module._modules), list(module._modules)) for name, module in model.named_modules()
    }


def test_the_cache_after_a_call_is_that_of_the_whole_model() -> None:
    model = _model()
    inputs = tiny.build_inputs(model, seed=2)
    options = {"do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**inputs, max_new_tokens=20, **options)
    mmspec.patch(model, drafter="self", tree_size=8)
    drafted = model.generate(**inputs, max_new_tokens=20, **options)
    for one, other in zip(plain.past_key_values.layers, drafted.past_key_values.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_draft_that_fails_leaves_the_lengths_as_they_were(
    backend: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model()
    inputs = tiny.build_inputs(model, seed=1)
    plain = _generate(model, inputs, do_sample=False)
    mmspec.patch(model, drafter="self", tree_size=8, backend=backend)
    with monkeypatch.context() as patched:
        patched.setattr("mmspec.drafters.model.chain_draft.next_log_probs", _raise)
        patched.setattr("mmspec.cpu.chain.Chain.run", _raise)
        assert torch.equal(plain, _generate(model, inputs, do_sample=False))
        assert "'self' failed (planted)" in caplog.text
    assert torch.equal(plain, _generate(model, inputs, do_sample=False))


def _raise(*args: Any) -> Tensor:
    raise RuntimeError("planted")


def test_layer_sets() -> None:
    for num_layers in range(2, 40):
        sets = candidate_layer_sets(num_layers)
        assert sets and all(0 < len(layers) < num_layers and layers[-1] < num_layers for layers in sets)
        assert all(list(layers) == sorted(set(layers)) for layers in sets)
    assert (0, 1, 3, 5, 7, 8, 9) not in candidate_layer_sets(10, exit_limit=6)
    assert candidate_layer_sets(10, exit_limit=6) == [tuple(range(5)), tuple(range(6)), tuple(range(2))]


def test_models_that_cannot_draft_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    recurrent = next(family for family in zoo.ROWS if family in ("qwen3_5", "lfm2_vl", "lfm2"))
    with pytest.raises(ValueError, match=r"drafter='self'.*recurrent"):
        mmspec.patch(_model(recurrent), drafter="self")
    model = _model()
    model.model.language_model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match=r"drafter='self'.*LlamaModel.*hooks"):
        layer_access(find_adapter(model))
    model = _model()
    model.model.language_model.more = nn.ModuleList([nn.Identity() for _ in range(4)])
    with pytest.raises(ValueError, match=r"drafter='self'.*one list of 4 decoder layers.*found 2"):
        layer_access(find_adapter(model))
    with pytest.raises(ValueError, match=r"drafter='self'.*of which LlavaForConditionalGeneration has 1"):
        layer_access(find_adapter(_model(layers=1)))
    model = mmspec.patch(_model(), drafter=SelfDrafter([0, 9]))
    inputs = tiny.build_inputs(model, seed=1)
    _generate(model, inputs, do_sample=False)
    assert "below the target's number of decoder layers, 4" in caplog.text
    for layers in ((), (2, 1), (-1,)):
        with pytest.raises(ValueError, match="layers must be rising"):
            SelfDrafter(layers)


@pytest.mark.parametrize("batch", [1, 3])
def test_other_layers_are_skipped_in_compiled_rounds_too(batch: int) -> None:
    """The same tree in every round, whether the rounds run in C or in the model's own forward."""
    model = tiny.build_model(tiny.ModelSpec(layers=5))
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, seed=3, batch=batch)
    counts = []
    for layers, backend in (((0, 2), "auto"), ((0, 2), "torch"), (range(5), "auto")):
        mmspec.patch(model, drafter=SelfDrafter(layers), tree_size=8, backend=backend)
        _generate(model, inputs, do_sample=False)
        stats = mmspec.stats(model)
        counts.append((stats.num_draft_tokens, stats.num_accepted_tokens))
        mmspec.unpatch(model)
    assert counts[0] == counts[1]
    few, all_layers = (accepted / drafted for drafted, accepted in (counts[0], counts[2]))
    assert few < 0.7 * all_layers, "two layers are not the model"


def test_costs_are_kept_by_the_rows_that_have_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose rows have ended must not plan the next batch's drafts, nor the other way round."""
    model = _model()
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, seed=3, batch=5)
    tokens = _generate(model, inputs, do_sample=False)[:, -20:].tolist()
    ends = [row[step] for row, step in zip(tokens, (1, 3, 6, 9), strict=False)]
    drafts: Counter[int] = Counter()
    drafter: Any = None
    propose = SelfDrafter.propose

    def spy(self: SelfDrafter, state: Any, max_nodes: int, active: Any) -> Any:
        nonlocal drafter
        tree, drafter, rows = propose(self, state, max_nodes, active), state.prompt.chooser, sum(active)
        drafts[5 if rows > 4 else 4 if rows > 2 else rows] += tree.num_nodes > 1
        return tree

    monkeypatch.setattr(SelfDrafter, "propose", spy)
    monkeypatch.setattr(Chooser, "choose_size", choose_all)
    monkeypatch.setattr(Chooser, "plan", planned())
    mmspec.patch(model, drafter=SelfDrafter(range(3)))
    _generate(model, inputs, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert len(+drafts) > 2, "rows do not end one by one"
    assert {rows for _, rows, *_ in drafter.economy.drafts_s.snapshot()} == (+drafts).keys()


@pytest.mark.every(2)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_row_drafts_the_same_bits_whether_others_do(
    backend: str, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("qwen2_5_vl")
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, seed=3, batch=3)
    plain = _generate(model, inputs, do_sample=sample, temperature=0.9)
    propose, num_compared = SelfDrafter.propose, 0

    def twice(self: SelfDrafter, state: Any, max_nodes: int, active: Any) -> Any:
        nonlocal num_compared
        some = [on and row != 1 for row, on in enumerate(active)]
        alone, together = (propose(self, state, max_nodes, rows) for rows in (some, active))
        for row in (row for row, on in enumerate(some) if on):
            for name in ("tokens", "parents", "node_mask", "scores"):
                assert torch.equal(getattr(alone, name)[row], getattr(together, name)[row])
            num_compared += 1
        return together

    monkeypatch.setattr(SelfDrafter, "propose", twice)
    mmspec.patch(model, drafter=SelfDrafter(range(3)), tree_size=4, backend=backend)
    assert torch.equal(plain, _generate(model, inputs, do_sample=sample, temperature=0.9))
    assert num_compared > 10
