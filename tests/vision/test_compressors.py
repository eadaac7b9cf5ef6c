"""Compressors: each against a slow reference implementation, and drafting and training with compressed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import (
    HEAD_CONFIG,
    IMAGE_TOKEN_ID,
    NUM_LAYERS,
    FakeTarget,
    begin_decoding,
    build_first_result,
    build_prompt,
    build_train_batch,
    reference_draft_inputs,
    reference_forward,
    scores_by_path,
)
from fuzz import patch_model
from parity import assert_parity
from torch import Tensor

import mmspec
import research.compressors  # noqa: F401  - by name
from mmspec.app.cli.arguments import validate_drafter
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train.data import Request, Teacher
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.heads.base.compressed_inputs import compressed_inputs, prompt_grids
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES, DraftInputs
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.drafters.heads.registry import find_method
from mmspec.drafters.heads.vispec.head import VispecConfig, VispecDrafter, VispecHead
from mmspec.drafters.training.batch import DraftModel, build_inputs_and_labels
from mmspec.drafters.training.gate import fit_gate_on_batches
from mmspec.drafters.training.losses import LossInputs, LossWeights, TrainProgress, eagle_loss
from mmspec.drafters.training.trainer import TrainConfig, Trainer
from mmspec.interfaces import Compressor, Prompt, VisualGrid, VisualTokens
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.vision.compressors.elastic import BUDGET_PENALTY, Elastic
from mmspec.vision.compressors.latent import LatentCompressor
from mmspec.vision.compressors.pooling import Conv, Pool, Window, choose_window, group_grids
from mmspec.vision.compressors.resampler import Resampler
from mmspec.vision.compressors.select import Drop, gather_tokens, top_score_indices
from mmspec.vision.registry import (
    build_compressor,
    init_compressor,
    load_compressor,
    parse_compressor,
)


def tokens_of(counts: list[int], width: int = 8, seed: int = 0) -> VisualTokens:
    """Random visual tokens with `counts` tokens per row."""
    rng = torch.Generator().manual_seed(seed)
    length = max(counts)
    mask = torch.arange(length) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), length, width, generator=rng) for _ in range(2))
    return VisualTokens(*parts, mask, torch.arange(length).expand(mask.shape) * 2 + 3)


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    """What is made with random weights of that seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def latent(tokens: int = 3, width: int = 8) -> LatentCompressor:
    return seeded(2, lambda: LatentCompressor(width, tokens)).eval()


# --- each against a slow reference ------------------------------------------------------------------------------------


def slow_latent(compressor: LatentCompressor, embeddings: Tensor, states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(embedding, hidden state) of each query's mixture, for one row."""
    result = []
    for query in compressor.queries:
        scores = []
        for state in states:
            normed = (state - state.mean()) / (state.var(unbiased=False) + 1e-5).sqrt()
            scores.append(float(query.detach() @ normed) / math.sqrt(len(state)))
        shares = torch.tensor(scores).softmax(0)
        result.append((shares @ embeddings, shares @ states))
    return result


@pytest.mark.parametrize("counts", [[5, 5], [7, 2, 0], [1]])
def test_latent_equals_the_reference(counts: list[int]) -> None:
    compressor, visual = latent(), tokens_of(counts)
    compressed = compressor.compress(visual, None, 3)
    assert compressed.inputs_embeds.shape == compressed.hidden_states.shape == (len(counts), 3, 8)
    for row, count in enumerate(counts):
        assert compressed.mask[row].tolist() == [count > 0] * 3
        expected = (
            slow_latent(compressor, visual.inputs_embeds[row, :count], visual.hidden_states[row, :count])
            if count
            else []
        )
        for slot, (embedding, state) in enumerate(expected):
            assert torch.allclose(compressed.inputs_embeds[row, slot], embedding, atol=1e-5)
            assert torch.allclose(compressed.hidden_states[row, slot], state, atol=1e-5)
        positions = compressed.position_ids[row].tolist()
        assert not count or (
            positions == sorted(positions) and positions[0] == 3 and positions[-1] == 3 + 2 * (count - 1)
        )
    assert torch.isfinite(compressed.inputs_embeds).all()


def test_latent_with_fewer_tokens_and_with_empty_rows() -> None:
    compressor, visual = latent(), tokens_of([5, 4])
    whole, part = compressor.compress(visual, None, 3), compressor.compress(visual, None, 2)
    assert torch.allclose(whole.inputs_embeds[:, :2], part.inputs_embeds) and part.mask.shape == (2, 2)
    empty = tokens_of([0, 0])
    assert compressor.compress(empty, None, 3).inputs_embeds.shape[1] == 0
    axes = replace(visual, position_ids=visual.position_ids.expand(3, -1, -1))
    assert compressor.compress(axes, None, 3).position_ids.shape == (3, 2, 3)


@pytest.mark.parametrize("name", ["latent", "resampler"])
def test_training_draws_a_prefix_of_the_queries(name: str) -> None:
    """All with probability 1/2, else a half, a fourth, ... of the limit; in eval mode always all."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        compressor: Any = init_compressor(f"{name}:12", 8)
        looked = [compressor.train().compress(tokens_of([5]), None, 12).mask.shape[1] for _ in range(200)]
        assert set(looked) == {12, 6, 3, 1} and 70 < looked.count(12) < 130
        assert {compressor.compress(tokens_of([5]), None, 5).mask.shape[1] for _ in range(50)} == {5, 2, 1}
        assert {compressor.compress(tokens_of([5]), None, 1).mask.shape[1] for _ in range(9)} == {1}
    before = torch.get_rng_state()
    assert [compressor.eval().compress(tokens_of([5]), None, count).mask.shape[1] for count in (12, 7, 1)] == [12, 7, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_build_and_use_set_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = latent().train()
    assert build_compressor(compressor) is compressor and not compressor.training
    moved: list[Any] = []
    monkeypatch.setattr(compressor, "to", lambda device: moved.append(device) or compressor)
    compressed = RecordingCompressor(compressor.train()).compress(tokens_of([5]), None, 3)
    assert compressed.mask.shape[1] == 3 and not compressor.training and moved == [compressed.hidden_states.device]


GRIDS = {
    "one": ([VisualGrid(0, 0, 3, 4, 0)], [12]),
    "odd": ([VisualGrid(0, 0, 5, 3, 0)], [15]),
    "wide": ([VisualGrid(0, 0, 3, 5, 0)], [15]),
    "line": ([VisualGrid(0, 0, 1, 7, 0)], [7]),
    "tied": ([VisualGrid(0, 0, 4, 5, 0)], [20]),
    "two": ([VisualGrid(0, 0, 2, 2, 0), VisualGrid(0, 4, 3, 3, 1)], [13]),
    "rows": ([VisualGrid(0, 0, 4, 4, 0), VisualGrid(1, 0, 2, 3, 1), VisualGrid(1, 6, 4, 4, 2)], [16, 22]),
    "clip": ([VisualGrid(0, 9 * t, 3, 3, 0, role="frame", frame=t) for t in range(4)], [36]),
    "newline": ([VisualGrid(0, 0, 2, 3, 0, has_newlines=True)], [8]),
    "pictures": ([VisualGrid(0, 4 * n, 2, 2, n) for n in range(8)], [32]),
    "unknown": ([], [9, 4]),
    "half known": ([VisualGrid(0, 0, 2, 3, 0)], [6, 5]),
    "inconsistent": ([VisualGrid(0, 0, 2, 3, 0), VisualGrid(1, 0, 2, 2, 1)], [5, 5]),
    "tiny": ([VisualGrid(0, 0, 1, 1, 0)], [1]),
    "none": ([], [0, 0]),
    "ragged": (
        [
            VisualGrid(0, 0, 14, 14, 0),
            *(VisualGrid(1, 196 * t, 14, 14, 4, role="frame", frame=t) for t in range(8)),
            *(VisualGrid(2, 0, 12, 12, 1), VisualGrid(2, 144, 9, 16, 2)),
        ],
        [196, 1568, 288, 0],
    ),
}


def members_of(grids: list[VisualGrid], count: int, window: Window) -> list[list[int]]:
    """The token indices of each cell of one row, by explicit loops."""
    if not grids:
        return [list(range(i, min(count, i + window.width))) for i in range(0, count, window.width)]
    cells: list[list[int]] = []
    groups: dict[tuple[int, int], list[VisualGrid]] = {}
    for grid in grids:
        groups.setdefault(
            (grid.media_index, 0) if grid.role == "frame" else (grid.media_index, 1 + grid.start), []
        ).append(grid)
    for frames in groups.values():
        h, w = frames[0].height, frames[0].width + int(frames[0].has_newlines)
        for t in range(0, len(frames), window.frames):
            for y in range(0, h, window.height):
                for x in range(0, w, window.width):
                    cells.append(
                        [
                            frame.start + yy * w + xx
                            for frame in frames[t : t + window.frames]
                            for yy in range(y, min(h, y + window.height))
                            for xx in range(x, min(w, x + window.width))
                        ]
                    )
    return cells


def slow_window(grids: list[VisualGrid], count: int, budget: int) -> Window:
    """By exhaustive search: of the windows that fit, the one that leaves the most tokens; then square, then small."""
    best, max_kept = None, -1
    sides = [side for grid in grids for side in (grid.height, grid.width + int(grid.has_newlines), grid.frame + 1)]
    longest = max([1, *(sides or [count])])
    for n in range(1, longest + 1):
        for window in (Window(n, n, n), Window(n + 1, n, n), Window(n + 1, n, n + 1)):
            num_kept = len(members_of(grids, count, window))
            squarer = best is not None and best.height < best.width and window.height == window.width
            if num_kept <= budget and (num_kept > max_kept or (num_kept == max_kept and squarer)):
                best, max_kept = window, num_kept
    return best or Window(longest, longest, longest)


def grouped(members: list[list[int]], budget: int) -> list[list[int]]:
    """Merge neighbouring cells evenly where there are more than `budget`."""
    if len(members) <= budget:
        return members
    groups = [[part for i, part in enumerate(members) if i * budget // len(members) == n] for n in range(budget)]
    return [list(chain(*group)) for group in groups]


def merging(kind: str, budget: int) -> Any:
    """`Pool`, or `Conv` with random weights."""
    if kind == "pool":
        return Pool(budget)
    conv = Conv(8, budget)
    conv.kernel.data.normal_(generator=torch.Generator().manual_seed(1))
    return conv


def check_merging(grid: str, kind: str, max_tokens: int) -> None:
    """Each cell of the grids is merged as by explicit loops."""
    grids, counts = GRIDS[grid]
    visual = replace(tokens_of(counts), grids=tuple(grids))
    compressor = merging(kind, max_tokens)
    compressed = compressor.compress(visual, None, max_tokens)
    for row, count in enumerate(counts):
        row_grids = [entry for entry in grids if entry.row == row]
        row_grids = row_grids if sum(entry.num_tokens for entry in row_grids) == count else []
        window = slow_window(row_grids, count, max_tokens)
        members = grouped(members_of(row_grids, count, window), max_tokens)
        slots = range(compressed.mask.shape[1])
        assert compressed.mask[row].tolist() == [slot < len(members) for slot in slots] and len(members) <= max_tokens
        assert sorted(chain(*members)) == list(range(count))
        if compressed.source_indices is not None:
            sources = compressed.source_indices[row, : len(members)].tolist()
            assert kind == "pool" and sources == [cell[0] if len(cell) == 1 else -1 for cell in members]
        for slot, cell in enumerate(members):
            weights = torch.ones(len(cell), 8)
            if kind == "conv":
                weights = torch.stack([_kernel(compressor, row_grids, token, window) for token in cell])
            for name in ("inputs_embeds", "hidden_states"):
                expected = (getattr(visual, name)[row, cell] * weights).sum(0) / len(cell)
                assert torch.allclose(getattr(compressed, name)[row, slot], expected, atol=1e-5), (row, slot)
            position = sum(float(visual.position_ids[row, token]) for token in cell) / len(cell)
            assert abs(int(compressed.position_ids[row, slot]) - position) <= 0.5001


@pytest.mark.every(2)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", ["pool", "conv"])
def test_merging_equals_the_reference(grid: str, kind: str) -> None:
    for max_tokens in (1, 2, 3, 4, 6, 8, 16, 49, 72, 100, 500):
        check_merging(grid, kind, max_tokens)


def _kernel(conv: Conv, grids: list[VisualGrid], token: int, window: Window) -> Tensor:
    """[D] weight of a token, from its position in its window."""
    y, x = 0, token
    for grid in grids:
        if grid.start <= token < grid.start + grid.num_tokens:
            y, x = divmod(token - grid.start, grid.width + int(grid.has_newlines))
    size = conv.KERNEL_SIZE
    kernel: Tensor = conv.kernel[
        :, (y % window.height) * size // window.height, (x % window.width) * size // window.width
    ]
    return kernel.detach()


def test_conv_is_initialised_as_the_mean() -> None:
    segments, counts = GRIDS["rows"]
    visual = replace(tokens_of(counts), grids=tuple(segments))
    actual, other = Conv(8, 5).compress(visual, None, 5), Pool(5).compress(visual, None, 5)
    assert torch.allclose(actual.inputs_embeds, other.inputs_embeds, atol=1e-6) and torch.equal(actual.mask, other.mask)


def test_choose_window_is_the_smallest_that_fits() -> None:
    blocks = group_grids([VisualGrid(0, 0, 14, 14, 0)], [196])
    assert [blocks[0].num_cells(choose_window(blocks, budget)) for budget in (196, 100, 49, 25, 12, 4, 1)] == [
        196, 98, 49, 25, 12, 4, 1,
    ]  # fmt: skip
    twelve = group_grids([VisualGrid(0, 0, 12, 12, 0)], [144])
    assert [choose_window(twelve, budget) for budget in (72, 36)] == [Window(2, 1, 2), Window(2, 2, 2)]
    wide = group_grids([VisualGrid(0, 0, 4, 5, 0)], [20])
    assert choose_window(wide, 4) == Window(3, 3, 3), "2 x 3 leaves four as well"
    clip = group_grids([VisualGrid(0, 196 * t, 14, 14, 0, role="frame", frame=t) for t in range(8)], [1568])
    assert len(clip) == 1 and clip[0].num_cells(choose_window(clip, 200)) <= 200
    assert choose_window(clip, 1568) == Window(1, 1, 1) and choose_window(clip, 1) == Window(14, 14, 14)
    assert choose_window(clip, 784) == Window(2, 1, 1) and choose_window(clip, 783) == Window(2, 1, 2)


@pytest.mark.parametrize("counts", [[6, 6], [7, 2, 0], [1], [0]])
@pytest.mark.parametrize("budget", [1, 3, 50])
@pytest.mark.parametrize("name", ["stride", "random", "relevant", "diverse"])
def test_selection_equals_the_reference(name: str, budget: int, counts: list[int]) -> None:
    visual = tokens_of(counts)
    query = torch.randn(len(counts), 8, generator=torch.Generator().manual_seed(3))
    compressed = build_compressor(f"{name}:{budget}").compress(visual, query, budget)
    for row, count in enumerate(counts):
        tokens, num_kept = list(range(count)), min(count, budget)
        embeddings, states = visual.inputs_embeds[row], visual.hidden_states[row]
        if name == "stride":
            expected = [(2 * i + 1) * count // (2 * num_kept) for i in range(num_kept)]
        elif name == "random":
            rng = torch.rand(max(counts), generator=torch.Generator().manual_seed(0))
            expected = sorted(sorted(tokens, key=lambda t: -float(rng[t]))[:num_kept])
        elif name == "relevant":
            expected = sorted(sorted(tokens, key=lambda t: -_cosine(states[t], query[row]))[:num_kept])
        else:
            expected = _diverse(embeddings[:count], num_kept)
        assert compressed.mask[row].tolist() == [True] * num_kept + [False] * (compressed.mask.shape[1] - num_kept)
        for slot, token in enumerate(expected):
            assert torch.equal(compressed.inputs_embeds[row, slot], embeddings[token]), (name, row, slot)
            assert torch.equal(compressed.hidden_states[row, slot], states[token])
            assert compressed.position_ids[row, slot] == visual.position_ids[row, token]


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a @ b) / (a.norm() * b.norm()))


def _diverse(rows: Tensor, num_kept: int) -> list[int]:
    """Greedy max-min, written out."""
    chosen: list[int] = []
    while len(chosen) < num_kept:
        rest = [t for t in range(len(rows)) if t not in chosen]
        others = chosen or None
        chosen.append(
            max(rest, key=lambda t: min((1 - _cosine(rows[t], rows[o]) for o in (others or rest) if o != t), default=9))
        )
    return sorted(chosen)


def test_identity_and_drop() -> None:
    visual = tokens_of([5, 3])
    whole = build_compressor("identity").compress(visual, None, 1)
    assert whole.inputs_embeds is visual.inputs_embeds and whole.mask is visual.mask
    assert build_compressor("drop").compress(visual, None, 1).inputs_embeds.shape == (2, 0, 8)


@pytest.mark.parametrize("name", ["latent:4", "resampler:4", "conv:4", "elastic:4"])
def test_load_compressor_leaves_the_generator_unchanged(name: str) -> None:
    compressor = init_compressor(name, 32)
    assert isinstance(compressor, torch.nn.Module)
    before = torch.get_rng_state()
    loaded = load_compressor(
        {"name": compressor.name, "max_tokens": compressor.max_tokens}, compressor.state_dict(), 32
    )
    assert torch.equal(torch.get_rng_state(), before), "or a seed set before `patch` is another after it"
    assert isinstance(loaded, torch.nn.Module)
    for name_, value in compressor.state_dict().items():
        assert torch.equal(loaded.state_dict()[name_], value), name_


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("counts", [[6, 6], [7, 2, 0], [1], [0]])
def test_resampler_equals_the_reference_and_starts_as_the_mean(counts: list[int], count: int) -> None:
    resampler, trained = (seeded(5, lambda: Resampler(8, 3, num_heads=2, head_dim=4)).eval() for _ in range(2))
    trained.load_state_dict(resampler.state_dict())
    trained.out.weight.data.normal_(generator=torch.Generator().manual_seed(6))
    visual = tokens_of(counts)
    with torch.no_grad():
        compressed, trained_output = resampler.compress(visual, None, count), trained.compress(visual, None, count)
    if not max(counts):
        assert compressed.inputs_embeds.shape[1] == 0
        return
    assert compressed.inputs_embeds.shape == (len(counts), count, 8)
    for row, tokens in enumerate(counts):
        assert compressed.mask[row].tolist() == [tokens > 0] * count
        for slot in range(count if tokens else 0):
            weights = []
            for head in range(2):
                scores = []
                for token in range(tokens):
                    parts = [visual.inputs_embeds[row, token], visual.hidden_states[row, token]]
                    normed = [(p - p.mean()) / (p.var(unbiased=False) + 1e-5).sqrt() for p in parts]
                    key = resampler.keys.weight[4 * head : 4 * head + 4] @ torch.cat(normed)
                    scores.append(float(key @ resampler.queries[slot, head]) / 2)
                weights.append(torch.tensor(scores).softmax(0))
            for name in ("inputs_embeds", "hidden_states"):
                rows = getattr(visual, name)[row, :tokens]
                mean = (weights[0] @ rows + weights[1] @ rows) / 2
                assert torch.allclose(getattr(compressed, name)[row, slot], mean, atol=1e-5)
                heads = [weights[h] @ (rows @ resampler.values.weight[4 * h : 4 * h + 4].t()) for h in range(2)]
                correction = trained.out.weight @ torch.cat(heads)
                assert torch.allclose(getattr(trained_output, name)[row, slot], mean + correction, atol=1e-4)


def elastic(tokens: int = 8) -> Elastic:
    return seeded(7, lambda: Elastic(8, tokens))


@pytest.mark.parametrize("counts", [[12, 12], [12, 5, 0], [1], [0, 0]])
def test_elastic_output_is_that_of_the_chosen_branch(counts: list[int]) -> None:
    """Every branch for every row: what comes out is what that branch makes of that row."""
    gate, visual = elastic().eval(), tokens_of(counts)
    query = torch.randn(len(counts), 8, generator=torch.Generator().manual_seed(8))
    for index in range(len(gate.branches)):
        features = torch.nn.functional.layer_norm(query, (8,))
        gate.gate.weight.data.zero_()
        gate.gate.bias.data.zero_()
        gate.gate.weight.data[index, :8] = 50 * features[0]  # the first row picks it; the others what they may
        compressed = gate.compress(visual, query, 8)
        assert gate.choices is not None and gate.choices[0] == gate.branch_labels()[index]
        for row, label in enumerate(gate.choices):
            branch = gate.branches[gate.branch_labels().index(label)]
            alone = branch.compress(visual, query, branch.max_tokens)
            mask, branch_mask = compressed.mask[row], alone.mask[row]
            assert int(mask.sum()) == int(branch_mask.sum()) <= 8, label
            assert torch.allclose(compressed.inputs_embeds[row][mask], alone.inputs_embeds[row][branch_mask])
            assert torch.allclose(compressed.hidden_states[row][mask], alone.hidden_states[row][branch_mask])
            assert torch.equal(compressed.position_ids[row][mask], alone.position_ids[row][branch_mask])


def test_gradients_reach_the_gate_of_elastic() -> None:
    """A loss that rewards large embeddings moves the gate to the branch with the largest sum."""
    compressor, visual = elastic().train(), tokens_of([12, 12])
    visual, query = replace(visual, inputs_embeds=visual.inputs_embeds.abs()), torch.ones(2, 8)
    optimiser, before = torch.optim.Adam(compressor.gate.parameters(), 0.1), compressor.gate.bias.detach().clone()
    torch.manual_seed(0)
    for _ in range(30):
        compressed = compressor.compress(visual, query, 8)
        loss = -compressed.inputs_embeds.sum()
        optimiser.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimiser.step()
    compressor.eval().compress(visual, query, 8)
    assert not torch.equal(compressor.gate.bias, before)
    assert set(compressor.choices or ()) <= {"pool:8", "conv:8"}, "a convolution starts as the mean"
    with pytest.raises(ValueError, match="needs the last hidden state of the prompt"):
        compressor.compress(visual, None, 8)


# --- drafting and training with them ----------------------------------------------------------------------------------


COMPRESSED = ("eagle", "flash", "parallel", "falcon")
"""Architectures that a trained compressor fits: heads that read one hidden state."""


def head(kind: str = "eagle") -> DraftHead:
    shape = {"eagle": {}, "flash": {"intermediate_size": 0, "block_size": 2, "block_ffn_size": 40}}.get(
        kind, {"block_size": 2}
    )
    classes = find_method(kind).classes()
    eagle_head: DraftHead = seeded(4, lambda: classes.head(classes.config.of(HEAD_CONFIG, **shape)))
    for weight in eagle_head.parameters():
        weight.data.mul_(1.5)
    return eagle_head.eval()


def drafts(
    world: FakeTarget, visual_mode: str, own_compressor: Any, pads: tuple[int, int] = (0, 3), **options: Any
) -> list[Any]:
    drafter = EagleDrafter(head(), visual_mode, num_layers=NUM_LAYERS, max_depth=3, top_k=3)
    drafter.compressor = own_compressor
    tree = drafter.propose(begin_decoding(world, drafter, build_prompt(world, 11, pads, **options)), 16, [True, True])
    return [scores_by_path(tree, row) for row in range(2)]


@pytest.mark.parametrize(
    ("visual_mode", "own", "of_the_call", "same_as"),
    [
        *((mode, "identity", None, mode) for mode in VISUAL_MODES),
        ("coupled", "drop", None, "text_only"),
        ("coupled", "identity", "drop", "text_only"),
    ],
)
def test_drafts_are_those_without_a_compressor(
    world: FakeTarget, visual_mode: str, own: str, of_the_call: str | None, same_as: str
) -> None:
    """Of the same mode where all tokens are kept, of the text where none is; that of the call has precedence."""
    chosen = {} if of_the_call is None else {"compressor": build_compressor(of_the_call)}
    found = drafts(world, visual_mode, build_compressor(own), **chosen)
    for actual, expected in zip(found, drafts(world, same_as, None), strict=True):
        assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("runs", [[(2, 6)], [(1, 3), (7, 9)], [(0, 12)], [(11, 12)], []])
@pytest.mark.parametrize("name", ["identity", "pool:2", "stride:3", "drop"])
def test_a_single_row_is_read_as_in_a_batch(world: FakeTarget, runs: list[tuple[int, int]], name: str) -> None:
    """Contiguous visual tokens of a single row are not copied, unlike those of a batch or scattered ones."""
    rng = torch.Generator().manual_seed(9)
    visual = torch.zeros(2, 12, dtype=torch.bool)
    for start, end in runs:
        visual[0, start:end] = True
    visual[1, 4:9:2] = True
    next_embeds, states = (torch.randn(2, 12, 32, generator=rng) for _ in range(2))
    index = torch.arange(12).expand(2, 12)

    def read(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        inputs = DraftInputs(
            next_embeds[rows],
            states[rows],
            visual[rows],
            next_embeds[0, 0],
            attention_mask=torch.ones_like(visual[rows]),
            position_ids=index[rows],
        )
        return compressed_inputs(head(), "decoupled", inputs, build_compressor(name), states[rows, -1])

    with torch.no_grad():
        alone, batch = read(slice(0, 1)), read(slice(0, 2))
    on, there = alone[1][0], batch[1][0]
    assert torch.equal(alone[2][0][on], batch[2][0][there])
    assert torch.allclose(alone[0][0][on], batch[0][0][there], atol=1e-5)


@pytest.mark.parametrize("visual_mode", ["text_only", "coupled"])
def test_positions_beyond_the_compressed_length(world: FakeTarget, visual_mode: str) -> None:
    """690 visual tokens, all dropped: few rows whose position ids exceed the number of rows."""
    rng = torch.Generator().manual_seed(6)
    visual = torch.zeros(1, 700, dtype=torch.bool)
    visual[:, 3:693] = True
    ids = torch.randint(3, 38, (1, 700), generator=rng).masked_fill(visual, IMAGE_TOKEN_ID)
    embeddings = world.shared_embeddings.embed_tokens(ids)
    states = torch.randn(1, 700, 32, generator=rng)
    prompt = Prompt(
        *(ids, torch.ones_like(visual), visual, ids),
        hidden_states={0: embeddings, NUM_LAYERS: states},
        vocab_size=40,
        shared_embeddings=world.shared_embeddings,
    )
    drafter = EagleDrafter(head(), visual_mode, num_layers=NUM_LAYERS, max_depth=1, top_k=3)
    drafter.compressor = None if visual_mode == "text_only" else build_compressor("drop")
    state = drafter.begin(prompt)
    drafter.observe(state, build_first_result([7]), {})
    drafter.read_prompt(state)
    drafter.read_pending(state)
    indices = [index for index in range(700) if index == 699 or not visual[0, index + 1]]
    next_embeds = torch.cat([embeddings[0, 1:], world.shared_embeddings.embed_tokens(torch.tensor([[7]]))[0]])
    with torch.no_grad():
        rows = [drafter.head.fc(torch.cat([next_embeds[index], states[0, index]])) for index in indices]
        out = reference_forward(drafter.head, torch.stack(rows), torch.tensor(indices))[-1]
    assert torch.allclose(state.last_hidden[0], out, atol=1e-4)


def test_a_trained_compressor_moves_to_the_device_of_the_states(
    world: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    compressor = latent(width=HEAD_CONFIG.hidden_size)
    monkeypatch.setattr(compressor, "to", moved.append)
    drafts(world, "decoupled", compressor)
    assert moved == [world.hidden_states.device], "its file was read on the host"


@pytest.mark.parametrize("name", ["conv:3", "elastic:3", "latent:3", "resampler:3"])
def test_a_trained_compressor_preserves_the_dtype(name: str) -> None:
    compressor = seeded(3, lambda: init_compressor(name, 8))
    assert isinstance(compressor, torch.nn.Module)
    for weight in compressor.parameters():
        weight.data += 0.1
    if isinstance(compressor, Elastic):
        compressor.gate.bias.data[-1] = 9.0  # the way with weights
    whole, query = tokens_of([5, 3]), torch.zeros(2, 8)
    half = replace(whole, inputs_embeds=whole.inputs_embeds.bfloat16(), hidden_states=whole.hidden_states.bfloat16())
    with torch.no_grad():
        compressed, other = compressor.eval().compress(half, query.bfloat16(), 3), compressor.compress(whole, query, 3)
    assert compressed.inputs_embeds.dtype == compressed.hidden_states.dtype == torch.bfloat16
    assert torch.allclose(compressed.hidden_states.float(), other.hidden_states, atol=0.1) and torch.equal(
        compressed.mask, other.mask
    )


def slow(
    world: FakeTarget, eagle_head: EagleHead, compressor: LatentCompressor, visual_mode: str, row: int, n: int
) -> Tensor:
    """[V] logits after the first n tokens and the n-th, the visual tokens 2 to 4 compressed to mixtures."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    mixed = slow_latent(compressor, world.merge_embeddings(visual)[row, 2:5], world.hidden_states[row, 1:4])
    texts, positions = reference_draft_inputs(world, eagle_head, "text_only", row, n)
    rows = [e if visual_mode == "decoupled" else eagle_head.fc(torch.cat([e, s])) for e, s in mixed]
    mixed_positions = [1, 2, 3] if len(rows) == 3 else [1, 3]
    out = reference_forward(eagle_head, torch.stack([*rows, *texts]), torch.tensor([*mixed_positions, *positions]))[-1]
    logits: Tensor = world.shared_embeddings.lm_head(out)
    return logits


@pytest.mark.parametrize("visual_mode", ["decoupled", "coupled"])
@pytest.mark.parametrize("count", [2, 3])
def test_drafts_with_mixtures_equal_the_reference(world: FakeTarget, visual_mode: str, count: int) -> None:
    compressor = latent(count, 32)
    found = drafts(world, visual_mode, compressor)
    with torch.no_grad():
        for row, n in enumerate((11, 8)):
            logits = slow(world, head(), compressor, visual_mode, row, n)
            logits[[0, IMAGE_TOKEN_ID]] = float("-inf")
            chances = logits.softmax(-1)
            first = {path[0]: score for path, score in found[row].items() if len(path) == 1}
            assert first == pytest.approx({token: float(chances[token]) for token in first}, rel=2e-3)


@pytest.mark.parametrize("visual_mode", ["decoupled", "coupled"])
def test_training_reads_the_same_compressed_tokens_as_drafting(
    world: FakeTarget, visual_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmspec.drafters.training.losses import LossAccumulator

    calls: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(LossAccumulator, "add", lambda self, part, out, goal, *_, **__: calls.append((part, out)))
    model = DraftModel(head(), visual_mode, compressor=latent(3, 32))
    placeholder = world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    batch = build_train_batch(world)
    with torch.no_grad():
        eagle_loss(LossInputs(model, batch, world.shared_embeddings, placeholder, LossWeights(ttt_steps=1)))
        data = build_inputs_and_labels(model, batch, placeholder)
        logits = world.shared_embeddings.lm_head(calls[0][1])
        for row_logits, (b, p) in zip(logits, data.loss_mask.nonzero().tolist(), strict=True):
            expected = slow(world, head(), model.compressor, visual_mode, b, int(data.position_ids[b, p]) + 1)
            assert torch.allclose(row_logits, expected, atol=2e-3)
    assert len(logits) > 6


def grids(sort: str) -> Any:
    """A grid-based compressor to two tokens, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        conv = Conv(32, 2)
        conv.kernel.data.normal_()
        return {"pool": Pool(2), "conv": conv, "elastic": Elastic(32, 2, [conv]).eval()}[sort]


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("kind_of_compressor", ["pool", "conv", "elastic"])
def test_training_uses_the_same_grids_as_drafting(
    world: FakeTarget, kind: str, kind_of_compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tokens with two images of one and two visual tokens: training outputs equal drafting outputs."""
    from mmspec.drafters.training.losses import LossAccumulator

    eagle_head = head(kind)
    image_grids = [VisualGrid(row, start, 1, 1 + start, 2 * row + start) for row in range(2) for start in range(2)]
    prompt = build_prompt(world, 9, grids=tuple(replace(grid, start=grid.start + 2) for grid in image_grids))
    drafter = find_method(kind).classes().drafter(eagle_head, "coupled", num_layers=NUM_LAYERS)
    drafter.compressor = grids(kind_of_compressor)
    tree = drafter.propose(begin_decoding(world, drafter, prompt), 8, [True, True])
    calls: list[tuple[int, Tensor, Tensor]] = []
    monkeypatch.setattr(
        LossAccumulator, "add", lambda self, part, out, goal, *_, **__: calls.append((part, out, goal.hidden_states))
    )
    model, placeholder = (
        DraftModel(eagle_head, "coupled", kind, grids(kind_of_compressor)),
        world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)),
    )
    batch, found = replace(build_train_batch(world), grids=tuple(image_grids)), set()
    with torch.no_grad():
        for seed in range(3):  # where Falcon's blocks begin
            progress = TrainProgress(1.0, torch.Generator().manual_seed(seed))
            find_method(kind).loss()(
                LossInputs(model, batch, world.shared_embeddings, placeholder, LossWeights(ttt_steps=1), progress)
            )
        for part, out, goal in calls:
            for output, target in zip(out, goal, strict=True):
                row = next((b for b in range(2) if torch.equal(target, batch.hidden_states[b, 9])), None)
                if part == 0 and row is not None:
                    logits = world.shared_embeddings.lm_head(output)
                    logits[[0, IMAGE_TOKEN_ID]] = float("-inf")
                    probs, found = logits.softmax(-1), found | {row}
                    first = {path[0]: score for path, score in scores_by_path(tree, row).items() if len(path) == 1}
                    assert first == pytest.approx({token: float(probs[token]) for token in first}, rel=2e-3)
    assert found == {0, 1}


def trainer(folder: Path, world: FakeTarget, model: DraftModel, plan: TrainConfig) -> Trainer:
    """Trains on the same batch in each step."""
    shared = world.shared_embeddings
    for part in (shared.embed_tokens, shared.lm_head):
        part.requires_grad_(False)
    placeholder = shared.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    return Trainer(folder, {"one": model}, plan, shared, lambda step: build_train_batch(world), placeholder, {})


def test_a_compressor_is_trained_saved_and_loaded(world: FakeTarget, tmp_path: Path) -> None:
    model = DraftModel(head(), "decoupled", compressor=latent(2, 32))
    before = model.compressor.queries.detach().clone()
    assert trainer(tmp_path / "a", world, model, TrainConfig(max_steps=4, batch_size=2)).run()
    assert not torch.equal(model.compressor.queries, before)
    config = {"name": "latent", "max_tokens": 2}
    metadata = HeadMetadata(HEAD_CONFIG, "decoupled", NUM_LAYERS, compressor=(config, model.compressor.state_dict()))
    save_head(tmp_path / "b", model.head, metadata, torch.float32)
    _, restored = load_head(tmp_path / "b")
    assert restored.compressor is not None
    loaded = load_compressor(*restored.compressor, 32)
    assert isinstance(loaded, LatentCompressor) and torch.equal(loaded.queries, model.compressor.queries)
    with pytest.raises(ValueError, match="compressor latent"):
        load_compressor({"name": "latent", "max_tokens": 3}, restored.compressor[1], 32)


def gated() -> Elastic:
    return seeded(7, lambda: Elastic(32, 2))


def test_a_resumed_run_trains_the_same_gate(world: FakeTarget, tmp_path: Path) -> None:
    def run(name: str, seconds: float) -> Elastic:
        model = DraftModel(head(), "decoupled", compressor=gated())
        plan = TrainConfig(max_steps=8, batch_size=2, warmup_steps=1)
        torch.seed()  # whatever else went on in the process
        before = torch.get_rng_state()
        if not trainer(tmp_path / name, world, model, plan).run(seconds):
            return run(name, seconds)
        assert torch.equal(torch.get_rng_state(), before)
        gate: Elastic = model.compressor
        return gate

    whole, cut = run("whole", math.inf), run("cut", 0.0)
    assert whole.gate.bias.abs().max() > 0
    for name, value in whole.state_dict().items():
        # The gate holds costs a hundred times over.
        assert torch.allclose(value, cut.state_dict()[name], atol=1e-3 if "gate" in name else 1e-6), name


@pytest.mark.parametrize("informative", [True, False])
def test_fit_gate_chooses_the_cheapest_branch(informative: bool) -> None:
    """By informative features; otherwise the branch with the lowest mean cost."""
    gate, rng = elastic(), torch.Generator().manual_seed(4)
    features = torch.randn(300, 9, generator=rng)
    costs = 0.3 + 0.05 * torch.randn(300, len(gate.branches), generator=rng) + torch.rand(300, 1, generator=rng)
    costs[:, 2] -= 0.1
    if informative:
        costs[:, 4] -= 0.1 + 0.3 * features[:, 5]
    gate.fit_gate(features, costs)
    with torch.no_grad():
        picked = gate.gate(torch.randn(200, 9, generator=rng) if not informative else features).argmax(1)
    wanted = torch.where(features[:, 5] > 0, 4, 2) if informative else torch.full((200,), 2)
    assert (picked == wanted).float().mean() > (0.85 if informative else 0.99)


def test_force_branch() -> None:
    gate, visual = elastic().eval(), tokens_of([12, 5])
    query = torch.randn(2, 8, generator=torch.Generator().manual_seed(8))
    for index, branch in enumerate(gate.branches):
        with gate.force_branch(index) as observations:
            compressed = gate.compress(visual, query, 8)
        expected = branch.compress(visual, query, branch.max_tokens)
        assert torch.equal(compressed.inputs_embeds, expected.inputs_embeds) and torch.equal(
            compressed.mask, expected.mask
        )
        assert torch.allclose(observations[0].penalty, BUDGET_PENALTY * expected.mask.sum(1) / torch.tensor([12, 5]))
        assert len(observations) == 1 and observations[0].features.shape == (2, 9)
    gate.compress(visual, query, 8)
    assert gate.choices is not None and len(observations) == 1


def test_fit_gate_gets_the_loss_and_penalty_of_each_branch(world: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per row: the loss with that branch only, plus its budget penalty."""
    gate, placeholder = gated().eval(), world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    model, calls = DraftModel(head(), "decoupled", compressor=gate), list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(gate, "fit_gate", lambda features, costs: calls.append((features, costs)))
    fit_gate_on_batches(
        model,
        [build_train_batch(world), build_train_batch(world)],
        world.shared_embeddings,
        placeholder,
        LossWeights(ttt_steps=2, step_decay=0.5),
    )
    [(features, costs)] = calls
    assert features.shape == (4, 33) and costs.shape == (4, len(gate.branches)) and torch.equal(costs[:2], costs[2:])
    text, progress = build_train_batch(world).split()[1], TrainProgress(1.0)
    weights = LossWeights(0.0, 1.0, ttt_steps=2, step_decay=0.5)
    for index, branch in enumerate(gate.branches):
        with torch.no_grad():
            alone = DraftModel(model.head, "decoupled", compressor=branch)
            given = LossInputs(alone, text, world.shared_embeddings, placeholder, weights, progress)
            loss, _ = find_method("eagle").loss()(given)
        num_kept = 0 if branch.name == "drop" else min(3, branch.max_tokens)
        assert float(costs[1, index]) == pytest.approx(float(loss) / 1.5 + BUDGET_PENALTY * num_kept / 3, rel=1e-4)
    fit_gate_on_batches(
        DraftModel(model.head, "decoupled", compressor=Drop()), [], world.shared_embeddings, placeholder, LossWeights()
    )


@pytest.mark.parametrize("kind", COMPRESSED)
def test_the_budget_penalty_is_part_of_the_loss(world: FakeTarget, kind: str) -> None:
    """With all other weights 0, the loss is the mean share of three tokens that the branches keep."""
    gate, placeholder = gated().train(), world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    model, free = DraftModel(head(kind), "decoupled", kind, gate), LossWeights(0.0, 0.0)
    given = LossInputs(model, build_train_batch(world), world.shared_embeddings, placeholder, free)
    loss, metrics = find_method(kind).loss()(given)
    num_kept = [0 if label == "drop" else int(label.partition(":")[2]) for label in gate.branch_labels()]
    assert (
        float(loss.detach())
        == pytest.approx(BUDGET_PENALTY * sum(num_kept) / len(num_kept) / 3)
        == metrics["compressor_loss"]
    )
    loss.backward()
    assert gate.gate.bias.grad is not None and int(gate.gate.bias.grad.argmin()) == gate.branch_labels().index("drop")


def test_a_train_batch_has_the_grids_of_its_rows(tiny: Captioner) -> None:
    """Counted in visual tokens of the row; in any batch, also from the teacher's cache."""
    images = [render_scene(generate_scene(index)) for index in range(3)]
    data = [Request(images[0], "what is it"), Request((), "a"), Request(tuple(images[1:]), "list the colors")]
    teacher = Teacher(tiny.model, tiny.processor, data, cache_bytes=1 << 30)
    teacher.answers = {index: [7, 8, 9] for index in range(3)}
    for indices in ([0, 1, 2], [2, 1], [2, 0, 2]):
        batch = teacher.make_batch(indices)
        expected = {0: [0], 1: [], 2: [0, 16]}
        for row, index in enumerate(indices):
            row_grids = [grid for grid in batch.grids if grid.row == row]
            assert [(grid.start, grid.height, grid.width) for grid in row_grids] == [
                (at, 4, 4) for at in expected[index]
            ]
            assert sum(grid.num_tokens for grid in row_grids) == int(batch.visual_mask[row].sum())


def test_a_stored_compressor_is_used_and_the_output_is_unchanged(tiny: Captioner, tmp_path: Path) -> None:
    model = tiny.model
    config = EagleConfig(64, 128, 4, 2, 384)
    inputs = tiny.build_inputs(
        [render_scene(generate_scene(i)) for i in range(3)], ["a", "what is this thing", "list the colors please"]
    )
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    metadata = HeadMetadata(
        config, "decoupled", 2, "llava", compressor=({"name": "latent", "max_tokens": 5}, latent(5, 64).state_dict())
    )
    save_head(tmp_path, EagleHead(config), metadata)
    lengths: list[int] = []
    with patch_model(model, str(tmp_path), tree_size=16):
        compressor = model.__dict__["_mmspec"].config.drafter.compressor
        original = compressor.compress

        def spy(visual: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
            compressed: VisualTokens = original(visual, query, max_tokens)
            assert query is not None and query.shape == (3, 64)
            assert sum(grid.num_tokens for grid in visual.grids) == int(visual.mask.sum())
            lengths.append(compressed.inputs_embeds.shape[1])
            return compressed

        compressor.compress = spy
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False), plain)
        chosen = {"compressor": build_compressor("drop")}
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, mmspec=chosen), plain)
    assert lengths == [5]


def test_elastic_by_name_is_the_drafters_gate(tiny: Captioner, tmp_path: Path) -> None:
    model, config = tiny.model, EagleConfig(64, 128, 4, 2, 384)
    gate = Elastic(64, 4)
    gate.gate.bias.data[gate.branch_labels().index("stride:1")] = 1.0
    stored = {"name": "elastic", "max_tokens": 4}, gate.state_dict()
    save_head(tmp_path / "msd", EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava"))
    save_head(tmp_path / "own", EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava", compressor=stored))
    inputs = tiny.build_inputs([render_scene(generate_scene(1))], ["what is this thing"])
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    msd, own = (str(tmp_path / name) for name in ("msd", "own"))
    validate_drafter(msd, "elastic")
    with pytest.raises(ValueError, match="compressor 'elastic' is one that a drafter was trained with, and"):
        mmspec.patch(model, msd, "elastic")
    for drafter, compressor, options in (
        (own, "elastic", {}),
        (msd, None, {"drafter": own, "compressor": "elastic"}),
        (own, "drop", {"compressor": "elastic"}),
    ):
        with patch_model(model, drafter, compressor, tree_size=8):
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False, mmspec=options)
            assert torch.equal(output, plain)
            assert [row.choice for row in mmspec.stats(model, last=True).compression] == ["stride:1"]


def test_inconsistent_grids_are_logged_and_ignored(world: FakeTarget, caplog: pytest.LogCaptureFixture) -> None:
    """Three visual tokens per row; one grid has one too few, the other one too many, so the total is right."""
    wrong = (VisualGrid(0, 2, 2, 1, 0), VisualGrid(1, 2, 4, 1, 1))
    for actual, expected in zip(
        drafts(world, "coupled", Pool(1), grids=wrong), drafts(world, "coupled", Pool(1)), strict=True
    ):
        assert actual == pytest.approx(expected, rel=1e-3)
    caplog.clear()
    assert len(group_grids(wrong, [3, 3])) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert (
        "the grids of row 0 have 2 tokens, the row has 3" in messages[0]
        and "the grids of row 1 have 4 tokens, the row has 3" in messages[1]
    )


@pytest.mark.parametrize("name", ["conv:4", "elastic:4", "latent:4", "resampler:4"])
def test_a_compressor_of_another_hidden_size_is_refused(tiny: Captioner, name: str) -> None:
    model, drafter = tiny.model, EagleDrafter(EagleHead(EagleConfig(64, 128, 4, 2, 384)), num_layers=2)
    message = f"compressor {name[:-2]!r} has weights for hidden size 32, drafter 'eagle' reads hidden size 64"
    with pytest.raises(ValueError, match=message):
        mmspec.patch(model, drafter, compressor=init_compressor(name, 32))
    assert not mmspec.is_patched(model)
    with patch_model(model, drafter, compressor=init_compressor(name, 64), tree_size=8):
        inputs = tiny.build_inputs([render_scene(generate_scene(1))], ["what is this thing"])
        with pytest.raises(ValueError, match=message):
            model.generate(**inputs, max_new_tokens=4, mmspec={"compressor": init_compressor(name, 32)})
        model.generate(
            **inputs, max_new_tokens=4, mmspec={"drafter": "lookup", "compressor": init_compressor(name, 32)}
        )


@pytest.mark.parametrize("name", ["conv:4", "elastic:4", "latent:4", "resampler:4"])
def test_a_trained_compressor_is_refused_with_eagle3(tiny: Captioner, name: str) -> None:
    """EAGLE-3 concatenates three hidden states, which no trained compressor fits; untrained ones work."""
    config = Eagle3Config(64, 128, 4, 2, 384, draft_vocab_size=384)
    drafter = Eagle3Drafter(Eagle3Head(config), "coupled", num_layers=8, name="eagle3")
    drafter.set_hidden_state_indices((0, 1, 2), 2)
    message = (
        f"compressor {name[:-2]!r} .* drafter 'eagle3' reads several hidden states side by side; "
        "choose a compressor without weights"
    )
    for width in (64, 192):
        with pytest.raises(ValueError, match=message):
            mmspec.patch(tiny.model, drafter, compressor=init_compressor(name, width))
    assert not mmspec.is_patched(tiny.model)
    inputs = tiny.build_inputs([render_scene(generate_scene(1))], ["what is this thing"])
    plain = tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    with patch_model(tiny.model, drafter, compressor="pool:4", tree_size=8):
        assert torch.equal(tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False), plain)
        assert mmspec.stats(tiny.model, last=True).compression[0].num_compressed_tokens == 4


def test_a_drafter_that_compresses_itself_accepts_no_compressor(tiny: Captioner) -> None:
    message = "drafter 'vispec' compresses visual tokens itself; pass compressor=None"
    drafter = VispecDrafter(VispecHead(VispecConfig(64, 128, 4, 2, 384)), num_layers=2)
    with pytest.raises(ValueError, match=message):
        mmspec.patch(tiny.model, drafter, compressor="pool:4")
    assert not mmspec.is_patched(tiny.model)
    inputs = tiny.build_inputs([render_scene(generate_scene(1))], ["what is this thing"])
    with patch_model(tiny.model, "lookup", compressor="pool:4"):
        with pytest.raises(ValueError, match=message):
            tiny.model.generate(**inputs, max_new_tokens=4, mmspec={"drafter": drafter})
        tiny.model.generate(**inputs, max_new_tokens=4, mmspec={"drafter": drafter, "compressor": None})


class SamplingCompressor:
    """Draws the tokens it keeps from the global generator, as sampling does."""

    name, max_tokens, num_calls = "sampling", 3, 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """See `Compressor`."""
        self.num_calls += 1
        index, mask = top_score_indices(torch.rand(visual_tokens.mask.shape), visual_tokens.mask, max_tokens)
        return gather_tokens(visual_tokens, index, mask)


@pytest.mark.parametrize("sample", [True, False])
def test_random_draws_of_a_compressor_are_undone(tiny: Captioner, sample: bool) -> None:
    compressor = SamplingCompressor()
    drafter = EagleDrafter(EagleHead(EagleConfig(64, 128, 4, 2, 384)), "decoupled", num_layers=2)
    inputs = tiny.build_inputs([render_scene(generate_scene(i)) for i in range(2)], ["a", "what is this thing"])
    patch_options = {"compressor": compressor}
    assert_parity(tiny.model, inputs, drafter, 5, patch_options, max_new_tokens=16, do_sample=sample)
    assert compressor.num_calls == 1


def test_grids_are_counted_in_visual_tokens(world: FakeTarget) -> None:
    grids = (VisualGrid(1, 6, 1, 2, 1), VisualGrid(0, 2, 1, 3, 0), VisualGrid(1, 2, 1, 3, 1))
    prompt = build_prompt(world, 11, grids=grids)
    assert [(grid.row, grid.start) for grid in prompt_grids(prompt, 11)] == [(0, 0), (1, 0), (1, 3)]
    assert prompt_grids(prompt, 5) == ()


# --- names ------------------------------------------------------------------------------------------------------------


def test_parse_and_build() -> None:
    assert parse_compressor("latent:64") == ("latent", 64)
    compressor = init_compressor("latent:4", 16)
    assert (
        isinstance(compressor, Compressor) and compressor.max_tokens == 4 and build_compressor(compressor) is compressor
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic:4", "unknown compressor 'magic:4'; available: identity, drop, stride:N"),
        ("latent", "'latent' needs a maximum number of tokens, as in latent:64; got 'latent'"),
        ("latent:0", "got 'latent:0'"),
        ("latent:64", "has weights: pass the folder of a drafter"),
        ("elastic:64", "has weights: pass the folder of a drafter"),
        ("pool:0", "'pool' needs a maximum number of tokens, as in pool:64; got 'pool:0'"),
    ],
)
def test_invalid_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_compressor(text)


def test_invalid_objects() -> None:
    with pytest.raises(TypeError, match=r"a compressor needs `name`, `max_tokens` and `compress\(...\)`; got int"):
        build_compressor(3)
    with pytest.raises(ValueError, match="at least 1 token; got 0"):
        LatentCompressor(8, 0)
