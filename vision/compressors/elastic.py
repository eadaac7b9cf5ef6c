"""SpecVLM's elastic compressor (arXiv 2509.11815, section 3.2): per prompt, a light gate picks one of several ways.

The gate reads the prompt's last state and how many visual tokens there are. Training draws its choice with Gumbel noise
and lets gradients through the chosen share; it also charges the gate for what it shows, which the paper does not: its
loss has nothing that asks for fewer tokens. At the end the gate is told what each way cost (`learn`), which the paper
does not do either. In use the likeliest is taken, and only what some row chose is computed.
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
from mmspec.vision.compressors.pooling import Conv, Pool
from mmspec.vision.compressors.resampler import Resampler
from mmspec.vision.compressors.row_groups import origin_of, padded
from mmspec.vision.compressors.select import Drop, Prune, Stride, distinctness, relevance

CHARGE = 0.02
"""What the loss grows by if a gate shows every visual token: of a clip that is 1% to 5% of a call on two CPU cores, and
a head whose loss is higher by 0.01 accepts about 1% less."""
SURE = 100.0
"""What costs are multiplied by in a gate that was told them: a difference of 0.01 of loss counts."""
SHRINKS = [10.0**power for power in range(-2, 9)]


class Elastic(nn.Module):
    """Chooses among ways for each row.

    Attributes:
        chosen: after a call, the way of each row by name, on the host; None before.
        cost: after a call in training, what the loss is to grow by for what the gate likes to show; else None.
    """

    name = "elastic"

    def __init__(self, hidden_size: int, tokens: int, ways: Sequence[Compressor] = ()) -> None:
        """
        Args:
            ways: what is chosen among; by default nothing, pooling and pruning by what the vision tower attends to (to
                the budget and to a fourth of it), every n-th token, the most relevant ones, a convolution, a resampler.

        Raises:
            ValueError: fewer than one token.
        """
        super().__init__()
        if tokens < 1:
            raise ValueError(f"an elastic compressor keeps at least 1 token; got {tokens}.")
        self.hidden_size, self.max_tokens = hidden_size, tokens
        self.branches: list[Compressor] = list(ways) or _ways(hidden_size, tokens)
        # Registered besides, since a list of protocols is no ModuleList.
        self.learned = nn.ModuleList([way for way in self.branches if isinstance(way, nn.Module)])
        self.gate = nn.Linear(hidden_size + 1, len(self.branches))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.attends = any(getattr(way, "attends", False) for way in self.branches)
        self.chosen: list[str] | None = None
        self.cost: Tensor | None = None
        self._only: tuple[int, list[GateObservation]] | None = None

    def train(self, mode: bool = True) -> Elastic:
        """Puts the gate into training. The ways stay as they are in use, so that each keeps what its name says."""
        super().train(mode)
        self.learned.eval()
        return self

    def labels(self) -> list[str]:
        """The ways by name, with what each keeps."""
        return [compressor_label(way) for way in self.branches]

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Each row by the way that its gate picks, with at most `budget` tokens.

        Raises:
            ValueError: there is no question.
        """
        if query is None:
            raise ValueError("an elastic compressor needs the question's last state (query); got None.")
        sight = _sight(visual_tokens, query)
        if self._only is not None:
            way, seen = self._only
            part = self.branches[way].compress(visual_tokens, query, min(max_tokens, self.branches[way].max_tokens))
            seen.append(GateObservation(sight, CHARGE * part.mask.sum(1) / visual_tokens.mask.sum(1).clamp(min=1)))
            return part
        logits = self.gate(sight).float()
        # Drawn on the host, so that a seed means the same on every device.
        shares = functional.gumbel_softmax(logits.cpu(), hard=True).to(logits) if self.training else _hard(logits)
        picked = shares.argmax(1)
        names = picked.tolist()  # once per prompt, not per round
        self.chosen = [self.labels()[way] for way in names]
        # In training the ways that were not chosen tell the gate what they would have given.
        wanted = range(len(self.branches)) if self.training else sorted(set(names))
        few = {
            n: self.branches[n].compress(visual_tokens, query, min(max_tokens, self.branches[n].max_tokens))
            for n in wanted
        }
        self.cost = _charge(logits, [few[n].mask for n in wanted], visual_tokens.mask) if self.training else None
        return self._joined(visual_tokens, few, names, shares)

    @contextmanager
    def force_branch(self, way: int) -> Iterator[list[GateObservation]]:
        """See `mmspec.interfaces.GatedCompressor`; for training, not for calls of several threads."""
        seen: list[GateObservation] = []
        self._only = way, seen
        try:
            yield seen
        finally:
            self._only = None

    @torch.no_grad()
    def fit_gate(self, sights: Tensor, costs: Tensor) -> None:
        """See `mmspec.interfaces.GatedCompressor`. The gate becomes the ridge regression of the costs, of which the least wins.

        How much it shrinks what it was told is chosen by generalised cross-validation: of sights that say nothing about
        costs, the way stays that is best on the whole.
        """
        x, y = sights.double(), (costs - costs.mean(1, keepdim=True)).double().to(sights.device)
        middle, level = x.mean(0), y.mean(0)
        left, sizes, right = torch.linalg.svd(x - middle, full_matrices=False)
        told = left.T @ (y - level)

        def kept(shrink: float) -> Tensor:
            return sizes**2 / (sizes**2 + shrink)

        def error(shrink: float) -> float:
            rest = (y - level - left @ (kept(shrink)[:, None] * told)).square().sum()
            return float(rest / (1 - (1 + kept(shrink).sum()) / (len(x) + 1)) ** 2)

        best = min(SHRINKS, key=error)
        slope = right.T @ ((kept(best) / sizes.clamp(min=1e-9))[:, None] * told)
        self.gate.weight.copy_(-SURE * slope.T)
        self.gate.bias.copy_(-SURE * (level - middle @ slope))

    def _joined(
        self, visual: VisualTokens, few: dict[int, VisualTokens], names: Sequence[int], shares: Tensor
    ) -> VisualTokens:
        """Rows of several lengths as one batch; gradients reach the gate through the shares, of which one is 1."""
        longest = max(part.mask.shape[1] for part in few.values())
        device = visual.mask.device
        rows = torch.tensor(names, device=device)
        out: VisualTokens | None = None
        for number, part in few.items():
            part = padded(part, longest)
            scale = shares[:, number, None, None].to(part.inputs_embeds.dtype) * part.mask[..., None]
            part = replace(part, inputs_embeds=part.inputs_embeds * scale, hidden_states=part.hidden_states * scale)
            out = part if out is None else _plus(rows == number, part, out)
        assert out is not None
        return replace(out, choices=tuple(self.labels()[way] for way in names))


def _ways(hidden_size: int, tokens: int) -> list[Compressor]:
    some = max(1, tokens // 4)
    ways: list[Compressor] = [Drop(), Stride(some), Prune(some, "relevant", relevance)]
    for size in sorted({some, tokens}):
        ways += [Pool(size), Prune(size, "salient", distinctness, attends=True)]
    return [*ways, Conv(hidden_size, tokens), Resampler(hidden_size, min(2, tokens))]


def _sight(visual: VisualTokens, query: Tensor) -> Tensor:
    """[B, D + 1] what the gate reads: the question's last state, normed, and the log of the number of tokens."""
    count = visual.mask.sum(1, keepdim=True).float()
    state = functional.layer_norm(query.float(), query.shape[-1:])
    return torch.cat([state, (1 + count).log() / math.log(1000)], dim=1)


def _hard(logits: Tensor) -> Tensor:
    return functional.one_hot(logits.argmax(1), logits.shape[1]).float()


def _charge(logits: Tensor, kept: Sequence[Tensor], mask: Tensor) -> Tensor:
    """[] of the tokens [B, M] the share that ways [B, K] keep, in the mean over what the gate may pick."""
    shares = torch.stack([part.sum(1) for part in kept], dim=1) / mask.sum(1, keepdim=True).clamp(min=1)
    return CHARGE * (logits.softmax(1) * shares).sum(1).mean()


def _plus(rows: Tensor, one: VisualTokens, other: VisualTokens) -> VisualTokens:
    """The sum; what stands where, in the rows [B] as in one, in the rest as in another."""
    return VisualTokens(
        one.inputs_embeds + other.inputs_embeds,
        one.hidden_states + other.hidden_states,
        torch.where(rows[:, None], one.mask, other.mask),
        torch.where(rows[:, None], one.position_ids, other.position_ids),
        source_indices=torch.where(rows[:, None], origin_of(one), origin_of(other)),
    )


__all__ = ["Elastic"]
