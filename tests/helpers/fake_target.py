"""A fake target for tests of draft heads: embeddings, hidden states, prompts, results; and a slow reference layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.losses import LossInputs, LossWeights
from mmspec.drafters.training.trainer import TrainConfig, Trainer
from mmspec.engine.tree import DraftTree, root_only
from mmspec.interfaces import Prompt, SharedEmbeddings, VerifyResult

HEAD_CONFIG = EagleConfig(32, 48, 4, 2, 40, qkv_bias=True)
NUM_LAYERS, IMAGE_TOKEN_ID = 3, 39
LAYERS = (1, 0, NUM_LAYERS)
"""That heads over several layers read."""


@dataclass
class FakeTarget:
    """Embeddings, and random hidden states for every position of two texts."""

    shared_embeddings: SharedEmbeddings
    head: EagleHead
    input_ids: Tensor
    hidden_states: Tensor

    def merge_embeddings(self, visual_mask: Tensor) -> Tensor:
        """Merged embeddings: visual tokens have their own, not the placeholder's."""
        own = torch.randn(*self.input_ids.shape, 32, generator=torch.Generator().manual_seed(5))
        return torch.where(visual_mask[..., None], own, self.shared_embeddings.embed_tokens(self.input_ids))


def build_fake_target() -> FakeTarget:
    """The fake target, the same in every call."""
    rng = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        embeddings = SharedEmbeddings(nn.Embedding(40, 32), nn.Linear(32, 40, bias=False))
        head = EagleHead(HEAD_CONFIG)
    for weight in head.parameters():
        weight.data.mul_(1.5)
    embeddings.lm_head.weight.data.mul_(3)  # type: ignore[operator,union-attr]
    ids = torch.randint(3, 38, (2, 16), generator=rng)
    return FakeTarget(embeddings, head.eval(), ids, torch.randn(2, 16, 32, generator=rng))


def build_prompt(
    target: FakeTarget, length: int, num_pads: tuple[int, int] = (0, 0), pad_right: bool = False, **kwargs: Any
) -> Prompt:
    """Row b: the first `length - num_pads[b]` tokens of its text (2 to 4 are visual), and padding."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    embedded = target.merge_embeddings(visual)
    parts: dict[str, list[Tensor]] = {"ids": [], "padding": [], "visual": [], "embedded": [], "states": []}
    for row, count in enumerate(num_pads):
        n = length - count
        attention_mask = torch.ones(n, dtype=torch.bool)
        whole = {
            "ids": torch.where(visual, IMAGE_TOKEN_ID, target.input_ids)[row, :n],
            "padding": attention_mask,
            "visual": visual[row, :n],
        }
        whole |= {"embedded": embedded[row, :n], "states": target.hidden_states[row, :n]}
        for name, value in whole.items():
            fill = value.new_zeros(count, *value.shape[1:])
            parts[name].append(torch.cat([value, fill] if pad_right else [fill, value]))
    joined = {name: torch.stack(values) for name, values in parts.items()}
    return Prompt(
        input_ids=joined["ids"],
        attention_mask=joined["padding"],
        visual_mask=joined["visual"],
        position_ids=joined["ids"],
        hidden_states={0: joined["embedded"], NUM_LAYERS: joined["states"]},
        vocab_size=40,
        banned_ids=frozenset((0, IMAGE_TOKEN_ID)),
        shared_embeddings=target.shared_embeddings,
        **kwargs,
    )


def build_first_result(tokens: list[int]) -> VerifyResult:
    column = torch.tensor(tokens)[:, None]
    rows = [[token] for token in tokens]
    ones, zeros = torch.ones(len(tokens), dtype=torch.long), torch.zeros_like(column)
    return VerifyResult(root_only(len(tokens)), zeros, ones, column, rows, [[0]] * len(tokens))


def build_result(tree: DraftTree, accepted_nodes: list[list[int]], tokens: list[list[int]]) -> VerifyResult:
    """The result of a round with these accepted nodes and emitted tokens."""
    longest = max(map(len, tokens))
    fill = (
        [[*row, *[0] * (longest - len(row))] for row in tokens],
        [[*row, *[0] * (longest - len(row))] for row in accepted_nodes],
    )
    counts = torch.tensor([len(row) for row in tokens])
    return VerifyResult(tree, torch.tensor(fill[1]), counts, torch.tensor(fill[0]), tokens, accepted_nodes)


def begin_decoding(target: FakeTarget, drafter: HeadDrafter, prompt: Prompt) -> DraftState:
    """The drafter's state after the prompt, with the next tokens of the texts as first tokens."""
    state = drafter.begin(prompt)
    lengths = prompt.attention_mask.sum(1).tolist()
    drafter.observe(state, build_first_result([int(target.input_ids[row, n]) for row, n in enumerate(lengths)]), {})
    drafter.read_prompt(state)
    drafter.read_pending(state)
    return state


def check_no_host_copy(drafter: HeadDrafter, state: DraftState, *layers: int) -> None:
    """A draft asks for no value, in trees of one shape per bucket.

    Fake tensors have shapes and no values: whatever asks for one (`.item()`, an index by condition) raises.
    """
    taps = {layer: torch.randn(2, 4, 32) for layer in layers}
    drafter.observe(state, build_result(root_only(2).pad(4), [[0, 2], [0]], [[5, 6], [7]]), taps)
    drafter.observe(state, build_result(root_only(2).pad(4), [[0], [0]], [[5], [7]]), taps)
    for max_nodes in (16, 8):
        with FakeTensorMode(allow_non_fake_inputs=True):
            tree = drafter.propose(state, max_nodes, [True, False])
            assert tree.tokens.shape == (2, max_nodes)
            with pytest.raises(Exception, match="local_scalar_dense"):
                tree.tokens.tolist()


def reference_draft_inputs(
    target: FakeTarget, head: EagleHead, visual_mode: str, row: int, n: int
) -> tuple[list[Tensor], list[int]]:
    """The head's inputs for the first n tokens of a text in a visual mode, token n being known, and their positions."""
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    embed = target.shared_embeddings.embed_tokens
    embedded = target.merge_embeddings(visual)[row]
    after = embed(target.input_ids[row, n])
    rows, positions = [], []
    for p in range(n):
        next_embeds = embedded[p + 1] if p + 1 < n else after
        visible = p + 1 < n and bool(visual[row, p + 1])
        if visual_mode == "text_only" and visible:
            continue
        if visual_mode == "placeholder" and visible:
            next_embeds = embed(torch.tensor(IMAGE_TOKEN_ID))
        fused = head.fc(torch.cat([next_embeds, target.hidden_states[row, p]]))
        rows.append(next_embeds if visual_mode == "decoupled" and visible else fused)
        positions.append(p)
    return rows, positions


def reference_forward(
    head: EagleHead, inputs: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """The layer, written out. attention_mask: [n, n] bool, which rows each row looks at; all up to itself if None."""
    layer, n, d = head.layer, len(inputs), HEAD_CONFIG.head_dim
    queries, keys, values = layer.qkv_proj(inputs).view(n, 8, d).split([4, 2, 2], 1)
    angle = position_ids[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotate(v: Tensor) -> Tensor:
        pairs = torch.complex(v[..., : d // 2], v[..., d // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    sees = torch.ones(n, n, dtype=torch.bool).tril() if attention_mask is None else attention_mask
    scores = torch.einsum("ihd,jhd->hij", rotate(queries), rotate(keys).repeat_interleave(2, 1)) / math.sqrt(d)
    shares = scores.masked_fill(~sees, -math.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", shares, values.repeat_interleave(2, 1))
    inputs = inputs + layer.o_proj(out.flatten(1))
    if not layer.has_mlp:
        return inputs
    normed = inputs * (inputs.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.post_norm.weight
    gate, up = layer.gate_up_proj(normed).chunk(2, -1)
    result: Tensor = inputs + layer.down_proj(functional.silu(gate) * up)
    return result


def scores_by_path(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """{tokens below the root: score} of a row's nodes."""
    assert tree.scores is not None
    found: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node, "parents first"
        paths.append((*paths[parent], int(tree.tokens[row, node])))
        if tree.node_mask[row, node]:
            assert paths[-1] not in found, "twins"
            found[paths[-1]] = float(tree.scores[row, node])
    return found


def build_train_batch(target: FakeTarget, seed: int = 0, length: int = 14) -> TrainBatch:
    visual = torch.zeros(2, 16, dtype=torch.bool)
    visual[:, 2:5] = True
    index = torch.arange(16)[:length]
    answer = (index >= 7) & (index < torch.tensor([[14], [12]]))
    attention_mask = index < torch.tensor([[14], [12]])
    ids = torch.where(visual, IMAGE_TOKEN_ID, target.input_ids)[:, :length]
    return TrainBatch(
        ids,
        attention_mask,
        visual[:, :length],
        answer,
        target.merge_embeddings(visual)[:, :length],
        target.hidden_states[:, :length],
        next_ids=target.shared_embeddings.logits(target.hidden_states[:, :length]).argmax(-1),
    )


def new_trainer(
    target: FakeTarget, folder: Path, draft_models: dict[str, DraftModel], batch: TrainBatch | None = None, **plan: Any
) -> Trainer:
    """A run over one batch; the target's embeddings are frozen."""
    shared = target.shared_embeddings
    for part in (shared.embed_tokens, shared.lm_head):
        part.requires_grad_(False)
    given = build_train_batch(target) if batch is None else batch
    placeholder = shared.embed_tokens(torch.tensor(IMAGE_TOKEN_ID)).detach()
    config = TrainConfig(**{"max_steps": 40, "batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 2} | plan)
    return Trainer(folder, draft_models, config, shared, lambda step: given, placeholder, {"target": "t"})


# --- of heads that read several layers --------------------------------------------------------------------------------


def layer_states(target: FakeTarget, layer: int) -> Tensor:
    """[2, 16, 32] of a layer; the last are those of the fake target."""
    if layer == NUM_LAYERS:
        return target.hidden_states
    return torch.randn(target.hidden_states.shape, generator=torch.Generator().manual_seed(layer))


def build_layers_prompt(target: FakeTarget, length: int, pads: tuple[int, int]) -> Prompt:
    prompt = build_prompt(target, length, pads)
    states = dict(prompt.hidden_states)
    for layer in (0, 1):
        rows = [
            functional.pad(layer_states(target, layer)[row, : length - count], (0, 0, count, 0))
            for row, count in enumerate(pads)
        ]
        states[layer] = torch.stack(rows) if layer else states[0]
    return replace(prompt, hidden_states=states)


def descend(
    given: LossInputs, loss_of: Callable[[LossInputs], Any], lr: float, steps: int
) -> list[tuple[float, dict[str, float]]]:
    """Gradient steps on one batch. Returns the loss and the metrics of each."""
    optimizer, history = torch.optim.Adam(given.draft_model.parameters(), lr=lr), []
    for _ in range(steps):
        loss, metrics = loss_of(given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((float(loss.detach()), metrics))
    return history


def check_training(target: FakeTarget, name: str, head: DraftHead, loss_of: Callable[[LossInputs], Any]) -> None:
    """A few steps lower the loss of a head over pairs, teach its second position, and reach every weight."""
    model, batch = DraftModel(head.train(), "coupled", name), build_layers_batch(target)
    given = LossInputs(model, batch, target.shared_embeddings, torch.zeros(32), LossWeights(logits=1.0, loss="kl"))
    (first, before), *_, (last, after) = descend(given, loss_of, 1e-2, 25)
    assert last < 0.8 * first and after["agree2"] > before["agree2"]
    assert all(weight.grad is not None for weight in model.parameters()), "every weight is trained"


def build_layers_batch(target: FakeTarget) -> TrainBatch:
    batch = build_train_batch(target)
    embeds = batch.inputs_embeds.detach()
    aux = {layer: embeds if layer == 0 else layer_states(target, layer)[:, :14] for layer in LAYERS}
    return replace(batch, inputs_embeds=embeds, aux_hidden_states=aux)
