"""The check of a device before `backend="auto"` records on it: what the probe notices, what becomes of its verdict."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recorded_rounds import build_inputs, build_model, generate, patched, recording, wrong
from torch import Tensor

from mmspec.app import device_probe
from mmspec.app.cli.main import main
from mmspec.control import device_check
from mmspec.control.device_check import (
    DeviceChecks,
    NoVerdictError,
    check_files,
    check_folder,
    device_key,
    probe_command,
    run_probe,
)
from mmspec.engine.graph import Recorder, Replay, StaticFunction, record_nothing, record_trace
from mmspec.engine.round import ForwardFunction, RoundFunction
from mmspec.targets.lanes import LanePool
from research.bench.shape.phases import device_note

CPU = torch.device("cpu")
KEY = device_key(CPU)
PASSED = {"key": KEY, "passed": True, "reason": None}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for each test."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(code: str) -> list[str]:
    """A process that runs `code`, quickly: without site packages."""
    return [sys.executable, "-S", "-E", "-c", code]


def answers(content: Any, before: str = "") -> list[str]:
    """A process that prints JSON."""
    return script(f"{before}\nprint({json.dumps(content)!r})")


class Checks(DeviceChecks):
    """Checks by a given process; counts them."""

    def __init__(self, command: Sequence[str], timeout_s: float = 60.0) -> None:
        super().__init__(self.count, timeout_s)
        self.process = command
        self.num_started = 0

    def count(self, device: torch.device) -> Sequence[str]:
        """The command."""
        self.num_started += 1
        return self.process


# --- the probe --------------------------------------------------------------------------------------------------------


def trace_rounds(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder that traces rounds; drafts, of which a trace takes seconds, are called."""
    return (record_trace if isinstance(function, ForwardFunction) else record_nothing)(function, state, inputs)


def test_the_probe_passes_where_recordings_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a user can run, on a CPU with traces in place of graphs."""
    with mock.patch.multiple(
        device_probe, NUM_PROMPTS=2, BATCH_SIZES=(3,), default_recorder=lambda device: trace_rounds
    ):
        assert device_probe.main(["--device", "cpu"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["passed"] is True and result["reason"] is None and result["key"] == KEY
    assert result["recorded"] == 9, (
        "three rounds with a draft, a draft and a forward alone, two with a given tree; in bfloat16 one of each round"
    )
    assert result["rounds"] > 30 and result["drafts"] > 30


def wrong_later(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose replays are wrong once they are no longer compared."""
    count = iter(range(10_000))

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first, *others = function(*state, *new_inputs)
        return (first if next(count) < 4 else first.roll(1, -1), *others)

    return replay


def frozen_state(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder that makes the lengths of the recorded round constants."""
    recorded = inputs[0].clone()

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first, *others = new_inputs
        if isinstance(function, RoundFunction):  # its fifth column
            first = torch.cat((first[:, :4], recorded[:, 4:5], first[:, 5:]), dim=1)
        elif isinstance(function, ForwardFunction):
            first = recorded
        return function(*state, first, *others)

    return replay


def frozen_inputs(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder that repeats the outputs of the recorded call."""
    outputs = [tensor.clone() for tensor in function(*state, *inputs)]
    return lambda new_inputs: tuple(tensor.clone() for tensor in outputs)


def loses_writes(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose replays leave the cache as it was."""

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        before = [tensor.clone() for tensor in state]
        outputs = function(*state, *new_inputs)
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        return outputs

    return replay


def refuses(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder that cannot record."""
    raise RuntimeError("operation not permitted when stream is capturing")


def is_full(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder on a full device."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


def smaller_probe(**changes: Any) -> Any:
    """Context of a probe with fewer calls, and one size of `torch.multinomial`."""
    return mock.patch.multiple(device_probe, MULTINOMIAL_SIZES=(device_probe.PROBE_VOCAB,), **changes)


@pytest.mark.every(3)
@pytest.mark.parametrize("recorder", [wrong, wrong_later, frozen_state, frozen_inputs, loses_writes, refuses, is_full])
def test_the_probe_fails_for_a_faulty_recorder(recorder: Recorder) -> None:
    with mock.patch.object(device_probe, "BATCH_SIZES", (3,)):
        result = device_probe.probe(CPU, recorder)
    assert result.passed is (None if recorder is is_full else False) and result.reason, result


@pytest.mark.parametrize("unrecorded", ["rounds", "drafts"])
def test_the_probe_fails_if_rounds_or_drafts_are_not_recorded(unrecorded: str) -> None:
    plant = (
        mock.patch.object(LanePool, "reason", return_value="something unusual")
        if unrecorded == "rounds"
        else mock.patch("mmspec.drafters.heads.base.drafter.find_recorded_draft", return_value=None)
    )
    with plant, smaller_probe(NUM_PROMPTS=1, BATCH_SIZES=(1,)):
        result = device_probe.probe(CPU, record_nothing)
    assert result.passed is False
    assert {"rounds": "a call runs eager (something unusual)", "drafts": "replays"}[unrecorded] in str(result.reason)


@pytest.mark.parametrize("plant", ["tokens", "state"])
def test_the_probe_compares_multinomial(plant: str) -> None:
    inner = torch.multinomial

    def other(probs: Tensor, num_samples: int) -> Tensor:
        found = inner(probs, num_samples)
        if plant == "state":
            torch.rand(1)
        return (found + 1) % probs.shape[1] if plant == "tokens" else found

    with mock.patch("torch.multinomial", other), mock.patch.object(device_probe, "PROBE_STEPS", 1):
        result = device_probe.probe(CPU, record_nothing)
    assert result.passed is False and "multinomial" in str(result.reason)


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_recordings_are_exact_on_this_gpu() -> None:
    device = torch.device("cuda:0")
    assert run_probe(probe_command(device), device_key(device)) == {"passed": True, "reason": None}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_probe_in_a_process_of_its_own() -> None:
    """All of it traced."""
    assert run_probe(probe_command(CPU), KEY, 120) == {"passed": True, "reason": None}


# --- the process ------------------------------------------------------------------------------------------------------


def test_what_the_process_says() -> None:
    assert run_probe(answers(PASSED, "print('a warning')"), KEY, 60) == {"passed": True, "reason": None}
    failed = PASSED | {"passed": False, "reason": "other tokens"}
    assert run_probe(answers(failed), KEY, 60) == {"passed": False, "reason": "other tokens"}


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_dies_or_hangs_is_a_failure() -> None:
    dies = run_probe(script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), KEY, 60)
    assert dies["passed"] is False and "died" in dies["reason"]
    start = time.monotonic()
    hangs = run_probe(script("import time; time.sleep(60)"), KEY, 0.3)
    assert hangs == {"passed": False, "reason": "the check took more than 0.3 s"} and time.monotonic() - start < 30


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (script("import no_such_module"), "No module named 'no_such_module'"),
        (script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "exit code -9"),
        (answers(PASSED | {"passed": None, "reason": "CUDA out of memory"}), "out of memory"),
        (answers(PASSED | {"key": KEY | {"device": "another"}}), "another"),
        (answers(["passed"]), "exit code 0"),
        (script("pass"), "no message"),
    ],
)
def test_what_is_no_verdict(command: list[str], message: str) -> None:
    with pytest.raises(NoVerdictError, match=message):
        run_probe(command, KEY, 60)


@pytest.mark.parametrize("executable", ["", None, "/opt/uwsgi"])
def test_programs_that_are_no_interpreter(executable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(NoVerdictError, match="no Python interpreter"):
        probe_command(CPU)


def test_a_frozen_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(NoVerdictError):
        probe_command(CPU)


# --- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_found_once_and_kept(passed: bool, caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks(answers(PASSED | {"passed": passed, "reason": None if passed else "other tokens"}))
    with caplog.at_level(logging.INFO, "mmspec"):
        assert checks.passed(CPU) is False, "in the background"
        checks.wait()
        assert [checks.passed(CPU) for _ in range(3)] == [passed] * 3 and checks.num_started == 1
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO" if passed else "WARNING"]
    later = Checks(script("1 / 0"))
    assert later.passed(CPU) is passed and later.num_started == 0, "the next process reads it"
    with mock.patch.object(device_check, "device_key", return_value=KEY | {"torch": "3.0"}):
        other = Checks(answers(PASSED))
        assert other.passed(CPU) is False
        other.wait()
        assert other.num_started == 1, "another version of torch is checked anew"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"key": 1}', json.dumps(PASSED | {"passed": 1}), "null"])
def test_damaged_verdicts_are_replaced(content: str) -> None:
    first = Checks(answers(PASSED))
    first.passed(CPU)
    first.wait()
    (file,) = [path for path in check_files() if path.suffix == ".json"]
    file.write_text(content)
    second = Checks(answers(PASSED))
    assert second.passed(CPU) is False
    second.wait()
    assert second.passed(CPU) and json.loads(file.read_text())["passed"] is True


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_verdict_that_others_can_write_is_ignored() -> None:
    first = Checks(answers(PASSED))
    first.passed(CPU)
    first.wait()
    (file,) = [path for path in check_files() if path.suffix == ".json"]
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o666)
    second = Checks(answers(PASSED | {"passed": False}))
    assert second.passed(CPU) is False
    second.wait()
    assert second.num_started == 1


@pytest.mark.parametrize("fault", ["folder", "process", "executable", "thread", "no verdict", "key", "home", "exit"])
def test_what_prevents_a_check_costs_speed_only(
    fault: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, not recorded, and nothing stored, so that the next process tries again."""
    checks = Checks(answers(PASSED))
    if fault == "folder":
        cache.write_text("a file")
    elif fault == "process":
        monkeypatch.setattr("subprocess.Popen", mock.Mock(side_effect=PermissionError("not permitted")))
    elif fault == "executable":
        checks = DeviceChecks()  # type: ignore[assignment]
        monkeypatch.setattr(sys, "executable", None)
    elif fault == "thread":
        monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    elif fault == "key":
        missing = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError("transformers"))
        monkeypatch.setattr("importlib.metadata.version", missing)
    elif fault == "home":
        monkeypatch.setattr(device_check, "cache_folder", mock.Mock(side_effect=RuntimeError("no home directory")))
    elif fault == "exit":
        monkeypatch.setattr("atexit.register", mock.Mock(side_effect=RuntimeError("can't register after shutdown")))
    else:
        checks = Checks(script("1 / 0"))
    with caplog.at_level(logging.WARNING, "mmspec"):
        assert checks.passed(CPU) is False
        if fault != "thread":
            checks.wait()
        assert not any(checks.passed(CPU) for _ in range(3))
    assert len(caplog.records) == 1 and "cannot be checked" in caplog.text
    monkeypatch.undo()
    assert not list(cache.rglob("*.json"))


def test_a_verdict_holds_for_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the caching allocator no graph can be captured: that is no verdict on processes that use it."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    key = device_key(CPU)
    first = Checks(answers({"key": key, "passed": False, "reason": "no capture"}))
    assert not first.settle(CPU) and not first.settle(CPU)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING")
    assert Checks(answers(PASSED)).settle(CPU)


def test_many_threads_start_one_check(tmp_path: Path) -> None:
    done = tmp_path / "done"
    checks = Checks(answers(PASSED, f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"))
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(checks.passed(CPU))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * 8, "nobody waits"
    done.touch()
    checks.wait()
    assert checks.num_started == 1 and checks.passed(CPU)


@pytest.mark.skipif(device_check.fcntl is None, reason="no locks between processes")
def test_another_process_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for; its verdict is used when it is there; if it ends without one, this process checks."""
    monkeypatch.setattr(device_check, "RETRY_S", 0.0)
    checks = Checks(answers(PASSED))
    path = device_check.verdict_path(json.dumps(KEY, sort_keys=True))
    with device_check._locked(path.with_suffix(".lock")):
        assert checks.passed(CPU) is False
        checks.wait()
        assert checks.num_started == 0
        path.write_text(json.dumps(PASSED))
        path.chmod(0o600)
        assert checks.passed(CPU)
        path.unlink()
    checks = Checks(answers(PASSED))
    assert checks.passed(CPU) is False
    checks.wait()
    assert checks.num_started == 1 and checks.passed(CPU)


def test_a_measurement_waits_for_the_verdict() -> None:
    assert Checks(answers(PASSED)).settle(CPU)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(answers(PASSED))
    checks.passed(CPU)
    checks.wait()
    monkeypatch.setenv("MMSPEC_DEVICE_CHECK", "0")
    assert not checks.passed(CPU), "neither checked nor recorded"
    assert not Checks(answers(PASSED)).passed(CPU)


def test_the_cache_command_lists_and_clears_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(answers(PASSED | {"passed": False, "reason": "other tokens"}))
    checks.passed(CPU)
    checks.wait()
    foreign = check_folder() / "notes.json"
    foreign.write_text("{}")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "not recorded: other tokens" in out and f"1 checks of GPUs in {check_folder()}" in out
    assert main(["cache", "clear"]) == 0
    assert list(check_folder().iterdir()) == [foreign], "files of others stay"


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def auto_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="auto"` treats the CPU as a GPU."""
    monkeypatch.setattr("mmspec.backend.AUTO_DEVICE_TYPES", frozenset({"cpu"}))


@pytest.mark.usefixtures("auto_on_cpu")
def test_recording_begins_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tmp_path / "done"
    checks = Checks(answers(PASSED, f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"))
    monkeypatch.setattr("mmspec.backend.DEVICE_CHECKS", checks)
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with recording(record_trace) as recorder, patched(model, "lookup", tree_size=4):
        assert checks.num_started == 0, "not at `patch`"
        assert torch.equal(generate(model, inputs, False), expected) and recorder.replays == 0
        done.touch()
        checks.wait()
        assert torch.equal(generate(model, inputs, False), expected) and recorder.replays > 5
    assert checks.num_started == 1


@pytest.mark.usefixtures("auto_on_cpu")
@pytest.mark.parametrize("options", [{"backend": "recorded"}, {"backend": "torch"}, {"deterministic": True}])
def test_nothing_is_checked_for_other_options(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(answers(PASSED))
    monkeypatch.setattr("mmspec.backend.DEVICE_CHECKS", checks)
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    with recording(record_nothing) as recorder, patched(model, "lookup", tree_size=4, **options):
        generate(model, inputs, False)
    assert checks.num_started == 0 and (recorder.replays > 0) == (options != {"deterministic": True})


def test_the_remark_of_the_bench() -> None:
    with mock.patch("research.bench.shape.phases.probe_command", return_value=answers(PASSED)):
        assert device_note(CPU) == "recorded rounds of a small model on cpu: exact"
    failed = answers(PASSED | {"passed": False, "reason": "other tokens"})
    with mock.patch("research.bench.shape.phases.probe_command", return_value=failed):
        assert "NOT EXACT (other tokens)" in device_note(CPU)
    with mock.patch("research.bench.shape.phases.probe_command", return_value=script("1 / 0")):
        assert "no verdict (its process ended with exit code 1: ZeroDivisionError" in device_note(CPU)
