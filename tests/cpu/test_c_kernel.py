"""The C kernel of few rows: accuracy, independence of the rows, what it refuses, every way a build can fail."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_avx512
import kernels
import pytest
import torch
from kernels import needs_kernel
from spies import spy_on
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu import c_kernel, c_library
from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, load_kernel
from mmspec.cpu.linear import MAX_ROWS, LinearAutotuner, use_fast_linears
from mmspec.economy.kernels import IN_C, KernelChoices

SHAPES = [(1, 1), (3, 7), (5, 16), (37, 100), (64, 384), (30, 1029), (18, 1536)]


def test_every_avx512_instruction_has_an_emulation() -> None:
    """With which its variants are tested on processors without it; the command is the helper itself."""
    found = emulated_avx512.emulated_sources(c_library.SOURCES)
    assert not any(b'"avx512' in text for text in found.values())
    other = c_library.SOURCES | {"more.h": b"_mm512_rsqrt14_ps(x)"}
    with pytest.raises(ValueError, match="rsqrt14_ps"):
        emulated_avx512.emulated_sources(other)


def test_instruction_sets_that_this_processor_lacks() -> None:
    """Their tests are run by `emulated_avx512`."""
    if missing := [name for name in c_kernel.INSTRUCTION_SETS.values() if name not in kernels.NAMES]:
        pytest.skip(f"this processor has no {' and no '.join(missing)}")


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(kernel: CKernel, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    got = kernel.linear(weight, bias, rows)
    assert got is not None
    return got


# --- results ----------------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products_equal_those_of_float64(kernel: CKernel, out_features: int, in_features: int) -> None:
    weight, bias = normal(out_features, in_features), normal(out_features, seed=1)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 31, 32):
        rows = normal(num_rows, in_features, seed=2)
        exact = functional.linear(rows.double(), weight.double(), bias.double())
        error = (product(kernel, weight, bias, rows) - exact).abs().max()
        assert error <= 3e-7 * in_features**0.5 * exact.abs().max().clamp(min=1), (num_rows, error)


@needs_kernel
@pytest.mark.parametrize("in_features", [384, 1024, 4096])
def test_errors_are_no_larger_than_those_of_torch(kernel: CKernel, in_features: int) -> None:
    weight, rows = normal(256, in_features), normal(8, in_features, seed=1)
    exact = functional.linear(rows.double(), weight.double())
    ours = (product(kernel, weight, None, rows) - exact).square().mean()
    torch_error = (functional.linear(rows, weight) - exact).square().mean()
    if kernel.level == 1 < c_library.processor_level():  # torch adds more partial sums here: what eight of them give
        sums = torch.zeros(8, 256, 8)
        for products in (rows[:, None] * weight).view(8, 256, -1, 8).unbind(2):
            sums += products
        torch_error = max(torch_error, (sums.sum(-1) - exact).square().mean())
    assert ours <= torch_error


@needs_kernel
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_does_not_depend_on_the_others(kernel: CKernel, out_features: int, in_features: int) -> None:
    """Bit for bit, so that a node of a tree is scored as if it were alone."""
    weight, bias = normal(out_features, in_features), normal(out_features, seed=1)
    rows = normal(MAX_C_ROWS, in_features, seed=2)
    alone = torch.cat([product(kernel, weight, bias, row[None]) for row in rows])
    for num_rows in range(2, MAX_C_ROWS + 1):
        assert torch.equal(product(kernel, weight, bias, rows[:num_rows]), alone[:num_rows]), num_rows
    for copies, num_rows in ((2, 33), (2, 36), (2, 37), (3, 96), (16, 511)):  # more rows are computed in another way
        many = rows.repeat(copies, 1)[:num_rows]
        assert torch.equal(product(kernel, weight, bias, many), alone.repeat(copies, 1)[:num_rows]), num_rows
    part = product(kernel, weight[1:].contiguous(), bias[1:].contiguous(), rows) if out_features > 1 else alone[:, 1:]
    assert torch.equal(part, alone[:, 1:]), "nor on the place in the result"


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_narrow_weight_gives_the_bits_of_the_widened_one(
    kernel: CKernel, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """With rows of float32; with rows of its own type the sums are rounded once."""
    weight, bias = normal(out_features, in_features).to(dtype), normal(out_features, seed=1).to(dtype)
    rows = normal(MAX_C_ROWS, in_features, seed=2).to(dtype)
    rows[-1, -1] = torch.nan
    for num_rows in (1, 2, 3, 5, 8, 16, MAX_C_ROWS, 70):
        some = rows.repeat(3, 1)[-num_rows:].contiguous()
        wide = product(kernel, weight.float(), bias.float(), some.float())
        mixed = product(kernel, weight, bias.float(), some.float())
        assert torch.equal(mixed.nan_to_num(), wide.nan_to_num()) and mixed[-1].isnan().all(), num_rows
        got = product(kernel, weight, bias, some)
        assert got.dtype is dtype and torch.equal(got.nan_to_num(), wide.to(dtype).nan_to_num()), num_rows
        assert got[-1].isnan().all()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_as_torch_rounds(dtype: torch.dtype) -> None:
    """To the nearest, of two as near to the even one; denormal, huge and infinite numbers too."""
    kernel = load_kernel()
    assert kernel is not None
    special = torch.tensor(
        [0.0, -0.0, 1e-40, -3e-8, 6e-8, 65519.0, 65520.0, 1e30, 3.39e38, 3.4e38, torch.inf, -torch.inf]
    )
    steps = 1 + torch.arange(4096) * 2.0**-13  # of which many are in the middle between two
    numbers = torch.cat([special, steps, -steps, normal(4096) * 1e-3])
    got = product(kernel, numbers[:, None].contiguous(), None, torch.ones(1, 1, dtype=dtype))[0]
    assert torch.equal(got, numbers.to(dtype))


@needs_kernel
@pytest.mark.parametrize(("num_rows", "out_features"), [(5, 1000), (300, 1000), (700, 40)])
def test_results_do_not_depend_on_the_number_of_threads(
    kernel: CKernel, num_rows: int, out_features: int, num_threads: None
) -> None:
    weight, rows = normal(out_features, 384), normal(num_rows, 384, seed=1)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results += [product(kernel, weight, None, rows) for _ in range(5)]
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_have_the_bits_of_few(kernel: CKernel, dtype: torch.dtype) -> None:
    """Rows in parts that fit in the caches; numbers that are not finite stay in their rows."""
    weight, bias, rows = normal(35, 4100).to(dtype), normal(35, seed=1).to(dtype), normal(700, 4100, seed=2).to(dtype)
    rows[3, 7], rows[40, 4099], rows[41], rows[699, 0] = torch.nan, torch.inf, 0, -torch.inf
    weight[34, 5], weight[0] = torch.inf, -0.0
    got = product(kernel, weight, bias, rows)
    few = torch.cat([product(kernel, weight, bias, part) for part in rows.split(MAX_C_ROWS)])
    assert torch.equal(got.view(torch.uint8)[few.isfinite().all(1)], few.view(torch.uint8)[few.isfinite().all(1)])
    assert torch.allclose(got, few, rtol=0, atol=0, equal_nan=True) and got[3].isnan().all()
    want = functional.linear(rows.float(), weight.float(), bias.float())
    assert torch.equal(got.isnan(), want.isnan()) and got[:, :34].isfinite().all(1).sum() == 697


@needs_kernel
def test_shapes_and_non_finite_numbers(kernel: CKernel) -> None:
    weight, rows = normal(6, 20), normal(2, 3, 20)
    assert product(kernel, weight, None, rows).shape == (2, 3, 6)
    assert product(kernel, weight, None, rows[0, 0]).shape == (6,)
    rows[0, 1, 3], rows[1, 2, 19] = torch.nan, torch.inf
    got, want = product(kernel, weight, None, rows), functional.linear(rows, weight)
    assert torch.allclose(got, want, atol=1e-5, equal_nan=True) and got.isnan().sum() == 6


@needs_kernel
def test_what_the_kernel_refuses() -> None:
    kernel, weight, rows = load_kernel(), normal(6, 20), normal(4, 20)
    assert kernel is not None and kernel.linear(weight, None, rows) is not None
    refused: list[tuple[Tensor, Tensor | None, Tensor]] = [
        (weight, None, normal(0, 20)),
        (weight, None, normal(4, 10)),
        (weight.double(), None, rows.double()),
        (weight, normal(6).bfloat16(), rows),
        (weight, normal(6), rows.bfloat16()),
        (normal(20, 6).t(), None, rows),
        (weight, None, normal(20, 4).t()),
        (weight, normal(12)[::2], rows),
        (weight, normal(5), rows),
        (weight, None, nn.Parameter(rows)),
        (weight.to("meta"), None, rows.to("meta")),
    ]
    assert [kernel.linear(*inputs) for inputs in refused] == [None] * len(refused)


# --- in the autotuner -------------------------------------------------------------------------------------------------


@needs_kernel
def test_deterministic_layers_compute_rows_as_if_alone_and_see_edits() -> None:
    layer, rows = nn.Linear(384, 64), normal(16, 384)
    with torch.inference_mode(), use_fast_linears(LinearAutotuner(), [layer], deterministic=True):
        alone = torch.cat([layer(row[None]) for row in rows])
        assert torch.equal(layer(rows.repeat(20, 1)), alone.repeat(20, 1)), "nor those of a prompt"
        assert torch.equal(layer(rows), alone) and torch.equal(layer(rows[None, 3:9])[0], alone[3:9])
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [layer], deterministic=True):
        for edit in (layer.weight.mul_, layer.weight.data.mul_):
            edit(2)  # in place, with and without a new version
            assert torch.allclose(layer(rows), functional.linear(rows, layer.weight, layer.bias), atol=1e-4)
        layer.double()  # a kernel of float32 must not read it
        assert layer(rows.double()).dtype == torch.float64


@needs_kernel
def test_the_kernel_is_a_candidate_up_to_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, candidates = nn.Linear(16, 8), list[bool]()
    autotuner, without = LinearAutotuner(KernelChoices()), LinearAutotuner(KernelChoices())
    without.allow_c = False

    def choose(self: KernelChoices, key: Any, names: Any, cases: Any, run: Any) -> str:
        candidates.append(IN_C in names)
        return str(names[0])

    monkeypatch.setattr(KernelChoices, "choose", choose)
    with torch.no_grad():
        for tuner in (autotuner, without):
            with use_fast_linears(tuner, [layer]):
                for num_rows in (MAX_C_ROWS, MAX_ROWS, MAX_ROWS + 1):
                    layer(normal(num_rows, 16))
    assert candidates == [True, False, False, False, False, False]
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [layer]):
        rows = normal(16, 4).t()  # refused by the kernel: torch computes
        assert torch.equal(layer(rows), functional.linear(rows, layer.weight, layer.bias))


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder of its own."""
    monkeypatch.delenv("MMSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mmspec"


def load(caplog: pytest.LogCaptureFixture) -> tuple[CKernel | None, list[str]]:
    """A kernel found anew, and the log lines."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "mmspec"):
        kernel, _ = c_kernel.find_kernel()
    return kernel, [record.getMessage() for record in caplog.records]


def compiler(folder: Path, script: str) -> str:
    """A command that stands for the compiler; `$out` is the file it is to write."""
    file = folder / "compiler"
    find_out = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done'
    file.write_text(f"#!/bin/sh\n{find_out}\n{script}\n")
    file.chmod(0o700)
    return str(file)


@pytest.fixture(params=["copy", pytest.param("cc", marks=pytest.mark.slow)])
def build_command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds by a stand-in for the compiler, which takes ten seconds: it copies the library of this session."""
    if request.param == "copy":
        kernel = load_kernel()
        assert kernel is not None
        monkeypatch.setenv("CC", compiler(tmp_path, f'cp {kernel.library._name} "$out"'))


@needs_kernel
@pytest.mark.usefixtures("build_command")
def test_a_library_is_built_once_and_a_damaged_one_is_replaced(
    cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = spy_on(monkeypatch, c_library, "build")
    assert load(caplog)[0] is not None and load(caplog)[0] is not None and len(builds) == 1
    (file,) = cache_folder.iterdir()
    contents = file.read_bytes()
    for damaged in (b"foreign", b"", contents[: len(contents) // 2]):
        file.unlink()  # the library in use keeps its own file
        file.write_bytes(damaged)
        kernel, lines = load(caplog)
        assert kernel is not None and lines == [] and file.read_bytes()[:4] == b"\x7fELF"
    assert len(builds) == 4 and list(cache_folder.iterdir()) == [file]


@needs_kernel
@pytest.mark.usefixtures("build_command")
def test_builds_at_once(cache_folder: Path) -> None:
    """Of forked processes, which start sooner than those of the slow test below."""
    level = c_library.chosen_level()
    start = multiprocessing.get_context("fork").Process
    builds = [start(target=c_library.load_library, args=(level,)) for _ in range(3)]
    for build in builds:
        build.start()
    for build in builds:
        build.join()
    assert [build.exitcode for build in builds] == [0, 0, 0] and len(list(cache_folder.iterdir())) == 1
    assert CKernel(level).level == level


@needs_kernel
@pytest.mark.slow
@pytest.mark.usefixtures("build_command")
def test_processes_that_build_at_once(cache_folder: Path) -> None:
    script = "from mmspec.cpu.c_kernel import load_kernel; print(load_kernel().level)"
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ.copy())
        for _ in range(2)
    ]
    assert [int(process.communicate()[0]) >= 1 for process in started] == [True, True]
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no C compiler found"),
        ("echo 'some.c:1: unknown type' >&2; exit 1", "failed: some.c:1: unknown type"),
        ("exit 0", "No such file"),
        ('echo nothing > "$out"', ""),
        ("sleep 9", "timed out"),
    ],
    ids=["missing", "failing", "writes-nothing", "writes-garbage", "hangs"],
)
def test_a_compiler_that_fails(
    script: str | None,
    message: str,
    cache_folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(c_library, "BUILD_TIMEOUT_S", 0.2 if message == "timed out" else 60.0)
    monkeypatch.setenv("CC", compiler(tmp_path, script) if script else "no-such-compiler")
    kernel, lines = load(caplog)
    assert kernel is None and message in lines[-1]
    assert len(lines) <= 2, "a line for a compiler that knows no tiles, and one for none"
    assert not list(cache_folder.glob(".*")), "no unfinished file is left"


def test_settings_that_cannot_be_read(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '")
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1 and "No closing quotation" in lines[0]
    monkeypatch.delenv("CC")
    monkeypatch.delenv("MMSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(c_library.Path, "home", no_home)
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1


def test_a_cache_folder_that_cannot_be_used(
    cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.mkdir(parents=True)
    cache_folder.chmod(0o777)
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1 and "can be written by other users" in lines[0]
    assert f"chmod go-w {cache_folder}" in lines[0], "the command that mends it"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said without a change of the log level"
    cache_folder.chmod(stat.S_IRWXU)

    def full(file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(c_library, "atomic_write", full)
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1 and "No space left" in lines[0]
    cache_folder.rmdir()
    cache_folder.write_text("a file, not a folder")
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1 and "File exists" in lines[0]


@needs_kernel
def test_the_library_of_a_wheel_needs_no_compiler(
    cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole, under the name of these sources: neither a damaged one, nor one of other sources under that name."""
    kernel = load_kernel()
    assert kernel is not None
    monkeypatch.setattr(c_library, "FOLDER", tmp_path)
    copy = compiler(tmp_path, f'cp {kernel.library._name} "$out"')
    monkeypatch.setenv("CC", copy)
    level = kernel.level
    shipped = c_library.ship(tmp_path)[level - 1]
    monkeypatch.setenv("CC", "no-such-compiler")
    got, lines = load(caplog)
    assert got is not None and lines == [] and Path(got.library._name) == shipped == c_library.shipped_file(level)
    assert c_kernel.find_kernel()[1].endswith("installed with mmspec") and not cache_folder.exists()
    whole = shipped.read_bytes()
    shipped.unlink()  # the library in use keeps its own file
    shipped.write_bytes(whole[:-100])
    got, lines = load(caplog)
    assert got is None and "is damaged" in lines[0] and "no C compiler" in lines[1]
    monkeypatch.setenv("CC", copy)
    got, lines = load(caplog)
    assert got is not None and Path(got.library._name).parent == cache_folder, "a compiler is the second way"
    monkeypatch.setattr(c_library, "SOURCES", c_library.SOURCES | {"few_rows.h": b"of another version"})
    monkeypatch.setenv("CC", "no-such-compiler")
    shipped.write_bytes(whole)
    assert load(caplog)[0] is None, "under its own name"
    c_library.shipped_file(level).write_bytes(whole)
    got, lines = load(caplog)
    assert got is None and "is damaged" in lines[0], "renamed"


@needs_kernel
def test_a_library_with_wrong_results_or_functions_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_kernel, "load_library", lambda level: ctypes.CDLL(None))
    kernel, lines = load(caplog)
    assert kernel is None and len(lines) == 1 and "few_rows_struct_bytes" in lines[0]
    monkeypatch.undo()
    monkeypatch.setattr(CKernel, "linear", lambda self, weight, bias, rows: rows.new_zeros(len(rows), 37))
    kernel, lines = load(caplog)
    assert kernel is None and "differ" in lines[-1] and len(lines) == load_kernel().level, "each is tried"


@needs_kernel
def test_instructions_are_named_and_the_next_ones_taken_where_products_are_wrong(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = load_kernel().level
    for name, level in c_kernel.ISA_NAMES.items():
        monkeypatch.setenv(c_kernel.ISA_VARIABLE, name)
        found = c_kernel.find_kernel()[0]
        assert found is not None and found.level == min(level, best), name
    monkeypatch.setenv(c_kernel.ISA_VARIABLE, "sse")
    assert c_kernel.find_kernel()[0].level == best and "must be one of avx2, avx512, avx512_bf16" in caplog.text
    monkeypatch.delenv(c_kernel.ISA_VARIABLE)
    caplog.clear()
    is_right = c_kernel._is_right
    monkeypatch.setattr(c_kernel, "_is_right", lambda kernel: kernel.level < best and is_right(kernel))
    found = c_kernel.find_kernel()[0]
    assert (None if found is None else found.level) == (best - 1 or None)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == bool(best > 1)


@needs_kernel
@pytest.mark.parametrize("size", [(1, 5, 3), (7, 37, 100), (33, 64, 1029), (70, 18, 1536)])
def test_products_in_pairs_are_exact_to_one_rounding_and_independent_of_the_other_rows(
    size: tuple[int, int, int],
) -> None:
    """Against double precision and the kernel that widens bfloat16."""
    rows, out, columns = size
    best = load_kernel()
    weight, x = normal(out, columns).bfloat16(), normal(rows, columns, seed=1).bfloat16()
    wide = CKernel(min(best.level, 2))
    got, other = best.linear(weight, weight[:, 0].contiguous(), x), wide.linear(weight, weight[:, 0].contiguous(), x)
    assert got is not None and other is not None
    exact = x.double() @ weight.double().T + weight[:, 0].double()
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4 * columns**0.5).all()
    assert (got == other).double().mean() > 0.99
    for row in (0, rows - 1):
        assert torch.equal(
            best.linear(weight, weight[:, 0].contiguous(), x[row : row + 1].contiguous()), got[row : row + 1]
        )
    assert torch.equal(best.linear(weight.float(), None, x.float()), wide.linear(weight.float(), None, x.float()))


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("sse4_2 avx avx2 fma f16c", 1),
        ("avx2 fma f16c avx512f avx512dq avx512_vnni", 2),
        ("avx512_bf16 avx512f avx512dq avx2 fma f16c", 3),
        ("avx2 fma f16c avx512f avx512_bf16", 1),
        ("sse4_2 avx fma", None),
        ("", None),
    ],
)
def test_the_library_is_that_of_the_processor(
    flags: str, level: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: other\n")
    monkeypatch.setattr(c_library, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.delenv(c_kernel.ISA_VARIABLE, raising=False)
    if level is None:
        with pytest.raises(c_library.KernelUnavailableError, match="no AVX2"):
            c_library.load_library(1)
        return
    assert c_library.chosen_level() == level
    assert len(set(map(c_library.shipped_file, c_library.INSTRUCTION_SETS))) == len(c_library.INSTRUCTION_SETS)
    if level < 3:
        with pytest.raises(c_library.KernelUnavailableError, match=f"has {c_library.INSTRUCTION_SETS[level]}, not"):
            c_library.load_library(level + 1)


def test_other_processors_and_runtimes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library.platform, "machine", lambda: "aarch64")
    kernel, lines = load(caplog)
    assert kernel is None and "aarch64" in lines[0]
    monkeypatch.undo()
    monkeypatch.setattr(c_kernel.ctypes, "CDLL", lambda name: object())
    with pytest.raises(c_library.KernelUnavailableError, match="GOMP_parallel"):
        c_kernel._openmp_entries()


def test_layers_compute_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.cpu.linear.load_kernel", lambda: None)
    layer, rows, autotuner = nn.Linear(16, 8), normal(4, 16), LinearAutotuner(KernelChoices())
    with torch.no_grad():
        for deterministic in (False, True):
            with use_fast_linears(autotuner, [layer], deterministic):
                got = layer(rows)
            assert torch.allclose(got, functional.linear(rows, layer.weight, layer.bias), atol=1e-6)
    assert not set(autotuner.choices.known.values()) - {"plain", "transposed"}
