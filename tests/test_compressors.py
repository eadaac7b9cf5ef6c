"""Compressors: each against a slow reference, and what a drafter makes of them. The target never sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.app.captioner import Captioner
from mmspec.app.models import random_model
from mmspec.app.scenes.paint import paint
from mmspec.app.scenes.world import scene
from mmspec.drafters.checkpoint import Made, load, save
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.head import EagleHead, HeadConfig
from mmspec.drafters.rules import RULES, segments_of
from mmspec.drafters.training import Plan, Training
from mmspec.drafters.training_losses import Pupil, Weights, When, losses, rows_of
from mmspec.drafters.vispec import VispecDrafter, VispecHead
from mmspec.interfaces import Compressor, Segment, VisualTokens
from mmspec.vision.latent import LatentCompressor
from mmspec.vision.registry import make, new, parse, restored
from pretend import CONFIG, LAYERS, PICTURE, World, lesson_of, paths_of, prompt_of, prompt_rows, slow_pass, started


def tokens_of(counts: list[int], width: int = 8, seed: int = 0) -> VisualTokens:
    """Random visual tokens, so many per row."""
    dice, most = torch.Generator().manual_seed(seed), max(counts)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), most, width, generator=dice) for _ in range(2))
    return VisualTokens(*parts, mask, torch.arange(most).expand(mask.shape) * 2 + 3)


class Identity:
    """Shows everything."""

    name, tokens = "identity", 10_000

    def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
        return visual


class Nothing:
    """Shows nothing."""

    name, tokens = "nothing", 0

    def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
        parts = {name: getattr(visual, name)[:, :0] for name in ("embeddings", "states", "mask", "positions")}
        return VisualTokens(**parts)


def latent(tokens: int = 3, width: int = 8) -> LatentCompressor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        return LatentCompressor(width, tokens)


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
    assert few.embeddings.shape == few.states.shape == (len(counts), 3, 8)
    for row, count in enumerate(counts):
        assert few.mask[row].tolist() == [count > 0] * 3
        expected = slow_latent(made, visual.embeddings[row, :count], visual.states[row, :count]) if count else []
        for slot, (embedding, state) in enumerate(expected):
            assert torch.allclose(few.embeddings[row, slot], embedding, atol=1e-5)
            assert torch.allclose(few.states[row, slot], state, atol=1e-5)
        spots = few.positions[row].tolist()
        assert not count or (spots == sorted(spots) and spots[0] == 3 and spots[-1] == 3 + 2 * (count - 1))
    assert torch.isfinite(few.embeddings).all()


def test_latent_with_a_smaller_budget_and_with_nothing_to_show() -> None:
    made, visual = latent(), tokens_of([5, 4])
    whole, part = made.compress(visual, None, 3), made.compress(visual, None, 2)
    assert torch.allclose(whole.embeddings[:, :2], part.embeddings) and part.mask.shape == (2, 2)
    empty = tokens_of([0, 0])
    assert made.compress(empty, None, 3).embeddings.shape[1] == 0
    axes = replace(visual, positions=visual.positions.expand(3, -1, -1))
    assert made.compress(axes, None, 3).positions.shape == (3, 2, 3)


# --- what a drafter makes of them -------------------------------------------------------------------------------------


def head() -> EagleHead:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        made = EagleHead(CONFIG)
    for weight in made.parameters():
        weight.data.mul_(1.5)
    return made.eval()


def drafts(world: World, rule: str, own: Any, pads: tuple[int, int] = (0, 3), **more: Any) -> list[Any]:
    made = EagleDrafter(head(), rule, layers=LAYERS, depth=3, width=3)
    made.compressor = own
    tree = made.propose(started(world, made, prompt_of(world, 11, pads, **more)), 16, [True, True])
    return [paths_of(tree, row) for row in range(2)]


@pytest.mark.parametrize("rule", RULES)
def test_showing_everything_changes_nothing(world: World, rule: str) -> None:
    for mine, other in zip(drafts(world, rule, Identity()), drafts(world, rule, None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_showing_nothing_is_the_textual_rule(world: World) -> None:
    for mine, other in zip(drafts(world, "coupled", Nothing()), drafts(world, "textual", None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_the_one_that_was_chosen_for_the_call_comes_first(world: World) -> None:
    chosen = drafts(world, "coupled", Identity(), compressor=Nothing())
    for mine, other in zip(chosen, drafts(world, "textual", None), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_a_drafter_that_shrinks_pictures_itself_takes_none(world: World) -> None:
    made = VispecDrafter(VispecHead(CONFIG, 2), layers=LAYERS)
    with pytest.raises(ValueError, match="shrinks pictures itself; leave compressor=None"):
        made.begin(prompt_of(world, 11, compressor=Identity()))


def slow(world: World, made: EagleHead, compressor: LatentCompressor, rule: str, row: int, n: int) -> Tensor:
    """[V] logits after the first n words and the n-th, the picture at 2 to 4 shown as mixtures."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    mixed = slow_latent(compressor, world.embedded(visual)[row, 2:5], world.states[row, 1:4])
    texts, places = prompt_rows(world, made, "textual", row, n)
    rows = [e if rule == "decoupled" else made.fc(torch.cat([e, s])) for e, s in mixed]
    where = [1, 2, 3] if len(rows) == 3 else [1, 3]
    out = slow_pass(made, torch.stack([*rows, *texts]), torch.tensor([*where, *places]))[-1]
    logits: Tensor = world.words.head(out)
    return logits


@pytest.mark.parametrize("rule", ["decoupled", "coupled"])
@pytest.mark.parametrize("count", [2, 3])
def test_drafts_with_mixtures_are_those_of_the_slow_reference(world: World, rule: str, count: int) -> None:
    compressor = latent(count, 32)
    found = drafts(world, rule, compressor)
    with torch.no_grad():
        for row, n in enumerate((11, 8)):
            logits = slow(world, head(), compressor, rule, row, n)
            logits[[0, PICTURE]] = float("-inf")
            chances = logits.softmax(-1)
            first = {path[0]: score for path, score in found[row].items() if len(path) == 1}
            assert first == pytest.approx({token: float(chances[token]) for token in first}, rel=2e-3)


@pytest.mark.parametrize("rule", ["decoupled", "coupled"])
def test_it_is_taught_with_what_it_is_shown(world: World, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmspec.drafters.training_losses import Sum

    judged: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(Sum, "add", lambda self, part, out, goal: judged.append((part, out)))
    pupil = Pupil(head(), rule, compressor=latent(3, 32))
    placeholder = world.words.embedding(torch.tensor(PICTURE))
    lesson = lesson_of(world)
    with torch.no_grad():
        losses(pupil, lesson, world.words, placeholder, Weights(rollout=0), When())
        data = rows_of(pupil, lesson, placeholder)
        said = world.words.head(judged[0][1])
        for got, (b, p) in zip(said, data.learn.nonzero().tolist(), strict=True):
            expected = slow(world, head(), pupil.compressor, rule, b, int(data.positions[b, p]) + 1)
            assert torch.allclose(got, expected, atol=2e-3)
    assert len(said) > 6


def test_a_compressor_learns_along_and_comes_back(world: World, tmp_path: Path) -> None:
    pupil = Pupil(head(), "decoupled", compressor=latent(2, 32))
    before = pupil.compressor.queries.detach().clone()
    for part in (world.words.embedding, world.words.head):
        part.requires_grad_(False)
    placeholder = world.words.embedding(torch.tensor(PICTURE)).detach()
    plan = Plan(steps=4, batch=2)
    run = Training(tmp_path / "a", {"one": pupil}, plan, world.words, lambda step: lesson_of(world), placeholder, {})
    assert run.run() and not torch.equal(pupil.compressor.queries, before)
    facts = {"name": "latent", "tokens": 2}
    made = Made(CONFIG, "decoupled", LAYERS, compressor=(facts, pupil.compressor.state_dict()))
    save(tmp_path / "b", pupil.head, made, torch.float32)
    _, again = load(tmp_path / "b")
    assert again.compressor is not None
    back = restored(*again.compressor, 32)
    assert isinstance(back, LatentCompressor) and torch.equal(back.queries, pupil.compressor.queries)
    with pytest.raises(ValueError, match="compressor latent"):
        restored({"name": "latent", "tokens": 3}, again.compressor[1], 32)


@pytest.fixture(scope="module")
def tiny() -> Captioner:
    return Captioner(*random_model("tiny"))


def test_it_never_changes_a_word_and_is_used(tiny: Captioner, tmp_path: Path) -> None:
    model = tiny.model
    config = HeadConfig(64, 128, 4, 2, 384)
    inputs = tiny.inputs([paint(scene(i)) for i in range(3)], ["a", "what is this thing", "list the colors please"])
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    made = Made(
        config, "decoupled", 2, "llava", compressor=({"name": "latent", "tokens": 5}, latent(5, 64).state_dict())
    )
    save(tmp_path, EagleHead(config), made)
    seen: list[int] = []
    mmspec.patch(model, str(tmp_path), nodes=16)
    try:
        compressor = model.__dict__["_mmspec"].options.drafter.compressor
        original = compressor.compress

        def spy(visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            few: VisualTokens = original(visual, query, budget)
            assert query is not None and query.shape == (3, 64)
            assert sum(segment.length for segment in visual.segments) == int(visual.mask.sum())
            seen.append(few.embeddings.shape[1])
            return few

        compressor.compress = spy
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False), plain)
        chosen = {"compressor": Nothing()}
        assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, mmspec=chosen), plain)
    finally:
        mmspec.unpatch(model)
    assert seen == [5]


def test_grids_are_counted_in_visual_tokens(world: World) -> None:
    grids = (Segment(1, 6, 1, 2, 1), Segment(0, 2, 1, 3, 0), Segment(1, 2, 1, 3, 1))
    prompt = prompt_of(world, 11, segments=grids)
    assert [(s.row, s.start) for s in segments_of(prompt, 11)] == [(0, 0), (1, 0), (1, 3)]
    assert segments_of(prompt, 5) == ()


# --- names ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert parse("latent:64") == ("latent", 64)
    made = new("latent:4", 16)
    assert isinstance(made, Compressor) and made.tokens == 4 and make(made) is made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic:4", "no compressor is called 'magic'; known: latent"),
        ("latent", "say how many tokens are kept, as in latent:64; got 'latent'"),
        ("latent:0", "got 'latent:0'"),
        ("latent:64", "has weights: name the folder of a drafter"),
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
