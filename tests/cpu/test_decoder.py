"""The C decoder against a slow reference in float64, bit-exact independence of the tree, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import emulated_avx512
import pytest
import torch
from c_bugs import faulty_sources
from dequantised import dequantise
from torch import Tensor
from torch.nn import functional

from mmspec.cpu import c_kernel, c_library, structs
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.decoder import (
    MAX_DECODER_ROWS,
    CDecoder,
    DecoderEnds,
    DecoderInputs,
)
from mmspec.cpu.layers import LAYER_MATRICES, DecoderShape, LayerWeights
from mmspec.cpu.quantise import quantise
from mmspec.cpu.weights import BFLOAT16_PAIRS, FLOAT_TYPES

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
SHAPES = {
    "multi-head": DecoderShape(32, 48, 4, 4, 8, 1e-6, 8**-0.5),
    "odd sizes": DecoderShape(37, 53, 3, 1, 6, 1e-5, 0.3),
    "grouped, wide heads": DecoderShape(64, 80, 6, 2, 64, 1e-6, 64**-0.5),
    "head of 80": DecoderShape(48, 1100, 2, 1, 80, 1e-6, 80**-0.5),
    "head of 24": DecoderShape(40, 64, 5, 5, 24, 1e-6, 24**-0.5),
    "as in Gemma": DecoderShape(
        *(40, 64, 4, 2, 24, 1e-6, 0.2), activation="gelu_tanh", norm_offset=1.0, rounds_twice=False, embed_scale=6.5,
        attention_softcap=2.0, windows=(3, 0),
    ),
    "experts": DecoderShape(
        *(37, 53, 3, 1, 6, 1e-5, 0.3), num_experts=7, expert_size=19, experts_per_token=3, normalises_shares=False,
    ),
    "as in Qwen 3 with experts": DecoderShape(
        *(48, 0, 4, 2, 12, 1e-6, 0.3), num_experts=40, expert_size=24, experts_per_token=8, windows=(0, 7),
    ),
    "as in GLM": DecoderShape(40, 64, 4, 2, 24, 1e-6, 0.2, rotary_size=12, is_interleaved=True, windows=(0, 9)),
    "as in GLM with experts": DecoderShape(
        *(37, 53, 3, 1, 6, 1e-5, 0.3), num_experts=7, expert_size=19, experts_per_token=3, shared_size=61,
        share_scale=1.5, is_sigmoid=True,
    ),
    "as in OLMo 2": DecoderShape(37, 53, 6, 2, 6, 1e-5, 0.3, head_norms="all", activation="relu_squared"),
    "norms after rotation": DecoderShape(37, 53, 3, 1, 6, 1e-5, 0.3, head_norms="rotated"),
    "as in LFM 3": DecoderShape(40, 64, 5, 1, 24, 1e-6, 0.2, gates_heads=True, windows=(0, 9)),
}  # fmt: skip
TYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES_AND_KINDS = [
    (name, kind)
    for name, shape in SHAPES.items()
    for kind in (*TYPES, 8, 4)  # a dtype, or bits; experts are of a float type
    if not (shape.num_experts and isinstance(kind, int))
]
TREE_SHAPES = (
    *("odd sizes", "grouped, wide heads", "experts", "as in Gemma", "as in GLM"),
    *("as in GLM with experts", "as in OLMo 2", "as in LFM 3"),
)
LONG_SHAPES = {name: SHAPES[name] for name in ("odd sizes", "as in Gemma", "as in GLM", "grouped, wide heads")} | {
    "eager": replace(SHAPES["grouped, wide heads"], is_eager=True),
    "many heads of 96": DecoderShape(64, 80, 16, 1, 96, 1e-6, 96**-0.5),
}
VOCAB = 45


def angles(shape: DecoderShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    table = positions[:, None] * 0.3 ** torch.arange(shape.rotated // 2)
    both = table.repeat_interleave(2, -1) if shape.is_interleaved else torch.cat((table, table), -1)
    return both.cos(), both.sin()


@dataclass
class Model:
    """Random weights, and the slow reference."""

    shape: DecoderShape
    layers: list[LayerWeights]
    ends: DecoderEnds

    def decoder(self, kernel: CKernel) -> CDecoder:
        return CDecoder(kernel, self.shape, self.layers, self.ends, lambda positions: angles(self.shape, positions))

    def reference(self, inputs: DecoderInputs) -> list[Tensor]:
        """Hidden states and logits in float64; one query at a time, from the cache and the nodes it attends to."""
        s = self.shape
        batch, nodes = inputs.tokens.shape
        states = [self.ends.embeddings.double()[inputs.tokens] * s.embed_scale]
        lengths = torch.tensor(inputs.lengths)[:, None]
        positions = torch.tensor(inputs.position_base)[:, None] + (lengths + inputs.depths).clamp(
            max=inputs.max_position
        )
        cos, sin = (part.double()[:, :, None] for part in angles(s, positions.flatten()))
        cos, sin = (part.view(batch, nodes, 1, s.rotated) for part in (cos, sin))

        def norm(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is None:
                return x
            return x * (x.square().mean(-1, keepdim=True) + s.eps).rsqrt() * (weight.double() + s.norm_offset)

        def norm_at(place: str, x: Tensor, weight: Tensor | None) -> Tensor:
            return norm(x, weight if s.head_norms == place else None)

        def rotate(x: Tensor) -> Tensor:
            x, rest = x[..., : s.rotated], x[..., s.rotated :]
            if s.is_interleaved:
                turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            else:
                a, b = x.chunk(2, -1)
                turned = torch.cat((-b, a), -1)
            return torch.cat((x * cos + turned * sin, rest), -1)

        def limited(scores: Tensor) -> Tensor:
            cap = s.attention_softcap
            return (scores / cap).tanh() * cap if cap else scores

        for w, cache, window in zip(self.layers, inputs.caches, s.windows or [0] * len(self.layers), strict=True):
            x = norm(states[-1], w.input_norm)
            q, k, v = (linear(x, weight, bias) for weight, bias in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias)))
            q, k = norm_at("all", q, w.q_norm), norm_at("all", k, w.k_norm)
            q, k, v = (one.view(batch, nodes, -1, s.head_dim) for one in (q, k, v))
            q, k = rotate(norm_at("each", q, w.q_norm)), rotate(norm_at("each", k, w.k_norm))
            q, k = norm_at("rotated", q, w.q_norm), norm_at("rotated", k, w.k_norm)
            attended = torch.zeros(batch, nodes, s.num_heads, s.head_dim, dtype=torch.float64)
            for b in range(batch):
                seen = torch.ones(inputs.lengths[b], dtype=torch.bool)
                if inputs.padding is not None:
                    seen[: inputs.padding.shape[1]] &= inputs.padding[b, : inputs.lengths[b]]
                for n in range(nodes):
                    depth = inputs.depths[b, n]
                    near = depth + inputs.lengths[b] - torch.arange(inputs.lengths[b]) < (window or 10**9)
                    path = inputs.ancestor_mask[b, n] & (depth - inputs.depths[b] < (window or 10**9))
                    for h in range(s.num_heads):
                        g = h // (s.num_heads // s.num_kv_heads)
                        old = cache[:, b, g, : inputs.lengths[b]].double()[:, seen & near]
                        new = torch.stack((k[b, :, g], v[b, :, g]))[:, path]
                        keys, values = torch.cat((old, new), 1)
                        attended[b, n, h] = limited((keys @ q[b, n, h]) * s.scaling).softmax(-1) @ values
            attended = gate_heads(attended, x, w.head_gate)
            x = states[-1] + norm(linear(attended.flatten(2), w.o, w.o_bias), w.attention_out_norm)
            added = feed_forward(s, w, norm(x, w.post_norm))
            states.append(x + norm(added, w.mlp_out_norm))
        normed = norm(states[-1], self.ends.final_norm)
        return [*states[:-1], normed, linear(normed, self.ends.lm_head, self.ends.lm_head_bias)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight.double(), None if bias is None else bias.double())


def gate_heads(attended: Tensor, x: Tensor, weight: Any) -> Tensor:
    return attended if weight is None else attended * linear(x, weight, None).sigmoid()[..., None]


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def feed_forward(s: DecoderShape, w: LayerWeights, x: Tensor) -> Tensor:
    """That of a layer in float64."""

    def gated(gate: Any, up: Any, down: Any, *biases: Tensor | None) -> Tensor:
        first = linear(x, gate, biases[0])
        active = {"silu": functional.silu, "gelu_tanh": gelu_tanh, "relu_squared": relu_squared}[s.activation](first)
        return linear(active if up is None else active * linear(x, up, biases[1]), down, biases[2])

    if w.router is None:
        return gated(w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias)
    assert isinstance(w.gate, Tensor) and isinstance(w.down, Tensor)
    logits = linear(x, w.router, None)
    found = logits.sigmoid() if s.is_sigmoid else logits.softmax(-1)
    chosen = (found if w.router_bias is None else found + w.router_bias.double()).topk(s.experts_per_token).indices
    shares = found.gather(-1, chosen)
    shares = s.share_scale * (shares / shares.sum(-1, keepdim=True) if s.normalises_shares else shares)
    gates, downs = w.gate.view(s.num_experts, 2, s.expert_size, -1), w.down.view(s.num_experts, -1, s.expert_size)
    each = torch.stack([gated(*gates[e], downs[e], None, None, None) for e in range(s.num_experts)], -2)
    added = (each.gather(-2, chosen[..., None].expand(*chosen.shape, s.hidden_size)) * shares[..., None]).sum(-2)
    if w.shared_gate is None:
        return added
    shared = gated(w.shared_gate, w.shared_up, w.shared_down, None, None, None)
    return added + (shared if w.shared_router is None else shared * linear(x, w.shared_router, None).sigmoid())


def make_model(shape: DecoderShape, num_layers: int = 2, extras: bool = False, seed: int = 0) -> Model:
    rng = torch.Generator().manual_seed(seed)

    def weight(*size: int) -> Tensor:
        return torch.randn(size, generator=rng) / size[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=rng)

    def maybe(tensor: Tensor) -> Tensor | None:
        return tensor if extras else None

    hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_dim
    wide, narrow = shape.num_heads * size, shape.num_kv_heads * size
    normed = (wide, narrow) if shape.head_norms == "all" else (size, size)
    layers = [
        LayerWeights(
            input_norm=norm(hidden), q=weight(wide, hidden), k=weight(narrow, hidden), v=weight(narrow, hidden),
            q_bias=maybe(weight(wide)), k_bias=maybe(weight(narrow)), v_bias=maybe(weight(narrow)),
            q_norm=maybe(norm(normed[0])), k_norm=maybe(norm(normed[1])),
            o=weight(hidden, wide), o_bias=maybe(weight(hidden)), post_norm=norm(hidden),
            gate=weight(inner, hidden), up=weight(inner, hidden), gate_bias=maybe(weight(inner)),
            up_bias=maybe(weight(inner)), down=weight(hidden, inner), down_bias=maybe(weight(hidden)),
            attention_out_norm=maybe(norm(hidden)), mlp_out_norm=maybe(norm(hidden)),
        )
        for _ in range(num_layers)
    ]  # fmt: skip
    for index, layer in enumerate(layers):
        if shape.num_experts and (index == 0 or not inner):
            count, size = shape.num_experts, shape.expert_size
            biases = dict.fromkeys(("up", "gate_bias", "up_bias", "down_bias"))
            gate, down = weight(2 * count * size, hidden), weight(count * hidden, size)
            layer = replace(layer, gate=gate, down=down, router=weight(count, hidden), **biases)
            if shape.shared_size:
                inner_shared = shape.shared_size
                layer = replace(
                    layer,
                    router_bias=maybe(weight(count)),
                    shared_gate=weight(inner_shared, hidden),
                    shared_up=weight(inner_shared, hidden),
                    shared_down=weight(hidden, inner_shared),
                    shared_router=maybe(weight(1, hidden)),
                )
        if shape.activation == "relu_squared":
            layer = replace(layer, up=None, up_bias=None)
        if shape.gates_heads:
            layer = replace(layer, head_gate=weight(shape.num_heads, hidden))
        layers[index] = layer
    ends = DecoderEnds(3 * weight(VOCAB, hidden), norm(hidden), weight(VOCAB, hidden), maybe(weight(VOCAB)))
    return Model(shape, layers, ends)


def quantised(model: Model, kernel: CKernel, bits: int, back: bool = False) -> Model:
    """The model with quantised matrices; with `back` with the numbers that they stand for."""

    def convert(weight: Tensor) -> Any:
        found = quantise(kernel, weight, bits)
        return dequantise(found) if back else found

    layers = [
        replace(one, **{name: convert(getattr(one, name)) for name in LAYER_MATRICES if getattr(one, name) is not None})
        for one in model.layers
    ]
    return replace(model, layers=layers, ends=replace(model.ends, lm_head=convert(model.ends.lm_head)))


def in_type(model: Model, dtype: torch.dtype) -> Model:
    """The model with all weights in a type."""

    def convert(part: Any) -> Any:
        return replace(
            part, **{name: value if value is None else value.to(dtype) for name, value in vars(part).items()}
        )

    return replace(model, layers=[convert(one) for one in model.layers], ends=convert(model.ends))


def make_inputs(
    model: Model, lengths: list[int], nodes: int, padded: bool = False, seed: int = 1, capacity: int = 60
) -> DecoderInputs:
    """Random trees behind random keys and values; with `padded` the first row has three left pads."""
    rng = torch.Generator().manual_seed(seed)
    batch, shape = len(lengths), model.shape
    ancestors = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    depths = torch.zeros(batch, nodes, dtype=torch.long)
    for row in range(batch):
        for node in range(nodes):
            if node:
                parent = int(torch.randint(node, (1,), generator=rng))
                ancestors[row, node] = ancestors[row, parent]
                depths[row, node] = depths[row, parent] + 1
            ancestors[row, node, node] = True
    padding = torch.ones(batch, 5, dtype=torch.bool)
    padding[0, :3] = False
    size = 2, batch, shape.num_kv_heads, capacity, shape.head_dim
    return DecoderInputs(
        tokens=torch.randint(VOCAB, (batch, nodes), generator=rng),
        depths=depths,
        ancestor_mask=ancestors,
        lengths=lengths,
        position_base=[row % 2 for row in range(batch)],
        max_position=max(lengths) + 2,
        padding=padding if padded else None,
        caches=[torch.randn(size, generator=rng).to(model.ends.embeddings.dtype) for _ in model.layers],
    )


def run(model: Model, kernel: CKernel, inputs: DecoderInputs) -> list[Tensor]:
    """All hidden states, then the logits."""
    indices = range(len(model.layers) + 1)
    scored = model.decoder(kernel).forward(inputs, tuple(indices))
    assert scored is not None
    return [*(scored[1][index] for index in indices), scored[0]]


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases and head norms"])
@pytest.mark.parametrize("name", SHAPES)
def test_forwards_equal_the_reference(kernel: CKernel, name: str, extras: bool) -> None:
    model = make_model(SHAPES[name], extras=extras)
    for lengths, nodes, padded in (([9], 1, False), ([50], 7, False), ([8, 5, 20], 4, True), ([7, 6], 17, True)):
        inputs = make_inputs(model, lengths, nodes, padded)
        expected = model.reference(inputs)
        for index, (got, want) in enumerate(zip(run(model, kernel, inputs), expected, strict=True)):
            assert (got - want).abs().max() <= 4e-6 * want.abs().max(), (lengths, nodes, index)


def test_nodes_are_stored_behind_each_row_and_nothing_else_is_written(kernel: CKernel) -> None:
    model = make_model(SHAPES["odd sizes"])
    inputs = make_inputs(model, [8, 5], 4)
    before = [cache.clone() for cache in inputs.caches]
    run(model, kernel, inputs)
    for cache, old in zip(inputs.caches, before, strict=True):
        for row, length in enumerate(inputs.lengths):
            assert torch.equal(cache[:, row, :, :length], old[:, row, :, :length])
            assert torch.equal(cache[:, row, :, length + 4 :], old[:, row, :, length + 4 :])
            assert (cache[:, row, :, length : length + 4] != old[:, row, :, length : length + 4]).all()


def test_quantised_weights_give_nearly_the_logits_of_what_they_stand_for(kernel: CKernel) -> None:
    """Nearly, since the inputs of each product are rounded to 8 bits."""
    model = make_model(SHAPES["odd sizes"], extras=True)
    inputs = make_inputs(model, [8, 5, 20], 4, padded=True)
    for bits in (8, 4):
        *_, want = quantised(model, kernel, bits, back=True).reference(inputs)
        *_, got = run(quantised(model, kernel, bits), kernel, inputs)
        assert (got - want).abs().max() <= 0.03 * want.abs().max(), bits


@pytest.mark.every(2)
@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_forwards_in_half_precision_are_near_the_reference(
    kernel: CKernel, name: str, dtype: torch.dtype, eager: bool
) -> None:
    model = in_type(make_model(replace(SHAPES[name], is_eager=eager), extras=True), dtype)
    inputs = make_inputs(model, [8, 5, 20], 6, padded=True)
    for got, want in zip(run(model, kernel, inputs), model.reference(inputs), strict=True):
        assert got.dtype is dtype
        errors = (got - want).abs().mean(-1)
        error = errors.median() if model.shape.num_experts else errors.mean()  # of two near-ties another may be chosen
        assert error <= 2 * torch.finfo(dtype).eps * want.abs().mean()


@pytest.mark.parametrize(("name", "kind"), [pair for pair in NAMES_AND_KINDS if pair[0] in TREE_SHAPES], ids=str)
def test_a_tree_is_scored_as_if_its_path_were_decoded_token_by_token(
    kernel: CKernel, name: str, kind: torch.dtype | int
) -> None:
    """Bit for bit, hidden states included, in a batch of trees as in a single row."""
    model = make_model(SHAPES[name], extras=True)
    model = quantised(model, kernel, kind) if isinstance(kind, int) else in_type(model, kind)
    check_paths(model, kernel, make_inputs(model, [12, 9], 9))


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", LONG_SHAPES)
def test_a_tree_across_the_parts_of_attention_is_scored_as_if_it_were_decoded(
    kernel: CKernel, name: str, kind: torch.dtype
) -> None:
    check_parts(kernel, LONG_SHAPES[name], kind)


TILE_BUGS = {
    "what may be in the tree": (" - MAX_NODES, p->end)", ", p->end)"),
    "added twice": ("if (own[i] > least) memset", "if (0) memset"),
    "nodes that take less": ("weights_of_block(row, width, own + i, count, t + BLOCK, some);", "NULL;"),
    "columns of values": ("_tile_loadd(2, at + 16, 4 * D);", "_tile_loadd(2, at, 4 * D);"),
    "positions of keys": ("tile + k * BLOCK + TILE_ROWS, 4 * BLOCK", "tile + k * BLOCK, 4 * BLOCK"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", [None, *TILE_BUGS])
def test_faults_of_attention_by_tiles_are_found(bug: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles that are emulated where the processor has none."""
    if (level := c_library.processor_level()) < 3:
        pytest.skip("tests/helpers/emulated_avx512.py emulates the rest")
    sources = faulty_sources(*TILE_BUGS[bug], "attention_tiles.h") if bug else c_library.SOURCES
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("MMSPEC_CACHE", folder)
        monkeypatch.setattr(c_library, "SOURCES", sources if level > 3 else emulated_avx512.with_tiles(sources))
        kernel = CKernel(4)
    with pytest.raises(AssertionError) if bug else nullcontext():
        check_parts(kernel, SHAPES["grouped, wide heads"], torch.bfloat16)


def check_parts(kernel: CKernel, shape: DecoderShape, kind: torch.dtype) -> None:
    """Attention takes positions in parts of 256, counted behind the padding, of which the first row has three. Large
    values cancel each other, so that a sum in another order is another number in half precision too."""
    model = in_type(make_model(replace(shape, windows=(250, 0)), extras=True), kind)
    lengths = [258, 511, 319]
    inputs = make_inputs(model, lengths, 9, padded=True, capacity=530)
    for got, want in zip(run(model, kernel, inputs), model.reference(inputs), strict=True):
        if kind is torch.float32:
            assert (got - want).abs().max() <= 4e-6 * want.abs().max()
        else:
            assert (got - want).abs().mean() <= 2 * torch.finfo(kind).eps * want.abs().mean()
    for keys, values in inputs.caches:
        keys[:, :, 1::2] = keys[:, :, ::2]
        values *= 1e4 if kind is torch.float16 else 1e6
        values[:, :, 1::2] = -values[:, :, ::2]
    check_paths(model, kernel, inputs, pads=[3, 0, 0])


def check_paths(model: Model, kernel: CKernel, inputs: DecoderInputs, pads: Sequence[int] = (0, 0)) -> None:
    """Compare the nodes of trees, in each number, with those of each path decoded alone, without left padding."""
    inputs = replace(inputs, max_position=1000)
    scored = run(model, kernel, replace(inputs, caches=[cache.clone() for cache in inputs.caches]))
    for row, length in enumerate(inputs.lengths):
        for leaf in range(inputs.tokens.shape[1]):
            caches = [cache[:, row : row + 1, :, pads[row] :].contiguous() for cache in inputs.caches]
            path = inputs.ancestor_mask[row, leaf].nonzero().flatten().tolist()
            for step, node in enumerate(path):
                one = DecoderInputs(
                    tokens=inputs.tokens[row, node].view(1, 1),
                    depths=torch.zeros(1, 1, dtype=torch.long),
                    ancestor_mask=torch.ones(1, 1, 1, dtype=torch.bool),
                    lengths=[length - pads[row] + step],
                    position_base=[inputs.position_base[row] + pads[row]],
                    max_position=1000,
                    padding=None,
                    caches=caches,
                )
                for got, want in zip(run(model, kernel, one), scored, strict=True):
                    assert torch.equal(got[0, 0], want[row, node]), (row, leaf, node)


@pytest.mark.parametrize("kind", [*TYPES, 4], ids=str)
@pytest.mark.parametrize("rows", [[1], [0, 3], [3, 1, 0]], ids=str)
def test_some_rows_of_the_caches_are_computed_as_all_are(
    kernel: CKernel, rows: list[int], kind: torch.dtype | int
) -> None:
    """Bit for bit, and nothing is written in the others."""
    model = make_model(replace(SHAPES["grouped, wide heads"], windows=(6, 0)), extras=True)
    model = quantised(model, kernel, kind) if isinstance(kind, int) else in_type(model, kind)
    inputs = make_inputs(model, [12, 9, 20, 3], 5, padded=True)
    caches = [cache.clone() for cache in inputs.caches]
    some = replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in ("tokens", "depths", "ancestor_mask", "padding")},
        **{name: [getattr(inputs, name)[row] for row in rows] for name in ("lengths", "position_base")},
        caches=[cache.clone() for cache in caches],
        cache_rows=rows,
    )
    whole = run(model, kernel, inputs)
    assert all(torch.equal(got, want[rows]) for got, want in zip(run(model, kernel, some), whole, strict=True))
    others = [row for row in range(4) if row not in rows]
    for got, want, before in zip(some.caches, inputs.caches, caches, strict=True):
        assert torch.equal(got[:, rows], want[:, rows]) and torch.equal(got[:, others], before[:, others])
    decoder = model.decoder(kernel)
    for wrong in ([*rows, rows[0]], [4, *rows[1:]], [-1, *rows[1:]], [rows[-1], *rows[:-1]][: len(rows) - 1]):
        assert decoder.forward(replace(some, cache_rows=wrong)) is None


@pytest.mark.parametrize("experts", [{}, {"num_experts": 16, "expert_size": 200, "experts_per_token": 3}], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(kernel: CKernel, experts: dict[str, int]) -> None:
    model = make_model(DecoderShape(384, 1024, 6, 3, 64, 1e-6, 0.125, **experts))
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7, 2, 1):  # more than there are processors sleep while they wait
            torch.set_num_threads(count)
            results.append(run(model, kernel, make_inputs(model, [30], 8)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_nan_and_infinity_are_not_hidden(kernel: CKernel) -> None:
    model = make_model(SHAPES["multi-head"])
    inputs = make_inputs(model, [9], 3)
    inputs.caches[0][0, 0, 1, 4] = torch.nan
    assert run(model, kernel, inputs)[-1].isnan().all()
    inputs = make_inputs(model, [9], 3)
    model.layers[1].down[0, 0] = torch.inf
    assert not run(model, kernel, inputs)[-1].isfinite().any()


def test_large_gates_and_scores(kernel: CKernel) -> None:
    """The exponential does not overflow where that of torch does not, and far positions get exactly no weight."""
    model = make_model(SHAPES["multi-head"])
    for weights in model.layers:
        weights.gate.mul_(300)
        weights.q.mul_(60)
    inputs = make_inputs(model, [40], 5)
    for got, want in zip(run(model, kernel, inputs), model.reference(inputs), strict=True):
        assert (got - want).abs().max() <= 1e-3 * want.abs().max()


# --- what is seen, and what is refused --------------------------------------------------------------------------------


def test_weights_changed_in_place_are_seen_and_replaced_memory_lives_on(kernel: CKernel) -> None:
    model = make_model(SHAPES["multi-head"])
    decoder, inputs = model.decoder(kernel), make_inputs(model, [9], 3)
    first = decoder.forward(inputs)
    model.layers[1].down.mul_(2)
    second = decoder.forward(inputs)
    assert first is not None and second is not None and not torch.equal(first[0], second[0])
    assert (second[0] - model.reference(make_inputs(model, [9], 3))[-1]).abs().max() < 1e-4
    model.layers[0].up.data = torch.zeros_like(model.layers[0].up)
    third = decoder.forward(inputs)
    assert third is not None and torch.equal(second[0], third[0])


@pytest.mark.parametrize("in_pairs", [False, True])
def test_bfloat16_is_multiplied_in_pairs_where_the_kernel_does(
    kernel: CKernel, monkeypatch: pytest.MonkeyPatch, in_pairs: bool
) -> None:
    monkeypatch.setattr(CKernel, "multiplies_pairs", in_pairs)
    decoder = in_type(make_model(SHAPES["multi-head"]), torch.bfloat16).decoder(kernel)
    for one in (decoder, decoder.restrict([1])):
        found = [getattr(layer, name).type for layer in one._layers for name in ("q", "o", "gate", "up", "down")]
        wanted = BFLOAT16_PAIRS if in_pairs else FLOAT_TYPES[torch.bfloat16]
        assert {*found, one._decoder.lm_head.type} == {wanted}


def test_the_rotary_table_grows(kernel: CKernel) -> None:
    model = make_model(SHAPES["multi-head"])
    decoder = model.decoder(kernel)
    for base in (0, 1100, 5000):
        inputs = replace(make_inputs(model, [9], 3), position_base=[base])
        scored = decoder.forward(inputs)
        assert scored is not None and (scored[0] - model.reference(inputs)[-1]).abs().max() < 1e-4


def test_forwards_that_are_refused(kernel: CKernel) -> None:
    model = make_model(SHAPES["multi-head"])
    decoder, good = model.decoder(kernel), make_inputs(model, [9], 4)
    assert decoder.forward(good) is not None
    refused = [
        replace(good, tokens=good.tokens + VOCAB),
        replace(good, tokens=good.tokens - VOCAB),
        replace(good, position_base=[-40]),
        replace(good, caches=good.caches[:1]),
        replace(good, caches=[cache.double() for cache in good.caches]),
        replace(good, caches=[cache[..., :12, :] for cache in good.caches]),
        replace(good, caches=[cache[..., :12, :].contiguous() for cache in good.caches]),
        replace(good, caches=[cache.expand(-1, 2, -1, -1, -1) for cache in good.caches]),
        make_inputs(model, [9] * 33, MAX_DECODER_ROWS // 32),
    ]
    assert [decoder.forward(inputs) for inputs in refused] == [None] * len(refused)


@pytest.mark.parametrize("change", ["dtype", "shape", "strides", "bias"])
def test_weights_that_are_refused(change: str) -> None:
    model = make_model(SHAPES["multi-head"], extras=True)
    layer = model.layers[1]
    replaced = {
        "dtype": {"k": layer.k.double()},
        "shape": {"down": layer.down[:, 1:].contiguous()},
        "strides": {"up": layer.up.t().contiguous().t()},
        "bias": {"o_bias": layer.q_norm},
    }[change]
    kernel = load_kernel()
    assert kernel is not None
    with pytest.raises(ValueError, match=f"{next(iter(replaced))} of layer 1 must be contiguous float32"):
        replace(model, layers=[model.layers[0], replace(layer, **replaced)]).decoder(kernel)
    mixed = replace(layer, k=quantise(kernel, layer.k, 8))
    with pytest.raises(ValueError, match="q, k, v of layer 0 must be quantised together"):
        replace(model, layers=[mixed]).decoder(kernel)


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("experts", {"experts_per_token": 8}),
    "head_gate": ("multi-head", {"gates_heads": True}),
    "shared_gate": ("as in GLM with experts", {"shared_size": 60}),
    "q_norm": ("as in OLMo 2", {"head_norms": "each"}),
    "k": ("multi-head", {"num_kv_heads": 2}),
}


@pytest.mark.parametrize("weight", CONTRADICTIONS)
def test_traits_that_contradict_each_other(kernel: CKernel, weight: str) -> None:
    """Refused by the name of the weights that do not fit."""
    name, traits = CONTRADICTIONS[weight]
    model = make_model(SHAPES[name], extras=True)
    model.decoder(kernel)
    with pytest.raises(ValueError, match=f"^{weight} of layer 0 must"):
        replace(model, shape=replace(model.shape, **traits)).decoder(kernel)


def test_structs_of_other_sizes_are_found_when_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_kernel, "STRUCTS", c_kernel.STRUCTS[1:])
    with pytest.raises(c_library.KernelUnavailableError, match="LayerStruct has"):
        CKernel(c_library.chosen_level())


def test_structs_are_read_from_the_headers() -> None:
    """A field that C gets is one that Python has; what Python does not know is refused."""
    assert structs.fields_of("vector") == [
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("offset", ctypes.c_double),
    ]
    with pytest.raises(KeyError, match="weights"):
        structs.fields_of("decoder_layer")
    with pytest.raises(KeyError, match="no_struct"):
        structs.fields_of("no_struct")
