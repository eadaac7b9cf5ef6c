"""Adaptation of trained heads: what is recorded of a call, exact output while weights change, and what cannot learn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fuzz
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.heads.base.collector import MAX_COLLECTED
from mmspec.drafters.training import online
from mmspec.drafters.training.batch import TrainBatch
from mmspec.learning.budget import LearningBudget
from mmspec.learning.learner import MIN_SEQUENCES, Learner
from mmspec.learning.store import learned_files
from mmspec.learning.weights import WeightTrainer
from mmspec.patching import patch_state

SPEC = tiny.ModelSpec(calm=True)
KINDS = (
    "decoupled",
    "coupled",
    "placeholder",
    "text_only",
    "trimmed",
    "flash",
    "chained",
    "parallel",
    "falcon",
    "instant",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _every_call_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LearningBudget, "is_overdrawn", False)


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps after every call."""
    left = threading.local()

    def earn(self: LearningBudget, call_s: float) -> None:
        left.steps = 4

    def can_afford(self: LearningBudget, work: str) -> bool:
        left.steps -= 1
        return bool(left.steps >= 0)

    monkeypatch.setattr(LearningBudget, "earn", earn)
    monkeypatch.setattr(LearningBudget, "can_afford", can_afford)


@pytest.fixture
def model() -> Iterator[Any]:
    built = tiny.build_model(SPEC)
    yield built
    mmspec.unpatch(built)


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.generate(**inputs, **{"max_new_tokens": 12} | options)
    return output


def prompts(model: Any, seed: int, rows: int = 1) -> dict[str, Tensor]:
    """A batch with one picture in every row, padded on the left."""
    return tiny.build_inputs(model, seed, rows, images=[1] * rows, padding="none" if rows == 1 else "left")


def patch_head(model: Any, kind: str, **options: Any) -> Learner:
    """Patch with a head that often predicts what follows and learns; returns its learner."""
    mmspec.patch(model, drafter=heads.build_drafter(kind, SPEC), **{"learn": True, "tree_size": 4} | options)
    learner = patch_state(model).learner
    assert learner is not None
    return learner


def recorded(learner: Learner) -> list[TrainBatch]:
    found: Any = list(learner._reservoir._examples)
    return found


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decoupled", "flash"])
@pytest.mark.parametrize("sampled", [False, True])
def test_sequences_are_those_of_a_plain_forward(model: Any, kind: str, sampled: bool) -> None:
    inputs = prompts(model, 3)
    learner = patch_head(model, "leaning-" + kind)
    torch.manual_seed(0)
    output = generate(model, inputs, do_sample=sampled, suppress_tokens=[model.config.image_token_id])
    assert mmspec.stats(model).num_accepted_tokens > 0 or sampled, "states of accepted nodes are recorded too"
    mmspec.unpatch(model)
    (sequence,) = recorded(learner)
    with torch.no_grad():
        plain = model(input_ids=output, pixel_values=inputs["pixel_values"], output_hidden_states=True, use_cache=False)
    prompt_length = inputs["input_ids"].shape[1]
    assert torch.equal(sequence.input_ids, output)
    assert torch.allclose(sequence.inputs_embeds, plain.hidden_states[0], atol=1e-5)
    assert torch.allclose(sequence.hidden_states[:, :-1], plain.hidden_states[-1][:, :-1], atol=1e-4)
    assert not sequence.hidden_states[:, -1].any(), "the state of the last token is not computed"
    assert torch.equal(sequence.response_mask[0].nonzero()[:, 0], torch.arange(prompt_length, output.shape[1]))
    assert torch.equal(sequence.visual_mask[:, :prompt_length], inputs["input_ids"] == model.config.image_token_id)


def test_rows_of_a_padded_batch_are_recorded_as_calls_of_their_own(model: Any) -> None:
    inputs = prompts(model, 5, rows=3)
    learner = patch_head(model, "leaning-decoupled")
    generate(model, inputs, eos_token_id=None)
    for row in range(3):
        mask = inputs["attention_mask"][row].bool()
        ids = inputs["input_ids"][row][mask][None]
        pixels = inputs["pixel_values"][row : row + 1]
        generate(
            model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}, eos_token_id=None
        )
    sequences = recorded(learner)
    assert len(sequences) == 6
    for together, alone in zip(sequences[:3], sequences[3:], strict=True):
        assert torch.equal(together.input_ids, alone.input_ids)
        for part in ("inputs_embeds", "hidden_states"):
            assert torch.allclose(getattr(together, part), getattr(alone, part), atol=1e-4), part


def test_what_is_not_recorded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that outgrow the limit, and rows of a single token."""
    learner = patch_head(model, "decoupled")
    generate(model, prompts(model, 0), mmspec={"learn": False})
    with torch.no_grad():
        model.generate(**prompts(model, 0), max_new_tokens=1)
    monkeypatch.setattr("mmspec.drafters.heads.base.collector.MAX_COLLECTED", 8)
    generate(model, prompts(model, 0))
    assert MAX_COLLECTED > 8 and not recorded(learner) and learner.disabled_reason is None


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_learns_all_its_weights(model: Any, kind: str) -> None:
    rows = [prompts(model, seed, rows=2) for seed in range(4)]
    plain = [generate(model, inputs) for inputs in rows]
    learner = patch_head(model, kind)
    before = {name: weight.clone() for name, weight in learner.drafter.head.named_parameters()}  # type: ignore[attr-defined]
    for _ in range(3):
        assert all(torch.equal(generate(model, inputs), output) for inputs, output in zip(rows, plain, strict=True))
    assert learner.disabled_reason is None and learner.stats().num_updates > 0
    assert all(weight.grad is None for weight in model.parameters()), "the target's weights get no gradients"
    after = dict(learner.drafter.head.named_parameters())  # type: ignore[attr-defined]
    unchanged = [name for name, weight in before.items() if weight.numel() and torch.equal(weight, after[name])]
    assert not unchanged


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_in_half_precision(model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU without fast products in bfloat16."""
    monkeypatch.setattr(online, "bf16_is_faster", lambda device: False)
    learner = patch_head(model.to(dtype), "trimmed")
    for seed in range(4):
        inputs = prompts(model, seed, rows=2)
        generate(model, inputs | {"pixel_values": inputs["pixel_values"].to(dtype)})
    assert learner.disabled_reason is None and learner.stats().num_steps > 0


@pytest.mark.usefixtures("generous")
def test_every_step_sees_the_weights_of_the_last(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps copies of weights as long as any context of it is open, the user's or the learner's."""
    monkeypatch.setattr(online, "bf16_is_faster", lambda device: True)
    learner = patch_head(model, "decoupled")
    for seed in range(2):
        generate(model, prompts(model, seed, rows=2))
    examples = recorded(learner)

    def weights() -> dict[str, Tensor]:
        trainer = WeightTrainer(cast(Any, learner.drafter), learner.shared_embeddings)
        assert all(trainer.step(examples) is not None for _ in range(3))
        return dict(trainer.module.named_parameters())

    expected = weights()
    with torch.autocast("cpu", enabled=False):
        found = weights()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("generous")
def test_answers_that_are_too_short_to_learn_from_do_not_end_learning(model: Any) -> None:
    learner = patch_head(model, "falcon")
    for seed in range(8):
        generate(model, prompts(model, seed), max_new_tokens=2)
    assert recorded(learner) and learner.disabled_reason is None and learner.stats().num_steps == 0
    for seed in range(2):
        generate(model, prompts(model, seed, rows=2))
    assert learner.stats().num_steps > 0


@pytest.mark.every(2)
@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("kind", ["decoupled", "flash"])
def test_what_is_learned_is_accepted(model: Any, kind: str) -> None:
    """A head with random weights learns four prompts by heart."""
    rows = [prompts(model, seed) for seed in range(MIN_SEQUENCES)]
    patch_head(model, kind)
    accepted = []
    for _ in range(10):
        before = mmspec.stats(model).num_accepted_tokens
        for inputs in rows:
            generate(model, inputs, eos_token_id=None)
        accepted.append(mmspec.stats(model).num_accepted_tokens - before)
    assert accepted[-1] > accepted[0] + 4, accepted


@pytest.mark.every(2)
@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("seed", range(10))
def test_random_cases_while_a_head_learns(seed: int) -> None:
    case = replace(fuzz.draw_case(6000 + seed), drafter=f"head-{KINDS[seed % len(KINDS)]}", learn=True)
    case = replace(case, deterministic=False, override="" if case.override == "deterministic" else case.override)
    result = fuzz.run_case(case)
    assert not result.differences, result.report()
    assert result.stats["learning"]["disabled_reason"] is None


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("kind", ["leaning-decoupled", "leaning-flash"])
def test_weights_are_swapped_in_the_middle_of_calls(model: Any, kind: str) -> None:
    rows = [prompts(model, seed, rows=2) for seed in range(6)]
    plain = [generate(model, inputs) for inputs in rows]
    drafter: Any = patch_head(model, kind).drafter
    current = {name: weight.clone() for name, weight in drafter.head.named_parameters()}
    other = {name: torch.randn_like(weight) for name, weight in current.items()}
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            drafter.publish(other)
            drafter.publish(current)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        patched = [generate(model, inputs) for inputs in rows]
    finally:
        stop.set()
        thread.join()
    assert all(map(torch.equal, patched, plain))


@pytest.mark.usefixtures("generous")
def test_the_next_process_continues(model: Any) -> None:
    learner = patch_head(model, "decoupled")
    for seed in range(6):
        generate(model, prompts(model, seed, rows=2))
    learned = {name: weight.clone() for name, weight in learner.drafter.head.named_parameters()}  # type: ignore[attr-defined]
    mmspec.unpatch(model)
    (file,) = learned_files()
    assert file.key == learner.key
    resumed = patch_head(model, "decoupled")
    assert resumed.resumed
    for name, weight in resumed.drafter.head.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(weight, learned[name])
    mmspec.unpatch(model)
    other = heads.build_drafter("decoupled", SPEC, seed=2)  # other weights to start from
    mmspec.patch(model, drafter=other, learn=True)
    assert not mmspec.stats(model).learning.resumed


# --- what cannot learn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("eagle3", "it reads hidden states of inner layers"),
        ("dspark", "it reads hidden states of inner layers"),
        ("vispec", "its architecture has no training loss"),
    ],
)
def test_heads_that_cannot_learn_are_refused(model: Any, kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"learn=True needs a drafter.*{reason}"):
        mmspec.patch(model, drafter=heads.build_drafter(kind, SPEC), learn=True)
    assert not mmspec.is_patched(model)


def test_no_adaptation_with_a_compressor(model: Any) -> None:
    drafter = heads.build_drafter("decoupled", SPEC)
    with pytest.raises(ValueError, match=r"without a compressor only; got compressor 'drop'"):
        mmspec.patch(model, drafter=drafter, compressor="drop", learn=True)
    learner = patch_head(model, "decoupled")
    generate(model, prompts(model, 0), mmspec={"compressor": "drop"})
    assert not recorded(learner), "a call with a compressor shows the head other inputs"


def test_published_weights_must_fit(model: Any) -> None:
    drafter: Any = patch_head(model, "flash").drafter
    weights = {name: weight.clone() for name, weight in drafter.head.named_parameters()}
    with pytest.raises(ValueError, match=r"fc.weight holds values that are not finite"):
        drafter.publish(weights | {"fc.weight": torch.full_like(weights["fc.weight"], float("nan"))})
    with pytest.raises(ValueError, match=r"fc.weight must be \[32, 64\]; got \[2\]"):
        drafter.publish(weights | {"fc.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"these differ: other"):
        drafter.publish(weights | {"other": torch.zeros(2)})


def test_the_share_of_the_time_is_an_option(model: Any) -> None:
    assert patch_head(model, "flash", learn=0.25).budget.share == 0.25
    mmspec.unpatch(model)
    assert patch_head(model, "flash").budget.share == 0.03
    mmspec.unpatch(model)
    for share in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="learn must be a share of the time above 0 and at most 1"):
            mmspec.patch(model, learn=share)
