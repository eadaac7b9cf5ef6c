"""Chains that are drafted in one call, against forwards over one node and the log probabilities of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_decoder import NAMES_AND_KINDS, SHAPES, VOCAB, Model, in_type, make_inputs, make_model, quantised
from torch import Tensor

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.chain_types import ChainGuesses, ChainRequest, DraftedChains
from mmspec.cpu.decoder import DecoderContext, DecoderInputs
from mmspec.cpu.ngrams import CNgrams
from mmspec.drafters.rerank import LEVEL_PENALTY, next_log_probs

LENGTH, TOP_K, MAX_NODES = 6, 2, 9
COSTS = (1.0, 1.1, 1.2, 1.3)


def request_for(batch: int, **changes: object) -> ChainRequest:
    """Chains behind one or, in odd rows, three unread tokens."""
    unread = [[5 + row, 9, 2][: 3 if row % 2 else 1] for row in range(batch)]
    request = ChainRequest(
        unread, LENGTH, TOP_K, MAX_NODES, torch.zeros(VOCAB), None, 1.0, LEVEL_PENALTY, 0.0, (), None
    )
    return replace(request, **changes)


def context_of(inputs: DecoderInputs) -> DecoderContext:
    names = DecoderContext.__dataclass_fields__
    return DecoderContext(**{name: getattr(inputs, name) for name in names})


def step(model: Model, kernel: CKernel, inputs: DecoderInputs, row: int, length: int, token: int) -> Tensor:
    """Logits [V] behind one token of one row, which is stored."""
    one = DecoderInputs(
        tokens=torch.tensor([[token]]),
        depths=torch.zeros(1, 1, dtype=torch.long),
        ancestor_mask=torch.ones(1, 1, 1, dtype=torch.bool),
        lengths=[length],
        position_base=[inputs.position_base[row]],
        max_position=inputs.max_position,
        padding=None if inputs.padding is None else inputs.padding[row : row + 1],
        caches=inputs.caches,
        cache_rows=[row],
    )
    scored = model.decoder(kernel).forward(one)
    assert scored is not None
    return scored[0][0, 0]


def expected(
    model: Model, kernel: CKernel, inputs: DecoderInputs, request: ChainRequest, scale: float = 1.0, cap: float = 0.0
) -> tuple[list[list[int]], list[Tensor]]:
    """The chains, and tokens, path log probabilities and parents [3, candidates] of each row, token by token."""
    chains, candidates = [], []
    for row, unread in enumerate(request.unread):
        length, path, chain, found = inputs.lengths[row], 0.0, list[int](), list[Tensor]()
        for token in unread[:-1]:
            step(model, kernel, inputs, row, length, token)
            length += 1
        token = unread[-1]
        while len(chain) < request.length and not (chain and token in request.stop_ids):
            logits = step(model, kernel, inputs, row, length, token).float() * scale
            logits = (logits / cap).tanh() * cap if cap else logits
            noise = None if request.log_noise is None else request.log_noise[row, len(chain)]
            log_probs = next_log_probs(logits + request.logit_bias, request.temperature, noise)
            log_probs, ids = (part[: request.top_k] for part in log_probs.sort(descending=True, stable=True))
            paths = path + log_probs - LEVEL_PENALTY
            parent = (len(chain) - 1) * request.top_k if chain else -1
            found.append(torch.stack((ids.double(), paths.double(), torch.full_like(paths, parent).double())))
            path, token, length = float(paths[0]), int(ids[0]), length + 1
            chain.append(token)
        chains.append(chain)
        candidates.append(torch.cat(found, 1))
    return chains, candidates


def check(got: DraftedChains, chains: Sequence[Sequence[int]], candidates: Sequence[Tensor], size: int) -> None:
    assert got.num_tokens == max(map(len, chains))
    for row, (chain, found) in enumerate(zip(chains, candidates, strict=True)):
        assert got.chains[row, : len(chain)].tolist() == list(chain)
        ids, paths, parents = (part.tolist() for part in found)
        order = sorted(range(len(paths)), key=lambda index: -paths[index])[: size - 1]
        place = {index: 1 + n for n, index in enumerate(order)} | {-1: 0}
        tree, nodes = got.tree, 1 + len(order)
        assert tree.scores is not None and not tree.node_mask[row, nodes:].any()
        assert tree.node_mask[row, :nodes].tolist() == [True, *(paths[index] > float("-inf") for index in order)]
        assert tree.tokens[row, 1:nodes].tolist() == [ids[index] for index in order]
        assert tree.parents[row, :nodes].tolist() == [-1, *(place[int(parents[index])] for index in order)]
        assert tree.scores[row, 1:nodes].tolist() == pytest.approx(
            [math.exp(paths[index]) for index in order], rel=1e-3
        )


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS, ids=str)
def test_a_chain_is_that_of_single_forwards(kernel: CKernel, name: str, kind: torch.dtype | int) -> None:
    model = make_model(SHAPES[name], extras=True)
    model = quantised(model, kernel, kind) if isinstance(kind, int) else in_type(model, kind)
    for lengths, padded in (([9], False), ([12, 5, 20], True)):
        inputs = make_inputs(model, lengths, 1, padded)
        inputs = replace(inputs, max_position=100)
        request = request_for(len(lengths))
        alone = replace(inputs, caches=[cache.clone() for cache in inputs.caches])
        got = model.decoder(kernel).chain(context_of(inputs), request)
        assert got is not None
        check(got, *expected(model, kernel, alone, request), MAX_NODES)
        for row, length in enumerate(lengths):
            end = length + got.num_read[row]
            assert got.num_read[row] == len(request.unread[row]) + LENGTH - 1
            for cache, other in zip(inputs.caches, alone.caches, strict=True):
                assert torch.equal(cache[:, row, :, :end], other[:, row, :, :end])


@pytest.mark.parametrize("batch", [1, 2])
def test_bias_noise_scale_and_limit_are_applied(kernel: CKernel, batch: int) -> None:
    model = make_model(SHAPES["odd sizes"])
    rng = torch.Generator().manual_seed(3)
    noise = torch.empty(batch, LENGTH, VOCAB).exponential_(generator=rng).log()
    bias = torch.zeros(VOCAB)
    bias[::3] = float("-inf")
    inputs = replace(make_inputs(model, [9, 4][:batch], 1), max_position=100)
    request = request_for(batch, logit_bias=bias, log_noise=noise, temperature=0.7)
    alone = replace(inputs, caches=[cache.clone() for cache in inputs.caches])
    got = model.decoder(kernel).chain(context_of(inputs), request, 0.5, 3.0)
    assert got is not None
    chains, candidates = expected(model, kernel, alone, request, 0.5, 3.0)
    check(got, chains, candidates, MAX_NODES)
    assert not any(token % 3 == 0 for chain in chains for token in chain)


def test_stop_ids_end_a_chain_and_small_probabilities_all(kernel: CKernel) -> None:
    model = make_model(SHAPES["odd sizes"])
    inputs = replace(make_inputs(model, [9, 4], 1), max_position=100)
    free = model.decoder(kernel).chain(context_of(inputs), request_for(2))
    assert free is not None
    request = request_for(2, stop_ids=(int(free.chains[0, 2]),))
    alone = replace(inputs, caches=[cache.clone() for cache in inputs.caches])
    got = model.decoder(kernel).chain(context_of(inputs), request)
    assert got is not None
    check(got, *expected(model, kernel, alone, request), MAX_NODES)
    assert got.num_read[0] <= 3
    short = model.decoder(kernel).chain(context_of(inputs), request_for(2, min_prob=0.999))
    assert short is not None and short.num_tokens == 1


@pytest.mark.parametrize("num_unread", [1, 6])
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
def test_guesses_save_forwards_and_change_nothing(kernel: CKernel, right: float, num_unread: int) -> None:
    """Also behind more unread tokens than are scored at once."""
    model = in_type(make_model(SHAPES["grouped, wide heads"], extras=True), torch.bfloat16)
    inputs = replace(make_inputs(model, [9], 1), max_position=100)
    alone = replace(inputs, caches=[cache.clone() for cache in inputs.caches])
    request = request_for(1, unread=[list(range(3, 3 + num_unread))])
    plain = model.decoder(kernel).chain(context_of(alone), request)
    assert plain is not None and plain.forward_s.keys() == {1, num_unread}
    text = [request.unread[0][-1], *plain.chains[0].tolist()]
    counts = CNgrams(kernel, 3, 24, 1 << 10)
    for at in range(1, len(text)):
        is_right = at % 5 < 5 * right
        counts.add(tuple(text[max(0, at - 3) : at]), [text[at] if is_right else (text[at] + 1) % VOCAB])
    guesses = ChainGuesses(counts, (text[0],), COSTS, 0.05)
    got = model.decoder(kernel).chain(context_of(inputs), replace(request, guesses=guesses))
    assert got is not None
    assert torch.equal(got.chains, plain.chains)
    for name in ("tokens", "parents", "node_mask", "scores"):
        assert torch.equal(getattr(got.tree, name), getattr(plain.tree, name)), name
    end = inputs.lengths[0] + min(got.num_read[0], plain.num_read[0])
    for cache, other in zip(inputs.caches, alone.caches, strict=True):
        assert torch.equal(cache[..., :end, :], other[..., :end, :])
    assert max(got.forward_s) <= max(num_unread, len(COSTS))
    if right == 1:
        assert got.num_right >= LENGTH - (2 if num_unread == 1 else 3) and got.expected > 0
    if right == 0:
        assert got.num_right == 0


def test_what_is_not_for_the_kernel_is_refused(kernel: CKernel) -> None:
    model = make_model(SHAPES["odd sizes"])
    inputs = make_inputs(model, [9], 1, capacity=12)
    before = [cache.clone() for cache in inputs.caches]
    assert model.decoder(kernel).chain(context_of(inputs), request_for(1)) is None  # no room
    wide = replace(make_inputs(model, [9], 1), max_position=100)
    assert model.decoder(kernel).chain(context_of(wide), request_for(1, unread=[[VOCAB]])) is None  # no embedding
    assert model.decoder(kernel).chain(context_of(wide), request_for(1, unread=[[1] * 129])) is None  # too many
    assert all(torch.equal(cache, old) for cache, old in zip(inputs.caches, before, strict=True))
