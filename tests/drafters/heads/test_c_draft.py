"""Draft heads in C: the same drafts as the head's own forward, what is left to it, bugs in the C code."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from c_bugs import faulty_kernel, faulty_sources
from fake_target import (
    HEAD_CONFIG,
    NUM_LAYERS,
    FakeTarget,
    begin_decoding,
    build_fake_target,
    build_prompt,
    build_result,
    scores_by_path,
)
from torch import Tensor, nn

from mmspec.cpu import c_kernel, c_library
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.draft import CHead
from mmspec.drafters.heads.base import c_draft
from mmspec.drafters.heads.base.c_draft import CDraft
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.dflash2.head import Dflash2Config
from mmspec.drafters.heads.domino.head import DominoConfig
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.drafters.heads.flash.head import FlashConfig, FlashDrafter, FlashHead
from mmspec.drafters.heads.lilicorr.head import LilicorrConfig
from mmspec.drafters.heads.registry import HeadClasses, methods
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
TRIMMED = torch.arange(1, 39, 3)
LAYERS = (1, 0, NUM_LAYERS)
EAGLE3_CONFIG = Eagle3Config.of(HEAD_CONFIG, draft_vocab_size=40, hidden_state_layers=LAYERS)
DSPARK_CONFIG = DsparkConfig.of(
    HEAD_CONFIG, block_size=4, markov_rank=13, hidden_state_layers=LAYERS, num_hidden_layers=2, confidence_head=True
)
BLOCK: dict[str, Any] = {
    "block_size": 4, "hidden_state_layers": LAYERS, "num_hidden_layers": 2, "sample_from_anchor": False,
}  # fmt: skip
CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 8}
LATTICE = {"candidate_topk": 5, "lattice_size": 12, "factor_dim": 6}
KINDS: dict[str, tuple[HeadConfig, Tensor | None]] = {
    "eagle": (HEAD_CONFIG, None),
    "eagle, input norm, trimmed": (replace(HEAD_CONFIG, qkv_bias=False, bias=False, input_norm=True), TRIMMED),
    "eagle, no feed-forward": (replace(HEAD_CONFIG, intermediate_size=0), None),
    "flash": (FlashConfig.of(HEAD_CONFIG, intermediate_size=0, block_size=4, block_ffn_size=40, markov_rank=13), None),
    "flash, feed-forward, trimmed": (
        FlashConfig.of(HEAD_CONFIG, block_size=3, block_ffn_size=7, markov_rank=16),
        TRIMMED,
    ),
    "eagle3": (EAGLE3_CONFIG, None),
    "eagle3, draft vocabulary, normed residual": (
        replace(EAGLE3_CONFIG, draft_vocab_size=len(TRIMMED), norm_before_residual=True, qkv_bias=False),
        TRIMMED,
    ),
    "dspark": (DSPARK_CONFIG, None),
    "dspark, one layer, mixture, trimmed": (
        replace(DSPARK_CONFIG, num_hidden_layers=1, layer_mixture=True, confidence_head=False, qkv_bias=False),
        TRIMMED,
    ),
    "dspark, as published": (
        replace(DSPARK_CONFIG, draft_vocab_size=len(TRIMMED), num_hidden_layers=4, sample_from_anchor=False),
        TRIMMED,
    ),
    "dflash": (DsparkConfig.of(HEAD_CONFIG, **BLOCK), None),
    "dflash, as published": (DsparkConfig.of(HEAD_CONFIG, **BLOCK, draft_vocab_size=len(TRIMMED)), TRIMMED),
    "dflash2": (Dflash2Config.of(HEAD_CONFIG, **BLOCK, **CONVOLUTION, selector_rank=6, selector_top_k=5), None),
    "dflash2, scaled, trimmed": (
        Dflash2Config.of(
            HEAD_CONFIG,
            **BLOCK,
            conv_group_size=16,
            selector_rank=6,
            output_multiplier=0.5,
            final_logit_softcapping=4.0,
        ),
        TRIMMED,
    ),
    "lilicorr": (LilicorrConfig.of(HEAD_CONFIG, **BLOCK, **LATTICE), None),
    "lilicorr, convolution, trimmed": (LilicorrConfig.of(HEAD_CONFIG, **BLOCK, **CONVOLUTION, **LATTICE), TRIMMED),
    "domino": (DominoConfig.of(HEAD_CONFIG, **BLOCK, gru_hidden_dim=9, emb_dim=7, pure_draft_prefix_len=1), None),
}
"""{kind: (config, draft ids)}; "as published": an LM head, a table of tokens and a mask token of its own."""
UPON_DFLASH = ("dflash", "dflash2", "lilicorr", "domino")
OVER_PAIRS = ("dflash2", "lilicorr")
"""Of which the tree grows in C over scores of pairs that are computed in torch."""


@pytest.fixture(params=kernels.LEVELS[:2], ids=kernels.NAMES[:2])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CKernel:
    """The kernel for each instruction set that this processor has, in use."""
    found = kernels.kernel_of(request.param)
    monkeypatch.setattr(c_draft, "active_kernel", lambda: found)
    return found


@pytest.fixture
def best_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_draft, "active_kernel", load_kernel)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def method_classes(kind: str) -> HeadClasses:
    name = kind.split(",")[0]
    return methods()[{"dflash": "dspark"}.get(name, name)].classes()


def build_head(kind: str) -> DraftHead:
    """A head with loud random weights, so that drafts differ."""
    name = kind.split(",")[0]
    config, has_table = KINDS[kind][0], name == "dspark" and kind.endswith("published")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        head = method_classes(kind).head(config, **({"has_table": True} if has_table else {}))
        for name, weight in head.named_parameters():
            weight.data.normal_(1.0 if "norm" in name or name.endswith(("mixture", "base_kernel")) else 0.0, 0.2)
    return head


def first_layer(head: Any) -> Any:
    return head.layers[0] if isinstance(head, DsparkHead) else head.layer


def build_drafter(kind: str, top_k: int = 3) -> HeadDrafter:
    head = build_head(kind)
    visual_mode = "coupled" if head.config.hidden_state_layers else "decoupled"
    options: dict[str, Any] = {"num_layers": NUM_LAYERS, "top_k": top_k, "draft_ids": KINDS[kind][1]}
    drafter = method_classes(kind).drafter(head, visual_mode, **options)
    if isinstance(drafter, DsparkDrafter) and kind.endswith("published"):
        drafter.mask_token_id = 7
    return drafter


def build_c_prompt(target: FakeTarget, length: int, num_pads: tuple[int, int] = (0, 0), **kwargs: Any) -> Prompt:
    """A prompt with hidden states of a further layer."""
    prompt = build_prompt(target, length, num_pads, **kwargs)
    states = torch.randn(prompt.hidden_states[0].shape, generator=torch.Generator().manual_seed(1))
    return replace(prompt, hidden_states={**prompt.hidden_states, 1: states})


class TwoStates:
    """A call of two rows of different lengths twice: in C, and in the head's own forward."""

    def __init__(
        self, target: FakeTarget, drafter: HeadDrafter, sampled: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.drafter, self.rng, self.dtype = drafter, torch.Generator().manual_seed(9), dtype
        self.num_paths, self.num_common = 0, 0  # of the trees in half precision
        self.noise = torch.empty(2, 8, 40).exponential_(generator=self.rng)
        noise: dict[str, Any] = {"noise": lambda depth: self.noise[:, :depth], "temperature": 0.7} if sampled else {}
        prompt = build_c_prompt(target, 12, (0, 3), **noise)
        prompt = replace(prompt, hidden_states={i: one.to(dtype) for i, one in prompt.hidden_states.items()})
        self.compiled, self.plain = (begin_decoding(target, drafter, prompt) for _ in range(2))
        assert self.compiled.c_draft is not None
        self.plain.c_draft = None

    def round(self, counts: tuple[int, int]) -> None:
        """Draft with both and compare; then each row emits so many random tokens."""
        states = (self.compiled, self.plain)
        mine, want = (self.drafter.propose(state, 16, [True, True]) for state in states)
        self.compare(mine, want)
        size = max(counts)
        tokens = torch.randint(1, 39, (2, size), generator=self.rng).tolist()
        shape = (2, size, HEAD_CONFIG.hidden_size)
        hidden = {layer: torch.randn(shape, generator=self.rng).to(self.dtype) for layer in LAYERS}
        nodes = [list(range(count)) for count in counts]
        for state in states:
            result = build_result(mine, nodes, [row[:n] for row, n in zip(tokens, counts, strict=True)])
            self.drafter.observe(state, result, hidden)

    def rounds(self, *counts: tuple[int, int]) -> None:
        """Several rounds."""
        for pair in counts:
            self.round(pair)

    def compare(self, mine: DraftTree, want: DraftTree) -> None:
        error = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}[self.dtype]
        close = {"rtol": error, "atol": error}
        assert mine.tokens.shape == want.tokens.shape and mine.tokens.dtype == want.tokens.dtype
        for row in range(2):
            expected = scores_by_path(want, row)
            found = scores_by_path(mine, row)
            self.num_paths, self.num_common = (
                self.num_paths + len(expected),
                self.num_common + len(found.keys() & expected.keys()),
            )
            if self.dtype is torch.float32:
                assert found.keys() == expected.keys()
                assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3, abs=1e-7)
        torch.testing.assert_close(self.compiled.last_hidden, self.plain.last_hidden, **close)
        lengths = self.plain.kv_cache.seq_lens
        assert self.compiled.kv_cache.seq_lens == lengths and self.compiled.next_positions == self.plain.next_positions
        assert self.compiled.kv_cache.written_layers == self.plain.kv_cache.written_layers
        for layer in self.plain.kv_cache.written_layers:
            caches = (state.kv_cache.read(layer, max(lengths)) for state in (self.compiled, self.plain))
            for one, other in zip(*caches, strict=True):
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(one[row, :, :length], other[row, :, :length], **close)


ROUNDS = (1, 1), (3, 1), (0, 2), (4, 4), (2, 0), (1, 5)
"""Tokens that the two rows emit in each."""


def half_precision(kind: str) -> None:
    """Rounds in bfloat16, then in float16. Near-ties among candidates of LiLiCorr change ranks, which it reads."""
    ranks = 0.1 * kind.startswith("lilicorr")
    for dtype, share, sampled in ((torch.bfloat16, 0.88 - ranks, False), (torch.float16, 0.94 - ranks, True)):
        target, drafter = build_fake_target(), build_drafter(kind)
        for module in (target.shared_embeddings.embed_tokens, target.shared_embeddings.lm_head, drafter.head):
            assert isinstance(module, nn.Module)
            module.to(dtype).requires_grad_(False)
        states = TwoStates(target, drafter, sampled, dtype)
        states.rounds(*ROUNDS)
        assert states.num_common >= share * states.num_paths


FAMILIES = ("eagle", "flash", "eagle3", "dspark", *UPON_DFLASH)


@dataclass
class Calls:
    """How often C did what was asked of it, and how often not."""

    done: int = 0
    refused: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()

    def spy(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = method(*args)
            is_block = method.__name__ == "block"  # after its tree was refused
            counted.done += result is not None and result is not False
            counted.refused += -(result is not None) if is_block else not result
            return result

        return call

    for name in ("tree", "extend_context", "block"):
        monkeypatch.setattr(CDraft, name, spy(getattr(CDraft, name)))
    return counted


# --- the same drafts --------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_those_of_the_head(
    kind: str, sampled: bool, kernel: CKernel, target: FakeTarget, calls: Calls
) -> None:
    states = TwoStates(target, build_drafter(kind), sampled)
    states.rounds(*ROUNDS)
    assert calls.done == 11 + 6 * kind.startswith(OVER_PAIRS)  # the first draft has no emitted tokens to read
    assert not calls.refused


@pytest.mark.every(3)
@pytest.mark.parametrize("kernel", kernels.LEVELS, indirect=True, ids=kernels.NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_half_precision(kind: str, kernel: CKernel, calls: Calls) -> None:
    """States are those of the head up to rounding; trees too, but for near-ties."""
    half_precision(kind)
    assert calls.done == 22 + 12 * kind.startswith(OVER_PAIRS) and not calls.refused


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", FAMILIES)
def test_long_contexts_two_threads_and_single_nodes(
    kind: str, best_kernel: None, two_threads: None, target: FakeTarget, calls: Calls
) -> None:
    for top_k in (1, 4):
        states = TwoStates(target, build_drafter(kind, top_k))
        states.rounds(*[(60, 57)] * 10)
        assert max(states.plain.kv_cache.seq_lens) > 512  # the first rotary table ends there
    assert not calls.refused


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_that_change_during_a_call(kind: str, best_kernel: None, target: FakeTarget, calls: Calls) -> None:
    """In place, the new numbers are used; other memory or another parameter ends the drafts in C."""
    drafter = build_drafter(kind)
    states = TwoStates(target, drafter)
    states.round((2, 1))
    qkv_proj = first_layer(drafter.head).qkv_proj
    for linear in (qkv_proj, drafter.head.fc):
        linear.weight.data.mul_(-1)  # not larger: rounding would be amplified level by level
        states.round((1, 2))
    assert not calls.refused
    qkv_proj.weight.data = qkv_proj.weight.data * 0.5
    states.round((1, 2))
    refused = 2 + kind.startswith(OVER_PAIRS)  # such a tree is asked for twice
    assert calls.refused == refused
    begun = TwoStates(target, drafter)
    begun.round((1, 1))
    qkv_proj.weight = nn.Parameter(qkv_proj.weight.data * 2)
    begun.round((1, 1))
    assert calls.refused == 2 * refused


def test_rows_that_do_not_draft_and_small_trees(best_kernel: None, target: FakeTarget) -> None:
    drafter = build_drafter("flash")
    states = TwoStates(target, drafter)
    for max_nodes in (2, 3, 64):
        mine, want = (drafter.propose(state, max_nodes, [True, False]) for state in (states.compiled, states.plain))
        states.compare(mine, want)
        assert mine.num_nodes <= max_nodes and not mine.node_mask[1, 1:].any()


@pytest.mark.every(2)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_have_ended_cost_nothing(
    kind: str, sampled: bool, best_kernel: None, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of a row are the same bits whether the others draft and read tokens or not, and so is its state."""
    drafter, states = build_drafter(kind), TwoStates(target, build_drafter(kind), sampled)
    alone, together = states.compiled, states.plain
    for state in (alone, together):
        state.c_draft, state.static_shapes = drafter.c_draft(state), True  # as many levels whatever they cost
    computed = []

    def spy(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: CHead, *args: Any) -> Any:
            computed.append(len(args[-1].lengths))
            return method(self, *args)

        return call

    for name in ("tree", "forward", "block"):
        monkeypatch.setattr(CHead, name, spy(getattr(CHead, name)))
    for row in (1, 1, 0, 1):  # a row that waits for others goes on later
        active = [index == row for index in range(2)]
        computed.clear()
        mine = drafter.propose(alone, 12, active)
        assert set(computed) == {1}
        want = drafter.propose(together, 12, [True, True])
        for name in ("tokens", "parents", "node_mask", "scores"):
            assert torch.equal(getattr(mine, name)[row], getattr(want, name)[row])
        assert not mine.node_mask[1 - row].any()
        assert torch.equal(alone.last_hidden, together.last_hidden)
        counts = [2 * on for on in active]
        tokens = torch.randint(1, 39, (2, 2), generator=states.rng).tolist()
        hidden = {layer: torch.randn(2, 2, HEAD_CONFIG.hidden_size, generator=states.rng) for layer in LAYERS}
        nodes = [list(range(count)) for count in counts]
        for state in (alone, together):
            result = build_result(want, nodes, [ids[:n] for ids, n in zip(tokens, counts, strict=True)])
            drafter.observe(state, result, hidden)


def test_a_call_leaves_nothing_behind(best_kernel: None, target: FakeTarget) -> None:
    states = TwoStates(target, build_drafter("eagle"))
    states.round((2, 2))
    assert states.compiled.c_draft is not None
    references = [weakref.ref(states.compiled.c_draft), weakref.ref(states.compiled.c_draft._head)]
    del states
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# --- what is left to the head -----------------------------------------------------------------------------------------


class _OtherLinear(nn.Linear):
    pass


def _hook(head: Any) -> None:
    first_layer(head).o_proj.register_forward_hook(lambda module, args, output: output)


def _forward(head: Any) -> None:
    head.fc.forward = type(head.fc).forward.__get__(head.fc)


def _replaced(head: Any) -> None:
    other = _OtherLinear(head.fc.in_features, head.fc.out_features, head.fc.bias is not None)
    other.weight, other.bias = head.fc.weight, head.fc.bias
    head.fc = other


def _strided(head: Any) -> None:
    head.fc.weight.data = head.fc.weight.data.t().contiguous().t()


def _module(head: Any) -> None:
    first_layer(head).extra = nn.Tanh()


@pytest.mark.parametrize("change", [_hook, _forward, _replaced, _strided, _module], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", FAMILIES)
def test_changed_heads_are_not_recognised(
    kind: str, change: Callable[[Any], None], best_kernel: None, target: FakeTarget
) -> None:
    drafter = build_drafter(kind)
    change(drafter.head)
    assert begin_decoding(target, drafter, build_c_prompt(target, 8)).c_draft is None


@pytest.mark.every(2)
@pytest.mark.parametrize("own_scale", [None, 1.0, 0.5])
@pytest.mark.parametrize("kind", [*FAMILIES, "dspark, as published", "dflash, as published"])
def test_scaled_embeddings_and_logits(kind: str, own_scale: float | None, best_kernel: None, calls: Calls) -> None:
    """Of the target, and of a published head that has a factor of its own."""
    target, drafter = build_fake_target(), build_drafter(kind)
    if own_scale is not None and not isinstance(drafter, DsparkDrafter):
        return
    if isinstance(drafter, DsparkDrafter):
        drafter.embedding_scale = own_scale
    for name in ("embed_scale", "logit_scale", "logit_softcap"):
        target.shared_embeddings = replace(target.shared_embeddings, **{name: 2.0})
        TwoStates(target, drafter, sampled=True).rounds(*ROUNDS[:3])
    assert not calls.refused


def test_other_heads_and_no_kernel(best_kernel: None, target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = build_prompt(target, 8)
    independent = FlashHead(replace(KINDS["flash"][0], markov_rank=0))
    assert begin_decoding(target, FlashDrafter(independent, num_layers=NUM_LAYERS), prompt).c_draft is None
    one_state = Eagle3Head(replace(EAGLE3_CONFIG, hidden_state_layers=(NUM_LAYERS,)))
    assert begin_decoding(target, Eagle3Drafter(one_state, "coupled", num_layers=NUM_LAYERS), prompt).c_draft is None
    for change in ({"sliding_windows": (3, 0)}, {"causal_layers": (True, False)}):
        masked = DsparkHead(replace(DSPARK_CONFIG, hidden_state_layers=(0,), **change))
        assert begin_decoding(target, DsparkDrafter(masked, num_layers=NUM_LAYERS), prompt).c_draft is None

    class Others(DsparkDrafter):
        """Of a user."""

    dflash = build_head("dflash")
    assert begin_decoding(target, Others(dflash, num_layers=NUM_LAYERS), build_c_prompt(target, 8)).c_draft is None
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)
    assert begin_decoding(target, build_drafter("eagle"), prompt).c_draft is None


def test_hooks_and_autocast_during_a_call(best_kernel: None, target: FakeTarget, calls: Calls) -> None:
    drafter = build_drafter("eagle")
    states = TwoStates(target, drafter)
    handle = drafter.head.fc.register_forward_hook(lambda module, args, output: output * -1)
    states.round((1, 1))
    handle.remove()
    assert (calls.done, calls.refused) == (0, 1)
    with torch.autocast("cpu", torch.bfloat16):
        drafter.propose(states.compiled, 8, [True, True])
    assert (calls.done, calls.refused) == (0, 3)


def test_batches_beyond_the_kernel(best_kernel: None, target: FakeTarget, calls: Calls) -> None:
    states = TwoStates(target, build_drafter("eagle"))
    states.round((70, 70))  # 140 rows
    states.round((1, 1))
    assert calls.refused == 1


# --- the C code -------------------------------------------------------------------------------------------------------


def test_structs_are_as_large_as_in_the_library(kernel: CKernel) -> None:
    library = kernel.library
    library.few_rows_struct_bytes.restype = ctypes.c_int64
    sizes = [ctypes.sizeof(struct) for struct in c_kernel.STRUCTS]
    assert [library.few_rows_struct_bytes(number) for number in range(len(sizes))] == sizes


BUGS = {
    "a level's rotary positions": (
        "eagle",
        "h->positions[b] + (h->d.hides_nodes ? 0 : level);",
        ": level",
        ": level - 1",
    ),
    "a node sees its siblings": ("eagle", "mask[old + j] = i == j;", "i == j", "1"),
    "the correction of another position": ("flash", "(r / W * h->levels + level) * K + i", "level)", "level - 1)"),
    "a state that is added before its norm": ("eagle3, draft", "if (h->adds_normed_state)", "if (", "if (!"),
    "ids of the draft vocabulary as the target's": ("eagle3, draft", "g->ids[r] = h->ids ?", "h->ids ?", "0 ?"),
    "one rotary position for a whole block": ("dspark", "g->s.positions[r] = h->positions[b] + r % K;", "r % K", "0"),
    "the confidence of the position before": (
        "dspark",
        "position = b * h->block_positions + h->first_position + level;",
        "+ level",
        "+ level - !!level",
    ),
    "keys of a layer over those of another": ("dspark", "kv[] = {{&l->k,", "{{&l->k", "{{&d->layers->k"),
    "neighbours of another row": ("dflash2", "min64(num_taps, r % g->d.nodes + 1)", "r % g->d.nodes + 1", "r + 1"),
    "taps that do not depend on the position": (
        "dflash2",
        "NAME(load_some)(taps + t * D + i, n) + change",
        "+ change",
        "",
    ),
    "the change before a part behind it, too": ("dflash2", "g->changes + w->rows / 2,", " + w->rows / 2", ""),
    "the last token where a mask is": ("dflash, as", "r % K ? h->mask_token :", "h->mask_token", "h->anchors[b]"),
    "logits without a cap": (
        "dflash2, scaled",
        "NAME(scaled_logits)(h, NAME(load_some)(at, V - v))",
        "NAME(scaled_logits)(h, ",
        "(",
    ),
    "the first of several new features": ("lilicorr", "(b * d->nodes + h->counts[b] - 1) * D", "h->counts[b] - 1", "0"),
    "the pairs behind the first candidate": ("dflash2", "(level ? g->ids[row] : 0)) * C;", "g->ids[row]", "0"),
    "candidates of the first level": (
        "lilicorr",
        "h->candidates[(b * h->levels + level) * h->pair_size",
        "+ level",
        "",
    ),
    "features before their norm": ("domino", "thread == 0 && r < R; r++) NAME(normalise_row)", "thread == 0", "!h"),
    "the state of another node": ("domino", "g->states + (level ? parent : b) * S, (size_t)S", "parent", "r"),
    "a correction from the first position on": (
        "domino",
        "has_correction(h) && level >= h->first_corrected",
        ">= h->first_corrected",
        ">= 0",
    ),
}
"""{what is wrong: (first letters of the kind of head, text in a source, part of it, replacement)}"""
HALF_BUGS = {
    "a mixture without its last state": ("dspark, one", "for (int64_t s = 0; s < S; s++)", "s < S", "s + 1 < S"),
    "norms that are not copied": ("eagle3", "= g->lengths;\n  copy_vectors(&h->d);", "copy_vectors(&h->d);", ""),
    "a table as if it were float32": ("dspark, as", "widen_row(&h->token_table, row,", "row,", "row / 2,"),
    "products that are not added": ("flash", "step, is_added, (int)g->d.type, 0}", "is_added", "0"),
}
"""Those that are looked for in half precision."""
BUGS |= HALF_BUGS


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_can_be_planted(bug: str) -> None:
    _, text, part, replacement = BUGS[bug]
    assert part in text and faulty_sources(text, text.replace(part, replacement)) != c_library.SOURCES


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, text, part, replacement = BUGS[bug]
    kind = next(kind for kind in KINDS if kind.startswith(prefix))
    faulty = faulty_kernel(text, text.replace(part, replacement), optimized=False)
    monkeypatch.setattr(c_draft, "active_kernel", lambda: faulty)
    run = half_precision if bug in HALF_BUGS else lambda name: TwoStates(target, build_drafter(name)).rounds(*ROUNDS)
    with pytest.raises(AssertionError):
        run(kind)


def test_a_library_is_built_from_the_sources_that_were_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit of the C code while a process runs does not reach it, since it has declared the structs already."""
    folder = Path(c_library.__file__).parent
    assert {path.name: path.read_bytes() for path in folder.glob("*.[ch]")} == c_library.SOURCES
    monkeypatch.setattr(c_library, "SOURCES", {c_library.MAIN_SOURCE: b"int few_rows_number(void) { return 7; }"})
    monkeypatch.setattr(c_library, "FLAGS", ("-shared", "-fPIC"))
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    assert c_library.load_library(1).few_rows_number() == 7
