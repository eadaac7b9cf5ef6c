"""Drafters that say several tokens a pass: their trees, what they draft (against slow references), how they learn."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
    build_prompt,
    build_result,
    build_train_batch,
    check_no_host_copy,
    new_trainer,
    reference_draft_inputs,
    reference_forward,
    scores_by_path,
)
from torch import Tensor, nn

from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.block_tree import candidate_paths, path_table
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.visual_inputs import VISUAL_MODES
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.drafters.heads.falcon.head import FalconDrafter, FalconHead
from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead
from mmspec.drafters.heads.parallel.head import ParallelConfig, ParallelDrafter, ParallelHead
from mmspec.drafters.heads.registry import find_method, methods
from mmspec.drafters.rerank import LEVEL_PENALTY, select_nodes
from mmspec.drafters.training.batch import DraftModel, Labels, build_inputs_and_labels
from mmspec.drafters.training.losses import LossInputs, LossWeights, TrainProgress
from mmspec.engine.tree import root_only

FLASH = FlashConfig.of(HEAD_CONFIG, intermediate_size=0, block_size=4, block_ffn_size=40)
PARALLEL = ParallelConfig.of(HEAD_CONFIG, block_size=4)
SORTS = ("flash", "chained", "parallel", "linked", "falcon2", "falcon3")
EVERY = ("eagle", *SORTS)
"""With the head that says one token a pass."""
WITH_MODES = [*product(SORTS, ("decoupled", "text_only")), *product(("eagle",), VISUAL_MODES)]


def new_head(kind: str) -> EagleHead:
    """Loud random weights, so that drafts differ."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        head: EagleHead
        if kind in ("flash", "chained"):
            head = FlashHead(replace(FLASH, markov_rank=12 if kind == "chained" else 0))
            if head.markov_head is not None:
                head.markov_head.vocab_proj.weight.data.normal_(0, 0.5)
        elif kind == "eagle":
            head = EagleHead(HEAD_CONFIG)
        elif kind.startswith("falcon"):
            head = FalconHead(replace(HEAD_CONFIG, block_size=int(kind[-1])))
        else:
            head = ParallelHead(replace(PARALLEL, block_ffn_size=20 if kind == "linked" else 0))
            head.mask_embeddings.data.normal_()
            if head.token_correction is not None:
                head.token_correction.down_proj.weight.data.normal_(0, 0.5)
    for weight in head.parameters():
        weight.data.mul_(1.5)
    return head.eval()


def kind_of(kind: str) -> str:
    """Of `drafters.kinds`."""
    return {"linked": "parallel", "chained": "flash"}.get(kind, kind.rstrip("23"))


def new_drafter(kind: str, visual_mode: str = "decoupled", **options: Any) -> Any:
    return (
        find_method(kind_of(kind))
        .classes()
        .drafter(new_head(kind), visual_mode, num_layers=NUM_LAYERS, top_k=3, **options)
    )


# --- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "nodes"), [(1, 5), (2, 7), (3, 15), (5, 15), (8, 4), (4, 31)])
def test_path_table_holds_exactly_the_candidates(slots: int, nodes: int) -> None:
    listed = candidate_paths(slots, nodes)
    brute = []
    for depth in range(1, slots + 1):
        for path in product(range(nodes), repeat=depth) if nodes**depth < 1e5 else ():
            betters = sum(math.prod(r + 1 for r in path[:i]) for i in range(1, depth + 1))
            if betters <= nodes:
                brute.append(path)
    assert [path for path in listed if nodes ** len(path) < 1e5] == brute
    assert len(set(listed)) == len(listed) and all(path[:-1] in listed for path in listed if len(path) > 1)


@pytest.mark.parametrize("seed", range(6))
def test_selected_nodes_are_the_most_likely(seed: int) -> None:
    """Best-first by hand over the whole product, at random sharp and flat distributions."""
    rng = torch.Generator().manual_seed(seed)
    slots, nodes, vocab = 2 + seed % 4, (4, 8, 16, 32)[seed % 4], (6, 40)[seed % 2]
    log_probs = (torch.randn(2, slots, vocab, generator=rng) * (1 + seed)).log_softmax(-1)
    table = path_table(slots, nodes - 1, vocab, torch.device("cpu"))
    tokens, totals, _ = table.score_paths(log_probs[:, None], torch.zeros(2, 1))
    tree = select_nodes(None, tokens[:, 0], totals[:, 0], table.parents.expand(2, -1), max_nodes=nodes)
    for row in range(2):
        found = {path: math.log(score) for path, score in scores_by_path(tree, row).items()}
        heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        expected: dict[tuple[int, ...], float] = {}
        while heap and len(expected) < nodes:
            cost, path = heapq.heappop(heap)
            if path:
                expected[path] = -cost
            if len(path) < slots:
                for token in range(vocab):
                    heapq.heappush(
                        heap, (cost - float(log_probs[row, len(path), token]) + LEVEL_PENALTY, (*path, token))
                    )
        expected = dict(list(expected.items())[: nodes - 1])
        assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)
        assert set(found) == set(expected)


# --- slow references --------------------------------------------------------------------------------------------------


def reference_log_probs(
    target: FakeTarget, head: EagleHead, visual_mode: str, row: int, n: int, path: list[int]
) -> Tensor:
    """[V] log probabilities of what follows `path` after the first n tokens and the n-th."""
    rows, positions = reference_draft_inputs(target, head, visual_mode, row, n)
    if isinstance(head, FlashHead):
        feature = _spread(head, reference_forward(head, torch.stack(rows), torch.tensor(positions))[-1])[len(path)]
    elif isinstance(head, FalconHead):
        feature = _falcon(target, head, rows, positions, path)
    elif type(head) is EagleHead:
        feature = _one_by_one(target, head, rows, positions, path)
    else:
        assert isinstance(head, ParallelHead)
        rows += list(head.mask_embeddings[: len(path)])
        positions += range(n, n + len(path))
        feature = reference_forward(head, torch.stack(rows), torch.tensor(positions))[-1]
        if head.token_correction is not None and path:
            correction, embeds = head.token_correction, target.shared_embeddings.embed_tokens(torch.tensor(path[-1]))
            gate, up = correction.gate_up_proj(torch.cat([_normed(feature) * correction.norm.weight, embeds])).chunk(2)
            feature = feature + correction.down_proj(torch.nn.functional.silu(gate) * up)
    logits = target.shared_embeddings.lm_head(feature)
    if isinstance(head, FlashHead) and head.markov_head is not None and path:
        markov_head, embeds = head.markov_head, target.shared_embeddings.embed_tokens(torch.tensor(path[-1]))
        both = markov_head.feature_proj.weight @ (_normed(feature) * markov_head.norm.weight)
        both = both + markov_head.token_proj.weight @ (_normed(embeds) * markov_head.token_norm.weight)
        logits = logits + markov_head.vocab_proj.weight @ torch.nn.functional.silu(both)
    logits[[0, IMAGE_TOKEN_ID]] = float("-inf")
    result: Tensor = logits.log_softmax(-1)
    return result


def _normed(row: Tensor) -> Tensor:
    return row * (row.pow(2).mean() + 1e-5).rsqrt()


def _spread(head: FlashHead, out: Tensor) -> list[Tensor]:
    inside = torch.nn.functional.silu(head.up_proj.weight @ (_normed(out) * head.norm.weight))
    return [out + head.block_proj.weight[32 * i : 32 * (i + 1)] @ inside for i in range(head.config.block_size)]


def _one_by_one(
    target: FakeTarget, head: EagleHead, rows: list[Tensor], positions: list[int], path: list[int]
) -> Tensor:
    """Each token of the path beside the output before it."""
    for token in path:
        feature = reference_forward(head, torch.stack(rows), torch.tensor(positions))[-1]
        rows.append(head.fuse(target.shared_embeddings.embed_tokens(torch.tensor(token)), feature))
        positions.append(positions[-1] + 1)
    return reference_forward(head, torch.stack(rows), torch.tensor(positions))[-1]


def _falcon(target: FakeTarget, head: FalconHead, rows: list[Tensor], positions: list[int], path: list[int]) -> Tensor:
    """Blocks of k, the last of which ends where the context ends."""
    k, count = head.config.block_size, len(rows)
    blocks = [(i - count) // k for i in range(count)]
    for block in range(len(path) // k + 1):
        attention_mask = torch.tensor([[other <= own for other in blocks] for own in blocks])
        out = reference_forward(head, torch.stack(rows), torch.tensor(positions), attention_mask)[-k:]
        if block == len(path) // k:
            return out[len(path) % k]
        for slot in range(k):
            rows.append(
                head.fuse(target.shared_embeddings.embed_tokens(torch.tensor(path[block * k + slot])), out[slot])
            )
            positions.append(positions[-1] + 1)
            blocks.append(block)
    raise AssertionError


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("visual_mode", VISUAL_MODES)
@pytest.mark.parametrize(("pads", "right"), [((0, 0), False), ((0, 4), False), ((0, 4), True)])
def test_drafts_equal_the_slow_reference(
    target: FakeTarget, kind: str, visual_mode: str, pads: tuple[int, int], right: bool
) -> None:
    target.shared_embeddings.lm_head.weight.data.mul_(2)  # type: ignore[operator,union-attr]
    drafter = new_drafter(kind, visual_mode)
    tree = drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11, pads, right)), 64, [True, True])
    with torch.no_grad():
        for row, count in enumerate(pads):
            n, found, output = 11 - count, scores_by_path(tree, row), dict[tuple[int, ...], Tensor]()

            def after(path: tuple[int, ...], row: int = row, n: int = n, output: Any = output) -> Tensor:
                if path not in output:  # paths share beginnings
                    output[path] = reference_log_probs(target, drafter.head, visual_mode, row, n, list(path))
                return output[path]

            deep = [path for path in found if len(path) > 2]
            assert len(found) > 15 and len(deep) > 2
            for path in [*list(found)[:12], *deep[:6], *deep[-6:]]:
                score = found[path]
                steps = [float(after(path[:i])[path[i]]) for i in range(len(path))]
                assert math.log(score) == pytest.approx(sum(steps), abs=2e-3), (row, path)
            likeliest = int(after(()).argmax())
            assert (likeliest,) in found


@pytest.mark.parametrize(("kind", "visual_mode"), WITH_MODES)
def test_rounds_feed_the_targets_hidden_states(target: FakeTarget, kind: str, visual_mode: str) -> None:
    """Rounds with drafts, rounds without and rows without tokens equal one long prompt."""
    drafter = new_drafter(kind, visual_mode)
    state = begin_decoding(target, drafter, build_prompt(target, 9, (0, 2)))
    lengths = [9, 7]
    for sizes, drafts in (([1, 2], True), ([2, 1], False), ([1, 0], True), ([1, 1], True)):
        tree = drafter.propose(state, 8, [True, True]) if drafts else root_only(2)
        states = torch.zeros(2, 8, 32)
        walked, tokens = [], []
        for row, size in enumerate(sizes):
            nodes = [0, 5][:size]
            for step, node in enumerate(nodes):
                states[row, node] = target.hidden_states[row, lengths[row] + step]
            walked.append(nodes)
            tokens.append([int(target.input_ids[row, lengths[row] + 1 + step]) for step in range(size)])
            lengths[row] += size
        drafter.observe(state, build_result(tree, walked, tokens), {NUM_LAYERS: states})
    drafted = drafter.propose(state, 16, [True, True])
    fresh = build_prompt(target, max(lengths), tuple(max(lengths) - n for n in lengths))  # type: ignore[arg-type]
    expected = drafter.propose(begin_decoding(target, drafter, fresh), 16, [True, True])
    for row in range(2):
        assert scores_by_path(drafted, row) == pytest.approx(scores_by_path(expected, row), rel=1e-3)


@pytest.mark.parametrize("kind", EVERY)
def test_drafts_follow_the_sampling_noise(target: FakeTarget, kind: str) -> None:
    noise = torch.empty(2, 9, 40).exponential_(generator=torch.Generator().manual_seed(1))
    drafter = new_drafter(kind)
    prompt = build_prompt(target, 11, noise=lambda depth: noise[:, :depth], temperature=0.7)
    tree = drafter.propose(begin_decoding(target, drafter, prompt), 8, [True, True])
    with torch.no_grad():
        for row in range(2):
            path: list[int] = []
            for column in range(2):
                log_probs = (reference_log_probs(target, drafter.head, "decoupled", row, 11, path) / 0.7).softmax(-1)
                path.append(int((log_probs / noise[row, column]).argmax()))
                assert column or int(tree.tokens[row, 1]) == path[0]
            assert tuple(path) in scores_by_path(tree, row)


@pytest.mark.parametrize("kind", EVERY)
def test_draft_vocabulary_limits_the_tokens(target: FakeTarget, kind: str) -> None:
    ids = torch.arange(1, 40, 3)
    drafter = new_drafter(kind, draft_ids=ids)
    tree = drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11)), 16, [True, True])
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids.tolist()) - {IMAGE_TOKEN_ID}
    whole = new_drafter(kind)
    tree = whole.propose(begin_decoding(target, whole, build_prompt(target, 11)), 64, [True, True])
    assert not set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("kind", SORTS)
@pytest.mark.parametrize("max_nodes", [2, 3, 4, 5, 64])
def test_any_tree_size_works(target: FakeTarget, kind: str, max_nodes: int) -> None:
    """Also one that is smaller than a block."""
    drafter = new_drafter(kind)
    tree = drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11)), max_nodes, [True, True])
    assert tree.num_nodes <= max_nodes and tree.node_mask[:, 1].all()
    assert len(scores_by_path(tree, 0)) == tree.num_nodes - 1
    assert drafter.propose(begin_decoding(target, drafter, build_prompt(target, 11)), 1, [True, True]).num_nodes == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("noisy", [False, True])
def test_drafting_needs_no_host_copy(target: FakeTarget, kind: str, noisy: bool) -> None:
    drafter = new_drafter(kind, draft_ids=torch.arange(40) if noisy else None)
    options = {"noise": lambda depth: torch.ones(2, depth, 40)} if noisy else {}
    state = begin_decoding(target, drafter, build_prompt(target, 11, (0, 4), **options))
    check_no_host_copy(drafter, state, NUM_LAYERS)


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "visual_mode"), WITH_MODES)
def test_training_features_are_those_of_drafting(
    target: FakeTarget, kind: str, visual_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every feature in a loss equals the one that drafting computes there, after the true tokens so far."""
    head, batch, steps = new_head(kind), build_train_batch(target), 3 if kind == "eagle" else 2
    recorded: list[tuple[int, Tensor, Tensor, Tensor]] = []
    from mmspec.drafters.training.losses import LossAccumulator

    def record(
        self: LossAccumulator, part: int, out: Tensor, labels: Labels, logit_bias: Tensor | None = None, **_: Any
    ) -> None:
        recorded.append(
            (part, out, labels.hidden_states, torch.zeros(len(out), 1) if logit_bias is None else logit_bias)
        )

    monkeypatch.setattr(LossAccumulator, "add", record)
    model = DraftModel(head, visual_mode)
    monkeypatch.setattr(LossAccumulator, "result", lambda self: (torch.zeros(()), {}))
    placeholder = target.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    with torch.no_grad():
        weights = LossWeights(ttt_steps=steps)
        for seed in range(3):  # offset of the first block
            progress = TrainProgress(1.0, torch.Generator().manual_seed(seed))  # no label is an input any more
            given = LossInputs(model, batch, target.shared_embeddings, placeholder, weights, progress)
            find_method(kind_of(kind)).loss()(given)
        data = build_inputs_and_labels(model, batch, placeholder)
    states = {tuple(batch.hidden_states[b, p].tolist()): (b, p) for b in range(2) for p in range(14)}
    checked = set()
    for part, out, target_hidden, logit_bias in recorded:
        for output, target_output, options in zip(out, target_hidden, logit_bias.expand(len(out), -1), strict=True):
            # The label is `part` positions after the token that follows the last input.
            b, p = states[tuple(target_output.tolist())]
            n = p - part
            assert data.loss_mask[b].any() and n >= 7
            path = target.input_ids[b, n + 1 : n + 1 + part].tolist()
            with torch.no_grad():
                expected = reference_log_probs(target, head, visual_mode, b, n, path)
                got = target.shared_embeddings.lm_head(output) + options
            got[[0, IMAGE_TOKEN_ID]] = float("-inf")
            assert torch.allclose(got.log_softmax(-1), expected, atol=4e-3), (part, b, n)
            checked.add(part)
    deepest = head.config.block_size * (steps if kind == "eagle" or kind.startswith("falcon") else 1)
    assert checked == set(range(deepest))


@pytest.mark.parametrize("kind", SORTS)
def test_heads_learn(target: FakeTarget, kind: str, tmp_path: Path) -> None:
    metrics: list[dict[str, float]] = []
    draft_models = {"one": DraftModel(new_head(kind), "decoupled", kind_of(kind))}
    assert new_trainer(target, tmp_path, draft_models).run(on_step=metrics.append)
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"] and metrics[-1]["agree1"] > metrics[0]["agree1"]


def test_glancing_replaces_a_decreasing_first_part_of_blocks(target: FakeTarget) -> None:
    from mmspec.drafters.heads.falcon import head as training_blocks

    head, batch = new_head("falcon3"), build_train_batch(target)
    data = build_inputs_and_labels(
        DraftModel(head, "decoupled"), batch, target.shared_embeddings.embed_tokens(torch.tensor(IMAGE_TOKEN_ID))
    )
    block = torch.arange(data.inputs.shape[1]) // 3
    learn = data.loss_mask_at(2)
    counts = []
    for share in (0.4, 0.2, 0.01):
        num_glanced = torch.zeros_like(learn, dtype=torch.long)
        for seed in range(60):
            progress = TrainProgress(rng=torch.Generator().manual_seed(seed))
            given = LossInputs(
                DraftModel(head, "decoupled"), batch, target.shared_embeddings, torch.zeros(32), progress=progress
            )
            one = training_blocks._glance_mask(data.inputs, data, given, block, 3, share)
            assert not (one & ~learn).any()
            for start in range(0, data.inputs.shape[1] - 2, 3):
                glanced, learned = one[:, start : start + 3], learn[:, start : start + 3]
                assert not (glanced[:, 1:] & ~glanced[:, :-1] & learned[:, :-1]).any(), "not a first part"
                assert not one[:, start + 2].any(), "the last position of a block is never glanced"
            num_glanced += one
        counts.append(int(num_glanced.sum()))
    assert counts[0] > counts[1] > counts[2]


def test_a_batch_without_a_response_is_no_error(target: FakeTarget, tmp_path: Path) -> None:
    batch = replace(build_train_batch(target), response_mask=torch.zeros(2, 14, dtype=torch.bool))
    draft_models = {kind: DraftModel(new_head(kind), "decoupled", kind_of(kind)) for kind in SORTS}
    before = new_head("flash").state_dict()
    assert new_trainer(target, tmp_path, draft_models, batch, max_steps=1).run()
    assert all(torch.equal(value, before[name]) for name, value in draft_models["flash"].head.state_dict().items())


# --- on disk, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SORTS)
def test_save_and_load_head(kind: str, tmp_path: Path) -> None:
    head = new_head(kind)
    save_head(
        tmp_path,
        head,
        HeadMetadata(head.config, "text_only", NUM_LAYERS, "llava", "abc", architecture=kind_of(kind)),
        torch.float32,
    )
    again, metadata = load_head(tmp_path)
    assert type(again) is type(head) and metadata.architecture == kind_of(kind) and metadata.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert type(load_trained(tmp_path)) is type(new_drafter(kind))


Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: new_drafter("flash", block_size=5),
            "block_size must be 1 to 4, for which this head was trained; got 5",
        ),
        (lambda: new_drafter("parallel", block_size=0), "block_size must be 1 to 4.*got 0"),
        (lambda: new_drafter("falcon3", block_size=2), "block_size must be 3, how far.*got 2"),
        (lambda: new_drafter("falcon2", max_forwards=0), "max_forwards must be at least 1; got 0"),
        (lambda: FlashHead(replace(FLASH, block_ffn_size=0)), "block_ffn_size of at least 1; got 0"),
        (lambda: FalconHead(HEAD_CONFIG), "block_size of at least 2; got 1"),
        (lambda: replace(HEAD_CONFIG, block_size=0), "block_size must be 1 to 16 tokens per forward; got 0"),
        (lambda: replace(HEAD_CONFIG, block_size=17), "block_size must be 1 to 16 tokens per forward; got 17"),
    ],
)
def test_block_sizes_that_do_not_fit_are_refused(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_shorter_block_is_a_prefix_of_the_longer(target: FakeTarget) -> None:
    for kind in ("flash", "chained", "parallel", "linked"):
        long = new_drafter(kind).propose(
            begin_decoding(target, drafter := new_drafter(kind), build_prompt(target, 11)), 64, [True, True]
        )
        del drafter
        short_drafter = new_drafter(kind, block_size=2)
        short = short_drafter.propose(begin_decoding(target, short_drafter, build_prompt(target, 11)), 64, [True, True])
        both = scores_by_path(long, 0).keys() & scores_by_path(short, 0).keys()
        assert max(map(len, scores_by_path(short, 0))) == 2 and len(both) > 5
        for path in both:
            assert scores_by_path(long, 0)[path] == pytest.approx(scores_by_path(short, 0)[path], rel=1e-3)


def test_methods_build_their_classes() -> None:
    assert issubclass(FlashDrafter, BlockDrafter) and issubclass(FalconDrafter, HeadDrafter)
    assert {"eagle", "eagle3", "vispec", "flash", "parallel", "dspark", "falcon"} <= set(methods())
    assert isinstance(new_drafter("linked"), ParallelDrafter) and isinstance(new_head("linked"), nn.Module)
