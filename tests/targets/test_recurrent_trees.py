"""Trees over recurrent states in C: every node has the bits of its path, decoded token by token. What C refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from c_bugs import faulty_kernel, faulty_sources
from parity import assert_parity, get_model
from recurrent_models import model_of, ragged
from test_targets import bush, inside, lines, result_of
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.decoder import CDecoder
from mmspec.cpu.decoder_types import LayerState
from mmspec.engine.tree import DraftTree, root_only
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.c_traits import read_parts
from mmspec.targets.hf import HFTarget
from mmspec.targets.model_state import unknown_code
from mmspec.targets.module_scan import scan_modules
from mmspec.targets.registry import find_adapter

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
BATCH = 3
TEXT = ("lfm2", "bamba", "granitemoehybrid")
TAPS = (1, 3)


class Trees:
    """Scores random trees in C, commits a part of a path in each row, and compares with decoding it token by token."""

    def __init__(self, kernel: CKernel, sizes: Sequence[int], depths: Sequence[int]) -> None:
        """
        Args:
            kernel: the C kernel.
            sizes: nodes of the trees that follow each other.
            depths: most nodes that each row accepts of each.
        """
        self.kernel, self.sizes, self.depths = kernel, sizes, depths
        self.branches = 0

    def __call__(self, target: HFTarget) -> None:
        target.prefill()
        target.use_c(self.kernel, unknown_code(target.adapter, scan_modules(target.model)))
        assert target.c_forwards is not None and not target.chains_only
        rng, trees, accepted, found = random.Random(sum(self.sizes)), list[DraftTree](), list[list[list[int]]](), []
        for size in self.sizes:
            tree = bush(rng, [9, 8, 7], size, range(20, 40))
            trees.append(tree)
            accepted.append([])
            for row, depth in enumerate(self.depths):
                path = rng.choice(lines(tree, row))
                self.branches += path != list(range(len(path)))
                accepted[-1].append(path[: depth or rng.randrange(len(path) + 1)])
            found.append(score(target, tree))
            target.commit(result_of(tree, accepted[-1]))
        states = [state.clone() for state in [*target.states.tensors, *caches(target)]]
        target.crop([0] * BATCH)
        for tree, paths, scored in zip(trees, accepted, found, strict=True):
            for step in range(max(map(len, paths))):
                nodes = [path[step : step + 1] for path in paths]
                root = root_only(
                    BATCH, root_ids=torch.tensor([tree.tokens[row, [*n, 0][0]] for row, n in enumerate(nodes)])
                )
                alone = score(target, root)
                for row, node in enumerate(nodes):
                    for mine, want in zip(scored, alone, strict=True):
                        assert torch.equal(mine[row, node], want[row, : len(node)])
                target.commit(result_of(root, [[0] for _ in nodes] if all(nodes) else [[0][: len(n)] for n in nodes]))
        assert all(map(torch.equal, states, [*target.states.tensors, *caches(target)]))


def score(target: HFTarget, tree: DraftTree) -> list[Tensor]:
    """Logits and hidden states, of a forward that C computes."""
    target.buffer.begin_forward(tree.num_nodes)
    assert target.c_forwards is not None
    scored = target.c_forwards.score(tree, target.buffer, TAPS)
    assert scored is not None
    return [scored[0], *scored[1].values()]


def caches(target: HFTarget) -> list[Tensor]:
    """Committed keys and values of each row of the layers with attention."""
    found = []
    for layer in target.buffer.written_layers:
        for part in target.buffer.read(layer, max(target.buffer.seq_lens)):
            found += [part[row, :, :length] for row, length in enumerate(target.buffer.seq_lens)]
    return found


def check(model: PreTrainedModel, kernel: CKernel | None = None) -> None:
    """Trees of several sizes; rows that accept nothing, up to each depth, and whole paths."""
    chosen = kernel or load_kernel()
    assert chosen is not None
    images = None if model.tiny_spec.family in TEXT else [1, 0, 1]
    inputs = tiny.build_inputs(model, 4, BATCH, images=images, padding="left")
    branches = 0
    for depths in ((1, 2, 3), (0, 0, 0), (4, 64, 2), (64, 64, 64)):
        for sizes in ((7, 16, 2, 9), (33,), (3, 1, 5)):
            trees = Trees(chosen, sizes, depths)
            inside(model, inputs, trees)
            branches += trees.branches
    assert branches > 20


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl", "lfm3_vl", *TEXT])
def test_each_node_has_the_bits_of_its_path(family: str, dtype: str) -> None:
    check(get_model(family, seed=17, layers=4, dtype=dtype))


def test_the_number_of_threads_changes_nothing() -> None:
    model, threads = get_model("qwen3_5", seed=17, layers=4, dtype="bfloat16"), torch.get_num_threads()
    inputs, results = tiny.build_inputs(model, 4, BATCH, images=[1, 0, 1], padding="left"), list[list[Tensor]]()
    tree = bush(random.Random(2), [9, 8, 7], 16, range(20, 40))

    def use(target: HFTarget) -> None:
        Trees(load_kernel(), (), (0, 0, 0))(target)
        results.append([*score(target, tree), *target.states.log.tensors()])

    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            inside(model, inputs, use)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, results[0], other) for other in results[1:])


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl"])
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_tree_that_c_refuses_goes_to_the_model(
    family: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root is verified there, and chains follow."""
    model, rounds = model_of(family), list[bool]()
    original = CForwards.score

    def score(self: CForwards, tree: DraftTree, *args: Any) -> Any:
        rounds.append(bool((tree.node_mask & (tree.parents != torch.arange(-1, tree.num_nodes - 1))).any()))
        return None if is_refused and len(rounds) > 2 else original(self, tree, *args)

    monkeypatch.setattr(CForwards, "score", score)
    stats = assert_parity(
        model, ragged(model), "bush", patch_options={"tree_size": 8}, max_new_tokens=24, do_sample=False
    )
    assert not stats.fallback_reason and stats.num_accepted_tokens > 0
    assert any(rounds[:3]) and any(rounds[4:]) != is_refused


BUGS = {
    "a node reads behind the one before": ("while (parents[n] > 0 && !own[parents[n]]) parents[n]--;", ""),
    "siblings share a state": (
        "memcpy(blocks[n], blocks[parents[n]], (size_t)size * sizeof(float));",
        "blocks[n] = blocks[parents[n]];",
    ),
    "the first child takes the state": ("last_child[parents[n]] = n;", "last_child[parents[n]] = parents[n] + 1;"),
    "taps of the node before": ("read[parents[n] * K + k + 1]", "read[(n - 1) * K + k + 1]"),
    "a commit without its path": ("b * N + path[b * steps + n]", "b * N + n"),
    "a commit of another row's path": ("path[b * steps + n]", "path[n]"),
    "states of another row": ("NAME(load_block)(l->state + state, D,", "NAME(load_block)(l->state + h * D * V, D,"),
}
"""{what is wrong: (text of mixers.h, replacement)}"""
SPACE_BUGS = {
    "rows of another head": ("l->channels + h * V + first, *const rates", "l->channels + first, *const rates"),
    "a step without its bias": ("round1(l->decay_bias[h], kept)", "0"),
    "a decay without its logarithm": ("to[h] = -expf(l->decay_log[h]) * step;", "to[h] = -l->decay_log[h] * step;"),
    "x without its factor": ("round1(x[r] * l->skip[h], type), type);", "0, type);"),
    "a gate of another group": ("l->channels + task % G * size;", "l->channels;"),
    "a norm before the gate": (
        "NAME(store_some)(x + k, v * (gate * NAME(sigmoid)(gate)), size - k);",
        "NAME(store_some)(x + k, v, size - k);",
    ),
    "weights of another group": (
        "NAME(load_some)(l->mix_scale + task % G * size + k",
        "NAME(load_some)(l->mix_scale + k",
    ),
}
"""The same of a state space, which the comparison with the model's own forward finds."""


@pytest.mark.parametrize("bug", [*BUGS, *SPACE_BUGS])
def test_bugs_can_be_planted(bug: str) -> None:
    assert faulty_sources(*(BUGS | SPACE_BUGS)[bug], "mixers.h")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    kernel = faulty_kernel(*BUGS[bug], "mixers.h", optimized=False)
    with pytest.raises(AssertionError):
        check(tiny.build_model(tiny.ModelSpec("qwen3_5", seed=17, layers=4)), kernel)


def runs_in_c(kernel: CKernel | None, dtype: str = "float32") -> bool:
    """Whether C decodes a state space whose numbers differ in each head and group."""
    assert kernel is not None
    model, rounds = tiny.build_model(tiny.ModelSpec("bamba", seed=17, layers=4, dtype=dtype)), list[bool]()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name in ("A_log", "D", "dt_bias"):
            if hasattr(module, name):
                getattr(module, name).data.uniform_(-1, 1, generator=generator)
        if type(module).__name__.endswith("NormGated"):
            module.weight.data.uniform_(0.5, 2, generator=generator)

    def use(target: HFTarget) -> None:
        target.prefill()
        target.use_c(kernel, unknown_code(target.adapter, scan_modules(target.model)))
        rounds.append(target.c_forwards is not None)

    inside(model, tiny.build_inputs(model, 4, BATCH, images=None, padding="left"), use)
    return rounds[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_state_space_runs_in_c(dtype: str) -> None:
    assert runs_in_c(load_kernel(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("bug", SPACE_BUGS)
def test_a_state_space_that_is_wrong_does_not_run_in_c(bug: str) -> None:
    assert not runs_in_c(faulty_kernel(*SPACE_BUGS[bug], "mixers.h", optimized=False))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(16, 4, 1, 8), (3, 4, 8, 8), (0, 4, 8, 8), (2, 8, 8, 4), (2, 4, 300, 8)], ids=str)
def test_heads_of_a_delta_rule_that_contradict_each_other(heads: tuple[int, int, int, int]) -> None:
    """The first has the right number of channels."""
    parts = next(read_parts(find_adapter(get_model("qwen3_5", seed=17, layers=4))))
    kernel = load_kernel()
    assert kernel is not None
    CDecoder(kernel, parts.shape, parts.layers, parts.ends, parts.rotaries)
    with pytest.raises(ValueError, match="of layer 0 must"):
        CDecoder(kernel, replace(parts.shape, delta_heads=heads), parts.layers, parts.ends, parts.rotaries)


@pytest.mark.parametrize("change", ["batch", "channels", "heads", "type", "strides", "missing", "no recurrence"])
def test_states_of_another_call(change: str) -> None:
    """Nothing is computed with them."""
    model = get_model("qwen3_5", seed=17, layers=4)

    def changed(state: LayerState) -> LayerState | None:
        conv, recurrent = state.conv, state.recurrent
        assert recurrent is not None
        if change in ("missing", "no recurrence"):
            return None if change == "missing" else LayerState(conv)
        if change == "heads":
            return LayerState(conv, recurrent[:, :-1].contiguous())
        if change == "type":
            return LayerState(conv.double(), recurrent)
        if change == "strides":
            return LayerState(conv, recurrent.transpose(2, 3))
        return LayerState(conv[1:].contiguous() if change == "batch" else conv[:, 1:].contiguous(), recurrent)

    def use(target: HFTarget) -> None:
        Trees(load_kernel(), (), (0, 0, 0))(target)
        assert target.c_forwards is not None and target.states is not None
        tree = bush(random.Random(2), [9, 8, 7], 4, range(20, 40))
        target.buffer.begin_forward(4)
        inputs = target.c_forwards.call.inputs(tree, target.buffer.common_buffers())
        states = [None if state is None else changed(state) for state in inputs.states]
        assert target.c_forwards.decoder.forward(inputs) is not None
        assert target.c_forwards.decoder.forward(replace(inputs, states=states)) is None
        rows = replace(inputs, cache_rows=[0, 1, 9])
        assert target.c_forwards.decoder.forward(rows) is None

    inside(model, tiny.build_inputs(model, 4, BATCH, images=[1, 0, 1], padding="left"), use)


def test_nan_in_a_state_stays_in_its_row() -> None:
    model = get_model("qwen3_5", seed=17, layers=4)
    tree = bush(random.Random(2), [9, 8, 7], 8, range(20, 40))
    found = list[list[Tensor]]()

    def use(target: HFTarget) -> None:
        Trees(load_kernel(), (), (0, 0, 0))(target)
        for _ in range(2):
            found.append(score(target, tree))
            with target._mode():
                target.states.tensors[1][1] = torch.nan

    inside(model, tiny.build_inputs(model, 4, BATCH, images=[1, 0, 1], padding="left"), use)
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert found[1][0][1].isnan().all() and not found[0][0].isnan().any()


def _mixer(model: PreTrainedModel) -> Any:
    layer = model.get_decoder().layers[0]
    return next(filter(None, (getattr(layer, name, None) for name in ("linear_attn", "conv", "self_attn", "mamba"))))


def _other_types(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    config.layer_types = config.layer_types[1:] + config.layer_types[:1]


def _no_projection(model: PreTrainedModel) -> None:
    mixer = _mixer(model)
    delattr(mixer, next(name for name in ("in_proj_qkv", "in_proj", "k_proj") if hasattr(mixer, name)))


def _no_weight(model: PreTrainedModel) -> None:
    mixer = _mixer(model)
    (mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj).weight = None


def _nan(model: PreTrainedModel) -> None:
    mixer = _mixer(model)
    part = next(getattr(mixer, name) for name in ("A_log", "conv", "q_norm") if hasattr(mixer, name))
    getattr(part, "weight", part).data.fill_(torch.nan)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "lfm3_vl", "gemma4", "granitemoehybrid"])
@pytest.mark.parametrize("change", [_other_types, _no_projection, _no_weight, _nan], ids=lambda one: one.__name__[1:])
def test_models_that_are_broken_fail_as_without_us(
    family: str, change: Callable[[PreTrainedModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that lies about the kinds of layers, weights that are missing, NaN: the same error or text, not in C."""
    rounds, results = list[CForwards](), list[Any]()
    original = CForwards.score
    monkeypatch.setattr(CForwards, "score", lambda self, *args: rounds.append(self) or original(self, *args))
    for is_patched in (False, True):
        model = tiny.build_model(tiny.ModelSpec(family, seed=3, layers=3))
        change(model)
        inputs = tiny.build_inputs(model, 5, 1, images=None if family in TEXT else [1], padding="none")
        try:
            if is_patched:
                mmspec.patch(model, "lookup")
            results.append(model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist())
        except (AttributeError, TypeError, ValueError) as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1] and not rounds
