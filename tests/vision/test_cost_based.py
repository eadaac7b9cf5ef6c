"""The compressor that goes by measured costs: what it chooses, what is measured and how, what `stats` says of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import (
    HEAD_CONFIG,
    NUM_LAYERS,
    FakeTarget,
    begin_decoding,
    build_fake_target,
    build_prompt,
    build_result,
)
from torch import Tensor

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.control.draft_cost import EXPLORE_EVERY, CallTimer, CostByLength, DraftCostModel, DraftCosts, elapsed
from mmspec.control.tree_size import TreeSizeController
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.interfaces import CompressionContext, VisualGrid, VisualTokens
from mmspec.metrics.compression_stats import CompressionRecord, RecordingCompressor
from mmspec.vision.compressors.cost_based import FEW, Measured, Way, choose
from mmspec.vision.registry import make, new, parse

GPU = DraftCosts(prefill_token_s=5e-6, draft_token_s=5e-8, round_s=0.03, tokens_per_round=3.0)
"""A large model: looking costs next to nothing."""
SLOW = DraftCosts(prefill_token_s=1e-3, draft_token_s=1e-5, round_s=0.03, tokens_per_round=3.0)


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visual", "answer", "rates", "way"),
    [
        (0, 128, None, "identity"),
        (FEW, 128, None, "identity"),  # by the number of tokens alone
        (FEW + 1, 128, None, "salient:65"),
        (576, 128, None, "salient:144"),
        (2880, 128, None, "salient:180"),
        (40000, 128, None, "salient:625"),
        (576, None, None, "salient:144"),
        (576, 128, GPU, "identity"),
        (2880, 128, GPU, "identity"),
        (2880, 8, GPU, "salient:720"),  # few rounds do not pay for reading it all
        (40000, 128, GPU, "salient:2500"),
        (196, 128, SLOW, "salient:13"),
        (196, 8, SLOW, "salient:13"),
        (196, 8, DraftCosts(1e-2, 1e-5, 0.03, 3.0), "drop"),
        (40000, 1, SLOW, "drop"),
        (1, 1000, SLOW, "identity"),
    ],
)
def test_the_way_for_a_prompt(visual: int, answer: int | None, rates: DraftCosts | None, way: str) -> None:
    assert str(choose(visual, answer, rates)) == way


def test_it_is_the_one_that_costs_least() -> None:
    """Written out: reading, longer drafts, and more rounds where less is seen."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(300):
        visual, answer = (int(torch.randint(1, most, (), generator=rng)) for most in (5000, 300))
        read, draft, round_s, more = torch.rand(4, generator=rng).tolist()
        rates = DraftCosts(1e-4 * read**3, 1e-6 * draft**3, 0.02 + 0.05 * round_s, 1 + 3 * more)
        way, rounds = choose(visual, answer, rates), answer / rates.tokens_per_round
        missed = {visual: 0.0, -(-visual // 4): 0.02, -(-visual // 16): 0.06, -(-visual // 64): 0.2, 0: 0.23}
        whole = {
            size: size * rates.prefill_token_s + rounds * (size * rates.draft_token_s + less * rates.round_s)
            for size, less in reversed(missed.items())
        }
        assert whole[way.tokens] == pytest.approx(min(whole.values())) and way == choose(visual, answer, rates)


@pytest.mark.parametrize(("lean", "way"), [(1, "salient:36"), (0, "salient:144"), (-1, "identity")])
def test_leaning(lean: int, way: str) -> None:
    assert str(choose(576, 128, None, lean)) == way
    assert str(choose(10, 128, None, -1)) == "identity"
    assert str(choose(40000, 1, SLOW, -1)) == "drop"


def tokens_of(counts: list[int], outlook: CompressionContext | None = None) -> VisualTokens:
    """Random tokens; each row is a square of them if it can be."""
    rng, most = torch.Generator().manual_seed(0), max(counts)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), most, 8, generator=rng) for _ in range(2))
    sides = [int(count**0.5) for count in counts]
    grids = tuple(VisualGrid(row, 0, side, side, row) for row, side in enumerate(sides) if side)
    positions = torch.arange(most).expand(mask.shape) + 3
    return VisualTokens(*parts, mask, positions, grids, context=outlook)


@pytest.mark.parametrize("counts", [[576], [576, 100, 0], [400, 400], [0, 0], [100, 225]])
@pytest.mark.parametrize("answer", [8, 128, None])
def test_each_row_is_what_its_way_makes_of_it_alone(counts: list[int], answer: int | None) -> None:
    outlook = CompressionContext(answer)
    visual, query = tokens_of(counts, outlook), torch.randn(len(counts), 8)
    few = Measured().compress(visual, query, 1 << 30)
    expected = [str(choose(count, answer)) for count in counts]
    assert few.choices == tuple(expected)
    for row, (count, way) in enumerate(zip(counts, expected, strict=True)):
        alone = tokens_of(counts).inputs_embeds[row : row + 1, :count], visual.hidden_states[row : row + 1, :count]
        mask = torch.ones(1, count, dtype=torch.bool)
        grids = tuple(replace(s, row=0) for s in visual.grids if s.row == row)
        one = VisualTokens(*alone, mask, visual.position_ids[row : row + 1, :count], grids)
        made = make(way)
        theirs = made.compress(one, query[row : row + 1], made.max_tokens)
        mine = few.mask[row]
        assert int(mine.sum()) == int(theirs.mask.sum()) and bool(mine.int().diff().le(0).all()), "tokens come first"
        assert torch.allclose(few.inputs_embeds[row][mine], theirs.inputs_embeds[0])
        assert torch.allclose(few.hidden_states[row][mine], theirs.hidden_states[0])
        assert torch.equal(few.position_ids[row][mine], theirs.position_ids[0])
        assert few.source_indices is not None and theirs.source_indices is not None
        assert torch.equal(few.source_indices[row][mine], theirs.source_indices[0])


def test_without_a_question_or_a_word_about_the_call() -> None:
    visual = tokens_of([576], CompressionContext(8))
    assert Measured().compress(visual, None, 1 << 30).choices == ("salient:144",)
    assert Measured().compress(tokens_of([576, 9]), None, 1 << 30).choices == ("salient:144", "identity")
    axes = replace(visual, position_ids=visual.position_ids.expand(3, -1, -1))
    assert Measured().compress(axes, None, 1 << 30).position_ids.shape == (3, 1, 144)
    several = tokens_of([576, 9])
    several = replace(several, position_ids=several.position_ids.expand(3, -1, -1))
    assert Measured().compress(several, None, 1 << 30).position_ids.shape == (3, 2, 144)


def test_its_name() -> None:
    assert parse("measured") == ("measured", 0) and isinstance(make("measured"), Measured)
    assert isinstance(new("measured", 8), Measured) and str(Way("salient", 3)) == "salient:3"
    with pytest.raises(ValueError, match="no compressor is called 'measured:64'; known: identity, drop, measured"):
        make("measured:64")


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_slope_is_known_from_two_widths() -> None:
    widths = CostByLength()
    assert widths.slope() is None
    widths.update(100, 1.0)
    widths.update(110, 1.0)
    assert widths.slope() is None, "about the same"
    widths.update(400, 7.0)
    low = widths.means[min(widths.means)][0]
    assert widths.slope() == pytest.approx(6.0 / (400 - low))
    for _ in range(50):
        widths.update(400, 1e9)
        if len(widths.means) and widths.means[max(widths.means)][1] > 7.0 * 1.2**5:
            break
    assert widths.means[max(widths.means)][1] <= 7.0 * 1.2**6, "an outlier counts for no more than twice the mean"
    for _ in range(30):
        widths.update(400, 0.5)
    assert widths.slope() == 0.0, "more tokens never cost less than nothing"


def test_a_pace_learns_after_the_first_prompt_and_then_looks_at_another_width() -> None:
    pace, leans = DraftCostModel(), []
    for number in range(2 * EXPLORE_EVERY + 1):
        leans.append(pace.exploration(3))
        pace.record_prefill(3, 1000 if number else 7, 99.0 if not number else 1.0)
    assert leans[2] == 1 and leans[EXPLORE_EVERY] == leans[2 * EXPLORE_EVERY] == -1
    assert sum(map(abs, leans)) == 3 and pace.costs(3) is None, "one width"
    pace.record_prefill(3, 500, 0.75)
    assert pace.costs(3) is None, "no round yet"
    pace.record_round(3, 0.1, 2.0)
    found = pace.costs(3)
    assert found is not None and found.prefill_token_s == pytest.approx(0.25 / 500) and found.draft_token_s == 0.0
    assert (found.round_s, found.tokens_per_round) == (0.1, 2.0)
    pace.record_draft(3, 1000, 4, 0.4)
    pace.record_draft(3, 500, 4, 0.2)
    found = pace.costs(3)
    assert found is not None and found.draft_token_s == pytest.approx(4 * 0.05 / 500)
    assert pace.costs(2) is None, "batch sizes are apart"
    assert copy.deepcopy(pace).costs(3) is None, "a copy of a model measures anew"


class Event:
    """Stands for one in a GPU's stream: the device is at `now`."""

    now = 0.0
    asked = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self, stream: object) -> None:
        self.at = Event.next

    def query(self) -> bool:
        Event.asked += 1
        return Event.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "asked before the device was there"
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")

    next = 0.0


def test_on_a_gpu_nobody_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("nobody waits for the device"))
    pace, found = DraftCostModel(), []
    monkeypatch.setattr(pace, "record_prefill", lambda batch, width, seconds: found.append(("read", width, seconds)))
    monkeypatch.setattr(pace, "record_draft", lambda batch, width, levels, s: found.append(("draft", width, levels, s)))
    meter = CallTimer(pace, 2, torch.device("cuda"))
    Event.now, Event.next = 0.0, 1.0
    began = meter.now()
    Event.next = 1.5
    meter.record_prefill(began, 700)
    assert not found, "the device has not come that far"
    Event.next = 2.0
    began = meter.now()
    Event.next = 2.25
    meter.record_draft(began, 710, 3)
    Event.now = 2.0
    meter.drain()
    assert found == [("read", 700, 0.5)]
    Event.now = 3.0
    meter.drain()
    assert found[1:] == [("draft", 710, 3, 0.25)]
    assert elapsed(1.0, 1.5) == 0.5


@pytest.fixture
def world() -> FakeTarget:
    return build_fake_target()


def drafter() -> EagleDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return EagleDrafter(EagleHead(HEAD_CONFIG), "coupled", num_layers=NUM_LAYERS, max_depth=3, beam_width=3)


def a_round(made: EagleDrafter, state: Any) -> None:
    tree = made.propose(state, 8, [True, True])
    made.observe(
        state, build_result(tree, [[0, 1], [0]], [[5, 6], [7]]), {NUM_LAYERS: torch.randn(2, tree.num_nodes, 32)}
    )


def test_a_drafter_measures_its_own_calls(world: FakeTarget) -> None:
    made, widths = drafter(), []
    for length in (6, 14, 9):
        state = begin_decoding(world, made, build_prompt(world, length, compressor=Measured()))
        widths.append(max(state.kv_cache.seq_lens))
        a_round(made, state)
    tally = made.cost_model.by_batch[2]
    assert widths[:2] == [6, 14] and widths[2] < 9, "the third prompt is looked at with fewer tokens"
    assert tally.num_prompts == 3 and len(tally.prefill.means) == 2 and tally.round_s > 0
    assert tally.tokens_per_round == pytest.approx(1.5) and 1 <= tally.levels <= 3
    assert made.cost_model.costs(2) is not None


def test_nothing_is_measured_without_a_compressor_and_nothing_chosen_by_timing_where_shapes_are_fixed(
    world: FakeTarget,
) -> None:
    made = drafter()
    state = begin_decoding(world, made, build_prompt(world, 11))
    a_round(made, state)
    assert not made.cost_model.by_batch and state.timer.cost_model is None
    made.cost_model.record_prefill(2, 1000, 1.0)
    made.cost_model.record_prefill(2, 1000, 1.0)
    seen: list[CompressionContext | None] = []

    class Spy(Measured):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            seen.append(visual.context)
            return super().compress(visual, query, budget)

    made.begin(build_prompt(world, 11))
    begin_decoding(world, made, build_prompt(world, 11, compressor=Spy(), fixed=True, answer=9))
    begin_decoding(world, made, build_prompt(world, 11, compressor=Spy(), answer=9))
    fixed, free = seen
    assert fixed is not None and (fixed.costs, fixed.exploration, fixed.max_new_tokens) == (None, 0, 9)
    assert free is not None and (free.exploration, free.max_new_tokens) == (0, 9)


# --- what stats says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way", "kept"),
    [
        ("identity", "identity", [[*range(16)], [*range(4)], []]),
        ("drop", "drop", [[], [], []]),
        ("stride:4", "stride:4", [[2, 6, 10, 14], [0, 1, 2, 3], []]),
        ("pool:4", "pool:4", [4, [0, 1, 2, 3], []]),
        ("pool:16", "pool:16", [[*range(16)], [*range(4)], []]),
        ("measured", "identity", [[*range(16)], [*range(4)], []]),
    ],
)
def test_what_was_shown_is_noted(name: str, way: str, kept: list[Any]) -> None:
    watch = RecordingCompressor(make(name))
    assert watch.records() == [] and watch.name == name.partition(":")[0]
    watch.compress(tokens_of([16, 4, 0]), None, watch.max_tokens)
    for row, (shown, wanted) in enumerate(zip(watch.records(), kept, strict=True)):
        numbers = None if isinstance(wanted, int) else tuple(wanted)
        count = wanted if isinstance(wanted, int) else len(wanted)
        assert (shown.choice, shown.num_visual_tokens, shown.num_compressed_tokens, shown.kept_indices) == (
            way,
            (16, 4, 0)[row],
            count,
            numbers,
        )
        assert [one.height for one in shown.grids] == [[4], [2], []][row]
        assert json.loads(json.dumps(shown.as_dict()))["numbers"] == (None if numbers is None else list(numbers))


def test_a_compressor_that_does_not_say_what_it_kept() -> None:
    class Own:
        name, tokens = "own", 3

        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return replace(visual, inputs_embeds=-visual.inputs_embeds)

    class Same(Own):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return visual

    for made, numbers in ((Own(), None), (Same(), (0, 1, 2))):
        watch = RecordingCompressor(made)
        watch.compress(tokens_of([3]), None, 3)
        assert watch.records()[0].kept_indices == numbers and watch.records()[0].choice == "own:3"


@pytest.fixture(scope="module")
def tiny() -> Captioner:
    return Captioner(*random_model("tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    config = HeadConfig(64, 128, 4, 2, 384)
    save_head(place, EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava"))
    return place


@pytest.mark.parametrize("sample", [False, True])
def test_the_text_is_the_same_and_stats_say_what_was_shown(
    tiny: Captioner, folder: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model
    monkeypatch.setattr(
        TreeSizeController, "should_draft", True
    )  # a drafter that sleeps through a call is shown nothing
    inputs = tiny.inputs(
        [render_scene(generate_scene(i)) for i in range(2)], ["a", "what is this thing, and what colour has it"]
    )
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample}
    torch.manual_seed(1)
    plain = model.generate(**inputs, **options)
    mmspec.patch(model, str(folder), "measured", nodes=None)
    try:
        for _ in range(4):
            torch.manual_seed(1)
            assert torch.equal(model.generate(**inputs, **options), plain)
        found, total = mmspec.stats(model, last=True), mmspec.stats(model)
        assert [row.num_visual_tokens for row in found.compression] == [16, 16]
        assert set(total.compressor_choices) <= {"identity", "drop", "salient:1", "salient:4"}
        assert (
            sum(total.compressor_choices.values()) == 8
            and total.num_visual_tokens == 4 * 32
            and total.num_compressed_tokens < 4 * 32
        )
        assert (
            f"{total.num_compressed_tokens}/128 visual tokens shown" in str(total)
            and total.compression == found.compression
        )
        told = json.loads(json.dumps(found.as_dict()))
        assert [row["way"] for row in told["shown"]] == [row.choice for row in found.compression]
        model.generate(**inputs, **options, mmspec={"compressor": "stride:4"})
        found = mmspec.stats(model, last=True)
        assert [row.kept_indices for row in found.compression] == [(2, 6, 10, 14)] * 2 and found.compressor_choices == {
            "stride:4": 2
        }
        model.generate(**inputs, **options, mmspec={"compressor": None})
        assert mmspec.stats(model, last=True).compression == [] and "visual" not in str(mmspec.stats(model, last=True))
        model.generate(**inputs, **options, mmspec={"drafter": "lookup"})
        assert mmspec.stats(model, last=True).compression == [], "a drafter that looks at nothing was shown nothing"
    finally:
        mmspec.unpatch(model)


def test_the_examples_of_the_docs(tiny: Captioner, folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "compressors.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    picture = render_scene(generate_scene(0))
    inputs = tiny.inputs([picture], ["a"])
    names: dict[str, Any] = {"model": tiny.model, "inputs": inputs, "image": picture, "FOLDER": str(folder)}
    here = tmp_path / "kept.png"
    try:
        exec(code.replace('"kept.png"', repr(str(here))), names)
    finally:
        mmspec.unpatch(tiny.model)
    assert (
        here.stat().st_size > 500
        and isinstance(names["shown"], CompressionRecord)
        and names["shown"].kept_indices is not None
    )
    try:
        exec(page.split("```python\n")[2].split("```")[0], names)
        tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        shown = mmspec.stats(tiny.model, last=True).compression[0]
    finally:
        mmspec.unpatch(tiny.model)
    assert (shown.choice, shown.num_visual_tokens, shown.num_compressed_tokens) == ("loud:16", 16, 16)
