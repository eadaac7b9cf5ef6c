"""DSpark heads: drafts and training against a slow reference, confidence, storage, what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import (
    HEAD_CONFIG,
    IMAGE_TOKEN_ID,
    LAYERS,
    NUM_LAYERS,
    FakeTarget,
    begin_decoding,
    build_layers_batch,
    build_layers_prompt,
    build_result,
    check_no_host_copy,
    descend,
    layer_states,
    scores_by_path,
)
from slow_readers import attend, rms_norm, rotate
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead
from mmspec.drafters.heads.dspark.loss import dspark_loss
from mmspec.drafters.training.batch import DraftModel, Labels
from mmspec.drafters.training.losses import LossAccumulator, LossInputs, LossWeights

CONFIG = DsparkConfig.of(
    HEAD_CONFIG, block_size=4, markov_rank=6, hidden_state_layers=LAYERS, num_hidden_layers=2, confidence_head=True
)


def new_head(mixture: bool = False, **changes: Any) -> DsparkHead:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        head = DsparkHead(replace(CONFIG, layer_mixture=mixture, **changes))
        if head.bigram_head is not None:
            head.bigram_head.vocab_proj.weight.data.normal_()
        head.mask_embedding.data.normal_()
    for name, weight in head.named_parameters():
        weight.data.mul_(1.0 if "norm" in name else 1.4)
        if head.mixture is weight:
            weight.data.copy_(torch.tensor([0.7, 0.1, 0.4]))
    return head.eval()


# --- slow reference ---------------------------------------------------------------------------------------------------


def reference_block(
    target: FakeTarget, head: DsparkHead, embeds: Tensor, row: int, n: int, visual_mode: str
) -> tuple[list[Tensor], int]:
    """Features of the block after n positions of a text, whose anchor is token n."""
    states = {layer: embeds if layer == 0 else layer_states(target, layer)[row] for layer in LAYERS}
    visual = [2 <= p + 1 < 5 and p + 1 < n for p in range(n)]
    context = []
    for p in range(n):
        if visual[p] and visual_mode == "text_only":
            continue
        parts = [states[layer][p] for layer in LAYERS]
        joined = torch.cat(parts)
        if head.mixture is not None:
            joined = sum(weight * part for weight, part in zip(head.mixture, parts, strict=True))
        context.append((rms_norm(head.fc.weight @ joined, head.hidden_norm.weight, 1e-5), p))
    k = head.config.block_size
    anchor = target.shared_embeddings.embed_tokens(target.input_ids[row, n])
    rows = [anchor, *[head.mask_embedding] * (k - 1)]
    for layer in head.layers:
        weight, bias = layer.qkv_proj.weight, layer.qkv_proj.bias

        def project(
            vector: Tensor, position: int, weight: Tensor = weight, bias: Tensor = bias, layer: Any = layer
        ) -> Any:
            heads = (weight @ vector + bias).view(-1, CONFIG.head_dim)
            queries, keys, values = heads.split([4, 2, 2])
            queries = torch.stack([rms_norm(query, layer.q_norm.weight, 1e-5) for query in queries])
            keys = torch.stack([rms_norm(key, layer.k_norm.weight, 1e-5) for key in keys])
            return rotate(queries, position, 1e4), rotate(keys, position, 1e4), values

        cache = [project(feature, p)[1:] for feature, p in context]
        own = [project(rms_norm(x, layer.input_norm.weight, 1e-5), n + i) for i, x in enumerate(rows)]
        cache += [parts[1:] for parts in own]
        for i, (queries, _, _) in enumerate(own):
            rows[i] = rows[i] + layer.o_proj(attend(queries, cache))
            gate, up = (layer.gate_up_proj.weight @ rms_norm(rows[i], layer.post_norm.weight, 1e-5)).chunk(2)
            rows[i] = rows[i] + layer.down_proj.weight @ (functional.silu(gate) * up)
    return [rms_norm(x, head.norm.weight, 1e-5) for x in rows], int(target.input_ids[row, n])


def reference_bigram(target: FakeTarget, head: DsparkHead, token: int) -> Tensor:
    """[R] numbers of a token."""
    bigram = head.bigram_head
    assert bigram is not None and bigram.token_norm is not None and bigram.token_proj is not None
    embed = target.shared_embeddings.embed_tokens(torch.tensor(token))
    return functional.silu(bigram.token_proj.weight @ rms_norm(embed, bigram.token_norm.weight, 1e-5))


def reference_logits(target: FakeTarget, head: DsparkHead, feature: Tensor, previous: int) -> Tensor:
    assert head.bigram_head is not None
    return target.shared_embeddings.lm_head(feature) + head.bigram_head.vocab_proj.weight @ reference_bigram(
        target, head, previous
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("visual_mode", ["coupled", "text_only"])
@pytest.mark.parametrize("pads", [(0, 0), (0, 4)])
@torch.no_grad()
def test_drafts_equal_the_slow_reference(
    target: FakeTarget, mixture: bool, visual_mode: str, pads: tuple[int, int]
) -> None:
    """After the prompt, and after two more tokens: path probabilities, scaled down where the head is not confident."""
    head = new_head(mixture)
    drafter = DsparkDrafter(head, visual_mode, num_layers=NUM_LAYERS, top_k=3)
    state = begin_decoding(target, drafter, build_layers_prompt(target, 11, pads))
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    embeds = target.merge_embeddings(visual)
    lengths = [11 - count for count in pads]
    for _ in range(2):
        tree = drafter.propose(state, 64, [True, True])
        for row, n in enumerate(lengths):
            features, anchor = reference_block(target, head, embeds[row], row, n, visual_mode)
            found = scores_by_path(tree, row)
            assert len(found) > 8 and max(map(len, found)) == 4
            for path, score in found.items():
                expected = 0.0
                for slot, token in enumerate(path):
                    previous = path[slot - 1] if slot else anchor
                    logits = reference_logits(target, head, features[slot], previous)
                    logits[[0, IMAGE_TOKEN_ID]] = -math.inf
                    log_probs = logits.log_softmax(-1)
                    assert head.confidence_head is not None
                    both = torch.cat((features[slot], reference_bigram(target, head, previous)))
                    confidence = functional.logsigmoid(head.confidence_head(both)[0])
                    expected += float(log_probs[token] + min(0.0, float(confidence - log_probs.max())))
                assert math.log(score) == pytest.approx(expected, abs=5e-3)
        # Two tokens of the text are emitted: the target's states at the anchor and at one accepted node.
        tokens = [target.input_ids[row, n + 1 : n + 3].tolist() for row, n in enumerate(lengths)]
        scored = {
            layer: torch.stack(
                [
                    (embeds if not layer else layer_states(target, layer))[row, n : n + 2]
                    for row, n in enumerate(lengths)
                ]
            )
            for layer in (0, *LAYERS)
        }
        state.num_levels = 0
        drafter.observe(state, build_result(tree.trim(2), [[0, 1], [0, 1]], tokens), scored)
        lengths = [n + 2 for n in lengths]


@pytest.mark.parametrize("noisy", [False, True])
def test_drafting_needs_no_host_copy(target: FakeTarget, noisy: bool) -> None:
    drafter = DsparkDrafter(new_head(), num_layers=NUM_LAYERS, top_k=3, draft_ids=torch.arange(40) if noisy else None)
    prompt = build_layers_prompt(target, 11, (0, 4))
    if noisy:
        prompt = replace(prompt, noise=lambda depth: torch.ones(2, depth, 40))
    check_no_host_copy(drafter, begin_decoding(target, drafter, prompt), 0, *LAYERS)


@pytest.mark.every(2)
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("visual_mode", ["coupled", "text_only"])
@torch.no_grad()
def test_training_features_are_those_of_drafting(
    target: FakeTarget, mixture: bool, visual_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, batch = new_head(mixture), build_layers_batch(target)
    recorded: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []

    def record(self: LossAccumulator, part: int, out: Tensor, labels: Labels, bias: Tensor, **kwargs: Tensor) -> None:
        recorded.append((part, out, labels.hidden_states, bias, kwargs["confidence"]))

    monkeypatch.setattr(LossAccumulator, "add", record)
    monkeypatch.setattr(LossAccumulator, "result", lambda self: (torch.zeros(()), {}))
    model = DraftModel(head, visual_mode, "dspark")
    dspark_loss(LossInputs(model, batch, target.shared_embeddings, torch.zeros(32)))
    places = {tuple(batch.hidden_states[b, p].tolist()): (b, p) for b in range(2) for p in range(14)}
    checked = set()
    for slot, out, label, bias, confidence in recorded:
        for output, row_label, row_bias, row_confidence in zip(out, label, bias, confidence, strict=True):
            b, p = places[tuple(row_label.tolist())]
            anchor = p - slot  # its state is not known yet: the context is what comes before
            features, _ = reference_block(target, head, batch.inputs_embeds[b], b, anchor, visual_mode)
            assert torch.allclose(output, features[slot], atol=2e-3)
            previous = int(target.input_ids[b, anchor + slot])
            expected = reference_logits(target, head, features[slot], previous)
            got = target.shared_embeddings.lm_head(output) + row_bias
            assert torch.allclose(got, expected, atol=6e-3)
            both = torch.cat((features[slot], reference_bigram(target, head, previous)))
            assert head.confidence_head is not None
            assert float(row_confidence) == pytest.approx(float(head.confidence_head(both)), abs=5e-3)
            checked.add((slot, b, anchor))
    # Anchors 7 to 12 (row 0) and 7 to 10 (row 1), each with the slots whose label is a token of the response.
    expected_places = {
        (s, b, a) for b, end in ((0, 14), (1, 12)) for a in range(7, end) for s in range(min(4, end - 1 - a))
    }
    assert checked == expected_places


def test_training_lowers_the_loss_and_fits_the_confidence(target: FakeTarget) -> None:
    model, batch = DraftModel(new_head().train(), "coupled", "dspark"), build_layers_batch(target)
    given = LossInputs(model, batch, target.shared_embeddings, torch.zeros(32), LossWeights(logits=1.0))
    (first, before), *_, (last, after) = descend(given, dspark_loss, 3e-3, 25)
    assert last < 0.8 * first and after["confidence0"] < before["confidence0"]


@pytest.mark.parametrize("mixture", [False, True])
def test_storage(target: FakeTarget, mixture: bool, tmp_path: Path) -> None:
    head = new_head(mixture)
    ids = torch.arange(0, 40, 2)
    save_head(
        tmp_path, head, HeadMetadata(head.config, "text_only", 3, architecture="dspark", draft_ids=ids), torch.float32
    )
    loaded, metadata = load_head(tmp_path)
    assert metadata.config == head.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())
    drafter = load_trained(tmp_path)
    assert isinstance(drafter, DsparkDrafter) and drafter.visual_mode == "text_only"
    whole = DsparkDrafter(head, "text_only", num_layers=NUM_LAYERS)
    states = [begin_decoding(target, one, build_layers_prompt(target, 9, (0, 2))) for one in (drafter, whole)]
    found = [
        scores_by_path(one.propose(state, 8, [True, True]), 0)
        for one, state in zip((drafter, whole), states, strict=True)
    ]
    assert found[0] and all(token % 2 == 0 for path in found[0] for token in path)
    assert any(token % 2 for path in found[1] for token in path)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="needs hidden_state_layers"):
        DsparkHead(replace(CONFIG, hidden_state_layers=()))
    with pytest.raises(ValueError, match="confidence_head needs a markov_rank"):
        DsparkHead(replace(CONFIG, markov_rank=0))
    with pytest.raises(ValueError, match="0 to 2"):
        DsparkDrafter(new_head(), num_layers=2)
    assert DsparkDrafter(new_head(markov_rank=0, confidence_head=False), num_layers=3).compressor_hidden_size is None
