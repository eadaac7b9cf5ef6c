"""Losses of draft heads, over a rollout in which the head reads its own outputs.

Smooth L1 on the hidden states and soft cross-entropy on the logits (EAGLE, arXiv 2401.15077; weights as in MSD), summed
over `ttt_steps` training-time-test steps: in `ttt_step` 0 the head reads the target's hidden states, in later ones its
own outputs, as it does below the first level of a tree. With a loss on the hidden states in every `ttt_step`, this is
the harmonized context alignment of HASS (arXiv 2408.15766). EAGLE-3 (arXiv 2503.01840), whose term "training-time test"
is the common one, has no such loss: its head has an LM head and a vocabulary of its own. `DISTRIBUTION_LOSSES` can
replace the cross-entropy. The module knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.markov import fit_vocabulary
from mmspec.drafters.training.batch import (
    DraftModel,
    HeadInputsAndLabels,
    Labels,
    PackedQueries,
    TrainBatch,
    build_inputs_and_labels,
    shift,
)
from mmspec.drafters.training.distribution_losses import DISTRIBUTION_LOSSES, overlap
from mmspec.interfaces import SharedEmbeddings

LossAndMetrics = tuple[Tensor, dict[str, float]]
"""What the loss of a method returns: the loss, a scalar, and the metrics of `LossAccumulator`."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the parts of the loss.

    Attributes:
        hidden: of smooth L1 on the hidden states (1 in EAGLE and MSD).
        logits: of soft cross-entropy on the logits (0.1 in EAGLE and MSD).
        ttt_steps: training-time-test steps, which is the number of forwards; 1 for no rollout.
        step_decay: factor of each further `ttt_step`, or slot of a block.
        loss: of the logits, a key of `DISTRIBUTION_LOSSES`.

    Raises:
        ValueError: `ttt_steps` below 1, or an unknown `loss`.
    """

    hidden: float = 1.0
    logits: float = 0.1
    ttt_steps: int = 3
    step_decay: float = 0.8
    loss: str = "ce"

    def __post_init__(self) -> None:
        if self.loss not in DISTRIBUTION_LOSSES:
            raise ValueError(f"loss must be one of {', '.join(DISTRIBUTION_LOSSES)}; got {self.loss!r}.")
        if self.ttt_steps < 1:
            raise ValueError(f"ttt_steps must be at least 1; got {self.ttt_steps}.")


@dataclass(frozen=True)
class TrainProgress:
    """How far a training run has come, and its randomness.

    Attributes:
        fraction: share of its optimizer steps that are done, 0 to 1.
        rng: random generator of this optimizer step.
    """

    fraction: float = 0.0
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class LossInputs:
    """What the loss of a method reads, a function of it that returns `LossAndMetrics`.

    Attributes:
        draft_model: head, visual mode and compressor.
        batch: hidden states of the target.
        shared_embeddings: of the target.
        placeholder: [D] embedding of the media placeholder id.
        weights: of the parts of the loss.
        progress: of the run.
    """

    draft_model: DraftModel
    batch: TrainBatch
    shared_embeddings: SharedEmbeddings
    placeholder: Tensor
    weights: LossWeights = field(default_factory=LossWeights)
    progress: TrainProgress = field(default_factory=TrainProgress)

    def aligned(self) -> HeadInputsAndLabels:
        """See `build_inputs_and_labels`."""
        return build_inputs_and_labels(self.draft_model, self.batch, self.placeholder, self.progress.rng)

    def accumulator(self, data: HeadInputsAndLabels, has_own_lm_head: bool = False) -> LossAccumulator:
        """An empty sum; with `has_own_lm_head` the head's outputs are not compared with hidden states."""
        return LossAccumulator(self, data.compressor_loss, has_own_lm_head)


class LossAccumulator:
    """Sums the loss over the `ttt_steps` of a rollout or the slots of a block, and collects metrics.

    Attributes:
        total: the loss so far.
        metrics: `hidden_loss` and `logits_loss` of `ttt_step` 0, unweighted; `agree0`, `agree1`, ..., the share of
            positions of each `ttt_step` or slot whose argmax is the target's; `compressor_loss`, if there is one.
    """

    def __init__(self, given: LossInputs, compressor_loss: Tensor | None, has_own_lm_head: bool) -> None:
        """
        Args:
            given: inputs of the loss.
            compressor_loss: what the compressor adds, or None.
            has_own_lm_head: the head's outputs are no hidden states of the target: there is no loss on them.
        """
        self.shared_embeddings, self.weights = given.shared_embeddings, given.weights
        self.compressor_loss = compressor_loss
        self.head, self.has_own_lm_head, ids = given.draft_model.head, has_own_lm_head, given.draft_model.draft_ids
        self.draft_ids = ids
        self.head_rows = None if ids is None else self.head.draft_lm_head(self.shared_embeddings, ids)
        self.path_probability: Tensor | None = None  # [B, m] that the draft tokens so far are accepted, for "path"
        self.total: Tensor | float = 0.0
        self.metrics: dict[str, float] = {}

    def add(
        self,
        ttt_step: int,
        hidden_states: Tensor,
        labels: Labels,
        logit_bias: Tensor | None = None,
        mask: Tensor | None = None,
        confidence: Tensor | None = None,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Add the loss of one `ttt_step` or slot.

        Args:
            ttt_step: of the rollout, or slot of a block, from 0.
            hidden_states: [n, D] outputs of the head.
            labels: of the same positions; where the target's likeliest token is not draftable there is no loss on
                logits (EAGLE-3, appendix).
            logit_bias: [n, V] added to the head's logits, or None; fitted to the rows of the target's LM head.
            mask: [B, m] bool with n positions, the same [B, m] in every step; needed by the loss "path" alone.
            confidence: [n] logit of the acceptance of each position; its cross-entropy is added.
            choose: [n, V] logits of the head -> [n, C] ids of candidates and their scores; the loss of these is added
                where the target's argmax is among them.
        """
        if not len(hidden_states):
            return
        logits, target_logits = self._logits(hidden_states, labels.hidden_states)
        logits = logits if logit_bias is None else logits + fit_vocabulary(logit_bias.float(), logits.shape[-1])
        losses, best = DISTRIBUTION_LOSSES[self.weights.loss](logits, target_logits), target_logits.argmax(-1)
        agrees = logits.argmax(-1) == best
        if choose is not None:
            candidates, scores = choose(logits)
            chosen = DISTRIBUTION_LOSSES[self.weights.loss](scores, target_logits.gather(1, candidates))
            losses = losses + chosen * (candidates == best[:, None]).any(1)
            agrees = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0] == best
        if self.weights.loss == "path" and mask is not None:
            losses = losses * self._path_weights(logits, target_logits, mask)
        logits_loss = (losses * labels.is_draftable).mean()
        loss = self.weights.logits * logits_loss
        if not self.has_own_lm_head:
            hidden_loss = functional.smooth_l1_loss(hidden_states.float(), labels.hidden_states.float())
            loss = loss + self.weights.hidden * hidden_loss
        if confidence is not None:
            acceptance = overlap(logits, target_logits).detach()
            confidence_loss = functional.binary_cross_entropy_with_logits(confidence.float(), acceptance)
            loss = loss + self.weights.logits * confidence_loss
            self.metrics[f"confidence{ttt_step}"] = float(confidence_loss.detach())
        self.total = self.total + self.weights.step_decay**ttt_step * loss
        self.metrics[f"agree{ttt_step}"] = float((agrees & labels.is_draftable).float().mean())
        if ttt_step == 0:
            self.metrics["logits_loss"] = float(logits_loss.detach())
            if not self.has_own_lm_head:
                self.metrics["hidden_loss"] = float(hidden_loss.detach())

    def _logits(self, hidden_states: Tensor, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the head and of the target over the draft vocabulary, float32 [n, V']."""
        logits = self.head.logits(hidden_states, self.shared_embeddings, self.head_rows).float()
        target_logits = self.shared_embeddings.logits_of(target_hidden, self.draft_ids).float().detach()
        return logits, target_logits[..., : logits.shape[-1]]

    def _path_weights(self, logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
        """[n] probability that all draft tokens before are accepted; multiplies it by that of this step."""
        if self.path_probability is None:
            self.path_probability = logits.new_ones(mask.shape)
        weights = self.path_probability[mask]
        self.path_probability = self.path_probability.masked_scatter(
            mask, weights * overlap(logits, target_logits).detach()
        )
        return weights

    def result(self) -> tuple[Tensor, dict[str, float]]:
        """The loss, a scalar, and the metrics."""
        if self.compressor_loss is not None:
            self.total = self.total + self.compressor_loss
            self.metrics["compressor_loss"] = float(self.compressor_loss.detach())
        return torch.as_tensor(self.total), self.metrics


class RolloutCache:
    """Keys and values of a rollout (harmonized context alignment of HASS).

    In `ttt_step` i a position attends causally to the positions of step 0 and to itself in steps 1 to i, as a tree node
    attends to the context and to its ancestors.
    """

    def __init__(self, head: DraftHead, packed: PackedQueries) -> None:
        self.head = head
        self.packed = packed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, inputs: Tensor, offset: int = 0) -> Tensor:
        """Run one forward, which is one `ttt_step`.

        Args:
            inputs: [B, n, D] in `ttt_step` 0, [B, m, D] in later ones.
            offset: added to the position ids of all positions.

        Returns:
            [B, m, D] outputs at the packed positions.
        """
        is_first, position_ids = not self.keys, self.packed.data.position_ids + offset
        position_ids = position_ids if is_first else self.packed.gather(position_ids)
        cos, sin = (part[:, None] for part in self.head.rotary_embedding(position_ids, inputs.dtype))
        outputs: Tensor = self.head(inputs, cos, sin, self._attend, self.packed.query_index if is_first else None)
        return outputs

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._append(queries.shape[1] // keys.shape[1], keys, values)
        if len(self.keys) == 1:
            mask = self.packed.causal_mask[:, None]
            return functional.scaled_dot_product_attention(queries, self.keys[0], self.values[0], mask)
        return self._rollout_attention(queries)

    def _append(self, num_groups: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of a `ttt_step`, each head repeated `num_groups` times (grouped queries)."""
        self.keys.append(keys.repeat_interleave(num_groups, 1))
        self.values.append(values.repeat_interleave(num_groups, 1))

    def _rollout_attention(self, queries: Tensor) -> Tensor:
        """Attention to `ttt_step` 0 causally, and to the later ones at the same position."""
        scale = queries.shape[-1] ** -0.5
        is_hidden = ~self.packed.causal_mask[:, None]
        context = (queries @ self.keys[0].transpose(-1, -2) * scale).masked_fill(is_hidden, float("-inf"))
        own = [(queries * keys).sum(-1, keepdim=True) * scale for keys in self.keys[1:]]
        weights = torch.cat([context, *own], dim=-1).float().softmax(-1).to(queries.dtype)
        n = self.keys[0].shape[2]
        outputs = weights[..., :n] @ self.values[0]
        for index, values in enumerate(self.values[1:]):
            outputs = outputs + weights[..., n + index : n + index + 1] * values
        return outputs


def rollout_loss(given: LossInputs, cache: RolloutCache, has_own_lm_head: bool = False) -> LossAndMetrics:
    """The loss of a head that predicts one token per forward, over a rollout on its own outputs.

    Args:
        given: inputs of the loss.
        cache: of this head, empty.
        has_own_lm_head: see `LossInputs.accumulator`.
    """
    packed, head = cache.packed, given.draft_model.head
    data, inputs = packed.data, packed.data.inputs
    loss = given.accumulator(data, has_own_lm_head)
    for ttt_step in range(given.weights.ttt_steps):
        outputs = cache.forward(inputs, ttt_step)
        mask = packed.loss_mask_at(ttt_step)
        loss.add(ttt_step, outputs[mask], packed.labels(ttt_step, mask), mask=mask)
        if ttt_step + 1 < given.weights.ttt_steps:
            inputs = head.fuse(packed.gather(shift(data.next_embeds, ttt_step + 1)), head.carried(outputs))
    return loss.result()


def eagle_loss(given: LossInputs) -> LossAndMetrics:
    """The loss of a head that predicts one token per forward (EAGLE, MSD, EAGLE-3)."""
    head = given.draft_model.head
    cache = RolloutCache(head, PackedQueries(given.aligned()))
    return rollout_loss(given, cache, has_own_lm_head=bool(head.config.draft_vocab_size))
