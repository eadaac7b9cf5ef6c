"""Huge pages for weights: which memory is moved, when, and that nothing else changes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from torch import Tensor

import mmspec
from mmspec import backend
from mmspec.cpu import huge_pages as module
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.huge_pages import (
    HUGE_PAGE,
    STEP,
    HugeMemory,
    HugePages,
    Range,
    describe_huge_pages,
    huge_ranges,
    obstacle,
)
from mmspec.cpu.mapped import mapped_file
from mmspec.cpu.weights import QuantisedWeight, Weight
from mmspec.patching import patch_state
from mmspec.targets.hf import HFTarget

needs_huge_pages = pytest.mark.skipif(bool(obstacle()), reason="no huge pages on this system")
KIB = 1 << 10
HALF, WEIGHTS_BYTES = HUGE_PAGE // 2, 16 << 20


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """The ranges that would be moved, of weights of any size, on a system that moves all."""
    ranges: list[Range] = []
    monkeypatch.setattr(module, "obstacle", lambda: "")
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "FIRST_STEP_S", 0.0)
    monkeypatch.setattr(module, "collapse", lambda *one: ranges.append(one) or "")
    return ranges


def weights_of(num_bytes: int = WEIGHTS_BYTES) -> Tensor:
    """Numbers in memory that begins with a huge page."""
    numbers = torch.arange((num_bytes + HUGE_PAGE) // 4, dtype=torch.float32, device="cpu")
    first = -numbers.data_ptr() % HUGE_PAGE // 4
    return numbers[first : first + num_bytes // 4].view(-1, 1024)


def huge_bytes(weight: Tensor) -> int:
    """Bytes of the memory areas of a weight that lie in huge pages, as Linux counts them."""
    first, last, found = weight.data_ptr(), weight.data_ptr() + weight.nbytes, 0
    is_ours = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_ours = int(area[1], 16) < last and int(area[2], 16) > first
        elif is_ours and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * KIB
    return found


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([], []),
        ([(0, HUGE_PAGE - 1)], []),
        ([(1, HUGE_PAGE)], []),
        ([(1, 2 * HUGE_PAGE + 5)], [(HUGE_PAGE, 2 * HUGE_PAGE)]),
        # two halves behind each other, whatever their order, with an allocator's header between them
        ([(HALF + 64, HUGE_PAGE), (0, HALF)], [(0, HUGE_PAGE)]),
        ([(HALF + 2 * 4096, HUGE_PAGE), (0, HALF)], [(0, HUGE_PAGE)]),
        ([(HALF + 2 * 4096 + 1, HUGE_PAGE), (0, HALF)], []),
        # overlapping (tied) and contained (views) blocks
        ([(0, HUGE_PAGE + HALF), (HALF, 2 * HUGE_PAGE), (64, 128)], [(0, 2 * HUGE_PAGE)]),
        ([(0, STEP + HUGE_PAGE + 1)], [(0, STEP), (STEP, STEP + HUGE_PAGE)]),
        ([(0, HUGE_PAGE), (9 * HUGE_PAGE, 10 * HUGE_PAGE)], [(0, HUGE_PAGE), (9 * HUGE_PAGE, 10 * HUGE_PAGE)]),
    ],
)
def test_neighbours_are_joined_and_cut_into_steps(blocks: list[Range], expected: list[Range]) -> None:
    assert huge_ranges(blocks) == expected


def test_weights_are_moved_once(moved: list[Range]) -> None:
    pages, weight = HugePages(), weights_of()
    pages.add([weight])
    assert moved == [(weight.data_ptr(), weight.data_ptr() + weight.nbytes)]
    assert pages.nbytes == weight.nbytes
    assert pages.describe() == "on for 16 MiB"
    pages.add([weight])
    other = weights_of(HUGE_PAGE)
    pages.add([weight, other])
    assert moved[1:] == [(other.data_ptr(), other.data_ptr() + HUGE_PAGE)]


def test_refused_memory_is_not_tried_again(moved: list[Range], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Range] = []
    monkeypatch.setattr(module, "collapse", lambda *one: tried.append(one) or "Invalid argument")
    pages, weight = HugePages(), weights_of()
    for _ in range(3):
        pages.add([weight])
    pages.add([weight[:-1024], weight[-1024:]])  # the same memory
    assert len(tried) == 1
    assert (pages.nbytes, pages.refused) == (0, "Invalid argument")
    assert pages.describe() == "off: Invalid argument"


@pytest.mark.parametrize(
    ("gain_s", "tokens", "counts"),
    [
        (1.0, 5, [1, 2, 3, 3]),  # at most 1.5 s a call, of which a step takes one
        (1.0, 0, [0, 0, 0, 0]),
        (0.45 / (3 * STEP), 1, [0, 0, 1, 1, 2, 2, 3, 3]),  # a token earns 0.45 s
    ],
)
def test_a_call_spends_what_its_tokens_gain_and_later_calls_go_on(
    gain_s: float, tokens: int, counts: list[int], moved: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, clock = weights_of(3 * STEP), iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))  # a step takes a second
    monkeypatch.setattr(module, "FIRST_STEP_S", 1.0)
    monkeypatch.setattr(module, "MAX_CALL_S", 1.5)
    monkeypatch.setattr(module, "GAIN_S", gain_s)
    pages, found = HugePages(), []
    for _ in counts:
        pages.add([weight], num_tokens=tokens)
        found.append(len(moved))
    assert found == counts and sorted(moved) == moved


def test_new_memory_lies_in_huge_pages_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module, "_madvise", lambda: lambda *args: asked.append(args))
    monkeypatch.setattr(module, "obstacle", str)
    sizes = [100, HUGE_PAGE, 64, 3]
    memory = HugeMemory(sum(sizes) + 64 * len(sizes))
    pieces = [memory.take(size) for size in sizes]
    ((start, nbytes, advice),) = asked
    assert start == pieces[0].data_ptr() and start % HUGE_PAGE == 0 and advice == 14
    assert nbytes % HUGE_PAGE == 0 and nbytes > sum(sizes) - HUGE_PAGE
    assert [len(piece) for piece in pieces] == sizes and all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_quantised_weights_have_two_blocks(moved: list[Range]) -> None:
    data, scales = weights_of(), weights_of(HUGE_PAGE)
    HugePages().add([QuantisedWeight(data.view(torch.uint8), scales, 1, 1, 8)])
    assert sorted(moved) == sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in (data, scales))


def test_few_weights_stay(moved: list[Range], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BYTES", WEIGHTS_BYTES + 1)
    HugePages().add([weights_of()])
    assert not moved


def test_nothing_is_moved_while_memory_is_short(moved: list[Range], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: WEIGHTS_BYTES - 1)
    pages = HugePages()
    pages.add([weights_of()])
    assert not moved
    assert "memory" in pages.refused


def setting(tmp_path: Path, text: str) -> Path:
    (tmp_path / "enabled").write_text(text)
    return tmp_path / "enabled"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch, path: patch.setattr(module.sys, "platform", "darwin"), "Linux"),
        (lambda patch, path: patch.setattr(module.os, "sysconf", lambda name: 65536), "4 KiB"),
        (lambda patch, path: patch.setattr(module, "_PID", -1), "forked"),
        (lambda patch, path: patch.setattr(module, "SYSTEM_SETTING", setting(path, "always [never]")), "never"),
        (lambda patch, path: patch.setattr(module, "SYSTEM_SETTING", path / "missing"), "none"),
        (lambda patch, path: patch.setattr(module, "MADV_COLLAPSE", 999), "6.1"),
    ],
)
def test_nothing_on_other_systems(
    change: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[Range] = []
    monkeypatch.setattr(module, "SYSTEM_SETTING", setting(tmp_path, "always [madvise] never"))
    monkeypatch.setattr(module, "collapse", lambda *one: tried.append(one) or "")
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    change(monkeypatch, tmp_path)
    HugePages().add([weights_of(HUGE_PAGE)])
    assert reason in obstacle()
    assert describe_huge_pages() == f"off: {obstacle()}"
    assert not tried


@needs_huge_pages
def test_linux_moves_the_memory_and_keeps_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "GAIN_S", 1.0)
    pages, weight = HugePages(), weights_of()
    before = weight.clone()
    pages.add([weight])
    if pages.refused:
        pytest.skip(f"Linux refuses: {pages.refused}")
    assert huge_bytes(weight) >= weight.nbytes
    assert torch.equal(weight, before)


@needs_huge_pages
def test_freed_memory_is_harmless() -> None:
    """The memory of weights may be freed, and even returned to the system, while it waits."""
    weight = weights_of(64 << 20)
    ranges = huge_ranges([(weight.data_ptr(), weight.data_ptr() + weight.nbytes)])
    del weight
    assert all(isinstance(module.collapse(*one), str) for one in ranges)
    assert module.collapse(HUGE_PAGE, 2 * HUGE_PAGE)  # where there is no memory
    assert ctypes.get_errno()


def mapped_weight(file: Path) -> tuple[Tensor, Tensor]:
    """A weight that is mapped from a file, as transformers loads a checkpoint in its own type; and its numbers."""
    numbers = torch.arange(6 << 20, dtype=torch.float32)
    file.write_bytes(numbers.numpy().tobytes())
    return torch.from_file(str(file), size=len(numbers), dtype=torch.float32).view(-1, 1024), numbers.view(-1, 1024)


def is_mapped(weight: Tensor) -> list[bool]:
    """Whether each of its huge ranges is still mapped from a file."""
    ranges = huge_ranges([(weight.data_ptr(), weight.data_ptr() + weight.nbytes)])
    return [mapped_file(*one) is not None for one in ranges]


@needs_huge_pages
@pytest.mark.parametrize("change", ["none", "weight", "file", "other file", "gone"])
def test_weights_mapped_from_a_file_are_copied_and_given_back(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "GAIN_S", 1.0)
    file, pages = tmp_path / "some weights", HugePages()
    weight, numbers = mapped_weight(file)
    address, before = weight.data_ptr(), file.read_bytes()
    assert all(is_mapped(weight))
    pages.add([weight])
    assert weight.data_ptr() == address and torch.equal(weight, numbers) and not any(is_mapped(weight))
    assert sum(end - start for start, end in pages.copied) == pages.copied_bytes >= weight.nbytes - 2 * HUGE_PAGE
    assert pages.refused or "MiB of them copied" in pages.describe()
    if change == "weight":
        weight.mul_(-1), numbers.mul_(-1)
    elif change == "file":
        with file.open("r+b") as stream:
            stream.seek(len(before) // 2)
            stream.write(b"changed")
    elif change == "other file":
        (tmp_path / "other").write_bytes(before)
        (tmp_path / "other").replace(file)
    elif change == "gone":
        file.unlink()
    pages.give_back([weight])
    given = is_mapped(weight)
    assert any(given) == (change in ("none", "file")) and all(given) == (change == "none")
    assert torch.equal(weight, numbers), "whatever happens to the file"
    assert change in ("file", "gone") or file.read_bytes() == before
    assert not pages.copied_bytes


@needs_huge_pages
def test_what_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with gradients, which others may write; shared mappings; what belongs to others since."""
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "GAIN_S", 1.0)
    weight, _ = mapped_weight(tmp_path / "trained")
    weight.grad = torch.ones_like(weight)
    pages = HugePages()
    pages.add([weight])
    shared = torch.from_file(str(tmp_path / "trained"), shared=True, size=6 << 20, dtype=torch.float32)
    pages.add([shared])
    assert not pages.copied and all(is_mapped(weight))
    weight.grad = None
    others = HugePages()
    others.add([weight])
    assert others.copied
    others.give_back([weights_of()])
    assert not any(is_mapped(weight)) and not others.copied


@needs_huge_pages
def test_unpatch_gives_back_what_stats_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build_model(tiny.ModelSpec("llava", seed=17, layers=2))
    weight, numbers = mapped_weight(tmp_path / "weights")
    model.register_parameter("extra", torch.nn.Parameter(weight))
    mmspec.patch(model, drafter="none")
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    monkeypatch.setattr(module, "GAIN_S", 1.0)
    patch_state(model).huge_pages.add([weight])
    assert mmspec.stats(model).copied_weight_bytes >= weight.nbytes - 2 * HUGE_PAGE
    mmspec.unpatch(model)
    assert all(is_mapped(weight)) and torch.equal(weight, numbers)


@pytest.mark.parametrize("way", ["C rounds", "linear kernels", "experts", "bfloat16 copies", "torch"])
@pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
def test_generate_hands_over_what_the_kernels_read(
    way: str, moved: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[tuple[list[int], int]] = []
    add = HugePages.add

    def spy(self: HugePages, weights: Iterable[Weight], num_tokens: int) -> None:
        weights = list(weights)
        added.append(([one.data_ptr() for one in weights if isinstance(one, Tensor)], num_tokens))
        add(self, weights, num_tokens)

    monkeypatch.setattr(HugePages, "add", spy)
    if way == "linear kernels":
        monkeypatch.setattr(HFTarget, "use_c", lambda *_: None)
        monkeypatch.setattr(backend, "SMALLEST_REPLACED", 0)
    model = tiny.build_model(tiny.ModelSpec("qwen3_moe" if way == "experts" else "llava", seed=17, layers=2))
    if way == "bfloat16 copies":
        model.to(torch.bfloat16).to(torch.float32)
    inputs = tiny.build_inputs(model, 5, 2)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    mmspec.patch(model, drafter="none", backend="torch" if way == "torch" else "auto")
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options), expected)
    if way == "torch":
        assert not added
        return
    pointers, num_tokens = added[0]
    assert added[1] == added[0]
    assert num_tokens == 6
    roots = ("model.layers", "lm_head") if way == "experts" else ("model.language_model.layers", "lm_head")
    decoder = {name: one for name, one in model.named_parameters() if name.startswith(roots) and one.dim() > 1}
    read = {one.data_ptr() for name, one in decoder.items() if "mlp.gate." not in name}  # the router is small
    read.add(model.get_output_embeddings().weight.data_ptr())
    assert len(pointers) == len(read)
    assert (set(pointers) == read) == (way != "bfloat16 copies")
