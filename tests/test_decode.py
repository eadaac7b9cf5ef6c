"""What users hand in that is a little unusual, and still is served by the loop: compared with the plain model."""

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
from mmspec.targets.hf import HFTarget
from mmspec.targets.registry import find_adapter

LONG: Kwargs = {**GREEDY, "max_new_tokens": 30, "eos_token_id": None}


# --- nan --------------------------------------------------------------------------------------------------------------


class Poisoner(adversarial.BranchingDrafter):
    """Proposes a token whose states are nan, beside good guesses."""

    poison = 0

    def propose_tree(self, state: adversarial.DrafterState, budget: int, live: Sequence[bool]) -> DraftTree:
        tree = super().propose_tree(state, budget, live)
        if tree.num_nodes > 2:
            tree.tokens[:, 2] = self.poison
        return tree


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_guess_that_is_nan_spoils_nothing(attention: str, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    """A plain run never meets the token; here it is scored beside the others, and its keys and values are nan."""
    model = tiny.build_model(tiny.ModelSpec(seed=31, attention=attention))
    given = tiny.build_inputs(model, 27, batch, images=[1] * batch)
    plain = generate_plain(model, given, **LONG)
    unsaid = sorted(set(range(20, 110)) - set(plain.flatten().tolist()))[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[unsaid] = torch.nan
        model.get_output_embeddings().weight[unsaid] = -torch.ones_like(model.get_output_embeddings().weight[unsaid])
    plain = generate_plain(model, given, **LONG, return_dict_in_generate=True, output_logits=True)
    liar = Poisoner(1, [plain.sequences])
    liar.poison = unsaid
    with speculate(model, liar):
        mine = generate_plain(model, given, **LONG, return_dict_in_generate=True, output_logits=True)
        assert not mmspec.stats(model).fallback_calls
    assert torch.equal(mine.sequences, plain.sequences)
    assert torch.allclose(torch.stack(mine.logits), torch.stack(plain.logits), atol=1e-4, equal_nan=True)
    assert any("decoded without drafts" in record.getMessage() for record in caplog.records)


# --- drafters that draw -----------------------------------------------------------------------------------------------


class Drawer(adversarial.BranchingDrafter):
    """Draws from the generator that tokens are sampled with, wherever it can, and looks at the noise in between."""

    def begin(self, prompt: Prompt) -> adversarial.DrafterState:
        torch.rand(3)
        self.noise = prompt.noise
        return super().begin(prompt)

    def propose_tree(self, state: adversarial.DrafterState, budget: int, live: Sequence[bool]) -> DraftTree:
        torch.randn(5)
        if self.noise is not None:
            self.noise(3)
        torch.rand(2)
        return super().propose_tree(state, budget, live)

    def observe(self, *args: Any) -> None:
        torch.rand(4)
        super().observe(*args)


@MODES
def test_drafters_that_draw_leave_no_trace(mode: Kwargs) -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    assert assert_parity(model, given, lambda plain: Drawer(1, [plain]), **mode).num_draft_tokens


# --- inputs -----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("family", tiny.FAMILIES[:3])  # the fourth asks for int64
def test_ids_in_int32(family: str, mode: Kwargs) -> None:
    model = get_model(family, seed=29)
    given = dict(tiny.build_inputs(model, 27, 2, images=[1, 1]))
    given["input_ids"] = given["input_ids"].int()
    assert assert_parity(model, given, "bush", **mode).num_accepted_tokens


@MODES
def test_more_tokens_than_the_model_was_made_with(mode: Kwargs) -> None:
    """`resize_token_embeddings` after `patch`: the same drafter goes on with another vocabulary."""
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    mmspec.patch(model, tree_size=8)
    model.generate(**given, **GREEDY)
    model.resize_token_embeddings(130)
    with mmspec.disabled(model):
        plain = generate_plain(model, given, **mode)
    assert torch.equal(generate_plain(model, given, **mode), plain)
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
def test_forward_is_given_what_transformers_gives_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model(family, seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    names: list[list[set[str]]] = [[], []]
    for patched in (0, 1):
        forward = type(model).forward

        @functools.wraps(forward)
        def spy(self: Any, *args: Any, seen: Any = names[patched], original: Any = forward, **kwargs: Any) -> Any:
            seen.append({name for name, value in kwargs.items() if value is not None})
            return original(self, *args, **kwargs)

        class Spy:
            """Stands for the model in our loop; a replaced forward would send the call the plain way."""

            def __call__(self, **kwargs: Any) -> Any:
                return spy(model, original=type(model).__call__, **kwargs)

        def forward_of_ours(target: HFTarget, *args: Any, original: Any = HFTarget._forward, **kwargs: Any) -> Any:
            with monkeypatch.context() as swapped:
                swapped.setattr(target, "model", Spy())
                return original(target, *args, **kwargs)

        with monkeypatch.context() as patcher:
            patcher.setattr(HFTarget, "_forward", forward_of_ours)
            if not patched:
                patcher.setattr(type(model), "forward", spy)
            if patched:
                with speculate(model, "bush", None):
                    model.generate(**given, **GREEDY, custom_generate=None)
                    assert not mmspec.stats(model).fallback_calls
            else:
                model.generate(**given, **GREEDY)
    plain, mine = names
    assert mine[0] == plain[0], "in the prefill"
    assert all(more - plain[-1] <= {"attention_mask"} for more in mine[1:]), "in a round"


# --- processors and criteria ------------------------------------------------------------------------------------------


class Picky(LogitsProcessor):
    """Wants what transformers gives it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.is_contiguous() and input_ids.dtype == torch.long and scores.dtype == torch.float32
        input_ids.view(-1)
        scores[:, 5] += input_ids.float().mean()
        return scores


@MODES
def test_processors_of_ones_own_are_called_as_transformers_does(mode: Kwargs) -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    assert_parity(
        model, given, "bush", **{**mode, **ALL_OUTPUTS}, logits_processor=lambda: LogitsProcessorList([Picky()])
    )


class Saying(StoppingCriteria):
    """Stops everything at a length, and says so in some way of its own."""

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
def test_criteria_may_answer_in_many_ways(form: str, mode: Kwargs) -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    stop = given["input_ids"].shape[1] + 7
    assert_parity(
        model, given, "oracle", **mode, stopping_criteria=lambda: StoppingCriteriaList([Saying(stop, FORMS[form])])
    )


def test_a_length_that_is_not_whole() -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    length = given["input_ids"].shape[1] + 6.5
    made = lambda: StoppingCriteriaList([MaxLengthCriteria(length)])  # noqa: E731
    assert_parity(model, given, "oracle", **GREEDY, stopping_criteria=made)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_calls_in_threads_are_sampled_independently() -> None:
    """The same prompt at the same time: a shared generator must not give both the same words."""
    model = tiny.build_model(tiny.ModelSpec(seed=29, calm=True))
    given = tiny.build_inputs(model, 27, 4, images=[1] * 4)
    said: dict[int, Tensor] = {}
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    gate = threading.Barrier(2)

    def speak(which: int) -> None:
        gate.wait()
        said[which] = model.generate(**given, **{**SAMPLED, "temperature": 3.0, "eos_token_id": None})

    threads = [threading.Thread(target=speak, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start = given["input_ids"].shape[1]
    alike = (said[0][:, start + 1 :] == said[1][:, start + 1 :]).float().mean()
    assert alike < 0.5
