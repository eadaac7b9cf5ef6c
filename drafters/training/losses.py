"""What a draft head is trained on: rows of teacher data, rolled out over its own outputs, and the losses on them.

Losses: smooth L1 on the states and soft cross-entropy on the logits (EAGLE, arXiv 2401.15077; weights as MSD published
them), summed over rollout steps in which the head reads what it said itself ("training-time test" of EAGLE-3, arXiv
2503.01840), since that is what it does below the first level of a tree. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mmspec.drafters.eagle.head import EagleHead
from mmspec.drafters.eagle.visual_inputs import VISUAL_MODES, DraftInputs, compressed_inputs, left_pack
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import SharedEmbeddings, VisualGrid


@dataclass(frozen=True)
class TrainBatch:
    """A batch of whole texts as the target has read them, padded on the right.

    Attributes:
        ids: [B, L] int64. real: [B, L] bool, False for pads. visual: [B, L] bool. answer: [B, L] bool, the tokens that
            the target said. embedded, states: [B, L, D] merged input embeddings, states after the final norm.
        segments: the grids of its pictures, `start` counted in visual tokens of their row (`rules.prompt_grids`); empty
            if the family cannot tell. attended: as in `Prompt`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    response_mask: Tensor
    inputs_embeds: Tensor
    hidden_states: Tensor
    grids: tuple[VisualGrid, ...] = field(default=(), kw_only=True)
    visual_saliency: Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same on a device."""
        attended = None if self.visual_saliency is None else self.visual_saliency.to(device)
        return TrainBatch(*(part.to(device) for part in self.tensors()), grids=self.grids, visual_saliency=attended)

    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, in their order."""
        return (
            self.input_ids,
            self.attention_mask,
            self.visual_mask,
            self.response_mask,
            self.inputs_embeds,
            self.hidden_states,
        )

    def split(self) -> list[TrainBatch]:
        """Each text by itself, without pads; copies, so that a row can outlive the batch."""
        sizes = self.attention_mask.sum(1).tolist()

        def alone(row: int, n: int) -> TrainBatch:
            grids = tuple(replace(one, row=0) for one in self.grids if one.row == row)
            parts = [
                None if part is None else part[row : row + 1, :n].clone()
                for part in (*self.tensors(), self.visual_saliency)
            ]
            return TrainBatch(*parts[:-1], grids=grids, visual_saliency=parts[-1])  # type: ignore[arg-type]

        return [alone(row, n) for row, n in enumerate(sizes)]

    @classmethod
    def collate(cls, rows: Sequence[TrainBatch]) -> TrainBatch:
        """Texts as a batch, zeros behind each."""
        grids = tuple(replace(one, row=number) for number, row in enumerate(rows) for one in row.grids)
        heard = [row.visual_saliency for row in rows if row.visual_saliency is not None]

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return pad_sequence([one[0] for one in parts], batch_first=True)

        parts = map(padded, zip(*(row.tensors() for row in rows), strict=True))
        return cls(*parts, grids=grids, visual_saliency=padded(heard) if len(heard) == len(rows) else None)


@dataclass(frozen=True)
class LossWeights:
    """How much each part of the loss counts.

    Attributes:
        states, words: smooth L1 on states, soft cross-entropy on logits (1 and 0.1 in EAGLE and MSD).
        rollout: steps in which the head reads its own outputs, after the first. decay: what each further step counts.
    """

    hidden: float = 1.0
    logits: float = 0.1
    ttt_steps: int = 2
    step_decay: float = 0.8


@dataclass(frozen=True)
class Progress:
    """Where a run is: `done`, the share of its steps that are behind it, and the dice of this step."""

    fraction: float = 0.0
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


@dataclass
class DraftModel:
    """A head that is trained, the rule by which it reads, its kind (of `drafters.kinds`), and what shrinks pictures for
    it, if anything does; it learns along."""

    head: Any
    visual_mode: str
    architecture: str = "eagle"
    compressor: Any = None

    def modules(self) -> nn.ModuleDict:
        """All that has weights."""
        learns = isinstance(self.compressor, nn.Module)
        return nn.ModuleDict({"head": self.head, **({"compressor": self.compressor} if learns else {})})


@dataclass
class DraftTargets:
    """Input rows [B, n, D] of the head, and what follows each of them.

    Attributes:
        following: [B, n, D] embedding of the next token. goal: [B, n, D] state at the next position.
        learn: [B, n] bool. positions: [B, n]. cost: what the compressor adds to the loss, if anything.
    """

    inputs: Tensor
    next_embeds: Tensor
    target_hidden: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    compressor_loss: Tensor | None = None


def build_targets(draft_model: DraftModel, batch: TrainBatch, placeholder: Tensor) -> DraftTargets:
    """What a head reads of a lesson, and what it should say: nothing but words of the answer is learned."""
    length = batch.input_ids.shape[1]
    sight = DraftInputs(
        next_embeds=batch.inputs_embeds.roll(-1, 1),
        hidden_states=batch.hidden_states,
        visual_mask=batch.visual_mask.roll(-1, 1),
        placeholder_embed=placeholder,
    )
    index = torch.arange(length, device=batch.input_ids.device).expand(batch.input_ids.shape)
    answered = batch.response_mask & batch.attention_mask
    learn = answered.roll(-1, 1) & answered.roll(-2, 1) & (index < length - 2)
    parts = (sight.next_embeds, batch.hidden_states.roll(-1, 1), learn)
    if draft_model.compressor is not None:
        # The question's last state; what comes after it is the answer, which a drafter has not seen yet.
        asked = answered.long().argmax(1).sub(1).clamp(min=0)
        query = batch.hidden_states.gather(1, asked[:, None, None].expand(-1, 1, batch.hidden_states.shape[-1]))[:, 0]
        rows, keep, index = compressed_inputs(
            *(
                draft_model.head,
                draft_model.visual_mode,
                sight,
                batch.attention_mask,
                index,
                draft_model.compressor,
                query,
                batch.grids,
            ),
            saliency=None if batch.visual_saliency is None else batch.visual_saliency.roll(-1, 1),
        )
        text, *packed = left_pack(
            batch.attention_mask & ~sight.visual_mask, *parts
        )  # as the text stands behind what is shown
        most = int(text.max())
        before = [part.new_zeros(len(part), rows.shape[1] - most, *part.shape[2:]) for part in parts]
        parts = tuple(torch.cat((none, part[:, :most]), dim=1) for none, part in zip(before, packed, strict=True))  # type: ignore[assignment]
    else:
        rows, chosen = VISUAL_MODES[draft_model.visual_mode](draft_model.head, sight)
        if chosen is None:
            return DraftTargets(rows, *parts, index)
        keep = chosen & batch.attention_mask
    counts, *packed = left_pack(keep, rows, *parts, index)
    longest = int(counts.max())
    inside = torch.arange(longest, device=rows.device) < counts[:, None]
    rows, following, goal, learn, index = (part[:, :longest] for part in packed)
    return DraftTargets(rows, following, goal, learn & inside, index, getattr(draft_model.compressor, "cost", None))


def shift(part: Tensor, steps: int) -> Tensor:
    """What stands `steps` rows further on; the last rows get what is never learned from."""
    return part.roll(-steps, 1)


def shifted_loss_mask(data: DraftTargets, steps: int) -> Tensor:
    """[B, n] bool, rows that learn what stands `steps` beyond what follows."""
    n = data.loss_mask.shape[1]
    inside = torch.arange(n, device=data.loss_mask.device) < n - steps
    return data.loss_mask & shift(data.loss_mask, steps) & inside


class PackedQueries:
    """The rows that learn, packed: of all others, visual tokens above all, only keys and values are wanted.

    Attributes:
        places: [B, m] int64, where they stand among the rows; past a text's own they repeat some other.
    """

    def __init__(self, targets: DraftTargets, query_mask: Tensor | None = None) -> None:
        """
        Args:
            wanted: [B, n] bool, if not just those that learn.
        """
        n = targets.loss_mask.shape[1]
        self.targets, index = targets, torch.arange(n, device=targets.loss_mask.device).expand(targets.loss_mask.shape)
        counts, places = left_pack(targets.loss_mask if query_mask is None else query_mask, index)
        self.query_index = places[:, : max(1, int(counts.max()))]
        self._real = torch.arange(self.query_index.shape[1], device=places.device) < counts[:, None]
        self.causal_mask = index[:, None] <= self.query_index[..., None]

    def gather(self, part: Tensor) -> Tensor:
        """[B, m, ...], of [B, n, ...]."""
        return gather_rows(part, self.query_index)

    def loss_mask(self, steps: int) -> Tensor:
        """[B, m] bool, see `learned`."""
        return self.gather(shifted_loss_mask(self.targets, steps)) & self._real


class LossAccumulator:
    """The loss so far, and figures: `states`, `words` of the first part, and `agree0`, `agree1`, ... of each, the share
    of rows at which the head's likeliest word is the target's; `cost`, if the compressor has one."""

    def __init__(
        self, shared_embeddings: SharedEmbeddings, weights: LossWeights, compressor_loss: Tensor | None = None
    ) -> None:
        self.shared_embeddings, self.weights, self.compressor_loss = shared_embeddings, weights, compressor_loss
        self.total: Tensor | float = 0.0
        self.metrics: dict[str, float] = {}

    def add(self, step: int, hidden_states: Tensor, target_hidden: Tensor, logit_bias: Tensor | None = None) -> None:
        """What was said and should have been, [n, D] states each, `part` places beyond the first.

        Args:
            added: [n, V] to the scores of what was said.
        """
        if not len(hidden_states):
            return
        said, meant = (
            self.shared_embeddings.lm_head(hidden_states).float(),
            self.shared_embeddings.lm_head(target_hidden).float().detach(),
        )
        said = said if logit_bias is None else said + logit_bias.float()
        near = functional.smooth_l1_loss(hidden_states.float(), target_hidden.float())
        soft = -(meant.softmax(-1) * said.log_softmax(-1)).sum(-1).mean()
        share = self.weights.step_decay**step
        self.total = self.total + share * (self.weights.hidden * near + self.weights.logits * soft)
        self.metrics[f"agree{step}"] = float((said.argmax(-1) == meant.argmax(-1)).float().mean())
        if step == 0:
            self.metrics |= {"states": float(near.detach()), "words": float(soft.detach())}

    def result(self) -> tuple[Tensor, dict[str, float]]:
        """The loss and the figures."""
        if self.compressor_loss is not None:
            self.total = self.total + self.compressor_loss
            self.metrics["cost"] = float(self.compressor_loss.detach())
        return torch.as_tensor(self.total), self.metrics


def eagle_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: Progress,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a lesson for a head that says one token a pass, and figures (`Sum`)."""
    head, data = draft_model.head, build_targets(draft_model, batch, placeholder)
    asked, told = PackedQueries(data), LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    memory, rows = RolloutCache(head, asked), data.inputs
    for step in range(weights.ttt_steps + 1):
        out = memory.forward(rows, data.position_ids + step)
        learn = asked.loss_mask(step)
        told.add(step, out[learn], asked.gather(shift(data.target_hidden, step))[learn])
        if step < weights.ttt_steps:
            rows = head.fuse(asked.gather(shift(data.next_embeds, step + 1)), out)
    return told.result()


class RolloutCache:
    """Keys and values of the rollout: in step i a row looks at all rows of step 0 up to its own, and at what itself was
    in the steps between, as a node of a tree looks at the text and at its ancestors (EAGLE-3, section 3.2)."""

    def __init__(self, head: EagleHead, queries: PackedQueries) -> None:
        self.head, self.queries = head, queries
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """Rows of the next step in, in step 0 [B, n, D], then [B, m, D]; the head's outputs [B, m, D] out.

        Args:
            positions: [B, n] of all rows.
        """
        first = not self.keys
        angles = self.head.rotary_embedding(position_ids if first else self.queries.gather(position_ids), inputs.dtype)
        cos, sin = (part[:, None] for part in angles)
        out: Tensor = self.head(inputs, cos, sin, self._attend, self.queries.query_index if first else None)
        return out

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._append(queries.shape[1] // keys.shape[1], keys, values)
        if len(self.keys) == 1:
            mask = self.queries.causal_mask[:, None]
            return functional.scaled_dot_product_attention(queries, self.keys[0], self.values[0], mask)
        return self._rollout_attention(queries)

    def _append(self, copies: int, keys: Tensor, values: Tensor) -> None:
        """Remember a step, each head of keys and values as often as queries share it."""
        self.keys.append(keys.repeat_interleave(copies, 1))
        self.values.append(values.repeat_interleave(copies, 1))

    def _rollout_attention(self, queries: Tensor) -> Tensor:
        """Attention to the first step causally, to the later ones row by row."""
        scale = queries.shape[-1] ** -0.5
        hidden = ~self.queries.causal_mask[:, None]
        first = (queries @ self.keys[0].transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
        later = [(queries * keys).sum(-1, keepdim=True) * scale for keys in self.keys[1:]]
        shares = torch.cat([first, *later], dim=-1).float().softmax(-1).to(queries.dtype)
        n = self.keys[0].shape[2]
        seen = shares[..., :n] @ self.values[0]
        for place, values in enumerate(self.values[1:]):
            seen = seen + shares[..., n + place : n + place + 1] * values
        return seen


__all__ = [
    "Asked",
    "DraftTargets",
    "Lesson",
    "LossAccumulator",
    "LossWeights",
    "Progress",
    "Pupil",
    "RolloutCache",
    "build_targets",
    "eagle_loss",
    "shift",
    "shifted_loss_mask",
]
