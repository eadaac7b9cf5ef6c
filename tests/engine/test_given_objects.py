"""Drafters and observers of the user that write into what they are given change neither tokens nor inputs."""

from __future__ import annotations

from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from parity import ALL_OUTPUTS, MODES, Kwargs, assert_parity, get_model, speculate
from torch import Tensor
from transformers import StoppingCriteria

import mmspec
from mmspec.interfaces import DrafterRequirements


class Never(StoppingCriteria):
    """User code that ends nothing."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def scribble(value: Any) -> None:
    """Write into every tensor and list below a value."""
    if isinstance(value, Tensor):
        value.copy_(torch.zeros_like(value) if value.dtype == torch.bool else torch.full_like(value, 9))
    elif isinstance(value, dict):
        for part in value.values():
            scribble(part)
    elif isinstance(value, list):
        for part in value:
            scribble(part)
        value.clear()
    elif hasattr(value, "__dataclass_fields__"):
        scribble({name: part for name, part in vars(value).items() if name != "shared_embeddings"})


class Scribbling(adversarial.OracleDrafter):
    """Writes into all that it is given and into the tree that it has returned."""

    requirements = DrafterRequirements((1,), media_inputs=True)
    tree: Any = None

    def begin(self, prompt: Any) -> Any:
        state = super().begin(prompt)
        scribble(prompt)
        if prompt.noise is not None:
            scribble(prompt.noise(2))
        return state

    def propose(self, state: Any, max_nodes: int, active: Any) -> Any:
        self.tree = super().propose(state, max_nodes, active)
        scribble(active)
        return self.tree

    def observe(self, state: Any, result: Any, hidden_states: Any) -> None:
        super().observe(state, result, hidden_states)
        scribble([self.tree, result, dict(hidden_states)])


@MODES
@pytest.mark.parametrize(
    "options", [{}, ALL_OUTPUTS, {"stopping_criteria": [Never()]}], ids=["", "outputs", "criterion"]
)
def test_a_drafter_that_writes_into_what_it_is_given(mode: Kwargs, options: Kwargs) -> None:
    model = get_model("qwen2_5_vl")
    given = tiny.build_inputs(model, 14, 2, images=[1, 1])
    before = {name: value.clone() for name, value in given.items()}
    more = {**mode, **options, "max_new_tokens": 12, "eos_token_id": None}
    stats = assert_parity(model, given, lambda plain: Scribbling(1, [plain]), **more)
    assert stats.num_accepted_tokens and all(torch.equal(value, before[name]) for name, value in given.items())


def test_an_observer_that_writes_into_what_it_is_told() -> None:
    model = get_model("llava")
    given = tiny.build_inputs(model, 14, 2)
    options: Kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)
    with speculate(model, adversarial.OracleDrafter(1, [plain] * 2)):
        found = model.generate(
            **given, **options, mmspec={"observers": [lambda one: scribble([one.prompt, one.result])]}
        )
        stats = mmspec.stats(model, last=True)
    assert torch.equal(found, plain) and stats.num_accepted_tokens and sum(stats.row_tokens) == 24
