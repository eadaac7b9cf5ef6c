"""The training stages of the scenes model (steps, learning rates, data mixture) and the optimizer, Muon with AdamW."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.training.trainer import warmup_cosine
from research.scenes.build_model import NUM_LOWER_LAYERS


@dataclass(frozen=True)
class TrainingStage:
    """One training stage. The fields are also the keys of a stage in `training.json`.

    Attributes:
        name: Name of the stage; "see" trains the vision tower alone, every other name the whole model.
        steps: Number of optimizer steps.
        batch: Samples per step.
        rate: Peak learning rate.
        first: Seed of the first sample.
        warmup: Steps of linear warm-up.
        eyes: Learning rate of the vision tower as a share of `rate`; 0 freezes it.
        last: Learning rate at the last step as a share of `rate`.
        named: Weight of the auxiliary losses on visual tokens and named things.
        layers: Number of text layers in use. Layers added by a later stage start as identity, so the early stages cost
            a fraction of the full depth.
        upper: Learning rate of the layers from `NUM_LOWER_LAYERS` on as a share of `rate`; their first updates are
            large and noisy.
        clips: Share of the batches that are clips, which are several times as long as scenes.
        full: Half of the scenes have four to six things, which teaches more names. If False, scenes follow the world's
            distribution and counting questions are more frequent and balanced over kinds, which teaches that one is the
            usual count.
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
    """Return the factor on the stage's learning rate for the parameter of that name."""
    if "vision_tower" in name or name.startswith("tower"):
        return stage.eyes
    layer = re.search(r"language_model\.layers\.(\d+)\.", name)
    return stage.upper if layer is not None and int(layer[1]) >= NUM_LOWER_LAYERS else 1.0


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that computes in float32 on devices where bfloat16 is emulated.

    Muon (K. Jordan et al. 2024, with the scaling of arXiv 2502.16982) orthogonalises the update of a matrix. The
    orthogonalisation of `torch.optim.Muon` runs in bfloat16, which takes minutes per step where `cpu.linear` finds no
    native support. State is that of the parent class; the float32 path implements only the settings of `MuonAdamW`:
    Nesterov momentum and `adjust_lr_fn="match_rms_adamw"`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one optimizer step, with decoupled weight decay."""
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
    """Return the [m, n] matrix with the singular vectors of `matrix` and singular values of about one.

    Args:
        matrix: [m, n].
        coefficients: Coefficients a, b, c of the Newton-Schulz polynomial a X + b X X^T X + c (X X^T)^2 X.
        steps: Number of iterations.
    """
    a, b, c = coefficients
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


class MuonAdamW:
    """Muon for the weight matrices of transformer layers, AdamW for all other parameters."""

    def __init__(self, stage: TrainingStage, module: nn.Module) -> None:
        """
        Args:
            stage: Learning rate and its factors per group of parameters.
            module: What is trained. `requires_grad` of its parameters is set: False where the factor is 0.
        """
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, weight in module.named_parameters():
            share = learning_rate_scale(name, stage)
            weight.requires_grad_(share > 0)
            if share:
                groups.setdefault((weight.ndim == 2 and ".layers." in name, share), []).append(weight)
        param_groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for (use_muon, share), weights in groups.items():
            param_groups[use_muon].append({"params": weights, "share": share})
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(param_groups[True], lr=stage.rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(param_groups[False], lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.02),
        ]

    def step(self, learning_rate: float) -> None:
        """Run one step at this learning rate; each group applies its factor."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["share"]
            optimizer.step()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of both optimizers, for `load_state_dict`."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of both optimizers."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
