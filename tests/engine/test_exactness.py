"""Patched and plain `generate` return the same: a fixed slice of the random cases, and sampling as a distribution.

The slow run takes thousands of cases: `MMSPEC_CASES=2000 pytest -m slow tests/engine/test_exactness.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import adversarial as adversarial
import assistants
import fuzz as fuzz
import own_heads as own
import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
import zoo
from kernels import needs_kernel
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.drafters.heads.base.c_draft import CDraft
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt
from mmspec.targets.c_forwards import CForwards

SLICE = range(150)
FAST = (*range(0, 150, 3), 2, 25, 71, 239, 1040)
"""Of the slice, and a few more, so that whatever is drawn occurs."""
BF16 = range(500, 530)


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in {*SLICE} - {*FAST})])
def test_case(seed: int) -> None:
    result = fuzz.run_seed(seed)
    assert not result.differences, result.report()


def test_every_kind_occurs_in_the_fast_cases() -> None:
    """Else they would show nothing of it: user code, streams of several rows, turns and their caches, padding."""
    drawn = list(map(fuzz.draw_case, FAST))
    found = {(name, getattr(case, name)) for case in drawn for name in vars(case) if name not in ("options", "spec")}
    expected: dict[str, Iterable[Any]] = {
        "processor": adversarial.PROCESSORS,
        "criterion": adversarial.CRITERIA,
        "streamer": ("plain", "failing", "gambling"),
        "turns": ("again", "other", "continue", "tail"),
        "cache": ("bare", "config"),
        "prefix": ("pure", "counting"),
        "pad": ("eos", "none"),
        "eos": ("one", "first", "several", "none"),
        "override": ("drafter", "deterministic", "enabled", "disabled", "reference"),
        "drafter": (*adversarial.DRAFTERS, *fuzz.BUILT_IN_DRAFTERS),
        "padding": ("left", "right", "none"),
        "stop_strings": (True,),
        "batch": (1, 2, 3, 4),
    }
    assert {(name, kind) for name, kinds in expected.items() for kind in kinds} <= found
    options = {name for case in drawn for name in (*case.options, *case.biased)}
    assert {"num_return_sequences", "max_time", "min_length", "bad_words_ids", "output_scores"} <= options
    assert any(case.streamer == "plain" and case.batch > 1 for case in drawn)
    assert {case.cache for case in drawn if case.turns == "continue"} >= {"", "bare"}


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("family", fuzz.LATER_FAMILIES)
def test_case_of_a_later_family(family: str, seed: int) -> None:
    result = fuzz.run_seed(seed, family=family)
    assert not result.differences, result.report()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", zoo.ROWS)
def test_case_of_a_model_type(family: str, seed: int) -> None:
    """More cases: `python tests/helpers/model_table.py`, whose result is in `docs/models.md`."""
    result = fuzz.run_seed(seed, family=family)
    assert not result.differences, result.report()


@pytest.mark.skipif("cohere_compass" not in zoo.ROWS, reason="this transformers does not have the model type")
def test_layers_without_angles_of_their_own() -> None:
    """The rotary module of a model with windows knows one type of layers: a trait that is not in C, and no error."""
    result = fuzz.run_seed(33, family="cohere_compass")
    assert not result.differences, result.report()


def test_the_cases_contain_videos() -> None:
    """For every family with videos: alone, with images, and in batches in which some rows have none."""
    drawn = [
        *map(fuzz.draw_case, SLICE),
        *(fuzz.draw_case(seed, family) for family in fuzz.LATER_FAMILIES for seed in range(40)),
    ]
    for family in tiny.VIDEO_FAMILIES:
        video_cases = [case for case in drawn if case.spec.family == family and case.videos]
        assert len(video_cases) >= 5 and {case.options["do_sample"] for case in video_cases} == {True, False}
        kinds = Counter[tuple[bool, bool]]()
        for case in video_cases:
            ids, special = fuzz._inputs(case, tiny.build_model(case.spec))[0]["input_ids"], tiny.special_ids(case.spec)
            for row in ids:
                kinds[bool((row == special.image).any()), bool((row == special.video).any())] += 1
        assert kinds[False, True] and kinds[True, True] and kinds[True, False], (family, kinds)


def test_the_slice_drafts_and_accepts() -> None:
    """A loop that never drafts would pass the tests above."""
    drawn = [
        case for case in map(fuzz.draw_case, SLICE) if case.drafter in ("oracle", "bush", "chaos") and not case.override
    ]
    drawn = [replace(case, nodes=8, criterion="", streamer="", processor="", prefix="") for case in drawn]
    sums: Counter[str] = Counter()
    for case in drawn[:15]:
        result = fuzz.run_case(case)
        assert not result.differences, result.report()
        sums["drafted"] += result.stats["num_draft_tokens"]
        sums["accepted"] += result.stats["num_accepted_tokens"]
        sums["fallbacks"] += bool(result.fallback)
    assert sums["drafted"] > 150 and sums["accepted"] > 40 and not sums["fallbacks"], sums


# --- the table: who drafts, for which model, in which rounds ----------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Random calls of one drafter.

    Attributes:
        drafter: as in `fuzz.Case`; "" for that of each seed.
        family: of the model; "" for that of each seed.
        seeds: of the calls.
        rounds: "c" if the C decoder must compute all of them, "" if who computes them is left open.
        drafts: "c" if all drafts must run in C.
        probe: what must have happened in them, a field of `Probe`.
        changes: of each case.
    """

    drafter: str
    family: str = ""
    seeds: Sequence[int] = (100, 101)
    rounds: str = ""
    drafts: str = ""
    probe: str = "drafted"
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Probe:
    """Who ran the calls of a row: rounds and drafts in C and not, tokens that were drafted and accepted."""

    c_rounds: int = 0
    other_rounds: int = 0
    c_drafts: int = 0
    other_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    calls: int = 0


@contextmanager
def probing() -> Iterator[Probe]:
    """Context that counts who ran what."""
    probe = Probe()

    def counted(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = method(*args)
            name = f"{'c' if found not in (None, False) else 'other'}_{what}"
            setattr(probe, name, getattr(probe, name) + 1)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CForwards, "score", counted(CForwards.score, "rounds"))
        for name in ("tree", "extend_context"):
            patch.setattr(CDraft, name, counted(getattr(CDraft, name), "drafts"))
        yield probe


C_HEADS = ("decoupled", "trimmed", "chained", "latent", "eagle3", "dspark")
TABLE: dict[str, Row] = {
    **{
        f"{drafter}, {family}": Row(drafter, family, range(100, 103), probe=probe)
        for drafter, probe in (("self", "accepted"), ("quantized", "accepted"), ("model", "drafted"))
        for family in ("llava", "qwen2_5_vl", "gemma3")
    },
    **{f"model-vision, {family}": Row("model-vision", family, (100,)) for family in ("llava", "qwen2_5_vl", "gemma3")},
    **{
        f"model-retokenizing, {family}": Row("model-retokenizing", family, probe="calls")
        for family in ("llava_next", "qwen2_5_vl")
    },
    **{f"mtp, {family}": Row("mtp", family, (7100,), probe="calls", changes={"nodes": 5}) for family in own.FAMILIES},
    **(
        {"assistant, gemma4": Row("assistant", "gemma4", range(7200, 7203), probe="calls", changes={"nodes": 5})}
        if "gemma4" in assistants.FAMILIES
        else {}
    ),
    **{f"{kind} in C": Row(f"head-{kind}", "", (8, 16), drafts="c", changes={"compiled": True}) for kind in C_HEADS},
    "rounds in C": Row("", "", (8, 20, 25), rounds="c", probe="c_rounds"),
    **{
        f"recurrent, {family}": Row("", family, (8209, 8247, 8251, 8281, 8284))  # one row, ragged, several of a prompt
        for family in ("qwen3_5", "lfm2_vl")
        if family in zoo.ROWS
    },
    "masks of one type": Row("", "paligemma", (2, 3), probe="calls"),
    **{
        f"recurrent batches, {family}": Row("", family, (8100 + n, 8102 + n), "", "", "calls",
                                            {"batch": 4, "padding": "left"})
        for n, family in enumerate(("qwen3_5", "lfm2_vl"))
        if family in zoo.ROWS
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_kernel) if name.endswith("in C") else name for name in TABLE]
)
def test_a_row_of_the_table(name: str) -> None:
    row = TABLE[name]
    with probing() as probe:
        for seed in row.seeds:
            case = fuzz.draw_case(seed, row.family)
            if row.drafter:
                case = replace(case, drafter=row.drafter, nodes=8, override="")
            result = fuzz.run_case(replace(case, **row.changes))
            assert not result.differences, result.report()
            probe.drafted += result.stats.get("num_draft_tokens", 0)
            probe.accepted += result.stats.get("num_accepted_tokens", 0)
            probe.calls += result.calls
    assert getattr(probe, row.probe) > 0
    assert not (row.rounds and probe.other_rounds) and not (row.drafts and probe.other_drafts)
    assert probe.c_drafts >= 4 or not row.drafts


@pytest.mark.parametrize("num_cases", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", heads.DRAFTER_KINDS)
def test_draft_heads(kind: str, num_cases: int) -> None:
    """Random requests with each kind of trained drafter; its weights are random. More until one has drafted."""
    drafted, seed = 0, 900 + 10 * heads.DRAFTER_KINDS.index(kind)
    if num_cases == 10:
        num_cases = {"compressed": len(heads.COMPRESSOR_SPECS), "dspark": 12}.get(kind, 10)  # each form once
    for number in range(12):
        if number >= num_cases and drafted:
            break
        result = fuzz.run_case(replace(fuzz.draw_case(seed + number), drafter=f"head-{kind}", nodes=8))
        assert not result.differences, result.report()
        drafted += result.stats.get("num_draft_tokens", 0)
    assert drafted > (50 if num_cases > 3 else 0)


COMPRESSED_SEED = 1040
"""First seed of calls with compressors; the texts of these repeat, so that drafts can be accepted."""


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, 0) for kind in heads.DRAFTER_KINDS[:-1]),
        *((heads.DRAFTER_KINDS[-1], seed) for seed in range(len(heads.COMPRESSOR_SPECS))),
    ],
)
def test_correct_drafts_of_heads_are_accepted(kind: str, seed: int) -> None:
    """Heads that often predict the next token, on simple calls; random heads are hardly ever accepted."""
    first_seed = 900 + 10 * heads.DRAFTER_KINDS.index(kind) if kind != "compressed" else COMPRESSED_SEED
    case = fuzz.draw_case(first_seed + seed)
    case = replace(
        case, spec=replace(case.spec, calm=True, vocab=40), batch=4, drafter=f"head-{heads.ECHOING_PREFIX}{kind}"
    )
    case = replace(case, nodes=8, eos="none", options={"do_sample": False, "max_new_tokens": 32}, stop_strings=False)
    odd = ("override", "turns", "processor", "prefix", "criterion", "streamer", "cache")
    result = fuzz.run_case(replace(case, biased=(), **dict.fromkeys(odd, "")))
    assert not result.differences, result.report()
    assert result.stats["num_accepted_tokens"] > 0
    assert bool(result.stats["compressor_choices"]) == (kind in ("latent", "compressed")), "a compressor was called"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_cases(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    option = request.config.getoption
    out = option("--cases-json") or str(tmp_path / "cases.json")
    first = str(option("--first-seed"))
    failed = fuzz.main(["--count", str(option("--cases")), "--first-seed", first, "--json", out])
    assert not failed, "\n".join(f["report"] for f in json.loads(Path(out).read_text())["failures"])
    for family in fuzz.LATER_FAMILIES:
        rest = str(option("--cases") // len(fuzz.FAMILIES))
        out = str(tmp_path / f"{family}.json")
        failed = fuzz.main(["--count", rest, "--first-seed", first, "--family", family, "--json", out])
        assert not failed, "\n".join(f["report"] for f in json.loads(Path(out).read_text())["failures"])


# --- half precision: near-ties may flip, and only near-ties -----------------------------------------------------------


def _half(seed: int) -> fuzz.Case:
    case = fuzz.draw_case(seed)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 0} if seed % 2 else {"do_sample": False}
    clean = {"processor": "", "prefix": "", "criterion": "", "cache": "", "streamer": "", "turns": "", "override": ""}
    drafter = "bush" if case.drafter in ("tapper", "raising") else case.drafter
    options = {**sampled, "max_new_tokens": 24}
    spec = replace(case.spec, dtype="bfloat16")
    return replace(case, spec=spec, options=options, drafter=drafter, stop_strings=False, biased=(), nodes=8, **clean)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_bf16_diverges_only_at_near_ties(step: int, record_property: Any) -> None:
    margins, total = [], 0
    for seed in BF16[::step]:
        result = fuzz.run_case(_half(seed))
        total += 1
        for difference in result.differences:
            assert difference.kind in ("sequences", "generator state"), result.report()
            if difference.margin is not None:
                margins.append(difference.margin)
    record_property("identical", f"{total - len(margins)}/{total}")
    record_property("margins", [round(margin, 4) for margin in margins])
    print(f"bf16: {total - len(margins)} of {total} identical, margins where not: {[f'{m:.3f}' for m in margins]}")
    # bf16 keeps 8 bits: logits around 8 are 1/32 apart, and an argmax is exact up to a few such steps.
    assert all(margin < 0.3 for margin in margins), margins
    assert len(margins) < total


# --- half precision in rounds in C: there drafts change nothing ------------------------------------------------------

EVERY_DRAFTER = (
    *(*fuzz.BUILT_IN_DRAFTERS[1:], "arbitrated", *fuzz.WHOLE_MODEL_DRAFTERS),
    *(name for name in adversarial.DRAFTERS if name not in ("raising", "tapper")),
    *(f"head-{kind}" for kind in heads.DRAFTER_KINDS),
)


def _half_case(drafter: str, seed: int, dtype: str, family: str) -> fuzz.Case:
    """A call of a model with rounds in C: `_half` in either type."""
    case = _half(seed)
    spec = replace(case.spec, dtype=dtype, family=family or case.spec.family)
    case = replace(case, videos=False) if family else case
    return replace(case, spec=spec, drafter=drafter, compiled=True, deterministic=False, eos="none")


def _run_in_c(case: fuzz.Case, prepared: fuzz.PreparedCase, plain: list[Any]) -> list[Any]:
    torch.manual_seed(case.seed)
    with probing() as probe:
        outcomes, _, stats = fuzz._run_patched(case, prepared, plain)
    assert not probe.other_rounds and probe.c_rounds >= stats["rounds"] > 0
    return outcomes


@cache
def _without_drafts(*what: Any) -> tuple[fuzz.PreparedCase, list[Any], list[Any]]:
    """The call of `_half_case`, its outcome in transformers, and in C by `none`."""
    case = _half_case("none", *what)
    prepared = fuzz.prepare_case(case)
    torch.manual_seed(case.seed)
    plain = fuzz.run_calls(prepared)
    return prepared, plain, _run_in_c(case, prepared, plain)


@pytest.mark.parametrize("drafter", EVERY_DRAFTER)
@needs_kernel
def test_in_half_precision_every_drafter_gives_the_tokens_of_none(drafter: str) -> None:
    """All of them, and the generator's state: the rule of both half types, of which no row is an exception."""
    number = EVERY_DRAFTER.index(drafter)
    what = 1400 + number % 2, ("bfloat16", "float16")[number // 2 % 2], "llava" if "vision" in drafter else ""
    prepared, plain, expected = _without_drafts(*what)
    for mine, other in zip(expected, _run_in_c(_half_case(drafter, *what), prepared, plain), strict=True):
        assert mine.error == other.error and torch.equal(mine.sequences, other.sequences)
        assert torch.equal(mine.rng_state, other.rng_state)


# --- the distribution -------------------------------------------------------------------------------------------------

STEPS, TOP_K = 3, 3


class Everything(adversarial.AdversarialDrafter):
    """Proposes every continuation that can be sampled, to depth 2: a draft token is always accepted."""

    name = "everything"

    def __init__(self, table: dict[tuple[int, ...], Tensor]) -> None:
        super().__init__()
        self.table = table

    def begin(self, prompt: Prompt) -> adversarial.DrafterState:
        return adversarial.DrafterState(prompt, fuzz.random.Random(0), [[] for _ in range(prompt.input_ids.shape[0])])

    def propose_tree(self, state: adversarial.DrafterState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return adversarial.build_raw_tree([self._row(tuple(prefix), max_nodes - 1) for prefix in state.generated])

    def _row(self, prefix: tuple[int, ...], nodes: int) -> list[tuple[int, int]]:
        first = [(token, 0) for token in self._next(prefix)]
        second = [(token, i) for i, (above, _) in enumerate(first, 1) for token in self._next((*prefix, above))]
        return (first + second)[:nodes]

    def _next(self, prefix: tuple[int, ...]) -> list[int]:
        return self.table[prefix].nonzero().flatten().tolist() if prefix in self.table else []


def _world() -> tuple[PreTrainedModel, tiny.Inputs, dict[str, Any]]:
    model = tiny.build_model(tiny.ModelSpec("llava", vocab=8, seed=5))
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, 3, 1, images=[1], padding="none")
    return model, inputs, {"do_sample": True, "temperature": 1.5, "top_k": TOP_K, "max_new_tokens": STEPS}


def _table(model: PreTrainedModel, inputs: tiny.Inputs, options: dict[str, Any]) -> dict[tuple[int, ...], Tensor]:
    """The exact distribution of the next token after each prefix that can be sampled."""
    table: dict[tuple[int, ...], Tensor] = {}
    for depth in range(STEPS):
        for prefix in product(range(8), repeat=depth):
            if depth and table.get(prefix[:-1], torch.zeros(8))[prefix[-1]] == 0:
                continue
            ids = torch.cat([inputs["input_ids"], torch.tensor([prefix], dtype=torch.long)], 1)
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, -1].float()
            top = (logits / options["temperature"]).topk(TOP_K)
            table[prefix] = torch.zeros(8).scatter(0, top.indices, top.values.softmax(-1))
    return table


def _joint(table: dict[tuple[int, ...], Tensor]) -> dict[tuple[int, ...], float]:
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(STEPS):
        joint = {
            (*prefix, token): prob * float(table[prefix][token])
            for prefix, prob in joint.items()
            for token in table[prefix].nonzero().flatten().tolist()
        }
    return joint


def g_test_p_value(samples: Sequence[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """p-value of a G-test of samples against a distribution; rare outcomes are pooled, impossible ones give 0."""
    counts, total = Counter(samples), len(samples)
    if set(counts) - set(joint):
        return 0.0
    cells: list[tuple[float, float]] = []
    pool = [0.0, 0.0]
    for outcome, prob in joint.items():
        if prob * total >= 5:
            cells.append((counts[outcome], prob * total))
        else:
            pool = [pool[0] + counts[outcome], pool[1] + prob * total]
    cells += [(pool[0], pool[1])] if pool[1] > 0 else []
    g = 2 * sum(o * float(torch.tensor(o / e).log()) for o, e in cells if o)
    freedom = torch.tensor((len(cells) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(max(g, 0.0) / 2)))


def _rows(
    model: PreTrainedModel, inputs: tiny.Inputs, options: dict[str, Any], calls: int
) -> Iterator[tuple[int, ...]]:
    for _ in range(calls):
        prefix = model.generate(**inputs, **options, num_return_sequences=40)
        yield from map(tuple, prefix[:, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.every(4)
@pytest.mark.parametrize(("drafter", "calls"), [("everything", 40), ("everything", 75), ("chaos", 75), ("lookup", 75)])
def test_sampling_has_the_targets_distribution(drafter: str, calls: int) -> None:
    model, inputs, options = _world()
    table = _table(model, inputs, options)
    drafter_argument: Any = {"everything": Everything(table), "chaos": adversarial.MalformedDrafter(1)}.get(
        drafter, drafter
    )
    torch.manual_seed(2024)
    with fuzz.patch_model(model, drafter_argument, tree_size=16):
        samples = list(_rows(model, inputs, options, calls))
    assert g_test_p_value(samples, _joint(table)) > 1e-3


def test_the_g_test_detects_typical_bugs() -> None:
    """Typical bugs of acceptance rules, simulated with the exact table: each must be detected."""
    model, inputs, options = _world()
    table, rng = _table(model, inputs, options), torch.Generator().manual_seed(1)
    joint = _joint(table)

    def play(bug: str) -> Iterator[tuple[int, ...]]:
        for _ in range(3000):
            prefix: tuple[int, ...] = ()
            noise = torch.empty(8).exponential_(generator=rng)
            for _ in range(STEPS):
                if bug != "one noise for all steps":
                    noise = torch.empty(8).exponential_(generator=rng)
                pick = int((table[prefix] / noise).argmax())
                if bug == "typical acceptance" and table[prefix].max() > 0.6 and torch.rand((), generator=rng) < 0.2:
                    pick = int(table[prefix].argmax())
                if bug == "no residual":
                    draft = int(table[prefix].argsort()[-2])
                    if torch.rand((), generator=rng) < table[prefix][draft]:
                        pick = draft
                prefix = (*prefix, pick)
            yield prefix

    assert g_test_p_value(list(play("")), joint) > 1e-3
    for bug in ("one noise for all steps", "typical acceptance", "no residual"):
        assert g_test_p_value(list(play(bug)), joint) < 1e-6, bug
