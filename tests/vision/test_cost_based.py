"""The compressor that goes by measured costs: what it chooses, what is measured and how, what `stats` says of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import CONFIG, LAYERS, World, emitted, new_world, prompt_of, started
from torch import Tensor

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import paint
from mmspec.app.scenes.world import scene
from mmspec.control.draft_cost import LOOK, Meter, Pace, Rates, Widths, between
from mmspec.control.tree_size import Budget
from mmspec.drafters.checkpoints.format import Made, save
from mmspec.drafters.eagle.drafter import EagleDrafter
from mmspec.drafters.eagle.head import EagleHead, HeadConfig
from mmspec.interfaces import Outlook, Segment, VisualTokens
from mmspec.metrics.compression_stats import Shown, Watch
from mmspec.vision.compressors.cost_based import FEW, Measured, Way, choose
from mmspec.vision.registry import make, new, parse

GPU = Rates(read_s=5e-6, draft_s=5e-8, round_s=0.03, gained=3.0)
"""A large model: looking costs next to nothing."""
SLOW = Rates(read_s=1e-3, draft_s=1e-5, round_s=0.03, gained=3.0)


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
        (196, 8, Rates(1e-2, 1e-5, 0.03, 3.0), "drop"),
        (40000, 1, SLOW, "drop"),
        (1, 1000, SLOW, "identity"),
    ],
)
def test_the_way_for_a_prompt(visual: int, answer: int | None, rates: Rates | None, way: str) -> None:
    assert str(choose(visual, answer, rates)) == way


def test_it_is_the_one_that_costs_least() -> None:
    """Written out: reading, longer drafts, and more rounds where less is seen."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(300):
        visual, answer = (int(torch.randint(1, most, (), generator=dice)) for most in (5000, 300))
        read, draft, round_s, more = torch.rand(4, generator=dice).tolist()
        rates = Rates(1e-4 * read**3, 1e-6 * draft**3, 0.02 + 0.05 * round_s, 1 + 3 * more)
        way, rounds = choose(visual, answer, rates), answer / rates.gained
        missed = {visual: 0.0, -(-visual // 4): 0.02, -(-visual // 16): 0.06, -(-visual // 64): 0.2, 0: 0.23}
        whole = {
            size: size * rates.read_s + rounds * (size * rates.draft_s + less * rates.round_s)
            for size, less in reversed(missed.items())
        }
        assert whole[way.tokens] == pytest.approx(min(whole.values())) and way == choose(visual, answer, rates)


@pytest.mark.parametrize(("lean", "way"), [(1, "salient:36"), (0, "salient:144"), (-1, "identity")])
def test_leaning(lean: int, way: str) -> None:
    assert str(choose(576, 128, None, lean)) == way
    assert str(choose(10, 128, None, -1)) == "identity"
    assert str(choose(40000, 1, SLOW, -1)) == "drop"


def tokens_of(counts: list[int], outlook: Outlook | None = None) -> VisualTokens:
    """Random tokens; each row is a square of them if it can be."""
    dice, most = torch.Generator().manual_seed(0), max(counts)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), most, 8, generator=dice) for _ in range(2))
    sides = [int(count**0.5) for count in counts]
    grids = tuple(Segment(row, 0, side, side, row) for row, side in enumerate(sides) if side)
    positions = torch.arange(most).expand(mask.shape) + 3
    return VisualTokens(*parts, mask, positions, grids, outlook=outlook)


@pytest.mark.parametrize("counts", [[576], [576, 100, 0], [400, 400], [0, 0], [100, 225]])
@pytest.mark.parametrize("answer", [8, 128, None])
def test_each_row_is_what_its_way_makes_of_it_alone(counts: list[int], answer: int | None) -> None:
    outlook = Outlook(answer)
    visual, query = tokens_of(counts, outlook), torch.randn(len(counts), 8)
    few = Measured().compress(visual, query, 1 << 30)
    expected = [str(choose(count, answer)) for count in counts]
    assert few.ways == tuple(expected)
    for row, (count, way) in enumerate(zip(counts, expected, strict=True)):
        alone = tokens_of(counts).embeddings[row : row + 1, :count], visual.states[row : row + 1, :count]
        mask = torch.ones(1, count, dtype=torch.bool)
        grids = tuple(replace(s, row=0) for s in visual.segments if s.row == row)
        one = VisualTokens(*alone, mask, visual.positions[row : row + 1, :count], grids)
        made = make(way)
        theirs = made.compress(one, query[row : row + 1], made.tokens)
        mine = few.mask[row]
        assert int(mine.sum()) == int(theirs.mask.sum()) and bool(mine.int().diff().le(0).all()), "tokens come first"
        assert torch.allclose(few.embeddings[row][mine], theirs.embeddings[0])
        assert torch.allclose(few.states[row][mine], theirs.states[0])
        assert torch.equal(few.positions[row][mine], theirs.positions[0])
        assert few.origin is not None and theirs.origin is not None
        assert torch.equal(few.origin[row][mine], theirs.origin[0])


def test_without_a_question_or_a_word_about_the_call() -> None:
    visual = tokens_of([576], Outlook(8))
    assert Measured().compress(visual, None, 1 << 30).ways == ("salient:144",)
    assert Measured().compress(tokens_of([576, 9]), None, 1 << 30).ways == ("salient:144", "identity")
    axes = replace(visual, positions=visual.positions.expand(3, -1, -1))
    assert Measured().compress(axes, None, 1 << 30).positions.shape == (3, 1, 144)
    several = tokens_of([576, 9])
    several = replace(several, positions=several.positions.expand(3, -1, -1))
    assert Measured().compress(several, None, 1 << 30).positions.shape == (3, 2, 144)


def test_its_name() -> None:
    assert parse("measured") == ("measured", 0) and isinstance(make("measured"), Measured)
    assert isinstance(new("measured", 8), Measured) and str(Way("salient", 3)) == "salient:3"
    with pytest.raises(ValueError, match="no compressor is called 'measured:64'; known: identity, drop, measured"):
        make("measured:64")


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_slope_is_known_from_two_widths() -> None:
    widths = Widths()
    assert widths.slope() is None
    widths.learn(100, 1.0)
    widths.learn(110, 1.0)
    assert widths.slope() is None, "about the same"
    widths.learn(400, 7.0)
    low = widths.known[min(widths.known)][0]
    assert widths.slope() == pytest.approx(6.0 / (400 - low))
    for _ in range(50):
        widths.learn(400, 1e9)
        if len(widths.known) and widths.known[max(widths.known)][1] > 7.0 * 1.2**5:
            break
    assert widths.known[max(widths.known)][1] <= 7.0 * 1.2**6, "an outlier counts for no more than twice the mean"
    for _ in range(30):
        widths.learn(400, 0.5)
    assert widths.slope() == 0.0, "more tokens never cost less than nothing"


def test_a_pace_learns_after_the_first_prompt_and_then_looks_at_another_width() -> None:
    pace, leans = Pace(), []
    for number in range(2 * LOOK + 1):
        leans.append(pace.lean(3))
        pace.read(3, 1000 if number else 7, 99.0 if not number else 1.0)
    assert leans[2] == 1 and leans[LOOK] == leans[2 * LOOK] == -1
    assert sum(map(abs, leans)) == 3 and pace.known(3) is None, "one width"
    pace.read(3, 500, 0.75)
    assert pace.known(3) is None, "no round yet"
    pace.round(3, 0.1, 2.0)
    found = pace.known(3)
    assert found is not None and found.read_s == pytest.approx(0.25 / 500) and found.draft_s == 0.0
    assert (found.round_s, found.gained) == (0.1, 2.0)
    pace.drafted(3, 1000, 4, 0.4)
    pace.drafted(3, 500, 4, 0.2)
    found = pace.known(3)
    assert found is not None and found.draft_s == pytest.approx(4 * 0.05 / 500)
    assert pace.known(2) is None, "batch sizes are apart"
    assert copy.deepcopy(pace).known(3) is None, "a copy of a model measures anew"


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
    pace, found = Pace(), []
    monkeypatch.setattr(pace, "read", lambda batch, width, seconds: found.append(("read", width, seconds)))
    monkeypatch.setattr(pace, "drafted", lambda batch, width, levels, s: found.append(("draft", width, levels, s)))
    meter = Meter(pace, 2, torch.device("cuda"))
    Event.now, Event.next = 0.0, 1.0
    began = meter.mark()
    Event.next = 1.5
    meter.read(began, 700)
    assert not found, "the device has not come that far"
    Event.next = 2.0
    began = meter.mark()
    Event.next = 2.25
    meter.drafted(began, 710, 3)
    Event.now = 2.0
    meter.settle()
    assert found == [("read", 700, 0.5)]
    Event.now = 3.0
    meter.settle()
    assert found[1:] == [("draft", 710, 3, 0.25)]
    assert between(1.0, 1.5) == 0.5


@pytest.fixture
def world() -> World:
    return new_world()


def drafter() -> EagleDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return EagleDrafter(EagleHead(CONFIG), "coupled", layers=LAYERS, depth=3, width=3)


def a_round(made: EagleDrafter, state: Any) -> None:
    tree = made.propose(state, 8, [True, True])
    made.observe(state, emitted(tree, [[0, 1], [0]], [[5, 6], [7]]), {LAYERS: torch.randn(2, tree.nodes, 32)})


def test_a_drafter_measures_its_own_calls(world: World) -> None:
    made, widths = drafter(), []
    for length in (6, 14, 9):
        state = started(world, made, prompt_of(world, length, compressor=Measured()))
        widths.append(max(state.buffer.lengths))
        a_round(made, state)
    tally = made.pace.tallies[2]
    assert widths[:2] == [6, 14] and widths[2] < 9, "the third prompt is looked at with fewer tokens"
    assert tally.prompts == 3 and len(tally.reading.known) == 2 and tally.round_s > 0
    assert tally.gained == pytest.approx(1.5) and 1 <= tally.levels <= 3
    assert made.pace.known(2) is not None


def test_nothing_is_measured_without_a_compressor_and_nothing_chosen_by_timing_where_shapes_are_fixed(
    world: World,
) -> None:
    made = drafter()
    state = started(world, made, prompt_of(world, 11))
    a_round(made, state)
    assert not made.pace.tallies and state.meter.pace is None
    made.pace.read(2, 1000, 1.0)
    made.pace.read(2, 1000, 1.0)
    seen: list[Outlook | None] = []

    class Spy(Measured):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            seen.append(visual.outlook)
            return super().compress(visual, query, budget)

    made.begin(prompt_of(world, 11))
    started(world, made, prompt_of(world, 11, compressor=Spy(), fixed=True, answer=9))
    started(world, made, prompt_of(world, 11, compressor=Spy(), answer=9))
    fixed, free = seen
    assert fixed is not None and (fixed.rates, fixed.lean, fixed.answer) == (None, 0, 9)
    assert free is not None and (free.lean, free.answer) == (0, 9)


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
    watch = Watch(make(name))
    assert watch.rows() == [] and watch.name == name.partition(":")[0]
    watch.compress(tokens_of([16, 4, 0]), None, watch.tokens)
    for row, (shown, wanted) in enumerate(zip(watch.rows(), kept, strict=True)):
        numbers = None if isinstance(wanted, int) else tuple(wanted)
        count = wanted if isinstance(wanted, int) else len(wanted)
        assert (shown.way, shown.visual, shown.kept, shown.numbers) == (way, (16, 4, 0)[row], count, numbers)
        assert [one.height for one in shown.grids] == [[4], [2], []][row]
        assert json.loads(json.dumps(shown.as_dict()))["numbers"] == (None if numbers is None else list(numbers))


def test_a_compressor_that_does_not_say_what_it_kept() -> None:
    class Own:
        name, tokens = "own", 3

        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return replace(visual, embeddings=-visual.embeddings)

    class Same(Own):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return visual

    for made, numbers in ((Own(), None), (Same(), (0, 1, 2))):
        watch = Watch(made)
        watch.compress(tokens_of([3]), None, 3)
        assert watch.rows()[0].numbers == numbers and watch.rows()[0].way == "own:3"


@pytest.fixture(scope="module")
def tiny() -> Captioner:
    return Captioner(*random_model("tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    config = HeadConfig(64, 128, 4, 2, 384)
    save(place, EagleHead(config), Made(config, "decoupled", 2, "llava"))
    return place


@pytest.mark.parametrize("sample", [False, True])
def test_the_text_is_the_same_and_stats_say_what_was_shown(
    tiny: Captioner, folder: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model
    monkeypatch.setattr(Budget, "awake", True)  # a drafter that sleeps through a call is shown nothing
    inputs = tiny.inputs([paint(scene(i)) for i in range(2)], ["a", "what is this thing, and what colour has it"])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample}
    torch.manual_seed(1)
    plain = model.generate(**inputs, **options)
    mmspec.patch(model, str(folder), "measured", nodes=None)
    try:
        for _ in range(4):
            torch.manual_seed(1)
            assert torch.equal(model.generate(**inputs, **options), plain)
        found, total = mmspec.stats(model, last=True), mmspec.stats(model)
        assert [row.visual for row in found.shown] == [16, 16]
        assert set(total.ways) <= {"identity", "drop", "salient:1", "salient:4"}
        assert sum(total.ways.values()) == 8 and total.visual == 4 * 32 and total.visual_kept < 4 * 32
        assert f"{total.visual_kept}/128 visual tokens shown" in str(total) and total.shown == found.shown
        told = json.loads(json.dumps(found.as_dict()))
        assert [row["way"] for row in told["shown"]] == [row.way for row in found.shown]
        model.generate(**inputs, **options, mmspec={"compressor": "stride:4"})
        found = mmspec.stats(model, last=True)
        assert [row.numbers for row in found.shown] == [(2, 6, 10, 14)] * 2 and found.ways == {"stride:4": 2}
        model.generate(**inputs, **options, mmspec={"compressor": None})
        assert mmspec.stats(model, last=True).shown == [] and "visual" not in str(mmspec.stats(model, last=True))
        model.generate(**inputs, **options, mmspec={"drafter": "lookup"})
        assert mmspec.stats(model, last=True).shown == [], "a drafter that looks at nothing was shown nothing"
    finally:
        mmspec.unpatch(model)


def test_the_examples_of_the_docs(tiny: Captioner, folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "compressors.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    picture = paint(scene(0))
    inputs = tiny.inputs([picture], ["a"])
    names: dict[str, Any] = {"model": tiny.model, "inputs": inputs, "image": picture, "FOLDER": str(folder)}
    here = tmp_path / "kept.png"
    try:
        exec(code.replace('"kept.png"', repr(str(here))), names)
    finally:
        mmspec.unpatch(tiny.model)
    assert here.stat().st_size > 500 and isinstance(names["shown"], Shown) and names["shown"].numbers is not None
    try:
        exec(page.split("```python\n")[2].split("```")[0], names)
        tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        shown = mmspec.stats(tiny.model, last=True).shown[0]
    finally:
        mmspec.unpatch(tiny.model)
    assert (shown.way, shown.visual, shown.kept) == ("loud:16", 16, 16)
