"""Compressors: each against a slow reference, and what a drafter makes of them. The target never sees them."""

from __future__ import annotations

import math
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mmspec
from mmspec.app.bench.recorder import Recorder
from mmspec.app.caption.command import check_drafter
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train.data import Request, Teacher
from mmspec.drafters.architectures import ARCHITECTURES
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import Eagle3Head, EagleHead, HeadConfig
from mmspec.drafters.eagle.vispec import VispecDrafter, VispecHead
from mmspec.drafters.eagle.visual_inputs import VISUAL_MODES, DraftInputs, compressed_inputs, prompt_grids
from mmspec.drafters.training.batch import DraftModel, build_targets
from mmspec.drafters.training.gate import fit_gate_on_batches
from mmspec.drafters.training.losses import LossWeights, Progress, eagle_loss
from mmspec.drafters.training.trainer import TrainConfig, Trainer
from mmspec.interfaces import Compressor, Prompt, VisualGrid, VisualTokens
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.vision.compressors import select as picking
from mmspec.vision.compressors.elastic import CHARGE, Elastic
from mmspec.vision.compressors.latent import LatentCompressor
from mmspec.vision.compressors.pooling import Conv, Pool, Window, blocks_of, window_for
from mmspec.vision.compressors.resampler import Resampler
from mmspec.vision.compressors.select import Drop, highest, take
from mmspec.vision.registry import make, new, parse, restored


def tokens_of(counts: list[int], width: int = 8, seed: int = 0) -> VisualTokens:
    """Random visual tokens, so many per row."""
    rng, most = torch.Generator().manual_seed(seed), max(counts)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), most, width, generator=rng) for _ in range(2))
    return VisualTokens(*parts, mask, torch.arange(most).expand(mask.shape) * 2 + 3)


def latent(tokens: int = 3, width: int = 8) -> LatentCompressor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        return LatentCompressor(width, tokens).eval()


# --- each against a slow reference ------------------------------------------------------------------------------------


def slow_latent(made: LatentCompressor, embeddings: Tensor, states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Row by row: a query's mixture of embeddings and of states."""
    result = []
    for query in made.queries:
        scores = []
        for state in states:
            normed = (state - state.mean()) / (state.var(unbiased=False) + 1e-5).sqrt()
            scores.append(float(query.detach() @ normed) / math.sqrt(len(state)))
        shares = torch.tensor(scores).softmax(0)
        result.append((shares @ embeddings, shares @ states))
    return result


@pytest.mark.parametrize("counts", [[5, 5], [7, 2, 0], [1]])
def test_latent_is_the_slow_reference(counts: list[int]) -> None:
    made, visual = latent(), tokens_of(counts)
    few = made.compress(visual, None, 3)
    assert few.inputs_embeds.shape == few.hidden_states.shape == (len(counts), 3, 8)
    for row, count in enumerate(counts):
        assert few.mask[row].tolist() == [count > 0] * 3
        expected = (
            slow_latent(made, visual.inputs_embeds[row, :count], visual.hidden_states[row, :count]) if count else []
        )
        for slot, (embedding, state) in enumerate(expected):
            assert torch.allclose(few.inputs_embeds[row, slot], embedding, atol=1e-5)
            assert torch.allclose(few.hidden_states[row, slot], state, atol=1e-5)
        spots = few.position_ids[row].tolist()
        assert not count or (spots == sorted(spots) and spots[0] == 3 and spots[-1] == 3 + 2 * (count - 1))
    assert torch.isfinite(few.inputs_embeds).all()


def test_latent_with_a_smaller_budget_and_with_nothing_to_show() -> None:
    made, visual = latent(), tokens_of([5, 4])
    whole, part = made.compress(visual, None, 3), made.compress(visual, None, 2)
    assert torch.allclose(whole.inputs_embeds[:, :2], part.inputs_embeds) and part.mask.shape == (2, 2)
    empty = tokens_of([0, 0])
    assert made.compress(empty, None, 3).inputs_embeds.shape[1] == 0
    axes = replace(visual, position_ids=visual.position_ids.expand(3, -1, -1))
    assert made.compress(axes, None, 3).position_ids.shape == (3, 2, 3)


@pytest.mark.parametrize("name", ["latent", "resampler"])
def test_in_training_the_first_queries_learn_to_do_alone(name: str) -> None:
    """Half of the time all of them look, else a half, a fourth, ... of what is asked for; in use always all."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        made: Any = new(f"{name}:12", 8)
        looked = [made.train().compress(tokens_of([5]), None, 12).mask.shape[1] for _ in range(200)]
        assert set(looked) == {12, 6, 3, 1} and 70 < looked.count(12) < 130
        assert {made.compress(tokens_of([5]), None, 5).mask.shape[1] for _ in range(50)} == {5, 2, 1}
        assert {made.compress(tokens_of([5]), None, 1).mask.shape[1] for _ in range(9)} == {1}
    before = torch.get_rng_state()
    assert [made.eval().compress(tokens_of([5]), None, count).mask.shape[1] for count in (12, 7, 1)] == [12, 7, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_one_that_is_in_training_is_taken_out_of_it_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made = latent().train()
    assert make(made) is made and not made.training
    moved: list[Any] = []
    monkeypatch.setattr(made, "to", lambda device: moved.append(device) or made)
    few = RecordingCompressor(made.train()).compress(tokens_of([5]), None, 3)
    assert few.mask.shape[1] == 3 and not made.training and moved == [few.hidden_states.device]


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
    "not theirs": ([VisualGrid(0, 0, 2, 3, 0), VisualGrid(1, 0, 2, 2, 1)], [5, 5]),
    "tiny": ([VisualGrid(0, 0, 1, 1, 0)], [1]),
    "none": ([], [0, 0]),
}


def members_of(segments: list[VisualGrid], count: int, window: Window) -> list[list[int]]:
    """Per merged token of a row, the tokens in it: written out place by place."""
    if not segments:
        return [list(range(i, min(count, i + window.columns))) for i in range(0, count, window.columns)]
    made: list[list[int]] = []
    clips: dict[tuple[int, int], list[VisualGrid]] = {}
    for one in segments:
        clips.setdefault((one.media_index, 0) if one.role == "frame" else (one.media_index, 1 + one.start), []).append(
            one
        )
    for frames in clips.values():
        h, w = frames[0].height, frames[0].width + int(frames[0].has_newlines)
        for t in range(0, len(frames), window.frames):
            for y in range(0, h, window.lines):
                for x in range(0, w, window.columns):
                    made.append(
                        [
                            frame.start + yy * w + xx
                            for frame in frames[t : t + window.frames]
                            for yy in range(y, min(h, y + window.lines))
                            for xx in range(x, min(w, x + window.columns))
                        ]
                    )
    return made


def slow_window(segments: list[VisualGrid], count: int, budget: int) -> Window:
    """Of the windows that fit a row, tried one by one, what keeps the most, then the more square, then the smaller."""
    best, most = None, -1
    sides = [side for one in segments for side in (one.height, one.width + int(one.has_newlines), one.frame + 1)]
    longest = max([1, *(sides or [count])])
    for n in range(1, longest + 1):
        for window in (Window(n, n, n), Window(n + 1, n, n), Window(n + 1, n, n + 1)):
            kept = len(members_of(segments, count, window))
            squarer = best is not None and best.lines < best.columns and window.lines == window.columns
            if kept <= budget and (kept > most or (kept == most and squarer)):
                best, most = window, kept
    return best or Window(longest, longest, longest)


def grouped(members: list[list[int]], budget: int) -> list[list[int]]:
    """Merged tokens of which neighbours are merged, where they are more than the budget."""
    if len(members) <= budget:
        return members
    groups = [[part for i, part in enumerate(members) if i * budget // len(members) == n] for n in range(budget)]
    return [list(chain(*group)) for group in groups]


def merging(sort: str, budget: int) -> Any:
    """`Pool`, or `Conv` with weights that are no mean."""
    if sort == "pool":
        return Pool(budget)
    made = Conv(8, budget)
    made.kernel.data.normal_(generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 6, 8, 100])
@pytest.mark.parametrize("sort", ["pool", "conv"])
def test_merging_is_the_slow_reference(grid: str, budget: int, sort: str) -> None:
    segments, counts = GRIDS[grid]
    visual = replace(tokens_of(counts), grids=tuple(segments))
    made = merging(sort, budget)
    few = made.compress(visual, None, budget)
    for row, count in enumerate(counts):
        mine = [one for one in segments if one.row == row]
        mine = mine if sum(one.length for one in mine) == count else []
        window = slow_window(mine, count, budget)
        members = grouped(members_of(mine, count, window), budget)
        assert int(few.mask[row].sum()) == len(members) <= budget
        assert sorted(chain(*members)) == list(range(count))
        for slot, inside in enumerate(members):
            weights = torch.ones(len(inside), 8)
            if sort == "conv":
                weights = torch.stack([_kernel(made, mine, token, window) for token in inside])
            for name in ("embeddings", "states"):
                expected = (getattr(visual, name)[row, inside] * weights).sum(0) / len(inside)
                assert torch.allclose(getattr(few, name)[row, slot], expected, atol=1e-5), (row, slot)
            spot = sum(float(visual.position_ids[row, token]) for token in inside) / len(inside)
            assert abs(int(few.positions[row, slot]) - spot) <= 0.5001


def _kernel(made: Conv, segments: list[VisualGrid], token: int, window: Window) -> Tensor:
    """What a token of a row counts, by where in its window it lies."""
    y, x = 0, token
    for one in segments:
        if one.start <= token < one.start + one.num_tokens:
            y, x = divmod(token - one.start, one.width + int(one.has_newlines))
    size = made.SIZE
    kernel: Tensor = made.kernel[
        :, (y % window.lines) * size // window.lines, (x % window.columns) * size // window.columns
    ]
    return kernel.detach()


def test_a_convolution_begins_as_the_mean() -> None:
    segments, counts = GRIDS["rows"]
    visual = replace(tokens_of(counts), grids=tuple(segments))
    mine, other = Conv(8, 5).compress(visual, None, 5), Pool(5).compress(visual, None, 5)
    assert torch.allclose(mine.inputs_embeds, other.inputs_embeds, atol=1e-6) and torch.equal(mine.mask, other.mask)


def test_windows_grow_no_further_than_needed() -> None:
    blocks = blocks_of([VisualGrid(0, 0, 14, 14, 0)], [196])
    assert [blocks[0].cells(window_for(blocks, budget)) for budget in (196, 100, 49, 25, 12, 4, 1)] == [
        196, 98, 49, 25, 12, 4, 1,
    ]  # fmt: skip
    twelve = blocks_of([VisualGrid(0, 0, 12, 12, 0)], [144])
    assert [window_for(twelve, budget) for budget in (72, 36)] == [Window(2, 1, 2), Window(2, 2, 2)]
    wide = blocks_of([VisualGrid(0, 0, 4, 5, 0)], [20])
    assert window_for(wide, 4) == Window(3, 3, 3), "2 x 3 leaves four as well"
    clip = blocks_of([VisualGrid(0, 196 * t, 14, 14, 0, role="frame", frame=t) for t in range(8)], [1568])
    assert len(clip) == 1 and clip[0].cells(window_for(clip, 200)) <= 200
    assert window_for(clip, 1568) == Window(1, 1, 1) and window_for(clip, 1) == Window(14, 14, 14)
    assert window_for(clip, 784) == Window(2, 1, 1) and window_for(clip, 783) == Window(2, 1, 2)


RAGGED = (
    [VisualGrid(0, 0, 14, 14, 0)],
    [VisualGrid(0, 196 * t, 14, 14, 4, role="frame", frame=t) for t in range(8)],
    [VisualGrid(0, 0, 12, 12, 1), VisualGrid(0, 144, 9, 16, 2)],
    [],
)


@pytest.mark.parametrize("budget", [1, 4, 16, 49, 72, 500])
@pytest.mark.parametrize("sort", ["pool", "conv"])
def test_a_row_does_not_hang_on_its_neighbours(sort: str, budget: int) -> None:
    counts = [sum(one.num_tokens for one in row) for row in RAGGED]
    segments = tuple(replace(one, row=row) for row, mine in enumerate(RAGGED) for one in mine)
    visual, made = replace(tokens_of(counts), grids=segments), merging(sort, budget)
    few = made.compress(visual, None, budget)
    for row, (count, mine) in enumerate(zip(counts, RAGGED, strict=True)):
        own = (part[row : row + 1, :count] for part in (visual.inputs_embeds, visual.hidden_states, visual.mask))
        alone = made.compress(VisualTokens(*own, visual.position_ids[row : row + 1, :count], tuple(mine)), None, budget)
        kept = int(few.mask[row].sum())
        assert alone.mask.tolist() == [[True] * kept] and not few.mask[row, kept:].any()
        for name in ("embeddings", "states"):
            assert torch.allclose(getattr(few, name)[row, :kept], getattr(alone, name)[0], atol=1e-6)
        assert torch.equal(few.positions[row, :kept], alone.positions[0])
        if sort == "pool":
            assert few.origin is not None and alone.origin is not None
            assert torch.equal(few.origin[row, :kept], alone.origin[0])


@pytest.mark.parametrize("counts", [[6, 6], [7, 2, 0], [1], [0]])
@pytest.mark.parametrize("budget", [1, 3, 50])
@pytest.mark.parametrize("name", ["stride", "random", "relevant", "salient", "diverse"])
def test_picking_is_the_slow_reference(name: str, budget: int, counts: list[int]) -> None:
    visual = tokens_of(counts)
    query = torch.randn(len(counts), 8, generator=torch.Generator().manual_seed(3))
    few = make(f"{name}:{budget}").compress(visual, query, budget)
    for row, count in enumerate(counts):
        tokens, kept = list(range(count)), min(count, budget)
        embeddings, states = visual.inputs_embeds[row], visual.hidden_states[row]
        if name == "stride":
            expected = [(2 * i + 1) * count // (2 * kept) for i in range(kept)]
        elif name == "random":
            rng = torch.rand(max(counts), generator=torch.Generator().manual_seed(0))
            expected = sorted(sorted(tokens, key=lambda t: -float(rng[t]))[:kept])
        elif name == "relevant":
            expected = sorted(sorted(tokens, key=lambda t: -_cosine(states[t], query[row]))[:kept])
        elif name == "salient":
            mean = embeddings[:count].mean(0)
            expected = sorted(sorted(tokens, key=lambda t: _cosine(embeddings[t], mean))[:kept])
        else:
            expected = _diverse(embeddings[:count], kept)
        assert few.mask[row].tolist() == [True] * kept + [False] * (few.mask.shape[1] - kept)
        for slot, token in enumerate(expected):
            assert torch.equal(few.inputs_embeds[row, slot], embeddings[token]), (name, row, slot)
            assert torch.equal(few.hidden_states[row, slot], states[token])
            assert few.position_ids[row, slot] == visual.position_ids[row, token]


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a @ b) / (a.norm() * b.norm()))


def _diverse(rows: Tensor, kept: int) -> list[int]:
    """Greedy max-min, written out."""
    chosen: list[int] = []
    while len(chosen) < kept:
        rest = [t for t in range(len(rows)) if t not in chosen]
        others = chosen or None
        chosen.append(
            max(rest, key=lambda t: min((1 - _cosine(rows[t], rows[o]) for o in (others or rest) if o != t), default=9))
        )
    return sorted(chosen)


@pytest.mark.parametrize("counts", [[7, 6], [7, 2, 0], [1, 7]])
@pytest.mark.parametrize("kept", [1, 4, 7])
def test_diverse_in_several_stretches(counts: list[int], kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "STRETCH", 3)
    visual = tokens_of(counts)
    few = make(f"diverse:{kept}").compress(visual, None, kept)
    for row, count in enumerate(counts):
        assert few.source_indices is not None
        found = few.source_indices[row][few.mask[row]].tolist()
        assert found == _diverse(visual.inputs_embeds[row, :count], min(count, kept))


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor holds that anything returns."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max(self.found, out.numel() if isinstance(out, Tensor) else 0)
        return out


def test_diverse_of_a_long_clip_makes_no_square() -> None:
    visual = tokens_of([2000])
    with Largest() as largest:
        make("diverse:5").compress(visual, None, 5)
    assert largest.found <= picking.STRETCH * 2000


def test_scores_of_the_tower_are_used_where_there_are_any() -> None:
    visual = replace(tokens_of([5]), saliency=torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.0]]))
    assert make("salient:2").compress(visual, None, 2).position_ids.tolist() == [[5, 9]]
    with pytest.raises(ValueError, match="needs the question's last state"):
        make("relevant:2").compress(visual, None, 2)


def test_all_and_nothing() -> None:
    visual = tokens_of([5, 3])
    whole = make("identity").compress(visual, None, 1)
    assert whole.inputs_embeds is visual.inputs_embeds and whole.mask is visual.mask
    assert make("drop").compress(visual, None, 1).inputs_embeds.shape == (2, 0, 8)


@pytest.mark.parametrize("name", ["latent:4", "resampler:4", "conv:4", "elastic:4"])
def test_what_was_trained_comes_back_and_draws_nothing(name: str) -> None:
    made = new(name, 32)
    assert isinstance(made, torch.nn.Module)
    before = torch.get_rng_state()
    again = restored({"name": made.name, "tokens": made.max_tokens}, made.state_dict(), 32)
    assert torch.equal(torch.get_rng_state(), before), "or a seed set before `patch` is another after it"
    assert isinstance(again, torch.nn.Module)
    for name_, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name_], value), name_


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("counts", [[6, 6], [7, 2, 0], [1], [0]])
def test_a_resampler_begins_as_a_mean_of_views(counts: list[int], count: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        made = Resampler(8, 3, heads=2, width=4).eval()
        later = Resampler(8, 3, heads=2, width=4).eval()
    later.load_state_dict(made.state_dict())
    later.out.weight.data.normal_(generator=torch.Generator().manual_seed(6))
    visual = tokens_of(counts)
    with torch.no_grad():
        few, more = made.compress(visual, None, count), later.compress(visual, None, count)
    if not max(counts):
        assert few.inputs_embeds.shape[1] == 0
        return
    assert few.inputs_embeds.shape == (len(counts), count, 8)
    for row, tokens in enumerate(counts):
        assert few.mask[row].tolist() == [tokens > 0] * count
        for slot in range(count if tokens else 0):
            shares = []
            for head in range(2):
                scores = []
                for token in range(tokens):
                    parts = [visual.inputs_embeds[row, token], visual.hidden_states[row, token]]
                    normed = [(p - p.mean()) / (p.var(unbiased=False) + 1e-5).sqrt() for p in parts]
                    key = made.keys.weight[4 * head : 4 * head + 4] @ torch.cat(normed)
                    scores.append(float(key @ made.queries[slot, head]) / 2)
                shares.append(torch.tensor(scores).softmax(0))
            for name in ("embeddings", "states"):
                rows = getattr(visual, name)[row, :tokens]
                plain = (shares[0] @ rows + shares[1] @ rows) / 2
                assert torch.allclose(getattr(few, name)[row, slot], plain, atol=1e-5)
                views = [shares[h] @ (rows @ made.values.weight[4 * h : 4 * h + 4].t()) for h in range(2)]
                added = later.out.weight @ torch.cat(views)
                assert torch.allclose(getattr(more, name)[row, slot], plain + added, atol=1e-4)


def elastic(tokens: int = 8) -> Elastic:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return Elastic(8, tokens)


@pytest.mark.parametrize("counts", [[12, 12], [12, 5, 0], [1], [0, 0]])
def test_elastic_is_the_way_that_the_gate_picks(counts: list[int]) -> None:
    """Every way for every row: what comes out is what that way makes of that row."""
    made, visual = elastic().eval(), tokens_of(counts)
    query = torch.randn(len(counts), 8, generator=torch.Generator().manual_seed(8))
    for number in range(len(made.branches)):
        sight = torch.nn.functional.layer_norm(query, (8,))
        made.gate.weight.data.zero_()
        made.gate.bias.data.zero_()
        made.gate.weight.data[number, :8] = 50 * sight[0]  # the first row picks it; the others what they may
        few = made.compress(visual, query, 8)
        assert made.chosen is not None and made.chosen[0] == made.labels()[number]
        for row, label in enumerate(made.chosen):
            way = made.branches[made.labels().index(label)]
            alone = way.compress(visual, query, way.max_tokens)
            mine, theirs = few.mask[row], alone.mask[row]
            assert int(mine.sum()) == int(theirs.sum()) <= 8, label
            assert torch.allclose(few.inputs_embeds[row][mine], alone.inputs_embeds[row][theirs])
            assert torch.allclose(few.hidden_states[row][mine], alone.hidden_states[row][theirs])
            assert torch.equal(few.position_ids[row][mine], alone.position_ids[row][theirs])


def test_elastic_learns_its_gate() -> None:
    """A loss that wants much of what is shown moves the gate towards the way that shows the most."""
    made, visual = elastic().train(), tokens_of([12, 12])
    visual, query = replace(visual, inputs_embeds=visual.inputs_embeds.abs()), torch.ones(2, 8)
    optimiser, before = torch.optim.Adam(made.gate.parameters(), 0.1), made.gate.bias.detach().clone()
    torch.manual_seed(0)
    for _ in range(30):
        few = made.compress(visual, query, 8)
        loss = -few.inputs_embeds.sum()
        optimiser.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimiser.step()
    made.eval().compress(visual, query, 8)
    assert not torch.equal(made.gate.bias, before) and made.chosen == ["salient:8", "salient:8"]  # no mean is longer
    with pytest.raises(ValueError, match="needs the question's last state"):
        made.compress(visual, None, 8)


# --- what a drafter makes of them -------------------------------------------------------------------------------------


def head(kind: str = "eagle") -> EagleHead:
    shape = {"eagle": {}, "flash": {"intermediate_size": 0, "block_size": 2, "block_ffn_size": 40}}.get(kind, {"block_size": 2})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        made = ARCHITECTURES[kind].head(replace(HEAD_CONFIG, **shape))
    for weight in made.parameters():
        weight.data.mul_(1.5)
    return made.eval()


def drafts(world: FakeTarget, rule: str, own: Any, pads: tuple[int, int] = (0, 3), **more: Any) -> list[Any]:
    made = EagleDrafter(head(), rule, num_layers=NUM_LAYERS, max_depth=3, beam_width=3)
    made.compressor = own
    tree = made.propose(begin_decoding(world, made, build_prompt(world, 11, pads, **more)), 16, [True, True])
    return [scores_by_path(tree, row) for row in range(2)]


@pytest.mark.parametrize("rule", VISUAL_MODES)
def test_showing_everything_changes_nothing(world: FakeTarget, rule: str) -> None:
    for mine, other in zip(drafts(world, rule, make("identity")), drafts(world, rule, None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_showing_nothing_is_the_textual_rule(world: FakeTarget) -> None:
    for mine, other in zip(drafts(world, "coupled", make("drop")), drafts(world, "text_only", None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("runs", [[(2, 6)], [(1, 3), (7, 9)], [(0, 12)], [(11, 12)], []])
@pytest.mark.parametrize("name", ["identity", "pool:2", "stride:3", "salient:2", "drop"])
def test_a_text_by_itself_is_read_as_in_a_batch(world: FakeTarget, runs: list[tuple[int, int]], name: str) -> None:
    """Visual tokens of one text that stand together are not copied; those of a batch, or apart, are."""
    rng = torch.Generator().manual_seed(9)
    visual = torch.zeros(2, 12, dtype=torch.bool)
    for start, end in runs:
        visual[0, start:end] = True
    visual[1, 4:9:2] = True
    following, states = (torch.randn(2, 12, 32, generator=rng) for _ in range(2))
    attended, index = torch.rand(2, 12, generator=rng), torch.arange(12).expand(2, 12)

    def read(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        inputs = DraftInputs(
            following[rows],
            states[rows],
            visual[rows],
            following[0, 0],
            attention_mask=torch.ones_like(visual[rows]),
            position_ids=index[rows],
            saliency=attended[rows],
        )
        return compressed_inputs(head(), "decoupled", inputs, make(name), states[rows, -1])

    with torch.no_grad():
        alone, batch = read(slice(0, 1)), read(slice(0, 2))
    on, there = alone[1][0], batch[1][0]
    assert torch.equal(alone[2][0][on], batch[2][0][there])
    assert torch.allclose(alone[0][0][on], batch[0][0][there], atol=1e-5)


@pytest.mark.parametrize("rule", ["text_only", "coupled"])
def test_few_rows_may_stand_far_apart(world: FakeTarget, rule: str) -> None:
    """A picture of 690 tokens of which none is shown: rows are few, and their positions beyond any small table."""
    rng = torch.Generator().manual_seed(6)
    visual = torch.zeros(1, 700, dtype=torch.bool)
    visual[:, 3:693] = True
    ids = torch.randint(3, 38, (1, 700), generator=rng).masked_fill(visual, IMAGE_TOKEN_ID)
    embedded = world.shared_embeddings.embed_tokens(ids)
    states = torch.randn(1, 700, 32, generator=rng)
    prompt = Prompt(
        *(ids, torch.ones_like(visual), visual, ids),
        hidden_states={0: embedded, NUM_LAYERS: states},
        vocab_size=40,
        shared_embeddings=world.shared_embeddings,
    )
    made = EagleDrafter(head(), rule, num_layers=NUM_LAYERS, max_depth=1, beam_width=3)
    made.compressor = None if rule == "text_only" else make("drop")
    state = made.begin(prompt)
    made.observe(state, build_first_result([7]), {})
    made.sync(state)
    places = [place for place in range(700) if place == 699 or not visual[0, place + 1]]
    following = torch.cat([embedded[0, 1:], world.shared_embeddings.embed_tokens(torch.tensor([[7]]))[0]])
    with torch.no_grad():
        rows = [made.head.fc(torch.cat([following[place], states[0, place]])) for place in places]
        out = reference_forward(made.head, torch.stack(rows), torch.tensor(places))[-1]
    assert torch.allclose(state.last_hidden[0], out, atol=1e-4)


def test_the_one_that_was_chosen_for_the_call_comes_first(world: FakeTarget) -> None:
    chosen = drafts(world, "coupled", make("identity"), compressor=make("drop"))
    for mine, other in zip(chosen, drafts(world, "text_only", None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_a_trained_one_goes_where_the_states_are(world: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    made = latent(width=HEAD_CONFIG.hidden_size)
    monkeypatch.setattr(made, "to", moved.append)
    drafts(world, "decoupled", made)
    assert moved == [world.hidden_states.device], "its file was read on the host"


@pytest.mark.parametrize("name", ["conv:3", "elastic:3", "latent:3", "resampler:3"])
def test_a_trained_one_shows_rows_of_the_targets_precision(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        made = new(name, 8)
    assert isinstance(made, torch.nn.Module)
    for weight in made.parameters():
        weight.data += 0.1
    if isinstance(made, Elastic):
        made.gate.bias.data[-1] = 9.0  # the way with weights
    whole, query = tokens_of([5, 3]), torch.zeros(2, 8)
    half = replace(whole, inputs_embeds=whole.inputs_embeds.bfloat16(), hidden_states=whole.hidden_states.bfloat16())
    with torch.no_grad():
        few, other = made.eval().compress(half, query.bfloat16(), 3), made.compress(whole, query, 3)
    assert few.inputs_embeds.dtype == few.hidden_states.dtype == torch.bfloat16
    assert torch.allclose(few.hidden_states.float(), other.hidden_states, atol=0.1) and torch.equal(
        few.mask, other.mask
    )


def slow(world: FakeTarget, made: EagleHead, compressor: LatentCompressor, rule: str, row: int, n: int) -> Tensor:
    """[V] logits after the first n words and the n-th, the picture at 2 to 4 shown as mixtures."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    mixed = slow_latent(compressor, world.merge_embeddings(visual)[row, 2:5], world.hidden_states[row, 1:4])
    texts, places = reference_draft_inputs(world, made, "text_only", row, n)
    rows = [e if rule == "decoupled" else made.fc(torch.cat([e, s])) for e, s in mixed]
    where = [1, 2, 3] if len(rows) == 3 else [1, 3]
    out = reference_forward(made, torch.stack([*rows, *texts]), torch.tensor([*where, *places]))[-1]
    logits: Tensor = world.shared_embeddings.lm_head(out)
    return logits


@pytest.mark.parametrize("rule", ["decoupled", "coupled"])
@pytest.mark.parametrize("count", [2, 3])
def test_drafts_with_mixtures_are_those_of_the_slow_reference(world: FakeTarget, rule: str, count: int) -> None:
    compressor = latent(count, 32)
    found = drafts(world, rule, compressor)
    with torch.no_grad():
        for row, n in enumerate((11, 8)):
            logits = slow(world, head(), compressor, rule, row, n)
            logits[[0, IMAGE_TOKEN_ID]] = float("-inf")
            chances = logits.softmax(-1)
            first = {path[0]: score for path, score in found[row].items() if len(path) == 1}
            assert first == pytest.approx({token: float(chances[token]) for token in first}, rel=2e-3)


@pytest.mark.parametrize("rule", ["decoupled", "coupled"])
def test_it_is_taught_with_what_it_is_shown(world: FakeTarget, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmspec.drafters.training.losses import LossAccumulator

    judged: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(LossAccumulator, "add", lambda self, part, out, goal, *added: judged.append((part, out)))
    pupil = DraftModel(head(), rule, compressor=latent(3, 32))
    placeholder = world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    lesson = build_train_batch(world)
    with torch.no_grad():
        eagle_loss(pupil, lesson, world.shared_embeddings, placeholder, LossWeights(ttt_steps=0), Progress())
        data = build_targets(pupil, lesson, placeholder)
        said = world.shared_embeddings.lm_head(judged[0][1])
        for got, (b, p) in zip(said, data.loss_mask.nonzero().tolist(), strict=True):
            expected = slow(world, head(), pupil.compressor, rule, b, int(data.position_ids[b, p]) + 1)
            assert torch.allclose(got, expected, atol=2e-3)
    assert len(said) > 6


def grids(sort: str) -> Any:
    """One of those that go by the grid, to two tokens; the weights are loud."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        conv = Conv(32, 2)
        conv.kernel.data.normal_()
        return {"pool": Pool(2), "conv": conv, "elastic": Elastic(32, 2, [conv]).eval()}[sort]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("sort", ["pool", "conv", "elastic"])
def test_it_is_taught_on_the_grids_that_it_is_shown(
    world: FakeTarget, kind: str, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After nine words, of which three are a small and a wider picture, the losses judge what drafting says there."""
    from mmspec.drafters.training.losses import LossAccumulator

    made = head(kind)
    pictures = [VisualGrid(row, start, 1, 1 + start, 2 * row + start) for row in range(2) for start in range(2)]
    asked = build_prompt(world, 9, grids=tuple(replace(one, start=one.start + 2) for one in pictures))
    drafter = ARCHITECTURES[kind].drafter(made, "coupled", num_layers=NUM_LAYERS)
    drafter.compressor = grids(sort)
    tree = drafter.propose(begin_decoding(world, drafter, asked), 8, [True, True])
    judged: list[tuple[int, Tensor, Tensor]] = []
    monkeypatch.setattr(LossAccumulator, "add", lambda self, part, out, goal, *added: judged.append((part, out, goal)))
    pupil, placeholder = (
        DraftModel(made, "coupled", kind, grids(sort)),
        world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)),
    )
    lesson, found = replace(build_train_batch(world), grids=tuple(pictures)), set()
    with torch.no_grad():
        for seed in range(3):  # where Falcon's blocks begin
            when = Progress(1.0, torch.Generator().manual_seed(seed))
            ARCHITECTURES[kind].compute_loss(pupil, lesson, world.shared_embeddings, placeholder, LossWeights(ttt_steps=0), when)
        for part, out, goal in judged:
            for said, meant in zip(out, goal, strict=True):
                row = next((b for b in range(2) if torch.equal(meant, lesson.hidden_states[b, 9])), None)
                if part == 0 and row is not None:
                    logits = world.shared_embeddings.lm_head(said)
                    logits[[0, IMAGE_TOKEN_ID]] = float("-inf")
                    chances, found = logits.softmax(-1), found | {row}
                    first = {path[0]: score for path, score in scores_by_path(tree, row).items() if len(path) == 1}
                    assert first == pytest.approx({word: float(chances[word]) for word in first}, rel=2e-3)
    assert found == {0, 1}


def test_a_compressor_learns_along_and_comes_back(world: FakeTarget, tmp_path: Path) -> None:
    pupil = DraftModel(head(), "decoupled", compressor=latent(2, 32))
    before = pupil.compressor.queries.detach().clone()
    for part in (world.shared_embeddings.embed_tokens, world.shared_embeddings.lm_head):
        part.requires_grad_(False)
    placeholder = world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    plan = TrainConfig(max_steps=4, batch_size=2)
    run = Trainer(
        tmp_path / "a",
        {"one": pupil},
        plan,
        world.shared_embeddings,
        lambda step: build_train_batch(world),
        placeholder,
        {},
    )
    assert run.run() and not torch.equal(pupil.compressor.queries, before)
    facts = {"name": "latent", "tokens": 2}
    made = HeadMetadata(HEAD_CONFIG, "decoupled", NUM_LAYERS, compressor=(facts, pupil.compressor.state_dict()))
    save_head(tmp_path / "b", pupil.head, made, torch.float32)
    _, again = load_head(tmp_path / "b")
    assert again.compressor is not None
    back = restored(*again.compressor, 32)
    assert isinstance(back, LatentCompressor) and torch.equal(back.queries, pupil.compressor.queries)
    with pytest.raises(ValueError, match="compressor latent"):
        restored({"name": "latent", "tokens": 3}, again.compressor[1], 32)


def gated() -> Elastic:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return Elastic(32, 2)


def test_a_gate_learns_the_same_in_a_run_that_was_cut(world: FakeTarget, tmp_path: Path) -> None:
    placeholder = world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    for part in (world.shared_embeddings.embed_tokens, world.shared_embeddings.lm_head):
        part.requires_grad_(False)

    def run(name: str, seconds: float) -> Elastic:
        pupil, plan = DraftModel(head(), "decoupled", compressor=gated()), TrainConfig(max_steps=8, batch_size=2, warmup_steps=1)
        torch.seed()  # whatever else went on in the process
        before = torch.get_rng_state()
        training = Trainer(
            tmp_path / name,
            {"one": pupil},
            plan,
            world.shared_embeddings,
            lambda step: build_train_batch(world),
            placeholder,
            {},
        )
        if not training.run(seconds):
            return run(name, seconds)
        assert torch.equal(torch.get_rng_state(), before)
        made: Elastic = pupil.compressor
        return made

    whole, cut = run("whole", math.inf), run("cut", 0.0)
    assert whole.gate.bias.abs().max() > 0
    for name, value in whole.state_dict().items():
        # The gate holds costs a hundred times over.
        assert torch.allclose(value, cut.state_dict()[name], atol=1e-3 if "gate" in name else 1e-6), name


@pytest.mark.parametrize("says", [True, False])
def test_a_gate_that_was_told_costs_chooses_by_them(says: bool) -> None:
    """Where what it sees says which way is cheap it goes by that; where not, by what is best on the whole."""
    made, rng = elastic(), torch.Generator().manual_seed(4)
    sights = torch.randn(300, 9, generator=rng)
    costs = 0.3 + 0.05 * torch.randn(300, len(made.branches), generator=rng) + torch.rand(300, 1, generator=rng)
    costs[:, 2] -= 0.1
    if says:
        costs[:, 4] -= 0.1 + 0.3 * sights[:, 5]
    made.fit_gate(sights, costs)
    with torch.no_grad():
        picked = made.gate(torch.randn(200, 9, generator=rng) if not says else sights).argmax(1)
    wanted = torch.where(sights[:, 5] > 0, 4, 2) if says else torch.full((200,), 2)
    assert (picked == wanted).float().mean() > (0.85 if says else 0.99)


def test_one_way_alone() -> None:
    made, visual = elastic().eval(), tokens_of([12, 5])
    query = torch.randn(2, 8, generator=torch.Generator().manual_seed(8))
    for number, way in enumerate(made.branches):
        with made.force_branch(number) as seen:
            few = made.compress(visual, query, 8)
        theirs = way.compress(visual, query, way.max_tokens)
        assert torch.equal(few.inputs_embeds, theirs.inputs_embeds) and torch.equal(few.mask, theirs.mask)
        assert torch.allclose(seen[0].penalty, CHARGE * theirs.mask.sum(1) / torch.tensor([12, 5]))
        assert len(seen) == 1 and seen[0].features.shape == (2, 9)
    made.compress(visual, query, 8)
    assert made.chosen is not None and len(seen) == 1


def test_a_gate_is_told_what_each_way_costs_the_head(world: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text by text, the loss on words with that way alone, and what it is charged."""
    made, placeholder = gated().eval(), world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    pupil, told = DraftModel(head(), "decoupled", compressor=made), list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(made, "fit_gate", lambda sights, costs: told.append((sights, costs)))
    fit_gate_on_batches(
        pupil,
        [build_train_batch(world), build_train_batch(world)],
        world.shared_embeddings,
        placeholder,
        LossWeights(ttt_steps=1, step_decay=0.5),
    )
    [(sights, costs)] = told
    assert sights.shape == (4, 33) and costs.shape == (4, len(made.branches)) and torch.equal(costs[:2], costs[2:])
    text, when = build_train_batch(world).split()[1], Progress(1.0)
    for number, way in enumerate(made.branches):
        with torch.no_grad():
            alone = replace(pupil, compressor=way)
            loss, _ = ARCHITECTURES["eagle"].compute_loss(
                alone, text, world.shared_embeddings, placeholder, LossWeights(0.0, 1.0, 1, 0.5), when
            )
        kept = 0 if way.name == "drop" else min(3, way.max_tokens)
        assert float(costs[1, number]) == pytest.approx(float(loss) / 1.5 + CHARGE * kept / 3, rel=1e-4)
    fit_gate_on_batches(replace(pupil, compressor=Drop()), [], world.shared_embeddings, placeholder, LossWeights())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_gate_is_charged_for_what_it_shows(world: FakeTarget, kind: str) -> None:
    """All else is worth nothing here: what is left is the share of three tokens that each way keeps, in the mean."""
    made, placeholder = gated().train(), world.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    pupil, free = DraftModel(head(kind), "decoupled", kind, made), LossWeights(0.0, 0.0)
    loss, figures = ARCHITECTURES[kind].compute_loss(
        pupil, build_train_batch(world), world.shared_embeddings, placeholder, free, Progress()
    )
    kept = [0 if label == "drop" else int(label.partition(":")[2]) for label in made.labels()]
    assert float(loss.detach()) == pytest.approx(CHARGE * sum(kept) / len(kept) / 3) == figures["cost"]
    loss.backward()
    assert made.gate.bias.grad is not None and int(made.gate.bias.grad.argmin()) == made.labels().index("drop")


@pytest.fixture(scope="module")
def tiny() -> Captioner:
    return Captioner(*random_model("tiny"))


def test_a_lesson_knows_its_grids(tiny: Captioner) -> None:
    """By visual tokens of their row, whether the texts come together, alone, or from what was kept."""
    pictures = [render_scene(generate_scene(number)) for number in range(3)]
    data = [Request(pictures[0], "what is it"), Request((), "a"), Request(tuple(pictures[1:]), "list the colors")]
    teacher = Teacher(tiny.model, tiny.processor, data, room=1 << 30)
    teacher.answers = {number: [7, 8, 9] for number in range(3)}
    for numbers in ([0, 1, 2], [2, 1], [2, 0, 2]):
        lesson = teacher.lesson(numbers)
        expected = {0: [0], 1: [], 2: [0, 16]}
        for row, number in enumerate(numbers):
            mine = [one for one in lesson.grids if one.row == row]
            assert [(one.start, one.height, one.width) for one in mine] == [(at, 4, 4) for at in expected[number]]
            assert sum(one.num_tokens for one in mine) == int(lesson.visual_mask[row].sum())


def test_it_never_changes_a_word_and_is_used(tiny: Captioner, tmp_path: Path) -> None:
    model = tiny.model
    config = HeadConfig(64, 128, 4, 2, 384)
    inputs = tiny.inputs(
        [render_scene(generate_scene(i)) for i in range(3)], ["a", "what is this thing", "list the colors please"]
    )
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    made = HeadMetadata(
        config, "decoupled", 2, "llava", compressor=({"name": "latent", "tokens": 5}, latent(5, 64).state_dict())
    )
    save_head(tmp_path, EagleHead(config), made)
    seen: list[int] = []
    mmspec.patch(model, str(tmp_path), nodes=16)
    try:
        compressor = model.__dict__["_mmspec"].options.drafter.compressor
        original = compressor.compress

        def spy(visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            few: VisualTokens = original(visual, query, budget)
            assert query is not None and query.shape == (3, 64)
            assert sum(segment.num_tokens for segment in visual.grids) == int(visual.mask.sum())
            seen.append(few.inputs_embeds.shape[1])
            return few

        compressor.compress = spy
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False), plain)
        chosen = {"compressor": make("drop")}
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, mmspec=chosen), plain)
    finally:
        mmspec.unpatch(model)
    assert seen == [5]


def test_elastic_by_its_name_is_the_drafters_own_or_goes_by_cost(tiny: Captioner, tmp_path: Path) -> None:
    """The call that a user would try first, with a drafter that knows no gate and with one that came with it."""
    model, config = tiny.model, HeadConfig(64, 128, 4, 2, 384)
    gate = Elastic(64, 4)
    gate.gate.bias.data[gate.labels().index("stride:1")] = 1.0
    ours = {"name": "elastic", "tokens": 4}, gate.state_dict()
    save_head(tmp_path / "msd", EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava"))
    save_head(tmp_path / "own", EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava", compressor=ours))
    inputs = tiny.inputs([render_scene(generate_scene(1))], ["what is this thing"])
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for drafter, other, ways in (("msd", "own", ["identity", "stride:1"]), ("own", "msd", ["stride:1", "identity"])):
        check_drafter(str(tmp_path / drafter), "elastic")
        mmspec.patch(model, drafter=str(tmp_path / drafter), compressor="elastic", nodes=8)
        try:
            for more, way in zip(({}, {"mmspec": {"drafter": str(tmp_path / other)}}), ways, strict=True):
                assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False, **more), plain)
                assert [row.choice for row in mmspec.stats(model, last=True).compression] == [way]
        finally:
            mmspec.unpatch(model)


def test_grids_that_are_not_a_rows_own_are_told_and_left_out(
    world: FakeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """Three visual tokens each; one grid has one too few and the other one too many, so that the sum is right."""
    wrong = (VisualGrid(0, 2, 2, 1, 0), VisualGrid(1, 2, 4, 1, 1))
    for mine, other in zip(
        drafts(world, "coupled", Pool(1), grids=wrong), drafts(world, "coupled", Pool(1)), strict=True
    ):
        assert mine == pytest.approx(other, rel=1e-3)
    caplog.clear()
    assert len(blocks_of(wrong, [3, 3])) == 2
    told = [record.getMessage() for record in caplog.records]
    assert "row 0 hold 2 tokens, it has 3" in told[0] and "row 1 hold 4 tokens, it has 3" in told[1]


@pytest.mark.parametrize("name", ["conv:4", "elastic:4", "latent:4", "resampler:4"])
def test_a_compressor_of_another_width_is_refused_before_anything_is_changed(tiny: Captioner, name: str) -> None:
    model, drafter = tiny.model, EagleDrafter(EagleHead(HeadConfig(64, 128, 4, 2, 384)), num_layers=2)
    words = f"compressor {name[:-2]!r} was made for states of width 32, drafter 'eagle' reads states of width 64"
    with pytest.raises(ValueError, match=words):
        mmspec.patch(model, drafter, compressor=new(name, 32))
    assert not mmspec.is_patched(model)
    mmspec.patch(model, drafter, compressor=new(name, 64), nodes=8)
    try:
        inputs = tiny.inputs([render_scene(generate_scene(1))], ["what is this thing"])
        with pytest.raises(ValueError, match=words):
            model.generate(**inputs, max_new_tokens=4, mmspec={"compressor": new(name, 32)})
        model.generate(**inputs, max_new_tokens=4, mmspec={"drafter": "lookup", "compressor": new(name, 32)})
    finally:
        mmspec.unpatch(model)


@pytest.mark.parametrize("name", ["conv:4", "elastic:4", "latent:4", "resampler:4"])
def test_one_with_weights_is_refused_where_states_stand_side_by_side(tiny: Captioner, name: str) -> None:
    """EAGLE-3 reads three states as one: those without weights do, of the others no width fits."""
    config = HeadConfig(64, 128, 4, 2, 384, eagle3_input=True)
    drafter = EagleDrafter(Eagle3Head(config, 384, 64), "coupled", num_layers=8, name="eagle3")
    drafter.set_hidden_state_indices((0, 1, 2), 2)
    words = (
        f"compressor {name[:-2]!r} .* drafter 'eagle3' reads several states side by side; choose one without weights"
    )
    for width in (64, 192):
        with pytest.raises(ValueError, match=words):
            mmspec.patch(tiny.model, drafter, compressor=new(name, width))
    assert not mmspec.is_patched(tiny.model)
    inputs = tiny.inputs([render_scene(generate_scene(1))], ["what is this thing"])
    plain = tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    mmspec.patch(tiny.model, drafter, compressor="pool:4", nodes=8)
    try:
        assert torch.equal(tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False), plain)
        assert mmspec.stats(tiny.model, last=True).compression[0].num_compressed_tokens == 4
    finally:
        mmspec.unpatch(tiny.model)


def test_a_drafter_that_shrinks_pictures_itself_takes_none(tiny: Captioner) -> None:
    words = "drafter 'vispec' shrinks pictures itself; leave compressor=None"
    drafter = VispecDrafter(VispecHead(HeadConfig(64, 128, 4, 2, 384), 2), num_layers=2)
    with pytest.raises(ValueError, match=words):
        mmspec.patch(tiny.model, drafter, compressor="pool:4")
    assert not mmspec.is_patched(tiny.model)
    inputs = tiny.inputs([render_scene(generate_scene(1))], ["what is this thing"])
    mmspec.patch(tiny.model, "lookup", compressor="pool:4")
    try:
        for chosen in (drafter, Recorder(drafter)):
            with pytest.raises(ValueError, match=words):
                tiny.model.generate(**inputs, max_new_tokens=4, mmspec={"drafter": chosen})
        tiny.model.generate(**inputs, max_new_tokens=4, mmspec={"drafter": drafter, "compressor": None})
    finally:
        mmspec.unpatch(tiny.model)


class Dicing:
    """Keeps tokens by the throw of a die that samples are drawn with as well."""

    name, max_tokens, thrown = "dicing", 3, 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """See `Compressor`."""
        self.thrown += 1
        index, mask = highest(torch.rand(visual_tokens.mask.shape), visual_tokens.mask, max_tokens)
        return take(visual_tokens, index, mask)


@pytest.mark.parametrize("sample", [True, False])
def test_what_a_compressor_draws_leaves_no_trace(tiny: Captioner, sample: bool) -> None:
    model, dicing = tiny.model, Dicing()
    config = HeadConfig(64, 128, 4, 2, 384)
    inputs = tiny.inputs([render_scene(generate_scene(i)) for i in range(2)], ["a", "what is this thing"])
    torch.manual_seed(5)
    plain, left = model.generate(**inputs, max_new_tokens=16, do_sample=sample), torch.get_rng_state()
    mmspec.patch(model, EagleDrafter(EagleHead(config), "decoupled", num_layers=2), compressor=dicing, nodes=8)
    try:
        torch.manual_seed(5)
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=sample), plain)
    finally:
        mmspec.unpatch(model)
    assert torch.equal(torch.get_rng_state(), left) and dicing.thrown == 1


def test_grids_are_counted_in_visual_tokens(world: FakeTarget) -> None:
    grids = (VisualGrid(1, 6, 1, 2, 1), VisualGrid(0, 2, 1, 3, 0), VisualGrid(1, 2, 1, 3, 1))
    prompt = build_prompt(world, 11, grids=grids)
    assert [(s.row, s.start) for s in prompt_grids(prompt, 11)] == [(0, 0), (1, 0), (1, 3)]
    assert prompt_grids(prompt, 5) == ()


# --- names ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert parse("latent:64") == ("latent", 64)
    made = new("latent:4", 16)
    assert isinstance(made, Compressor) and made.max_tokens == 4 and make(made) is made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic:4", "no compressor is called 'magic:4'; known: identity, drop, measured, stride:N"),
        ("latent", "say how many tokens are kept, as in latent:64; got 'latent'"),
        ("latent:0", "got 'latent:0'"),
        ("latent:64", "has weights: name the folder of a drafter"),
        ("elastic:64", "has weights.* Or say 'elastic', which needs no weights"),
        ("pool:0", "say how many tokens are kept, as in pool:64; got 'pool:0'"),
    ],
)
def test_names_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(text)


def test_an_object_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"a compressor needs `name`, `tokens` and `compress\(...\)`; got int"):
        make(3)
    with pytest.raises(ValueError, match="at least 1 token; got 0"):
        LatentCompressor(8, 0)
