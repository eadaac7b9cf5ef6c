"""Shared by all tests: one thread, only errors from transformers, and the generator state restored after each test.

`MMSPEC_CASES` (or `--cases`) is the number of random cases of the slow run. `MMSPEC_MUTANT` plants a bug (`mutation`).
"""

from __future__ import annotations

import copy
import fcntl
import functools
import gc
import itertools
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from mmspec.cpu import c_library

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".pytest_cache" / "durations.txt"
"""Seconds of each test of the last run, set-up included, the slowest first."""
KERNELS = ROOT / ".pytest_cache" / "kernels"
CACHE = TemporaryDirectory(prefix="mmspec-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    number = int(os.environ.get("MMSPEC_CASES", "2000"))
    parser.addoption("--cases", type=int, default=number, help="random cases of the slow exactness run")
    parser.addoption("--first-seed", type=int, default=10_000, help="its first seed")
    parser.addoption("--shots", help="where test_app_browser.py keeps pictures of the pages")
    parser.addoption("--keep-result", type=Path, help="file of the last results by test file, as of `make slow`")
    parser.addoption("--cases-json", default=os.environ.get("MMSPEC_JSON"), help="where it writes its summary")


def pytest_configure() -> None:
    """Learned weights and kernels of tests go to a folder of their own, also while test files are imported."""
    os.environ["MMSPEC_CACHE"] = CACHE.name
    c_library.build = functools.partial(_build_once, c_library.build)


def _build_once(build: Callable[[list[str], Path], None], command: list[str], file: Path) -> None:
    """Build a kernel once for all workers and later runs, since that takes longer than most test files."""
    if file.parent != Path(CACHE.name):  # a test of building
        build(command, file)
        return
    KERNELS.mkdir(parents=True, exist_ok=True)
    with (KERNELS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (KERNELS / file.name).exists():
            build(command, KERNELS / file.name)
    shutil.copy2(KERNELS / file.name, file)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the parameters of a test with the mark `every(n)` each n-th is fast, the others are slow.

    Of several parameters along diagonals, so that each value of each is among the fast ones.
    """
    for item in items:
        if mark := item.get_closest_marker("every"):
            number = sum(_value_index(item, one) for one in item.iter_markers("parametrize"))
            if number % mark.args[0]:
                item.add_marker(pytest.mark.slow)


def _value_index(item: Any, parametrize: pytest.Mark) -> int:
    """Which of its values a test was made for."""
    names, values = parametrize.args[:2]
    names = [names] if isinstance(names, str) else names
    for index, value in enumerate(values):
        row = value.values if isinstance(value, ParameterSet) else [value] if len(names) == 1 else value
        if all(item.callspec.params[name] is one for name, one in zip(names, row, strict=True)):
            return index
    raise ValueError(f"{item.nodeid}: no value of {names} fits; the mark `every` needs a list")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    lines = [f"{spent:8.2f} {name}" for name, spent in seconds.most_common()]
    DURATIONS.parent.mkdir(exist_ok=True)
    DURATIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if file := config.getoption("--keep-result"):
        import kept_result as kept_result

        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        failed: defaultdict[str, list[str]] = defaultdict(list)
        of_files: Counter[str] = Counter()
        for outcome in kept_result.OUTCOMES:
            for report in terminalreporter.stats.get(outcome, []):
                name = report.nodeid.partition("::")[0]
                counts[name][outcome] += 1
                if outcome in ("failed", "error"):
                    failed[name].append(report.nodeid)
        for test, spent in seconds.items():
            of_files[test.partition("::")[0]] += spent
        kept_result.write_results(file, counts, of_files, failed)


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection (7% of the run)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    import fuzz as fuzz

    fuzz.init_worker()


@pytest.fixture(autouse=True, scope="session")
def _seeds_of_no_device() -> None:
    """Without a device torch keeps each of its seeds for later, with a stack trace (2% of the run)."""
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True, scope="session")
def _mutant() -> Iterator[None]:
    name = os.environ.get("MMSPEC_MUTANT")
    if name is None:
        yield
        return
    import mutation as mutation

    with mutation.plant_bug(name):
        yield


@pytest.fixture(autouse=True)
def _no_word_about_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands say that they build the kernels; which test is the first to need them is chance."""
    monkeypatch.setattr("mmspec.cpu.c_library.needs_build", lambda: False)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The captioner of `--model tiny`; a test must undo its changes."""
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.random_models import random_model

    return Captioner(*random_model("tiny"))


@pytest.fixture(scope="session")
def _idle_decoders() -> Iterator[dict[tuple[float, int], list[Any]]]:
    """By the limits of their pools."""
    idle: dict[tuple[float, int], list[Any]] = defaultdict(list)
    yield idle
    for worker in itertools.chain.from_iterable(idle.values()):
        worker.terminate()


@pytest.fixture
def warm_decoders(_idle_decoders: dict[tuple[float, int], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that decode serve one pool after the other, as each starts in most of a second. Those in which a test
    plants something serve no other."""
    from mmspec.vision.video import decoder_pool
    from mmspec.vision.video.decoder_pool import DecoderPool

    command, start, release = decoder_pool.worker_command, DecoderPool._start, DecoderPool.release

    def take(self: DecoderPool) -> Any:
        with self._lock:
            idle = _idle_decoders[self.timeout_s, self.memory]
            while idle and decoder_pool.worker_command is command:
                if (worker := idle.pop()).is_alive:
                    self._all.add(worker)
                    return worker
        return start(self)

    def give(self: DecoderPool, worker: Any) -> None:
        if worker.is_alive and decoder_pool.worker_command is command:
            self._all.discard(worker)
            _idle_decoders[self.timeout_s, self.memory].append(worker)
        else:
            release(self, worker)

    monkeypatch.setattr(DecoderPool, "_start", take)
    monkeypatch.setattr(DecoderPool, "release", give)


@pytest.fixture(scope="session")
def _loaded_scenes() -> Any:
    from mmspec.app import scenes

    return scenes.load_scenes_model()


@pytest.fixture
def scenes_once(_loaded_scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads the scenes model gets a copy of one that was loaded before."""
    monkeypatch.setattr("mmspec.app.scenes.load_scenes_model", lambda: copy.deepcopy(_loaded_scenes))


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    import torch

    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _drafters_do_not_fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error of a drafter costs a call its drafts and one warning, so no other test would see it. Tests that read the
    log look for themselves."""
    from mmspec.engine import loop

    errors: list[BaseException] = []

    def one_line(error: BaseException | str, limit: int) -> str:
        if isinstance(error, BaseException):  # else it is about an error of the user's at a draft
            errors.append(error)
        return str(error)[:limit]

    if "caplog" not in request.fixturenames:
        monkeypatch.setattr(loop, "one_line", one_line)
    yield
    if unplanned := [error for error in errors if type(error).__name__ != "InjectedError"]:
        raise unplanned[0]


@pytest.fixture
def world() -> Any:
    """See `fake_target.FakeTarget`."""
    from fake_target import build_fake_target

    return build_fake_target()
