"""Unusual inputs that the loop supports, compared with the plain model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import adversarial as adversarial
import numpy as np
import pytest
import tiny_models as tiny
import torch
from parity import (
    ALL_OUTPUTS,
    FAMILIES,
    GREEDY,
    MODES,
    SAMPLED,
    Kwargs,
    assert_parity,
    generate_plain,
    get_model,
    speculate,
)
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

import mmspec
from mmspec.decode import _draftable_ids
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt
from mmspec.targets.forward import run_forward
from mmspec.targets.registry import find_adapter
from mmspec.targets.selftest import judge

LONG: Kwargs = {**GREEDY, "max_new_tokens": 30, "eos_token_id": None}


# --- nan --------------------------------------------------------------------------------------------------------------


class NanDrafter(adversarial.BranchingDrafter):
    """Proposes a token whose hidden states are nan, beside correct drafts."""

    poison = 0

    def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        tree = super().propose_tree(state, max_nodes, active)
        if tree.num_nodes > 2:
            tree.tokens[:, 2] = self.poison
        return tree


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_token_with_nan_changes_nothing(attention: str, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    """Plain decoding never feeds the token; here it is scored, and its keys and values are nan."""
    model = tiny.build_model(tiny.ModelSpec(seed=31, attention=attention))
    inputs = tiny.build_inputs(model, 27, batch, images=[1] * batch)
    plain = generate_plain(model, inputs, **LONG)
    unused = sorted(set(range(20, 110)) - set(plain.flatten().tolist()))[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[unused] = torch.nan
        model.get_output_embeddings().weight[unused] = -torch.ones_like(model.get_output_embeddings().weight[unused])
    plain = generate_plain(model, inputs, **LONG, return_dict_in_generate=True, output_logits=True)
    liar = NanDrafter(1, [plain.sequences])
    liar.poison = unused
    with speculate(model, liar):
        mine = generate_plain(model, inputs, **LONG, return_dict_in_generate=True, output_logits=True)
        assert not mmspec.stats(model).fallback_calls
    assert torch.equal(mine.sequences, plain.sequences)
    assert torch.allclose(torch.stack(mine.logits), torch.stack(plain.logits), atol=1e-4, equal_nan=True)
    assert any("decoded without drafts" in record.getMessage() for record in caplog.records)


# --- drafters that use the RNG ----------------------------------------------------------------------------------------


class Drawer(adversarial.BranchingDrafter):
    """Draws from the default generator in every method, and reads the noise in between."""

    def begin(self, prompt: Prompt) -> adversarial.DrafterState:
        torch.rand(3)
        self.noise = prompt.noise
        return super().begin(prompt)

    def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        torch.randn(5)
        if self.noise is not None:
            self.noise(3)
        torch.rand(2)
        return super().propose_tree(state, max_nodes, active)

    def observe(self, *args: Any) -> None:
        torch.rand(4)
        super().observe(*args)


@MODES
def test_draws_of_drafters_are_undone(mode: Kwargs) -> None:
    model = get_model(seed=29)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    assert assert_parity(model, inputs, lambda plain: Drawer(1, [plain]), **mode).num_draft_tokens


# --- inputs -----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("family", tiny.FAMILIES[:3])  # the fourth needs int64
def test_ids_in_int32(family: str, mode: Kwargs) -> None:
    model = get_model(family, seed=29)
    inputs = dict(tiny.build_inputs(model, 27, 2, images=[1, 1]))
    inputs["input_ids"] = inputs["input_ids"].int()
    assert assert_parity(model, inputs, "bush", **mode).num_accepted_tokens


@MODES
def test_resized_token_embeddings(mode: Kwargs) -> None:
    """`resize_token_embeddings` after `patch`: the same drafter with another vocabulary."""
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    mmspec.patch(model, tree_size=8)
    model.generate(**inputs, **GREEDY)
    model.resize_token_embeddings(130)
    with mmspec.disabled(model):
        plain = generate_plain(model, inputs, **mode)
    assert torch.equal(generate_plain(model, inputs, **mode), plain)
    assert not mmspec.stats(model).fallback_calls


def test_ids_without_an_embedding_are_not_drafted() -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    adapter = find_adapter(model)
    model.set_input_embeddings(nn.Embedding(100, 32))
    ids = torch.zeros(1, 3, dtype=torch.long)
    prompt = Prompt(ids, ids.bool(), ids.bool(), ids, vocab_size=120, banned_ids=frozenset({4, 7, 500}))
    allowed = _draftable_ids(prompt, adapter, torch.device("cpu"))
    assert (~allowed).nonzero().flatten().tolist() == [4, 7, *range(100, 120)]


@FAMILIES
def test_forward_gets_the_arguments_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model(family, seed=29)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    names: list[list[set[str]]] = [[], []]
    judge(find_adapter(model))  # not in `patch`, whose forwards would be recorded
    for patched in (0, 1):
        forward = type(model).forward

        @functools.wraps(forward)
        def spy(self: Any, *args: Any, calls: Any = names[patched], original: Any = forward, **kwargs: Any) -> Any:
            calls.append({name for name, value in kwargs.items() if value is not None})
            return original(self, *args, **kwargs)

        class Spy:
            """Replaces the model in the loop; a replaced forward would cause a fallback."""

            def __call__(self, **kwargs: Any) -> Any:
                return spy(model, original=type(model).__call__, **kwargs)

        def forward_of_ours(model: Any, *args: Any) -> tuple[Tensor, ...]:
            return run_forward(Spy(), *args)

        with monkeypatch.context() as patcher:
            patcher.setattr("mmspec.targets.forward.run_forward", forward_of_ours)
            patcher.setattr("mmspec.targets.hf.run_forward", forward_of_ours)
            if not patched:
                patcher.setattr(type(model), "forward", spy)
            if patched:
                with speculate(model, "bush", None):
                    model.generate(**inputs, **GREEDY, custom_generate=None)
                    assert not mmspec.stats(model).fallback_calls
            else:
                model.generate(**inputs, **GREEDY)
    plain, mine = names
    assert mine[0] == plain[0], "in the prefill"
    assert all(more - plain[-1] <= {"attention_mask"} for more in mine[1:]), "in a round"


# --- processors and criteria ------------------------------------------------------------------------------------------


class Picky(LogitsProcessor):
    """Checks dtype and layout of its arguments."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.is_contiguous() and input_ids.dtype == torch.long and scores.dtype == torch.float32
        input_ids.view(-1)
        scores[:, 5] += input_ids.float().mean()
        return scores


@MODES
def test_user_processors_are_called_as_in_transformers(mode: Kwargs) -> None:
    model = get_model(seed=29)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    assert_parity(
        model, inputs, "bush", **{**mode, **ALL_OUTPUTS}, logits_processor=lambda: LogitsProcessorList([Picky()])
    )


class StopAtLength(StoppingCriteria):
    """Stops the batch at a length, with a return value of a given form."""

    def __init__(self, length: int, form: Any) -> None:
        self.length, self.form = length, form

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.form(input_ids.shape[1] >= self.length, input_ids.shape[0])


FORMS: dict[str, Any] = {
    "a bool": lambda stop, batch: stop,
    "numpy's bool": lambda stop, batch: torch.as_tensor(np.bool_(stop)),
    "a tensor of none": lambda stop, batch: torch.tensor(stop),
    "a tensor of one": lambda stop, batch: torch.tensor([stop]),
    "integers": lambda stop, batch: torch.full((batch,), int(stop)),
    "even integers": lambda stop, batch: torch.full((batch,), 2 * int(stop)),
    "bytes": lambda stop, batch: torch.full((batch,), int(stop), dtype=torch.uint8),
}


@MODES
@pytest.mark.parametrize("form", FORMS)
def test_return_values_of_criteria(form: str, mode: Kwargs) -> None:
    model = get_model(seed=29)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    stop = inputs["input_ids"].shape[1] + 7
    assert_parity(
        model,
        inputs,
        "oracle",
        **mode,
        stopping_criteria=lambda: StoppingCriteriaList([StopAtLength(stop, FORMS[form])]),
    )


def test_a_length_that_is_not_whole() -> None:
    model = get_model(seed=29)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    length = inputs["input_ids"].shape[1] + 6.5
    make_criteria = lambda: StoppingCriteriaList([MaxLengthCriteria(length)])  # noqa: E731
    assert_parity(model, inputs, "oracle", **GREEDY, stopping_criteria=make_criteria)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_calls_in_threads_are_sampled_independently() -> None:
    """The same prompt at the same time: a shared generator must not give both the same tokens."""
    model = tiny.build_model(tiny.ModelSpec(seed=29, calm=True))
    inputs = tiny.build_inputs(model, 27, 4, images=[1] * 4)
    outputs: dict[int, Tensor] = {}
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    gate = threading.Barrier(2)

    def generate(index: int) -> None:
        gate.wait()
        outputs[index] = model.generate(**inputs, **{**SAMPLED, "temperature": 3.0, "eos_token_id": None})

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start = inputs["input_ids"].shape[1]
    alike = (outputs[0][:, start + 1 :] == outputs[1][:, start + 1 :]).float().mean()
    assert alike < 0.5
