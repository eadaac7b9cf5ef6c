"""Numbers that no call needs, and that scripts pass: the same tokens as plain `generate`, or the same error."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import Kwargs, get_model

INF, NAN = float("inf"), float("nan")
LENGTHS: list[Kwargs] = [
    *({name: value} for name in ("max_new_tokens", "max_length") for value in (2**62, 2**63 - 1, 10**30, INF)),
    *({"max_length": NAN}, {"max_new_tokens": 10.5}, {"max_length": 30.5}, {"max_length": torch.tensor(30)}),
    *({"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_length": -INF}, {"max_time": INF, "max_new_tokens": 9}),
]
MODES: list[Kwargs] = [
    *({"num_beams": value} for value in (0, -1, 1.0, True, "1", None)),
    *({"num_beam_groups": 0}, {"penalty_alpha": -0.5}, {"penalty_alpha": 0.5, "top_k": 1}, {"penalty_alpha": "0"}),
    *(
        {"guidance_scale": 0},
        {"num_return_sequences": 0},
        {"num_return_sequences": -1},
        {"num_return_sequences": "2"},
        {"temperature": 0.0, "do_sample": True},
    ),
]
PADDING: list[Kwargs] = [{"pad_token_id": value} for value in (-1, -100, 120, 10**7, 2**63 - 1, torch.tensor(500))]


def outcome(model: Any, given: tiny.Inputs, options: Kwargs) -> Any:
    """The sequences and the generator's state, or the error."""
    torch.manual_seed(0)
    try:
        found = model.generate(**given, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("(Tensor")[0]
    return found.tolist(), torch.get_rng_state().tolist()


@pytest.mark.every(2)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cases", [LENGTHS, MODES, PADDING], ids=["lengths", "modes", "padding"])
def test_odd_numbers(cases: list[Kwargs], batch: int) -> None:
    model = get_model("llama")
    given = tiny.build_inputs(model, 4, batch)
    torch.manual_seed(0)
    free = model.generate(**given, max_new_tokens=16, do_sample=False, eos_token_id=None)
    ends = [int(row[at]) for row, at in zip(free, (-1, -9), strict=False)]  # rows end at different steps
    for case in cases:
        options: Kwargs = {"do_sample": False, "eos_token_id": ends, **case}
        if not {*case} & {"max_new_tokens", "max_length"}:
            options["max_new_tokens"] = 16
        plain = outcome(model, given, options)
        with patch_model(model, "hybrid", tree_size=6):
            assert outcome(model, given, options) == plain, case
    assert batch == 1 or cases is not PADDING or isinstance(plain, str), "finished rows must be padded in a forward"
