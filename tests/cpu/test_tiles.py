"""The tiles of AMX: asked for before their first use, and the next instructions without; products by emulated tiles."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_avx512
import pytest
import torch
from torch import Tensor

from mmspec.cpu import c_kernel, c_library
from mmspec.cpu.c_kernel import CKernel, load_kernel

AMX_FLAGS = "avx2 fma f16c avx512f avx512dq avx512_bf16 amx_tile amx_bf16"
pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")


def linux(monkeypatch: pytest.MonkeyPatch, answers: dict[int, int], mask: int = 0) -> list[int]:
    """A system that answers requests for permission so; returns the requests."""
    asked = []

    class System:
        def syscall(self, number: int, request: int, argument: Any) -> int:
            assert number == c_library.ARCH_PRCTL
            asked.append(request)
            if request == c_library.GET_PERMISSION:
                argument._obj.value = mask
            return answers[request]

    monkeypatch.setattr(c_library.ctypes, "CDLL", lambda *args, **kwargs: System())
    return asked


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One with AMX."""
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {AMX_FLAGS}\n")
    monkeypatch.setattr(c_library, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.delenv(c_library.ISA_VARIABLE, raising=False)
    c_library.are_tiles_permitted.cache_clear()
    yield
    c_library.are_tiles_permitted.cache_clear()


@pytest.mark.parametrize(
    ("ask", "mask", "level"),
    [(0, 1 << 18, 4), (-1, 0, 3), (0, 0, 3), (0, 1 << 17, 3)],
    ids=["permitted", "refused", "emulated", "other-states"],
)
def test_tiles_are_used_where_linux_permits_them(
    ask: int, mask: int, level: int, processor: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmspec")
    asked = linux(monkeypatch, {c_library.ASK_PERMISSION: ask, c_library.GET_PERMISSION: 0}, mask)
    assert [c_library.processor_level() for _ in range(2)] == [level] * 2
    assert asked[0] == c_library.ASK_PERMISSION and len(asked) <= 2, "asked once"
    assert caplog.text.count("use AMX") == (level == 3)


def test_a_processor_without_tiles_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {AMX_FLAGS.removesuffix(' amx_bf16')}\n")
    monkeypatch.setattr(c_library, "CPU_INFO", tmp_path / "cpuinfo")
    asked = linux(monkeypatch, {})
    assert c_library.processor_level() == 3 and not asked


@pytest.mark.skipif(getattr(load_kernel(), "level", 0) < 3, reason="the processor has not even the next instructions")
def test_this_system_answers_a_processor_with_tiles(processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the real one refuses, what is forced multiplies by the next instructions."""
    monkeypatch.setenv(c_library.ISA_VARIABLE, "amx")
    kernel, _ = c_kernel.find_kernel()
    assert c_library.processor_level() == (4 if c_library.are_tiles_permitted() else 3)
    assert kernel is not None and kernel.level == c_library.processor_level()
    weight, rows = normal(20, 40), normal(5, 40, seed=1)
    product = kernel.linear(weight, None, rows)
    assert product is not None and torch.allclose(product, rows @ weight.T, atol=0.2)


def test_a_compiler_without_tiles_builds_the_next_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmspec")
    load, best = c_kernel.load_library, c_library.processor_level()

    def refuse(level: int) -> Any:
        if level == 4:
            raise c_library.CompilerError("cc failed: unknown target")
        return load(min(level, best))

    monkeypatch.setattr(c_kernel, "load_library", refuse)
    monkeypatch.setattr(c_kernel, "chosen_level", lambda: 4)
    kernel, _ = c_kernel.find_kernel()
    assert kernel is not None and kernel.level == 3 and "unknown target" in caplog.text


CHILD = """
import os, signal, threading
ready, found, seen = threading.Event(), [], []

def work():
    ready.wait()
    found.append(kernel.linear(weight, None, rows))

threads = [threading.Thread(target=work) for _ in range(3)]
[one.start() for one in threads]

import torch
from mmspec import forks
from mmspec.cpu.c_kernel import load_kernel
torch.set_num_threads(2)
forks.note_threads()
kernel = load_kernel()  # asks for permission
weight, rows = torch.randn(400, 640).bfloat16(), torch.randn(40, 640).bfloat16()
want = kernel.linear(weight, None, rows)
ready.set()
[one.join() for one in threads]
assert len(found) == 3 and all(torch.equal(one, want) for one in found), "threads from before"

signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while len(seen) < 20:
    assert torch.equal(kernel.linear(weight, None, rows), want), "signals"
signal.setitimer(signal.ITIMER_REAL, 0)

if not (child := os.fork()):
    signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.alarm(60)
    os._exit(not torch.equal(kernel.linear(weight, None, rows), want))
assert os.waitpid(child, 0)[1] == 0, "fork"
"""


def run_child(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_threads_from_before_signals_and_forks() -> None:
    """Whatever the real system permits: no signal ends the process, and the bits stay."""
    run_child(CHILD)


# --- emulated tiles ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CKernel]:
    """The kernel with tiles, emulated where the processor has none."""
    if (level := c_library.processor_level()) < 3:
        pytest.skip("tests/helpers/emulated_avx512.py emulates the rest")
    with pytest.MonkeyPatch.context() as patch:
        if level == 3:
            patch.setattr(c_library, "SOURCES", emulated_avx512.with_tiles(c_library.SOURCES))
            patch.setattr(c_library, "processor_level", lambda: 4)
            patch.setenv("MMSPEC_CACHE", str(tmp_path_factory.mktemp("tiles")))
        yield CKernel(4)


EMULATED = f"""
import sys
sys.path.insert(0, {str(Path(emulated_avx512.__file__).parent)!r})
import emulated_avx512
from mmspec.cpu import c_library
c_library.SOURCES = emulated_avx512.with_tiles(c_library.SOURCES)
c_library.processor_level = lambda: 4
"""


@pytest.mark.slow
def test_threads_from_before_signals_and_forks_with_tiles(tiles: CKernel) -> None:
    """A thread that uses tiles that it has not configured is ended by SIGILL."""
    emulated = EMULATED if emulated_avx512.TILES.name in c_library.SOURCES else ""
    first, second = CHILD.split("kernel = load_kernel()")
    run_child(f"{first}{emulated}kernel = load_kernel()\nassert kernel.level == 4{second}")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 5, 3), (7, 37, 100), (16, 16, 32), (17, 33, 31), (33, 64, 77), (70, 18, 640)])
def test_products_by_tiles(tiles: CKernel, size: tuple[int, int, int]) -> None:
    """Near double precision, of a row alone the same bits, for any number of threads; the check of each process too."""
    rows, out, columns = size
    weight, x = normal(out, columns), normal(rows, columns, seed=1)
    bias = weight[:, 0].contiguous()
    got = tiles.linear(weight, bias, x)
    assert got is not None and c_kernel._is_right(tiles)
    exact = x.double() @ weight.double().T + bias.double()
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4 * columns**0.5).all()
    for row in range(rows):
        assert torch.equal(tiles.linear(weight, bias, x[row : row + 1].contiguous()), got[row : row + 1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.equal(tiles.linear(weight, bias, x), got)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_numbers_behind_a_weight_are_not_read(tiles: CKernel) -> None:
    """NaN lies around weight, rows and result; what is behind the result stays."""
    around = torch.full((60, 45), torch.nan).bfloat16()
    around[20:39].copy_(normal(19, 45))
    x = torch.cat((normal(3, 45, seed=2), around[:1]))[:3]
    got = tiles.linear(around[20:39], None, x)
    assert got is not None and torch.equal(got, tiles.linear(around[20:39].clone(), None, x)) and not got.isnan().any()


@pytest.mark.slow
def test_threads_configure_tiles_of_their_own(tiles: CKernel) -> None:
    weight, x = normal(40, 64), normal(5, 64, seed=1)
    want, found = tiles.linear(weight, None, x), []
    work: Callable[[], None] = lambda: found.append(tiles.linear(weight, None, x))  # noqa: E731
    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 3 and all(torch.equal(one, want) for one in found)
