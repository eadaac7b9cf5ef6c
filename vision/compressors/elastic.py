"""SpecVLM's elastic compressor (arXiv 2509.11815, section 3.2): a small gate picks one of several compressors per row.

The gate reads the last hidden state of the prompt and the number of visual tokens. In training its choice is drawn with
Gumbel noise (straight-through), so gradients reach it. Two differences from the paper, whose loss contains no term that
favours fewer tokens: the loss is increased by `BUDGET_PENALTY` per share of the tokens kept, and at the end of training
the gate is fitted to the measured cost of each branch (`fit_gate`). In inference the most probable branch is used, and
only branches that some row uses are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.interfaces import Compressor, GateObservation, VisualTokens
from mmspec.metrics.compression_stats import compressor_label
from mmspec.vision.compressors.latent import TrainedCompressor
from mmspec.vision.compressors.pooling import Conv, Pool
from mmspec.vision.compressors.resampler import Resampler
from mmspec.vision.compressors.select import Drop, Relevant, Stride

BUDGET_PENALTY = 0.02
"""Increase of the loss for keeping all visual tokens. Keeping all of a video takes 1% to 5% of a call on two CPU cores,
and a head whose loss is higher by 0.01 accepts about 1% less."""
LOGIT_SCALE = 100.0
"""Factor from costs to logits in a fitted gate: a difference of 0.01 in loss is decisive."""
RIDGE_LAMBDAS = [10.0**power for power in range(-2, 9)]
"""Candidate regularisation strengths of `fit_gate`."""


class Elastic(TrainedCompressor):
    """Chooses one of several compressors (branches) for each row.

    Attributes:
        branches: The compressors it chooses among.
        choices: The label of each row's branch in the last call; None before the first.
        cost: [] float, the budget penalty of the last call in training mode; else None.
    """

    name = "elastic"

    def __init__(self, hidden_size: int, max_tokens: int, branches: Sequence[Compressor] = ()) -> None:
        """
        Args:
            hidden_size: Width D of the states.
            max_tokens: Largest number of tokens that a default branch keeps.
            branches: Compressors to choose among; `default_branches` if empty.

        Raises:
            ValueError: `max_tokens` is below 1.
        """
        super().__init__(hidden_size, max_tokens)
        self.branches: list[Compressor] = list(branches) or default_branches(hidden_size, max_tokens)
        # Registers the trainable branches; `branches` is a plain list, since not all branches are modules.
        self.learned = nn.ModuleList([branch for branch in self.branches if isinstance(branch, nn.Module)])
        self.gate = nn.Linear(hidden_size + 1, len(self.branches))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.choices: list[str] | None = None
        self.cost: Tensor | None = None
        self._forced: tuple[int, list[GateObservation]] | None = None

    def train(self, mode: bool = True) -> Elastic:
        """Set the gate's mode. Branches stay in eval mode, so that each keeps as many tokens as its label says."""
        super().train(mode)
        self.learned.eval()
        return self

    def branch_labels(self) -> list[str]:
        """The label of each branch, as in "pool:49"."""
        return [compressor_label(branch) for branch in self.branches]

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Each row by the branch that its gate picks, with at most `max_tokens` tokens.

        Raises:
            ValueError: `query` is None.
        """
        if query is None:
            raise ValueError("an elastic compressor needs the last hidden state of the prompt (query); got None.")
        features = gate_features(visual_tokens, query)
        if self._forced is not None:
            index, observations = self._forced
            compressed = self._run_branch(index, visual_tokens, query, max_tokens)
            share = compressed.mask.sum(1) / visual_tokens.mask.sum(1).clamp(min=1)
            observations.append(GateObservation(features, BUDGET_PENALTY * share))
            return compressed
        logits = self.gate(features).float()
        # Drawn on the CPU, so that a seed gives the same choice on every device.
        weights = (
            functional.gumbel_softmax(logits.cpu(), hard=True).to(logits) if self.training else _one_hot_argmax(logits)
        )
        picked = weights.argmax(1).tolist()  # synchronises with the device, once per prompt and not per round
        labels = self.branch_labels()
        self.choices = [labels[index] for index in picked]
        # In training all branches run, since the gate's gradient needs their outputs.
        needed = range(len(self.branches)) if self.training else sorted(set(picked))
        outputs = {index: self._run_branch(index, visual_tokens, query, max_tokens) for index in needed}
        self.cost = None
        if self.training:
            self.cost = _budget_loss(logits, [outputs[index].mask for index in needed], visual_tokens.mask)
        return self._merge_branches(outputs, picked, weights)

    def _run_branch(self, index: int, visual_tokens: VisualTokens, query: Tensor, max_tokens: int) -> VisualTokens:
        branch = self.branches[index]
        return branch.compress(visual_tokens, query, min(max_tokens, branch.max_tokens))

    @contextmanager
    def force_branch(self, branch: int) -> Iterator[list[GateObservation]]:
        """See `mmspec.interfaces.GatedCompressor`. For training; not thread-safe."""
        observations: list[GateObservation] = []
        self._forced = branch, observations
        try:
            yield observations
        finally:
            self._forced = None

    @torch.no_grad()
    def fit_gate(self, features: Tensor, costs: Tensor) -> None:
        """See `mmspec.interfaces.GatedCompressor`. Sets the gate to a ridge regression that predicts the costs.

        The regularisation strength is chosen by generalised cross-validation; with uninformative features the gate
        always picks the branch with the lowest mean cost.

        Args:
            features: [n, F] float, what `gate_features` returned.
            costs: [n, K] float, the loss with each of the K branches, budget penalty included.
        """
        x = features.double()
        y = (costs - costs.mean(1, keepdim=True)).double().to(features.device)
        x_mean = x.mean(0)
        y_mean = y.mean(0)
        u, singular, vt = torch.linalg.svd(x - x_mean, full_matrices=False)
        projected = u.T @ (y - y_mean)

        def shrinkage(ridge: float) -> Tensor:
            return singular**2 / (singular**2 + ridge)

        def gcv_error(ridge: float) -> float:
            residual = (y - y_mean - u @ (shrinkage(ridge)[:, None] * projected)).square().sum()
            return float(residual / (1 - (1 + shrinkage(ridge).sum()) / (len(x) + 1)) ** 2)

        best = min(RIDGE_LAMBDAS, key=gcv_error)
        slope = vt.T @ ((shrinkage(best) / singular.clamp(min=1e-9))[:, None] * projected)
        self.gate.weight.copy_(-LOGIT_SCALE * slope.T)
        self.gate.bias.copy_(-LOGIT_SCALE * (y_mean - x_mean @ slope))

    def _merge_branches(self, outputs: dict[int, VisualTokens], picked: Sequence[int], weights: Tensor) -> VisualTokens:
        """Rows of different lengths as one batch.

        Args:
            outputs: Output of each branch that ran.
            picked: Branch of each row.
            weights: [B, K] one-hot choice; gradients reach the gate through it.
        """
        length = max(part.mask.shape[1] for part in outputs.values())
        branch_of_row = torch.tensor(picked, device=next(iter(outputs.values())).mask.device)
        merged: VisualTokens | None = None
        for index, part in outputs.items():
            part = _pad(part, length)
            scale = weights[:, index, None, None].to(part.inputs_embeds.dtype) * part.mask[..., None]
            part = replace(part, inputs_embeds=part.inputs_embeds * scale, hidden_states=part.hidden_states * scale)
            merged = part if merged is None else _add_branch(branch_of_row == index, part, merged)
        assert merged is not None
        labels = self.branch_labels()
        return replace(merged, choices=tuple(labels[index] for index in picked))


def default_branches(hidden_size: int, max_tokens: int) -> list[Compressor]:
    """No token; evenly spaced and query-similar tokens (a fourth of `max_tokens`); pooling (a fourth, and
    `max_tokens`); a convolution; a resampler with two queries."""
    fourth = max(1, max_tokens // 4)
    branches: list[Compressor] = [Drop(), Stride(fourth), Relevant(fourth)]
    pools = map(Pool, sorted({fourth, max_tokens}))
    return [*branches, *pools, Conv(hidden_size, max_tokens), Resampler(hidden_size, min(2, max_tokens))]


def gate_features(visual_tokens: VisualTokens, query: Tensor) -> Tensor:
    """[B, D + 1] input of the gate: the layer-normalised query [B, D] and the log of the number of visual tokens."""
    count = visual_tokens.mask.sum(1, keepdim=True).float()
    state = functional.layer_norm(query.float(), query.shape[-1:])
    return torch.cat([state, (1 + count).log() / math.log(1000)], dim=1)


def _one_hot_argmax(logits: Tensor) -> Tensor:
    return functional.one_hot(logits.argmax(1), logits.shape[1]).float()


def _budget_loss(logits: Tensor, kept_masks: Sequence[Tensor], mask: Tensor) -> Tensor:
    """[] expected budget penalty over the branches, averaged over rows.

    Args:
        logits: [B, K] of the gate.
        kept_masks: K masks of the branches' outputs.
        mask: [B, M] of the input.
    """
    shares = torch.stack([kept.sum(1) for kept in kept_masks], dim=1) / mask.sum(1, keepdim=True).clamp(min=1)
    return BUDGET_PENALTY * (logits.softmax(1) * shares).sum(1).mean()


def _add_branch(rows: Tensor, part: VisualTokens, merged: VisualTokens) -> VisualTokens:
    """Sum of the scaled embeddings and states; mask and positions of `part` in `rows` [B] bool, else of `merged`."""
    return VisualTokens(
        part.inputs_embeds + merged.inputs_embeds,
        part.hidden_states + merged.hidden_states,
        torch.where(rows[:, None], part.mask, merged.mask),
        torch.where(rows[:, None], part.position_ids, merged.position_ids),
        source_indices=torch.where(rows[:, None], _source_indices(part), _source_indices(merged)),
    )


def _source_indices(visual_tokens: VisualTokens) -> Tensor:
    """[B, M] int64 `source_indices`; -1 (a mixture) for all tokens where the compressor sets none."""
    if visual_tokens.source_indices is None:
        return torch.full_like(visual_tokens.mask, -1, dtype=torch.long)
    return visual_tokens.source_indices


def _pad(visual_tokens: VisualTokens, length: int) -> VisualTokens:
    """The same tokens, padded on the right to `length` (mask False). The grids are dropped."""
    padding = length - visual_tokens.mask.shape[1]
    return VisualTokens(
        inputs_embeds=functional.pad(visual_tokens.inputs_embeds, (0, 0, 0, padding)),
        hidden_states=functional.pad(visual_tokens.hidden_states, (0, 0, 0, padding)),
        mask=functional.pad(visual_tokens.mask, (0, padding)),
        position_ids=functional.pad(visual_tokens.position_ids, (0, padding)),
        source_indices=functional.pad(_source_indices(visual_tokens), (0, padding), value=-1),
    )
