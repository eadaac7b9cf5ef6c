"""`compare` on tiny models: no false differences, planted differences are found, no side effects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import adversarial as adversarial
import pytest
import tiny_models as tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

import mmspec
from mmspec.comparison import replicate
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}


@lru_cache
def _model(family: str) -> PreTrainedModel:
    return tiny.build_model(tiny.ModelSpec(family, seed=4))


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A patched model without an eos token."""
    model = _model("llava")
    model.generation_config.eos_token_id = None
    mmspec.patch(model, drafter=adversarial.MalformedDrafter(1), tree_size=8)
    yield model
    mmspec.unpatch(model)
    model.generation_config.eos_token_id = tiny.special_ids(model.tiny_spec).eos


def plant(monkeypatch: pytest.MonkeyPatch, row: int, column: int, shift: int = 1) -> None:
    """Plant a bug: the loop samples another token at one position."""
    sample = TreeSampler.sample

    def wrong(
        self: TreeSampler,
        logits: Tensor,
        tree: DraftTree,
        sequences: Tensor,
        num_emitted: list[int],
        *rest: Any,
        **options: Any,
    ) -> Any:
        sampled_ids, scores, is_nan = sample(self, logits, tree, sequences, num_emitted, *rest, **options)
        assert tree.depths is not None
        here = tree.depths[row] + num_emitted[row] == column
        sampled_ids[row] = torch.where(here, (sampled_ids[row] + shift) % logits.shape[-1], sampled_ids[row])
        return sampled_ids, scores, is_nan

    monkeypatch.setattr(TreeSampler, "sample", wrong)


# --- nothing to find --------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_identical(family: str, options: dict[str, Any]) -> None:
    model = _model(family)
    mmspec.patch(model, drafter=adversarial.BranchingDrafter(1), tree_size=8)
    given = tiny.build_inputs(model, 3, 2)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    found = mmspec.compare(model, given, **options)
    assert torch.equal(torch.get_rng_state(), state), "the generator was touched"
    mmspec.unpatch(model)
    assert found.identical and (found.rows, found.rows_identical) == (2, 2) and found.first_divergence is None
    assert torch.equal(found.plain_ids, found.patched_ids)
    torch.manual_seed(11)
    assert torch.equal(model.generate(**given, **options), found.plain_ids), "what a call now would have given"


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_both_runs_take_place(model: PreTrainedModel, options: dict[str, Any]) -> None:
    before = mmspec.stats(model).calls
    given = tiny.build_inputs(model, 3, 1)
    found = mmspec.compare(model, given, repeats=3, **options)
    assert mmspec.stats(model).calls - before == 4, "a pair to warm up, and three that count"
    assert len(found.plain) == len(found.patched) == 3 and found.stats.calls == 3
    assert found.stats.tokens == 36 and found.tau == found.stats.tau
    assert all(run.tokens == 11 for run in (*found.plain, *found.patched))
    for run in (*found.plain, *found.patched):
        assert 0 < run.ttft_s < run.total_s and 0 < run.decode_s < run.total_s
    assert found.speedup_decode > 0 and found.speedup_e2e > 0
    assert abs(found.round_cost * found.speedup_decode - found.tau) < 1e-6


def test_dictionaries_stop_strings_and_criteria_of_the_caller(model: PreTrainedModel) -> None:
    log, given = adversarial.CallLog(), tiny.build_inputs(model, 3, 2)
    length = given["input_ids"].shape[1]
    own = StoppingCriteriaList([adversarial.Plain(log, length, 0)])
    found = mmspec.compare(model, given, **GREEDY, stopping_criteria=own, return_dict_in_generate=True)
    assert found.identical and found.plain_ids.shape[1] == length + 5
    assert len(log.calls) == 10 and len(own) == 1
    texts = tiny.token_texts(model.tiny_spec)
    stop = texts[int(found.plain_ids[0, length + 1])]
    found = mmspec.compare(model, given, **GREEDY, stop_strings=stop, tokenizer=tiny.build_tokenizer(model.tiny_spec))
    assert found.identical and found.plain_ids.shape[1] <= length + 12


def test_several_sequences_per_prompt(model: PreTrainedModel) -> None:
    found = mmspec.compare(model, tiny.build_inputs(model, 3, 2), **SAMPLED, num_return_sequences=2)
    assert found.identical and found.rows == 4 and found.plain[0].tokens == 4 * 11


def test_a_request_that_falls_back(model: PreTrainedModel) -> None:
    found = mmspec.compare(model, tiny.build_inputs(model, 3, 1), **GREEDY, num_beams=2)
    assert found.identical and found.stats.fallback_calls == 1 and found.tau == 1.0
    json.dumps(found.as_dict())
    assert "outputs identical" in str(found)


# --- something to find ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 4), (2, 11)])
def test_a_planted_token_is_found(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, row: int, column: int, options: dict[str, Any]
) -> None:
    given = tiny.build_inputs(model, 5, 3)
    plant(monkeypatch, row, column)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = mmspec.compare(model, given, **options)
    assert torch.equal(torch.get_rng_state(), state)
    divergence = found.first_divergence
    assert not found.identical and (found.rows, found.rows_identical) == (3, 2) and divergence is not None
    position, length = (divergence.row, divergence.column), given["input_ids"].shape[1]
    assert position == (row, column)
    assert divergence.plain == int(found.plain_ids[row, length + column])
    assert divergence.patched == int(found.patched_ids[row, length + column]) == (divergence.plain + 1) % 120
    with mmspec.disabled(model):
        logits = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True).logits
    want = logits[column][row, divergence.plain] - logits[column][row, divergence.patched]
    assert divergence.margin == pytest.approx(float(want), abs=1e-5)
    assert divergence.margin > 0 or options is SAMPLED
    assert f"2/3 rows identical; row {row} first differs at token {column}" in str(found)


def test_an_early_end_is_found(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tiny.build_inputs(model, 5, 1)
    length = given["input_ids"].shape[1]
    with mmspec.disabled(model):
        tokens = model.generate(**given, **GREEDY)[0, length:].tolist()
    eos = next(token for token in range(120) if token not in tokens)
    model.generation_config.eos_token_id = eos
    plant(monkeypatch, 0, 3, shift=eos - tokens[3])
    found = mmspec.compare(model, given, **GREEDY)
    divergence = found.first_divergence
    assert not found.identical and divergence is not None and found.patched_ids.shape[1] == length + 4
    assert (divergence.row, divergence.column, divergence.plain, divergence.patched) == (0, 3, tokens[3], eos)


def test_padding_is_not_compared(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row ends too early, so the batch is shorter; the other row, which ended before, is identical."""
    given = tiny.build_inputs(model, 5, 2)
    length = given["input_ids"].shape[1]
    with mmspec.disabled(model):
        first, second = model.generate(**given, **GREEDY)[:, length:].tolist()
    column = next(c for c in range(1, 9) if first[c] not in second and first[c] not in first[:c])
    model.generation_config.eos_token_id = first[column]
    wrong = column + 1
    plant(monkeypatch, 1, wrong, shift=first[column] - second[wrong])
    found = mmspec.compare(model, given, **GREEDY)
    assert found.patched_ids.shape[1] == length + wrong + 1 < found.plain_ids.shape[1]
    divergence = found.first_divergence
    assert divergence is not None and (divergence.row, divergence.column) == (1, wrong)
    assert (divergence.plain, divergence.patched) == (second[wrong], first[column])
    assert found.rows_identical == 1


def test_every_pair_of_runs_is_compared(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference in one of several pairs must be reported, whatever the last pair shows."""
    drafter, begun = adversarial.AdversarialDrafter(), list[int]()
    mmspec.unpatch(model)
    mmspec.patch(model, drafter=drafter)

    def begin(prompt: Any) -> Any:
        begun.append(1)
        monkeypatch.undo()
        if len(begun) == 3:
            plant(monkeypatch, 0, 5)
        return adversarial.AdversarialDrafter.begin(drafter, prompt)

    drafter.begin = begin  # type: ignore[method-assign]
    assert not mmspec.compare(model, tiny.build_inputs(model, 5, 2), repeats=3, **GREEDY).identical


# --- replicas of the drafter ------------------------------------------------------------------------------------------


def _trained_drafter() -> Any:
    import tiny_heads

    return tiny_heads.build_drafter("latent", SimpleNamespace(hidden=64, heads=4, kv_heads=2, vocab=384, layers=2))  # type: ignore[arg-type]


class Wrapper(adversarial.AdversarialDrafter):
    """A user's drafter around another."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(1)
        self.inner = inner


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_replica_shares_weights(is_wrapped: bool) -> None:
    drafter = _trained_drafter()
    twin: Any = replicate(Wrapper(drafter)).inner if is_wrapped else replicate(drafter)
    assert twin is not drafter and twin.head is drafter.head and twin.compressor is drafter.compressor


def test_drafters_may_replicate_themselves(model: PreTrainedModel) -> None:
    class Locked(adversarial.AdversarialDrafter):
        """Holds a lock, which `copy.deepcopy` refuses."""

        replicas = 0

        def __init__(self) -> None:
            super().__init__(1)
            self.lock = threading.Lock()

        def replicate(self) -> Drafter:
            """One more."""
            Locked.replicas += 1
            return Locked()

    assert mmspec.compare(
        model, tiny.build_inputs(model, 3, 1), repeats=2, **GREEDY, mmspec={"drafter": Locked()}
    ).identical
    assert Locked.replicas == 3, "one per pair, the warm-up included"


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [0, -1])
def test_wrong_repeats(model: PreTrainedModel, repeats: int) -> None:
    with pytest.raises(ValueError, match=f"repeats must be 1 or more; got {repeats}"):
        mmspec.compare(model, tiny.build_inputs(model, 3, 1), repeats=repeats)


def test_a_plain_model_cannot_be_compared() -> None:
    model = _model("llava")
    with pytest.raises(ValueError, match=r"patched model; call mmspec\.patch"):
        mmspec.compare(model, tiny.build_inputs(model, 3, 1))


def test_an_error_leaves_the_generator_unchanged(model: PreTrainedModel) -> None:
    state = torch.get_rng_state()
    criteria = StoppingCriteriaList([adversarial.Tripping(adversarial.CallLog(), 0, 0)])
    with pytest.raises(adversarial.InjectedError):
        mmspec.compare(model, tiny.build_inputs(model, 3, 1), **SAMPLED, stopping_criteria=criteria)
    assert torch.equal(torch.get_rng_state(), state)
    assert mmspec.compare(model, tiny.build_inputs(model, 3, 1), **SAMPLED).identical


def test_as_dict_and_table(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tiny.build_inputs(model, 5, 2)
    found = mmspec.compare(model, given, repeats=2, **GREEDY)
    values = json.loads(json.dumps(found.as_dict()))
    assert values["identical"] is True and values["first_divergence"] is None
    assert len(values["plain"]) == len(values["patched"]) == 2 and values["stats"]["calls"] == 2
    lines = str(found).splitlines()
    assert len(lines) == 4 and lines[1].startswith("plain") and lines[2].startswith("patched")
    assert lines[3].startswith("outputs identical; tau ")
    plant(monkeypatch, 1, 2)
    found = mmspec.compare(model, given, **GREEDY)
    values = json.loads(json.dumps(found.as_dict()))
    assert values["rows"] == 2 and values["rows_identical"] == 1
    assert set(values["first_divergence"]) == {"row", "column", "plain", "patched", "margin"}
    assert "tensor" not in repr(found)


def test_one_token_has_no_decode_time(model: PreTrainedModel) -> None:
    found = mmspec.compare(model, tiny.build_inputs(model, 3, 1), do_sample=False, max_new_tokens=1)
    assert found.identical and found.plain[0].decode_s == 0.0 and str(found)
