"""What layers with a state compute over prompts in C: against double precision, and the same bits in any division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from c_bugs import faulty_kernel, faulty_sources
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from mmspec.cpu import c_library, mixers
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.layers import LayerStruct
from mmspec.cpu.weights import FLOAT_TYPES

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """Of a delta rule: rows, tokens, heads of keys, of values, numbers of each."""

    batch: int = 2
    length: int = 70
    key_heads: int = 2
    heads: int = 4
    key_size: int = 24
    value_size: int = 40


SIZES = (
    Sizes(),
    Sizes(1, 1, 1, 1, 1, 1),
    Sizes(3, 1, 2, 2, 8, 8),
    Sizes(1, 33, 1, 3, 40, 52),
    Sizes(1, 200, 2, 2, 128, 128),
    Sizes(2, 5, 3, 3, 256, 17),
    Sizes(1, 64, 16, 16, 16, 64),
)
Inputs = tuple[Tensor, ...]
"""Five tensors of each token, what all tokens have, if anything, and the state before them."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def delta_inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Inputs:
    """Queries, keys, values, logarithms of decay, what is written, state."""
    tokens, s = (sizes.batch, sizes.length), sizes
    query, key = (numbers(*tokens, s.key_heads, s.key_size, seed=seed).to(dtype) for seed in (1, 2))
    value = numbers(*tokens, s.heads, s.value_size, seed=3).to(dtype)
    decay = -functional.softplus(numbers(*tokens, s.heads, seed=4) - 2)
    write = numbers(*tokens, s.heads, seed=5).sigmoid().to(dtype)
    return query, key, value, decay, write, numbers(s.batch, s.heads, s.key_size, s.value_size, seed=6)


def slow_delta(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> list[Tensor]:
    """The same in double precision, token by token."""
    query, key, value, g, beta, state = (part.double() for part in (query, key, value, g, beta, state))
    query, key = (part.repeat_interleave(value.shape[2] // part.shape[2], 2) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    found, state = torch.zeros_like(value), state.clone()
    for t in range(value.shape[1]):
        state *= g[:, t, :, None, None].exp()
        written = (value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)) * beta[:, t, :, None]
        state += torch.einsum("bhk,bhv->bhkv", key[:, t], written)
        found[:, t] = torch.einsum("bhk,bhkv->bhv", query[:, t], state) / query.shape[-1] ** 0.5
    return [found, state]


def slow_convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool) -> Tensor:
    """In double precision; rounded to the dtype before SiLU and behind it."""
    padded = functional.pad(inputs.double(), (weight.shape[1] - 1, 0))
    windows = padded.unfold(2, weight.shape[1], 1)
    out = torch.einsum("bclk,ck->bcl", windows, weight.double())
    out = (out if bias is None else out + bias.double()[:, None]).to(inputs.dtype)
    return (out.double() * out.double().sigmoid()).to(inputs.dtype) if has_silu else out


def delta(kernel: CKernel, inputs: Inputs) -> tuple[Tensor, Tensor]:
    found = mixers.delta_rule(kernel, *inputs)
    assert found is not None
    return found


def check_divisions(run: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs) -> None:
    """No bit depends on how tokens and rows are divided; `run` returns what is read and the last state."""
    found, state = run(inputs)
    parts, behind = list[Tensor](), inputs[-1]
    begin, step = 0, 1
    while begin < found.shape[1]:
        part, behind = run((*(one[:, begin : begin + step] for one in inputs[:5]), *inputs[5:-1], behind))
        parts.append(part)
        begin, step = begin + step, step % 7 + 1
    assert torch.equal(torch.cat(parts, 1), found) and torch.equal(behind, state)
    for row in range(found.shape[0]):
        alone = run(tuple(part if part.dim() == 1 else part[row : row + 1] for part in inputs))
        assert torch.equal(alone[0][0], found[row]) and torch.equal(alone[1][0], state[row])


def check_delta(kernel: CKernel, sizes: Sizes, dtype: torch.dtype) -> None:
    """Numbers of double precision, and the same bits in any division."""
    inputs = delta_inputs(sizes, dtype)
    found, state = delta(kernel, inputs)
    assert found.dtype is dtype and found.is_contiguous() and state.dtype is torch.float32
    for mine, want in zip((found, state), slow_delta(*inputs), strict=True):
        rounding = torch.finfo(mine.dtype).eps * want.abs().max().item()
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=2e-6 + rounding)
    check_divisions(partial(delta, kernel), inputs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_rule_is_right_and_its_bits_the_same_in_any_division(
    kernel: CKernel, sizes: Sizes, dtype: torch.dtype
) -> None:
    check_delta(kernel, sizes, dtype)


def test_a_prompt_leaves_the_bits_that_rounds_would(kernel: CKernel) -> None:
    """A commit reads what a forward over nodes has logged, by the code of rounds, however many."""
    sizes = Sizes(2, 100, 2, 6, 40, 56)
    for dtype in DTYPES:
        query, key, value, decay, write, state = delta_inputs(sizes, dtype)
        mixed = torch.cat([part.float().flatten(2) for part in (query, key, value)], 2).contiguous()
        rates, out = torch.stack([decay, write.float()], 2).contiguous(), torch.empty_like(state)
        layer = LayerStruct(
            channels=mixed.shape[2],
            num_key_heads=sizes.key_heads,
            num_value_heads=sizes.heads,
            key_size=sizes.key_size,
            value_size=sizes.value_size,
            state=state.data_ptr(),
            mixed=mixed.data_ptr(),
            rates=rates.data_ptr(),
        )
        address = c_library.ctypes.addressof(layer)
        path, counts = torch.arange(sizes.length).expand(2, -1), torch.full((2,), sizes.length)
        kernel.advance(address, sizes.length, path, counts, out)
        assert torch.equal(out, delta(kernel, (query, key, value, decay, write, state))[1])


def test_it_is_no_worse_than_torch(kernel: CKernel) -> None:
    """Both in float32, against double precision."""
    for sizes in (Sizes(1, 200, 2, 2, 128, 128), Sizes(1, 300, 1, 2, 64, 64)):
        inputs = delta_inputs(sizes)
        named = dict(zip(("query", "key", "value", "g", "beta", "initial_state"), inputs, strict=True))
        named |= {
            name: part.repeat_interleave(sizes.heads // sizes.key_heads, 2)
            for name, part in named.items()
            if name in ("query", "key")
        }
        reference = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            **named, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        for mine, other, want in zip(delta(kernel, inputs), reference, slow_delta(*inputs), strict=True):
            errors = [(part.double() - want).square().mean().sqrt() for part in (mine, other)]
            assert errors[0] <= errors[1]


def test_the_number_of_threads_changes_nothing(kernel: CKernel) -> None:
    """Nor how many columns of a head a thread takes at once."""
    threads, inputs, found = torch.get_num_threads(), delta_inputs(Sizes(1, 90, 2, 6, 128, 128)), list[Any]()
    weight = numbers(200, 4)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            convolved = mixers.convolution(kernel, numbers(2, 200, 400), weight, None, has_silu=True)
            found.append([*delta(kernel, inputs), convolved])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for parts in found[1:] for one, other in zip(found[0], parts, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_every_kind(kernel: CKernel, dtype: torch.dtype) -> None:
    """Parts of one projection, as layers pass them; other orders of dimensions; every second number; repeated heads."""
    sizes = Sizes(2, 37, 2, 4, 24, 40)
    inputs = delta_inputs(sizes, dtype)
    want = delta(kernel, inputs)
    projected = torch.cat([part.flatten(2) for part in inputs[:3]], 2).transpose(1, 2).contiguous().transpose(1, 2)
    widths = [part.shape[2] * part.shape[3] for part in inputs[:3]]
    split = [part.unflatten(2, one.shape[2:]) for part, one in zip(projected.split(widths, 2), inputs, strict=False)]
    turned = [part.transpose(0, -1).contiguous().transpose(0, -1) for part in inputs]
    doubled = [torch.stack([part, part], -1)[..., 0] for part in inputs]
    for parts in ([*split, *inputs[3:]], turned, doubled):
        assert all(torch.equal(*pair) for pair in zip(parts, inputs, strict=True))
        assert all(torch.equal(*pair) for pair in zip(delta(kernel, tuple(parts)), want, strict=True))
    repeated = (*(part.repeat_interleave(2, 2) for part in inputs[:2]), *inputs[2:])
    assert all(torch.equal(*pair) for pair in zip(delta(kernel, repeated), want, strict=True))
    expanded = (*(part[:, :, :1].expand(-1, -1, 4, -1) for part in inputs[:2]), *inputs[2:])
    alone = (*(part[:, :, :1] for part in inputs[:2]), *inputs[2:])
    assert all(torch.equal(*pair) for pair in zip(delta(kernel, expanded), delta(kernel, alone), strict=True))


def test_the_state_before_is_read_in_any_type_and_left_alone(kernel: CKernel) -> None:
    inputs = delta_inputs(Sizes())
    for state in (inputs[5].bfloat16(), inputs[5].double(), inputs[5].transpose(2, 3).contiguous().transpose(2, 3)):
        before = state.clone()
        found = delta(kernel, (*inputs[:5], state))
        assert torch.equal(state, before) and found[1].data_ptr() != state.data_ptr()
        assert all(map(torch.equal, found, delta(kernel, (*inputs[:5], state.float().contiguous()))))
    none = mixers.delta_rule(kernel, *inputs[:5], None)
    assert none is not None and all(map(torch.equal, none, delta(kernel, (*inputs[:5], torch.zeros_like(inputs[5])))))


class Traced(Tensor):
    """A subclass, as tracers have them."""


def test_other_tensors_are_left_to_torch(kernel: CKernel) -> None:
    inputs = delta_inputs(Sizes())
    query, key, value, decay, write, state = inputs
    others: list[tuple[Any, ...]] = [
        (query.double(), key.double(), value.double(), *inputs[3:]),
        (query.bfloat16(), *inputs[1:]),
        (query.to("meta"), *inputs[1:]),
        (query.as_subclass(Traced), *inputs[1:]),
        (query[:, :-1], *inputs[1:]),
        (query[:, :, :1], *inputs[1:]),
        (query[..., :-1], *inputs[1:]),
        (query, key, value[:, :-1], *inputs[3:]),
        (query, key, value[:, :, :3], decay[..., :3], write[..., :3], state[:, :3]),
        (query, key, value[0], *inputs[3:]),
        (*inputs[:3], decay[..., :1], write, state),
        (*inputs[:4], write[:1], state),
        (*inputs[:5], state[:, :1]),
        (*inputs[:5], state[..., :-1]),
        (*(part[:, :0] for part in inputs[:5]), state),
        tuple(delta_inputs(replace(Sizes(), key_size=257))),
    ]
    assert all(mixers.delta_rule(kernel, *one) is None for one in others)


@pytest.mark.parametrize("which", range(6))
def test_what_is_not_finite_is_left_to_torch(kernel: CKernel, which: int) -> None:
    """All but a query, which spoils the token that reads alone."""
    inputs = [part.clone() for part in delta_inputs(Sizes())]
    inputs[which].view(-1)[7] = torch.nan
    found = mixers.delta_rule(kernel, *inputs)  # type: ignore[arg-type]
    if which:
        assert found is None
    else:
        assert found is not None and found[0].isnan().any(-1).sum() == 2  # two heads of values have that query


# --- a state space ----------------------------------------------------------------------------------------------------


def space_inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, time steps, logarithms of decay, B, C, factors of x, state."""
    c, b, x, decay, _, state = delta_inputs(sizes, dtype)
    steps = functional.softplus(numbers(sizes.batch, sizes.length, sizes.heads, seed=7)).to(dtype).float()
    return x, steps, decay, b, c, numbers(sizes.heads, seed=8).to(dtype), state.transpose(2, 3).contiguous()


def slow_space(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in double precision, token by token."""
    x, dt, decay, b, c, skip, state = (part.double() for part in (x, dt, decay, b, c, skip, state))
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
    found = torch.zeros_like(x)
    for t in range(x.shape[1]):
        written = torch.einsum("bh,bhv,bhk->bhvk", dt[:, t], x[:, t], b[:, t])
        state = state * decay[:, t, :, None, None].exp() + written
        found[:, t] = torch.einsum("bhvk,bhk->bhv", state, c[:, t]) + skip[:, None] * x[:, t]
    return found, state


def space(kernel: CKernel, inputs: Inputs) -> tuple[Tensor, Tensor]:
    found = mixers.state_space(kernel, *inputs)
    assert found is not None
    return found


def check_space(kernel: CKernel, sizes: Sizes, dtype: torch.dtype) -> None:
    """Numbers of double precision, and the same bits in any division."""
    inputs = space_inputs(sizes, dtype)
    found, state = space(kernel, inputs)
    assert found.dtype is state.dtype is torch.float32
    for mine, want in zip((found, state), slow_space(*inputs), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=2e-6 * (1 + want.abs().max().item()))
    check_divisions(partial(space, kernel), inputs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_space_is_right_and_its_bits_the_same_in_any_division(
    kernel: CKernel, sizes: Sizes, dtype: torch.dtype
) -> None:
    check_space(kernel, sizes, dtype)


def advanced_space(kernel: CKernel, sizes: Sizes, inputs: Inputs) -> Tensor:
    """The state that a commit of all tokens leaves, if they are the nodes of a round."""
    x, dt, decay, b, c, skip, state = inputs
    mixed = torch.cat([part.float().flatten(2) for part in (x, b, c)], 2).contiguous()
    rates, out, factors = torch.stack([decay, dt], 2).contiguous(), torch.empty_like(state), skip.float()
    layer = LayerStruct(
        channels=mixed.shape[2],
        num_key_heads=sizes.key_heads,
        num_value_heads=sizes.heads,
        key_size=sizes.key_size,
        value_size=sizes.value_size,
        state=state.data_ptr(),
        mixed=mixed.data_ptr(),
        rates=rates.data_ptr(),
        skip=factors.data_ptr(),
        state_type=FLOAT_TYPES[x.dtype],
    )
    path, counts = torch.arange(sizes.length).expand(sizes.batch, -1), torch.full((sizes.batch,), sizes.length)
    kernel.advance(c_library.ctypes.addressof(layer), sizes.length, path, counts, out)
    return out


def check_space_steps(kernel: CKernel, dtype: torch.dtype) -> None:
    """A round rounds what it writes as transformers does, which decodes token by token."""
    sizes = Sizes(2, 30, 2, 6, 40, 56)
    x, dt, decay, b, c, skip, state = inputs = space_inputs(sizes, dtype)
    dt = dt.to(dtype)
    want, size = state.clone(), (sizes.heads, sizes.value_size)
    for t in range(sizes.length):
        steps = dt[:, t, :, None].expand(-1, *size)
        for row in range(sizes.batch):  # whose slopes differ here
            slope = (decay[row, t] / dt[row, t].float())[:, None, None].expand(-1, *state.shape[2:])
            one = slice(row, row + 1)
            modeling_bamba.mamba2_selective_state_update(
                want[one], x[one, t], steps[one], slope, b[one, t], c[one, t], skip[:, None].expand(size)
            )
    found = advanced_space(kernel, sizes, inputs)
    torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6 * want.abs().max().item())
    if dtype is torch.float32:  # else a prompt rounds less, as in transformers
        assert torch.equal(found, space(kernel, inputs)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_space_writes_what_a_step_of_transformers_does(kernel: CKernel, dtype: torch.dtype) -> None:
    check_space_steps(kernel, dtype)


def test_other_tensors_of_a_state_space_are_left_to_torch(kernel: CKernel) -> None:
    x, dt, decay, b, c, skip, state = space_inputs(Sizes())
    assert mixers.state_space(kernel, x, dt, decay, b, c, nn.Parameter(skip), None) is not None
    others: list[tuple[Any, ...]] = [
        (x.double(), dt, decay, b.double(), c.double(), skip, state),
        (x, dt, decay, b.bfloat16(), c, skip, state),
        (x, dt, decay, b, c[:, :, :1], skip, state),
        (x, dt, decay, b, c, skip[:1], state),
        (x, dt, decay, b, c, skip.as_subclass(Traced), state),
        (x, dt, decay, b, c, skip, state.transpose(2, 3)),
        (x, dt, decay, b, c, skip, state.fill_(torch.inf)),
    ]
    assert all(mixers.state_space(kernel, *one) is None for one in others)


# --- a convolution ----------------------------------------------------------------------------------------------------


def conv_inputs(batch: int, channels: int, length: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        numbers(batch, channels, length).to(dtype),
        numbers(channels, size, seed=1).to(dtype),
        numbers(channels, seed=2).to(dtype),
    )


def check_convolution(kernel: CKernel, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    inputs, weight, bias = conv_inputs(*shape, dtype)
    layouts = inputs, inputs.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([inputs, inputs], 1)[:, 0]
    for has_silu in (False, True):
        for offsets in (None, bias):
            found = [mixers.convolution(kernel, layout, weight, offsets, has_silu) for layout in layouts]
            mine = found[0]
            assert mine is not None and mine.dtype is dtype and mine.transpose(1, 2).is_contiguous()
            assert all(one is not None and torch.equal(one, mine) for one in found)
            want = slow_convolution(inputs, weight, offsets, has_silu)
            tolerance = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(mine.double(), want.double(), rtol=tolerance, atol=tolerance)
            assert dtype is torch.float32 or (mine != want).sum() <= mine.numel() / 50  # sums at the edge of rounding
            for t in range(0, shape[2], 5):  # the last token of the tokens up to it
                window = inputs[..., max(0, t - shape[3] + 1) : t + 1]
                alone = mixers.convolution(kernel, window, weight, offsets, has_silu)
                assert alone is not None and torch.equal(alone[..., -1], mine[..., t])


@pytest.mark.parametrize(
    "shape", [(2, 70, 75, 4), (1, 1, 1, 1), (1, 64, 32, 3), (3, 130, 2, 4), (1, 33, 100, 16)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_convolution_is_right_and_its_bits_the_same_in_any_division(
    kernel: CKernel, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    check_convolution(kernel, shape, dtype)


def test_other_convolutions_are_left_to_torch(kernel: CKernel) -> None:
    inputs, weight, bias = conv_inputs(2, 6, 9, 4, torch.float32)
    assert mixers.convolution(kernel, inputs, nn.Parameter(weight), nn.Parameter(bias), has_silu=True) is not None
    others: list[tuple[Any, ...]] = [
        (inputs.bfloat16(), weight, bias),
        (inputs.double(), weight.double(), None),
        (inputs.to("meta"), weight, bias),
        (inputs.as_subclass(Traced), weight, bias),
        (inputs[0], weight, bias),
        (inputs[..., :0], weight, bias),
        (inputs, weight[:-1], bias),
        (inputs, weight[:, None], bias),
        (inputs, weight[:, :0], bias),
        (inputs, numbers(6, 17), bias),
        (inputs, weight, bias[:-1]),
        (inputs, weight, bias.bfloat16()),
    ]
    assert all(mixers.convolution(kernel, *one, has_silu=False) is None for one in others)


def check_all(kernel: CKernel) -> None:
    for dtype in DTYPES:
        check_delta(kernel, SIZES[0], dtype)
        check_delta(kernel, SIZES[3], dtype)
        check_space(kernel, SIZES[0], dtype)
        check_space(kernel, SIZES[3], dtype)
        check_space_steps(kernel, dtype)
        check_convolution(kernel, (2, 70, 75, 4), dtype)


BUGS = {
    "the last token of a step decays by the first": ("SET1(expf(decay[(t + 1) * H]))", "SET1(expf(decay[t * H]))"),
    "a token writes before the state decays": ("if (next) s = s * decay, found[j] =", "if (next) found[j] ="),
    "keys of another head": ("key_head = h / (H / p->num_key_heads);", "key_head = h % p->num_key_heads;"),
    "states of another row": ("p->state + (b * H + h) * D * V;", "p->state + h * D * V;"),
    "columns that are no whole block": (
        "const int64_t n = min64(2 * LANES, V - first), *const",
        "const int64_t n = 2 * LANES <= V - first ? 2 * LANES : LANES < V - first ? LANES : V - first, *const",
    ),
    "B without its time step": (
        "pair[D + i] = wide[D + i] * p->write[(b * p->tokens + t) * H + h];",
        "pair[D + i] = wide[D + i];",
    ),
    "factors of another head": ("fmaf(x[r], p->skip[h], found[r]);", "fmaf(x[r], p->skip[0], found[r]);"),
    "rows of another four": ("SET1(x[r + j]), type);", "SET1(x[j]), type);"),
    "what is written is not rounded": ("write[i] = round1(rates[H] * B[i], type);", "write[i] = rates[H] * B[i];"),
    "B of another group": ("group = h / (H / l->num_key_heads);", "group = h % l->num_key_heads;"),
    "a state space is stored in columns": (
        "NAME(store_block)(block, D, V, first, !!p->skip, state);",
        "NAME(store_block)(block, D, V, first, 0, state);",
    ),
    "a convolution forgets what was before its step": ("t = max64(0, begin - K + 1);", "t = begin;"),
    "taps of another channel": ("p->taps + k * C + first + c", "p->taps + k * C + c"),
    "no rounding before SiLU": ("sum = NAME(round)(sum, type);", ""),
}
"""{what is wrong: (text of the headers, replacement)}"""


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_can_be_planted(bug: str) -> None:
    assert faulty_sources(*BUGS[bug])


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    kernel = faulty_kernel(*BUGS[bug], optimized=False)
    with pytest.raises(AssertionError):
        check_all(kernel)
