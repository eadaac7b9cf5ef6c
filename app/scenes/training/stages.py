"""The stages of the training of the scenes model: how long, how fast, and what learns at which rate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.app.scenes.training.build_model import NUM_LOWER_LAYERS
from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.training.schedule import warmup_cosine


@dataclass(frozen=True)
class TrainingStage:
    """One part of the training.

    Attributes:
        first: the seed of its first sample. eyes: learning rate of the tower, in shares of `rate`; 0 freezes it.
        last: the learning rate falls to this share of `rate`. named: weight of the losses on visual tokens.
        layers: how many layers of the text model are there; those that are added later begin as doing nothing, so that
            much is learned at a fraction of the cost.
        upper: learning rate of the layers from `LOWER` on, in shares of `rate`. Their first steps are large and blind.
        clips: share of the batches that are clips, which are several times as long.
        full: half of the pictures of chats have four to six things, which teaches more names; else they are as the
            world has them and numbers are asked more often and of all kinds alike, which teaches how often there is but
            one.
    """

    name: str
    steps: int
    batch: int
    rate: float
    first: int
    warmup: int = 100
    eyes: float = 0.0
    last: float = 0.02
    named: float = 0.3
    layers: int = 10
    upper: float = 1.0
    clips: float = 0.1
    full: bool = True


STAGES = (
    TrainingStage("see", 7500, 32, 1e-3, first=0, eyes=1.0),
    TrainingStage("talk", 1400, 16, 1e-3, first=1_000_000, last=0.3, layers=NUM_LOWER_LAYERS, eyes=0.1, clips=0.04),
    TrainingStage("settle", 300, 16, 4e-4, first=3_000_000, warmup=20, named=0.2, eyes=0.04, upper=0.3, clips=0.06),
    TrainingStage("polish", 2600, 16, 6e-4, first=5_000_000, warmup=20, eyes=0.2, clips=0.15),
    TrainingStage("even", 220, 16, 5e-4, first=7_000_000, warmup=30, eyes=0.2, clips=0.28, full=False),
)


def learning_rate_at(stage: TrainingStage, step: int) -> float:
    """Warm-up, then a cosine down to the last."""
    return warmup_cosine(
        step, peak=stage.rate, warmup_steps=stage.warmup, max_steps=stage.steps, final_scale=stage.last
    )


def learning_rate_scale(name: str, stage: TrainingStage) -> float:
    """The learning rate of a weight, in shares of the stage's."""
    if "vision_tower" in name or name.startswith("tower"):
        return stage.eyes
    layer = re.search(r"language_model\.layers\.(\d+)\.", name)
    return stage.upper if layer is not None and int(layer[1]) >= NUM_LOWER_LAYERS else 1.0


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, in float32 where that is faster (`halves`); where bfloat16 is emulated a step takes minutes.

    Muon (K. Jordan et al. 2024, scaled as in arXiv 2502.16982) makes the update of a matrix orthogonal; it needs fewer
    steps than AdamW at the same rates. State is that of the parent; settings are to be those of
    `Optimisers`: Nesterov's momentum, "match_rms_adamw".
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; decay is independent of the update."""
        if all(bf16_is_faster(weight.device) for group in self.param_groups for weight in group["params"]):
            super().step()
            return
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(
                    weight.grad.lerp(mean, group["momentum"]), group["ns_coefficients"], group["ns_steps"]
                )
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The nearest matrix with singular values of about one, by Newton and Schulz; [m, n] as given."""
    a, b, c = coefficients
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


class MuonAdamW:
    """Muon for the matrices of the layers, AdamW for all else; the tower may have a share of the rate."""

    def __init__(self, stage: TrainingStage, module: nn.Module) -> None:
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, weight in module.named_parameters():
            share = learning_rate_scale(name, stage)
            weight.requires_grad_(share > 0)
            if share:
                groups.setdefault((weight.ndim == 2 and ".layers." in name, share), []).append(weight)
        made: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for (matrix, share), weights in groups.items():
            made[matrix].append({"params": weights, "share": share})
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(made[True], lr=stage.rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(made[False], lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.02),
        ]

    def step(self, learning_rate: float) -> None:
        """One step at this learning rate."""
        for optimiser in self.optimizers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * group["share"]
            optimiser.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimiser in self.optimizers:
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps."""
        return [optimiser.state_dict() for optimiser in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint."""
        for optimiser, state in zip(self.optimizers, states, strict=True):
            optimiser.load_state_dict(state)
