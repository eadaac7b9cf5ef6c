"""Online learning: exact output while weights are swapped, bounded memory, time and failures, storage."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz as fuzz
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from torch import Tensor

import mmspec
from mmspec.app.cli.main import main
from mmspec.drafters.arbitrated import LearnableArbitratedDrafter
from mmspec.drafters.heads.instant.autoregression import RIDGE_EXAMPLES, RIDGE_PENALTY, AutoregressionFit
from mmspec.learning.budget import WINDOW, LearningBudget
from mmspec.learning.learner import Learner
from mmspec.learning.protocols import Examples
from mmspec.learning.reservoir import ExampleReservoir
from mmspec.learning.store import LearnedStore, learned_files, model_fingerprint
from mmspec.patching import patch_state

SPEC = tiny.ModelSpec(vocab=40, calm=True)
WORK_S = 0.1
"""Seconds of learning after each call, whatever the call took."""


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some work after every call."""

    def earn(self: LearningBudget, call_s: float) -> None:
        self.earned_s = self.spent_s + WORK_S

    monkeypatch.setattr(LearningBudget, "earn", earn)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model() -> Iterator[Any]:
    built = tiny.build_model(SPEC)
    yield built
    mmspec.unpatch(built)


def prompts(seed: int, batch: int = 1) -> Tensor:
    return torch.randint(5, 36, (batch, 6), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=None, **options
        )
    return output


def learn(model: Any, calls: int = 12) -> Learner:
    """Patch with instant heads and generate until they draft."""
    mmspec.patch(model, drafter="instant", learn=True, tree_size=4)
    for seed in range(calls):
        generate(model, prompts(seed, batch=2))
    learner = patch_state(model).learner
    assert learner is not None
    return learner


def learned_weights(drafter: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in drafter.heads._heads.state_dict().items()}


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("seed", range(14))
def test_random_cases_while_learning(seed: int) -> None:
    case = replace(fuzz.draw_case(4000 + seed), drafter=fuzz.LEARNING_DRAFTERS[seed % 2], learn=True)
    case = replace(case, deterministic=False, override="" if case.override == "deterministic" else case.override)
    result = fuzz.run_case(case)
    assert not result.differences, result.report()
    assert result.stats["learning"]["disabled_reason"] is None


@pytest.mark.usefixtures("generous")
def test_instant_heads_learn_and_draft(model: Any) -> None:
    plain = [generate(model, prompts(seed, batch=2)) for seed in range(12)]
    learner = learn(model)
    for seed, expected in enumerate(plain):
        assert torch.equal(generate(model, prompts(seed, batch=2)), expected)
    stats = mmspec.stats(model)
    assert learner.disabled_reason is None and stats.learning.num_updates > 0
    assert stats.num_accepted_tokens > 0, "tokens that the heads have learned"
    assert stats.learning.curve[-1].last_call == stats.calls == 24
    assert sum(point.tokens for point in stats.learning.curve) == stats.tokens - stats.first_tokens


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("sampled", [False, True])
def test_weights_are_swapped_in_the_middle_of_calls(model: Any, sampled: bool) -> None:
    """Another thread publishes other weights all the time."""
    options: dict[str, Any] = {"do_sample": sampled}
    torch.manual_seed(3)
    plain = [generate(model, prompts(seed, batch=3), **options) for seed in range(8)]
    drafter = learn(model).drafter
    assert isinstance(drafter, LearnableArbitratedDrafter) and drafter.heads.is_ready
    current = learned_weights(drafter)
    other = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in current.items()}
    stop, failures = threading.Event(), list[BaseException]()

    def swap() -> None:
        try:
            while not stop.is_set():
                drafter.publish(other)
                drafter.publish(current)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        torch.manual_seed(3)
        patched = [generate(model, prompts(seed, batch=3), **options) for seed in range(8)]
    finally:
        stop.set()
        thread.join()
    assert not failures and all(map(torch.equal, patched, plain))


@pytest.mark.usefixtures("generous")
def test_threads_share_a_learner(model: Any) -> None:
    plain = {seed: generate(model, prompts(seed)) for seed in range(12)}
    learner = learn(model, calls=4)
    wrong: list[int] = []

    def work(seeds: range) -> None:
        wrong.extend(seed for seed in seeds if not torch.equal(generate(model, prompts(seed)), plain[seed]))

    threads = [threading.Thread(target=work, args=(range(start, 12, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and learner.disabled_reason is None and mmspec.stats(model).calls == 16


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_learning_works_in_inference_mode(model: Any, context: Callable[[], Any]) -> None:
    state = torch.get_rng_state()
    with context():
        mmspec.patch(model, drafter="instant", learn=True)
        for seed in range(16):
            ids = prompts(seed, batch=2)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    learning = mmspec.stats(model).learning
    assert learning.disabled_reason is None and learning.num_fitted > 0
    assert torch.equal(state, torch.get_rng_state()), "learning draws from a generator of its own"


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("drafter", ["arbitrated", "decoupled"])
def test_other_defaults_of_torch(model: Any, drafter: str) -> None:
    """A program may have set another default device (here one without data) or data type."""
    plain = [generate(model, prompts(seed, batch=2)) for seed in range(5)]
    head = heads.build_drafter(drafter, SPEC) if drafter == "decoupled" else drafter
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        mmspec.patch(model, head, learn=True)
        for seed in range(5):
            with torch.device("cpu"):
                ids = prompts(seed, batch=2)
            assert torch.equal(generate(model, ids), plain[seed])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    learning = mmspec.stats(model).learning
    assert learning.disabled_reason is None and learning.num_fitted + learning.num_steps > 0


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("where", ["add", "solve"])
def test_an_exception_in_a_step_ends_learning_only(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def fail(self: AutoregressionFit, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    plain = [generate(model, prompts(seed, batch=2)) for seed in range(12)]
    monkeypatch.setattr(AutoregressionFit, where, fail)
    with caplog.at_level(logging.WARNING, "mmspec"):
        learner = learn(model)
        assert all(torch.equal(generate(model, prompts(s, batch=2)), plain[s]) for s in range(12))
    assert learner.disabled_reason == "RuntimeError: out of memory"
    assert len([record for record in caplog.records if "learning has ended" in record.message]) == 1


def test_states_that_are_not_finite_are_not_learned() -> None:
    fit = AutoregressionFit(8, 40, torch.device("cpu"))
    states = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    states[25] = float("nan")
    ids = torch.arange(40)
    next_ids = torch.where(ids % 20 == 19, -1, ids + 1)[:, None]
    fit.add(Examples(states, ids, next_ids))
    assert fit.num_examples == 20 - 5, "of the first of two texts, all positions with a state before and four after"
    weights = fit.solve()
    assert weights is not None and all(bool(torch.isfinite(value).all()) for value in weights.values())
    reservoir = ExampleReservoir()
    reservoir.add(Examples(states, ids, next_ids))
    assert not len(reservoir) and reservoir.num_dropped == 1


def test_the_fit_is_least_squares_over_all_positions() -> None:
    """The sums over lags, with their corrections at the ends of texts, against the plain matrices."""
    rng = torch.Generator().manual_seed(1)
    texts = [torch.randn(length, 6, generator=rng) for length in (30, 5, 6, 41)]
    fit = AutoregressionFit(6, 10, torch.device("cpu"))
    inputs, labels = [], []
    for states in texts:
        next_ids = torch.zeros(len(states), 1, dtype=torch.long)
        next_ids[-1] = -1
        fit.add(Examples(states, torch.zeros(len(states), dtype=torch.long), next_ids))
        for t in range(1, len(states) - 4):
            inputs.append(torch.cat((states[t - 1], states[t])))
            labels.append(states[t + 1 : t + 5].flatten())
    x, y = torch.stack(inputs).double(), torch.stack(labels).double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    gram = (x - x_mean).T @ (x - x_mean) / len(x)
    gram += RIDGE_PENALTY * (1 + RIDGE_EXAMPLES / len(x)) * gram.diagonal().mean() * torch.eye(12)
    maps = torch.linalg.solve(gram, (x - x_mean).T @ (y - y_mean) / len(x))
    weights = fit.solve()
    assert weights is not None and fit.num_examples == len(x)
    z = (weights["weight"] @ x.float().T).T + weights["bias"]
    predicted = z.unflatten(1, (4, -1)) @ weights["basis"].T + weights["means"]
    assert torch.allclose(predicted.flatten(1).double(), y_mean + (x - x_mean) @ maps, atol=1e-4)


@pytest.mark.usefixtures("generous")
def test_published_weights_must_fit(model: Any) -> None:
    drafter = learn(model).drafter
    assert isinstance(drafter, LearnableArbitratedDrafter)
    weights = learned_weights(drafter)
    with pytest.raises(ValueError, match=r"weight holds values that are not finite"):
        drafter.publish(weights | {"weight": torch.full_like(weights["weight"], float("inf"))})
    with pytest.raises(ValueError, match=r"weight must be \[128, 64\]; got \[2\]"):
        drafter.publish(weights | {"weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"candidate_ids must be ids from 0 to 39; got"):
        drafter.publish(weights | {"candidate_ids": weights["candidate_ids"] + 40})
    with pytest.raises(ValueError, match=r"these differ: other"):
        drafter.publish(weights | {"other": torch.zeros(2)})


@pytest.mark.usefixtures("generous")
def test_the_first_calls_draft_as_hybrid_does(model: Any) -> None:
    """Arms that have nothing to show yet do not hold back the first answers."""
    tau = {}
    for drafter, options in (("hybrid", {}), ("arbitrated", {"learn": True})):
        mmspec.patch(model, drafter=drafter, tree_size=8, **options)
        for seed in range(3):
            generate(model, prompts(seed))
        tau[drafter] = mmspec.stats(model).tau
        mmspec.unpatch(model)
    assert tau["arbitrated"] >= tau["hybrid"]


def test_bad_arguments(model: Any) -> None:
    with pytest.raises(ValueError, match="learn=True and deterministic=True exclude each other"):
        mmspec.patch(model, drafter="instant", learn=True, deterministic=True)
    with pytest.raises(ValueError, match=r"learn=True needs a drafter with weights.*'lookup'"):
        mmspec.patch(model, drafter="lookup", learn=True)
    with pytest.raises(TypeError, match=r"learn must be True.*'yes'"):
        mmspec.patch(model, learn="yes")
    assert not mmspec.is_patched(model)


@pytest.mark.usefixtures("generous")
def test_a_call_can_opt_out(model: Any) -> None:
    mmspec.patch(model, drafter="instant", learn=True)
    generate(model, prompts(0), mmspec={"learn": False})
    assert mmspec.stats(model).learning.num_examples == 0
    generate(model, prompts(0))
    assert mmspec.stats(model).learning.num_examples == 24 - 5, "positions with a state before and four after"


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_reservoir_is_bounded() -> None:
    reservoir = ExampleReservoir(max_bytes=1000)
    for number in range(20):
        ids = torch.full((5,), number)
        reservoir.add(Examples(torch.full((5, 4), float(number)), ids, ids[:, None]))  # 160 bytes
    assert len(reservoir) == 6 and reservoir.nbytes == 960
    found = reservoir.sample(10, torch.Generator().manual_seed(0))
    assert sorted(int(one.root_ids[0]) for one in found) == list(range(14, 20)), "the latest ones"
    assert len(reservoir.sample(2, torch.Generator().manual_seed(0))) == 2
    reservoir.add(Examples(torch.zeros(300, 4), torch.zeros(300).long(), torch.zeros(300, 1).long()))
    assert len(reservoir) == 6 and reservoir.num_dropped == 1, "larger than all the memory"


def test_the_budget_is_a_share_of_the_time() -> None:
    budget = LearningBudget(share=0.1)
    assert not budget.can_afford("step")
    budget.earn(10.0)
    assert budget.can_afford("step")
    budget.spend(0.6, "step")
    assert not budget.can_afford("step") and budget.can_afford("other")
    budget.spend(0.6, "other")
    assert not budget.can_afford("other")


def test_the_budget_shrinks_while_learning_does_not_pay() -> None:
    budget = LearningBudget()
    for _ in range(10 * WINDOW):
        budget.add_loss(1.0)
    assert budget.factor == 1 / 8
    for _ in range(WINDOW):
        budget.add_loss(2.0)  # another domain
    assert budget.factor == 1.0
    for window in range(4):
        for _ in range(WINDOW):
            budget.add_loss(1.5 * 0.9**window)
    assert budget.factor == 1.0, "as long as the loss falls"


# --- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("generous")
def test_the_next_process_continues(model: Any) -> None:
    learner = learn(model)
    learned = learned_weights(learner.drafter)
    mmspec.unpatch(model)
    (file,) = learned_files()
    assert file.key == learner.key and file.target == model_fingerprint(model)
    mmspec.patch(model, drafter="instant", learn=True)
    drafter = patch_state(model).config.drafter
    assert isinstance(drafter, LearnableArbitratedDrafter)
    assert mmspec.stats(model).learning.resumed and drafter.heads.is_ready
    assert all(torch.equal(value, learned[name]) for name, value in learned_weights(drafter).items())


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("damage", ["truncated", "foreign", "other target", "other shape", "folder"])
def test_unusable_files_are_ignored(model: Any, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    learner = learn(model)
    mmspec.unpatch(model)
    store = LearnedStore(model_fingerprint(model))
    path = store.path(learner.key)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "foreign":
        path.write_bytes(b"GIF89a" * 100)
    elif damage == "other target":
        other = LearnedStore("0" * 24)
        other.save(learner.key, {"weight": torch.zeros(2)})
        other.path(learner.key).rename(path)
    elif damage == "other shape":
        store.save(learner.key, {"weight": torch.zeros(2)})
    else:
        path.unlink()
        path.mkdir()
    with caplog.at_level(logging.WARNING, "mmspec"):
        mmspec.patch(model, drafter="instant", learn=True)
    assert not mmspec.stats(model).learning.resumed
    assert len([record for record in caplog.records if "learning starts anew" in record.message]) == 1


@pytest.mark.usefixtures("generous")
def test_a_folder_that_cannot_be_written_costs_one_warning(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "mmspec"):
        learner = learn(model)
        learner.save()
        generate(model, prompts(0))
        learner.save()
    assert learner.disabled_reason is None and learner.store is None
    assert len([record for record in caplog.records if "are not stored" in record.message]) == 1


@pytest.mark.usefixtures("generous")
@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("fault", ["no home folder", "unreadable weights"])
def test_what_prevents_learning_or_storing_is_one_warning(
    model: Any, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no home folder":
        monkeypatch.delenv("MMSPEC_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    else:
        error = NotImplementedError("no reshape of packed weights")
        monkeypatch.setattr("mmspec.learning.learner.model_fingerprint", mock.Mock(side_effect=error))
    plain = [generate(model, prompts(seed, batch=2)) for seed in range(8)]
    with caplog.at_level(logging.WARNING, "mmspec"):
        mmspec.patch(model, learn="auto")
        assert all(torch.equal(generate(model, prompts(seed, batch=2)), plain[seed]) for seed in range(8))
        assert mmspec.stats(model).learning.enabled == (fault == "no home folder")
        mmspec.unpatch(model)
    assert len(caplog.records) == 1


def test_a_changed_target_has_files_of_its_own(model: Any) -> None:
    before = model_fingerprint(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    assert model_fingerprint(model) != before


def test_two_writers_leave_a_whole_file(tmp_path: Path) -> None:
    store = LearnedStore("t" * 24, tmp_path)
    values = [{"fc.weight": torch.full((64, 64), float(number))} for number in range(4)]
    threads = [
        threading.Thread(target=lambda weights: [store.save("k", weights) for _ in range(10)], args=(weights,))
        for weights in values
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        found = store.load("k")
        assert found is None or bool((found["fc.weight"] == found["fc.weight"][0, 0]).all())
    for thread in threads:
        thread.join()
    assert [path.name for path in store.folder.iterdir()] == ["k.safetensors"]


@pytest.mark.usefixtures("generous")
def test_the_cache_command(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = learn(model)
    mmspec.unpatch(model)
    assert main(["cache", "list"]) == 0
    printed = capsys.readouterr().out
    assert learner.key in printed and "1 files in" in printed
    (tmp_path / "cache" / "learned" / ("0" * 24)).mkdir()
    (tmp_path / "cache" / "learned" / ("0" * 24) / "damaged.safetensors").write_bytes(b"damaged")
    (tmp_path / "cache" / "costs").mkdir(exist_ok=True)
    assert main(["cache", "clear"]) == 0
    assert "2 files deleted" in capsys.readouterr().out
    assert not list((tmp_path / "cache" / "learned").iterdir()) and (tmp_path / "cache" / "costs").exists()


def test_learning_by_default_where_no_head_is_trained(model: Any) -> None:
    mmspec.patch(model, learn="auto")
    config = patch_state(model).config
    assert config.learn and config.drafter.name == "arbitrated"
    mmspec.unpatch(model)
    for options in ({"drafter": "lookup"}, {"deterministic": True}):
        mmspec.patch(model, learn="auto", **options)
        assert not patch_state(model).config.learn and not mmspec.stats(model).learning.enabled
        mmspec.unpatch(model)


PROCESS = """
import sys, threading, torch
sys.path[:0] = {path!r}
import tiny_heads as heads
import tiny_models as tiny
import mmspec
from mmspec.patching import patch_state

model = tiny.build_model(tiny.ModelSpec(vocab=40, calm=True))
mmspec.patch(model, drafter="instant", learn=True)
learner = patch_state(model).learner
for seed in range(60):
    ids = torch.randint(5, 36, (1, 6), generator=torch.Generator().manual_seed(seed))
    learner.budget.earned_s += 1.0
    with torch.no_grad():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    learner.save()
learning = mmspec.stats(model).learning
assert learning.disabled_reason is None and learning.num_updates > 0, learning
"""


@pytest.mark.slow
def test_two_processes_share_a_cache(model: Any) -> None:
    script = PROCESS.format(path=sys.path)
    processes = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    assert not any("ignored" in error for error in errors), errors
    (file,) = learned_files()
    assert file.target == model_fingerprint(model)
    mmspec.patch(model, drafter="instant", learn=True)
    assert mmspec.stats(model).learning.resumed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arbitrated", "decoupled"])
def test_memory_does_not_grow_over_2000_calls(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first calls the sums of the fit, or the sequences, have their size, and the n-grams are known."""
    if kind != "arbitrated":  # drafts of a random head save nothing, so it would hardly learn
        monkeypatch.setattr(LearningBudget, "add_savings", lambda *_: None)
    share = 0.03 if kind == "arbitrated" else 0.25
    mmspec.patch(model, drafter=kind if kind == "arbitrated" else heads.build_drafter(kind, SPEC), learn=share)
    sizes = {}
    for call in range(1, 2001):
        generate(model, prompts(call % 100))
        if call in (500, 2000):
            gc.collect()
            sizes[call] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    learning = mmspec.stats(model).learning
    assert learning.disabled_reason is None and learning.num_updates > 0
    assert len(learning.curve) <= 128 and learning.learn_s <= (share + 0.02) * learning.call_s
    assert sizes[2000] - sizes[500] < 8 << 20
