"""Cost-based compressor: its choice, the measurement of costs, and the statistics of compression."""

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
from forced_drafts import planned
from torch import Tensor

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.economy.chooser import Chooser
from mmspec.economy.draft_cost import EXPLORE_EVERY, CallTimer, DraftCosts, HeadCostModel, elapsed
from mmspec.economy.tables import Seconds
from mmspec.interfaces import CompressionContext, VisualGrid, VisualTokens
from mmspec.metrics.compression_stats import CompressionRecord, RecordingCompressor
from mmspec.vision.compressors.cost_based import DEFAULT_MAX_TOKENS, Choice, CostBased, choose_compressor
from mmspec.vision.registry import build_compressor, init_compressor, parse_compressor

GPU = DraftCosts(prefill_token_s=5e-6, draft_token_s=5e-8, round_s=0.03, tokens_per_round=3.0)
"""A large model: visual tokens cost the drafter very little."""
SLOW = DraftCosts(prefill_token_s=1e-3, draft_token_s=1e-5, round_s=0.03, tokens_per_round=3.0)


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_visual_tokens", "max_new_tokens", "costs", "choice"),
    [
        (0, 128, None, "identity"),
        (DEFAULT_MAX_TOKENS, 128, None, "identity"),  # no costs: by the number of tokens
        (DEFAULT_MAX_TOKENS + 1, 128, None, "salient:65"),
        (576, 128, None, "salient:144"),
        (2880, 128, None, "salient:180"),
        (40000, 128, None, "salient:625"),
        (576, None, None, "salient:144"),
        (576, 128, GPU, "identity"),
        (2880, 128, GPU, "identity"),
        (2880, 8, GPU, "salient:720"),  # too compressed rounds to pay for reading all tokens
        (40000, 128, GPU, "salient:2500"),
        (196, 128, SLOW, "salient:13"),
        (196, 8, SLOW, "salient:13"),
        (196, 8, DraftCosts(1e-2, 1e-5, 0.03, 3.0), "drop"),
        (40000, 1, SLOW, "drop"),
        (1, 1000, SLOW, "identity"),
    ],
)
def test_choice(num_visual_tokens: int, max_new_tokens: int | None, costs: DraftCosts | None, choice: str) -> None:
    assert str(choose_compressor(num_visual_tokens, max_new_tokens, costs)) == choice


def test_choice_minimises_the_expected_cost() -> None:
    """Against the formula, written out for every candidate size."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(300):
        visual, answer = (int(torch.randint(1, limit, (), generator=rng)) for limit in (5000, 300))
        read, draft, round_s, more = torch.rand(4, generator=rng).tolist()
        rates = DraftCosts(1e-4 * read**3, 1e-6 * draft**3, 0.02 + 0.05 * round_s, 1 + 3 * more)
        choice, rounds = choose_compressor(visual, answer, rates), answer / rates.tokens_per_round
        missed = {visual: 0.0, -(-visual // 4): 0.02, -(-visual // 16): 0.06, -(-visual // 64): 0.2, 0: 0.23}
        whole = {
            size: size * rates.prefill_token_s + rounds * (size * rates.draft_token_s + less * rates.round_s)
            for size, less in reversed(missed.items())
        }
        assert whole[choice.tokens] == pytest.approx(min(whole.values())) and choice == choose_compressor(
            visual, answer, rates
        )


@pytest.mark.parametrize(("exploration", "choice"), [(1, "salient:36"), (0, "salient:144"), (-1, "identity")])
def test_exploration(exploration: int, choice: str) -> None:
    assert str(choose_compressor(576, 128, None, exploration)) == choice
    assert str(choose_compressor(10, 128, None, -1)) == "identity"
    assert str(choose_compressor(40000, 1, SLOW, -1)) == "drop"


def tokens_of(counts: list[int], context: CompressionContext | None = None) -> VisualTokens:
    """Random visual tokens; each row is a square grid where its number of tokens allows."""
    rng = torch.Generator().manual_seed(0)
    length = max(counts)
    mask = torch.arange(length) < torch.tensor(counts)[:, None]
    parts = (torch.randn(len(counts), length, 8, generator=rng) for _ in range(2))
    sides = [int(count**0.5) for count in counts]
    grids = tuple(VisualGrid(row, 0, side, side, row) for row, side in enumerate(sides) if side)
    positions = torch.arange(length).expand(mask.shape) + 3
    return VisualTokens(*parts, mask, positions, grids, context=context)


@pytest.mark.parametrize("counts", [[576], [576, 100, 0], [400, 400], [0, 0], [100, 225]])
@pytest.mark.parametrize("answer", [8, 128, None])
def test_each_row_equals_its_choice_alone(counts: list[int], answer: int | None) -> None:
    context = CompressionContext(answer)
    visual, query = tokens_of(counts, context), torch.randn(len(counts), 8)
    compressed = CostBased().compress(visual, query, 1 << 30)
    expected = [str(choose_compressor(count, answer)) for count in counts]
    assert compressed.choices == tuple(expected)
    for row, (count, choice) in enumerate(zip(counts, expected, strict=True)):
        alone = tokens_of(counts).inputs_embeds[row : row + 1, :count], visual.hidden_states[row : row + 1, :count]
        mask = torch.ones(1, count, dtype=torch.bool)
        grids = tuple(replace(s, row=0) for s in visual.grids if s.row == row)
        one = VisualTokens(*alone, mask, visual.position_ids[row : row + 1, :count], grids)
        built = build_compressor(choice)
        expected_tokens = built.compress(one, query[row : row + 1], built.max_tokens)
        mask_row = compressed.mask[row]
        assert int(mask_row.sum()) == int(expected_tokens.mask.sum()) and bool(mask_row.int().diff().le(0).all()), (
            "tokens come first"
        )
        assert torch.allclose(compressed.inputs_embeds[row][mask_row], expected_tokens.inputs_embeds[0])
        assert torch.allclose(compressed.hidden_states[row][mask_row], expected_tokens.hidden_states[0])
        assert torch.equal(compressed.position_ids[row][mask_row], expected_tokens.position_ids[0])
        assert compressed.source_indices is not None and expected_tokens.source_indices is not None
        assert torch.equal(compressed.source_indices[row][mask_row], expected_tokens.source_indices[0])


def test_without_query_and_without_context() -> None:
    visual = tokens_of([576], CompressionContext(8))
    assert CostBased().compress(visual, None, 1 << 30).choices == ("salient:144",)
    assert CostBased().compress(tokens_of([576, 9]), None, 1 << 30).choices == ("salient:144", "identity")
    axes = replace(visual, position_ids=visual.position_ids.expand(3, -1, -1))
    assert CostBased().compress(axes, None, 1 << 30).position_ids.shape == (3, 1, 144)
    several = tokens_of([576, 9])
    several = replace(several, position_ids=several.position_ids.expand(3, -1, -1))
    assert CostBased().compress(several, None, 1 << 30).position_ids.shape == (3, 2, 144)


def test_names() -> None:
    assert parse_compressor("elastic") == ("elastic", 0)
    compressor = build_compressor("elastic")
    assert isinstance(compressor, CostBased) and compressor.name == "elastic"
    assert isinstance(init_compressor("elastic", 8), CostBased) and str(Choice("salient", 3)) == "salient:3"
    with pytest.raises(ValueError, match="unknown compressor 'measured'; available: identity, drop, elastic, "):
        build_compressor("measured")


# --- measurement -----------------------------------------------------------------------------------------------------


def test_slope_needs_two_lengths() -> None:
    table = Seconds(step=1.0)
    assert table.slope("prefill", 1, 1.25) is None
    for _ in range(2):
        table.add("prefill", 1, 100, 1.0)
        table.add("prefill", 1, 110, 1.0)
        assert table.slope("prefill", 1, 1.25) is None, "too little difference"
    for seconds in (3.0, 3.1, 1e9, 1e9):
        table.add("prefill", 1, 400, seconds)
    assert table.slope("prefill", 1, 1.25) == pytest.approx(2.0 / 300, rel=0.1), "a stall does not count"
    for _ in range(9):
        table.add("prefill", 1, 400, 0.5)
    assert table.slope("prefill", 1, 1.25) == 0.0, "the slope is never negative"


def test_cost_model_skips_the_first_prompt_and_explores() -> None:
    cost_model, explorations = HeadCostModel(), []
    for number in range(2 * EXPLORE_EVERY + 1):
        explorations.append(cost_model.exploration(3))
        cost_model.record_prefill(3, 1024 if number else 7, 99.0 if not number else 1.0)
    assert explorations[2] == 1 and explorations[EXPLORE_EVERY] == explorations[2 * EXPLORE_EVERY] == -1
    assert sum(map(abs, explorations)) == 3 and cost_model.costs(3) is None, "one width"
    cost_model.record_prefill(3, 512, 0.75)
    assert cost_model.costs(3) is None, "no round yet"
    cost_model.record_round(3, 0.1, 2.0)
    found = cost_model.costs(3)
    assert found is not None and found.prefill_token_s == pytest.approx(0.25 / 512) and found.draft_token_s == 0.0
    assert (found.round_s, found.tokens_per_round) == pytest.approx((0.1, 2.0))
    cost_model.record_draft(3, 1024, 4, 0.4)
    cost_model.record_draft(3, 512, 4, 0.2)
    found = cost_model.costs(3)
    assert found is not None and found.draft_token_s == pytest.approx(4 * 0.05 / 512)
    assert cost_model.costs(2) is None, "batch sizes are apart"
    assert copy.deepcopy(cost_model).costs(3) is None, "a copy of a model measures anew"


class Event:
    """A CUDA event of a simulated stream that has executed up to `now`."""

    now = 0.0
    num_queries = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self, stream: object) -> None:
        self.at = Event.next

    def query(self) -> bool:
        Event.num_queries += 1
        return Event.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "elapsed_time before the device reached the event"
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the host synchronised with the device")

    next = 0.0


def test_timing_on_a_gpu_does_not_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("the host synchronised with the device"))
    cost_model, found = HeadCostModel(), []
    monkeypatch.setattr(
        cost_model, "record_prefill", lambda batch, width, seconds: found.append(("read", width, seconds))
    )
    monkeypatch.setattr(
        cost_model, "record_draft", lambda batch, width, levels, s: found.append(("draft", width, levels, s))
    )
    timer = CallTimer(cost_model, 2, torch.device("cuda"))
    Event.now, Event.next = 0.0, 1.0
    start = timer.now()
    Event.next = 1.5
    timer.record_prefill(start, 700)
    assert not found, "the device has not reached the event"
    Event.next = 2.0
    start = timer.now()
    Event.next = 2.25
    timer.record_draft(start, 710, 3)
    Event.now = 2.0
    timer.drain()
    assert found == [("read", 700, 0.5)]
    Event.now = 3.0
    timer.drain()
    assert found[1:] == [("draft", 710, 3, 0.25)]
    assert elapsed(1.0, 1.5) == 0.5


@pytest.fixture
def world() -> FakeTarget:
    return build_fake_target()


def drafter() -> EagleDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        return EagleDrafter(EagleHead(HEAD_CONFIG), "coupled", num_layers=NUM_LAYERS, max_depth=3, top_k=3)


def run_round(built: EagleDrafter, state: Any) -> None:
    tree = built.propose(state, 8, [True, True])
    built.observe(
        state, build_result(tree, [[0, 1], [0]], [[5, 6], [7]]), {NUM_LAYERS: torch.randn(2, tree.num_nodes, 32)}
    )


def test_drafter_measures_its_calls(world: FakeTarget) -> None:
    built, widths = drafter(), []
    for length in (6, 14, 9):
        state = begin_decoding(world, built, build_prompt(world, length, compressor=CostBased()))
        widths.append(max(state.kv_cache.seq_lens))
        run_round(built, state)
    measured = built.cost_model
    assert widths[:2] == [6, 14] and widths[2] < 9, "the third prompt explores fewer tokens"
    assert measured.num_prompts[2] == 3 and measured.seconds.count("prefill", 2) == 2
    assert 1 <= measured.means.rate((2, "levels"), 0.0) <= 3
    found = measured.costs(2)
    assert found is not None and found.round_s > 0 and found.tokens_per_round == pytest.approx(1.5)


def test_no_costs_without_a_compressor_or_with_static_shapes(
    world: FakeTarget,
) -> None:
    built = drafter()
    state = begin_decoding(world, built, build_prompt(world, 11))
    run_round(built, state)
    assert not built.cost_model.num_prompts and state.timer.cost_model is None
    built.cost_model.record_prefill(2, 1000, 1.0)
    built.cost_model.record_prefill(2, 1000, 1.0)
    contexts: list[CompressionContext | None] = []

    class Spy(CostBased):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            contexts.append(visual.context)
            return super().compress(visual, query, budget)

    built.begin(build_prompt(world, 11))
    begin_decoding(world, built, build_prompt(world, 11, compressor=Spy(), static_shapes=True, max_new_tokens=9))
    begin_decoding(world, built, build_prompt(world, 11, compressor=Spy(), max_new_tokens=9))
    fixed, free = contexts
    assert fixed is not None and (fixed.costs, fixed.exploration, fixed.max_new_tokens) == (None, 0, 9)
    assert free is not None and (free.exploration, free.max_new_tokens) == (0, 9)


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "choice", "kept_indices"),
    [
        ("identity", "identity", [[*range(16)], [*range(4)], []]),
        ("drop", "drop", [[], [], []]),
        ("stride:4", "stride:4", [[2, 6, 10, 14], [0, 1, 2, 3], []]),
        ("pool:4", "pool:4", [4, [0, 1, 2, 3], []]),
        ("pool:16", "pool:16", [[*range(16)], [*range(4)], []]),
        ("elastic", "identity", [[*range(16)], [*range(4)], []]),
    ],
)
def test_compression_records(name: str, choice: str, kept_indices: list[Any]) -> None:
    recorder = RecordingCompressor(build_compressor(name))
    assert recorder.records() == [] and recorder.name == name.partition(":")[0]
    recorder.compress(tokens_of([16, 4, 0]), None, recorder.max_tokens)
    for row, (record, expected) in enumerate(zip(recorder.records(), kept_indices, strict=True)):
        indices = None if isinstance(expected, int) else tuple(expected)
        count = expected if isinstance(expected, int) else len(expected)
        assert (record.choice, record.num_visual_tokens, record.num_compressed_tokens, record.kept_indices) == (
            choice,
            (16, 4, 0)[row],
            count,
            indices,
        )
        assert [one.height for one in record.grids] == [[4], [2], []][row]
        assert json.loads(json.dumps(record.as_dict()))["kept_indices"] == (None if indices is None else list(indices))


def test_records_of_a_compressor_without_source_indices() -> None:
    class Own:
        name, max_tokens = "own", 3

        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return replace(visual, inputs_embeds=-visual.inputs_embeds)

    class Same(Own):
        def compress(self, visual: VisualTokens, query: Tensor | None, budget: int) -> VisualTokens:
            return visual

    for built, numbers in ((Own(), None), (Same(), (0, 1, 2))):
        recorder = RecordingCompressor(built)
        recorder.compress(tokens_of([3]), None, 3)
        assert recorder.records()[0].kept_indices == numbers and recorder.records()[0].choice == "own:3"


@pytest.fixture(scope="module")
def tiny() -> Captioner:
    return Captioner(*random_model("tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    config = EagleConfig(64, 128, 4, 2, 384)
    save_head(path, EagleHead(config), HeadMetadata(config, "decoupled", 2, "llava"))
    return path


@pytest.mark.parametrize("sample", [False, True])
def test_output_is_unchanged_and_stats_report_compression(
    tiny: Captioner, folder: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model
    monkeypatch.setattr(Chooser, "plan", planned())  # a drafter that is disabled for a call reads no tokens
    inputs = tiny.build_inputs(
        [render_scene(generate_scene(i)) for i in range(2)], ["a", "what is this thing, and what colour has it"]
    )
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample}
    torch.manual_seed(1)
    plain = model.generate(**inputs, **options)
    mmspec.patch(model, str(folder), "elastic", tree_size=None)
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
            f"{total.num_compressed_tokens}/128 visual tokens" in str(total) and total.compression == found.compression
        )
        stored = json.loads(json.dumps(found.as_dict()))
        assert [row["choice"] for row in stored["compression"]] == [row.choice for row in found.compression]
        model.generate(**inputs, **options, mmspec={"compressor": "stride:4"})
        found = mmspec.stats(model, last=True)
        assert [row.kept_indices for row in found.compression] == [(2, 6, 10, 14)] * 2 and found.compressor_choices == {
            "stride:4": 2
        }
        model.generate(**inputs, **options, mmspec={"compressor": None})
        assert mmspec.stats(model, last=True).compression == [] and "visual" not in str(mmspec.stats(model, last=True))
        model.generate(**inputs, **options, mmspec={"drafter": "lookup"})
        assert mmspec.stats(model, last=True).compression == [], "a drafter without visual input"
    finally:
        mmspec.unpatch(model)


def test_examples_of_the_docs(tiny: Captioner, folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "compressors.md").read_text("utf-8")
    (code,) = (block for block in page.split("```python\n") if "heatmaps(" in block)
    code = code.split("```")[0]
    picture = render_scene(generate_scene(0))
    inputs = tiny.build_inputs([picture], ["a"])
    names: dict[str, Any] = {"model": tiny.model, "inputs": inputs, "image": picture, "FOLDER": str(folder)}
    output = tmp_path / "heatmaps.png"
    try:
        exec(code.replace('"heatmaps.png"', repr(str(output))), names)
    finally:
        mmspec.unpatch(tiny.model)
    assert (
        output.stat().st_size > 500
        and isinstance(names["record"], CompressionRecord)
        and names["record"].kept_indices is not None
    )
    try:
        (code,) = (block for block in page.split("```python\n") if "class LongestEmbeddings" in block)
        exec(code.split("```")[0], names)
        tiny.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        record = mmspec.stats(tiny.model, last=True).compression[0]
    finally:
        mmspec.unpatch(tiny.model)
    assert (record.choice, record.num_visual_tokens, record.num_compressed_tokens) == ("longest:16", 16, 16)
