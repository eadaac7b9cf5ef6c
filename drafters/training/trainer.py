"""`Trainer`: steps, checkpoints that survive an interruption, and a log. Several heads can share one target.

Batch n is the same in every run and carries the target's hidden states (`TrainBatch`), so none are written to disk. The
module knows neither the source of the batches nor the drafters.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.bf16 import bf16_is_faster
from mmspec.drafters.heads.registry import find_method
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.gate import fit_gate_on_batches
from mmspec.drafters.training.losses import LossInputs, LossWeights, TrainProgress
from mmspec.files import atomic_write
from mmspec.interfaces import GatedCompressor, SharedEmbeddings
from mmspec.metrics.compression_stats import compressor_label

STATE_NAME, LOG_NAME = "state.pt", "log.jsonl"
GATE_BATCHES = 32
"""Batches on which the gate of a `GatedCompressor` is fitted after the last step."""


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, max_steps: int, final_scale: float) -> float:
    """Learning rate of a step: linear warm-up to `peak`, then a cosine down to `peak * final_scale` at `max_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return peak * (final_scale + (1 - final_scale) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of a run.

    Attributes:
        max_steps: optimizer steps.
        batch_size: sequences per step, over all processes.
        learning_rate: the highest one.
        warmup_steps: steps of linear warm-up.
        max_grad_norm: gradients are clipped to this norm.
        seed: of the noise and of every random choice.
        weights: of the loss.
    """

    max_steps: int = 1000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    max_grad_norm: float = 0.5
    seed: int = 0
    weights: LossWeights = field(default_factory=LossWeights)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to one hundredth of the highest rate."""
        return warmup_cosine(
            step, peak=self.learning_rate, warmup_steps=self.warmup_steps, max_steps=self.max_steps, final_scale=0.01
        )


@dataclass(frozen=True)
class DistributedContext:
    """The processes of a data-parallel run.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        mean: all-reduce of a tensor to the mean over all processes.
    """

    rank: int = 0
    world_size: int = 1
    mean: Callable[[Tensor], Tensor] = lambda value: value


class SettingsError(ValueError):
    """The folder holds a run that cannot be resumed: with other settings, or damaged."""


def check_resume(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare the settings of the run in a folder with those of this one.

    Raises:
        SettingsError: names the settings that differ.
    """
    differs = sorted(name for name in {*current, *saved} if saved.get(name) != current.get(name))
    if differs:
        raise SettingsError(
            f"{folder} holds a run with other settings ({', '.join(differs)}); name another folder, or repeat the "
            "settings."
        )


class Trainer:
    """One run in a folder.

    Attributes:
        draft_models: by name.
        step: number of steps done.
        gate_is_fitted: whether the gates of the compressors were fitted.
        settings: JSON values that a resumed run must repeat.
    """

    def __init__(
        self,
        folder: Path,
        draft_models: Mapping[str, DraftModel],
        config: TrainConfig,
        shared_embeddings: SharedEmbeddings,
        get_batch: Callable[[int], TrainBatch],
        placeholder: Tensor,
        facts: Mapping[str, Any],
        distributed: DistributedContext | None = None,
    ) -> None:
        """
        Args:
            folder: of the run; an interrupted run in it is resumed.
            draft_models: by name.
            config: hyperparameters.
            shared_embeddings: of the target.
            get_batch: step -> its sequences (this process's share of them).
            placeholder: [D] embedding of the media placeholder id.
            facts: further JSON values that a resumed run must repeat.
            distributed: of a data-parallel run; None for a single process.

        Raises:
            SettingsError: the folder holds another run, or a damaged one.
        """
        self.folder = folder
        self.draft_models = dict(draft_models)
        self.config = config
        self.shared_embeddings = shared_embeddings
        self.get_batch = get_batch
        self.placeholder = placeholder
        self.distributed = distributed or DistributedContext()
        settings = {"config": asdict(config), **facts, "draft_models": self._model_settings()}
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.step = 0
        self.gate_is_fitted = False
        folder.mkdir(parents=True, exist_ok=True)
        self.optimizers = {
            name: torch.optim.AdamW(
                model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )
            for name, model in self.draft_models.items()
        }
        if (folder / STATE_NAME).exists():
            self._resume()

    def _model_settings(self) -> dict[str, Any]:
        return {
            name: {
                "architecture": model.architecture,
                "visual_mode": model.visual_mode,
                **({} if model.compressor is None else {"compressor": compressor_label(model.compressor)}),
                **asdict(model.head.config),
            }
            for name, model in self.draft_models.items()
        }

    def _resume(self) -> None:
        file = self.folder / STATE_NAME
        try:
            state = torch.load(file, map_location=self.placeholder.device, weights_only=True)
        except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
            raise SettingsError(
                f"{file} is damaged ({str(error).splitlines()[0][:120]}); delete it to train again from the start."
            ) from error
        check_resume(self.folder, state["settings"], self.settings)
        for name, model in self.draft_models.items():
            model.load_state_dict(state["heads"][name])
            self.optimizers[name].load_state_dict(state["optimisers"][name])
        self.step = state["step"]
        self.gate_is_fitted = state.get("weighed", False)

    def save(self) -> None:
        """Write the checkpoint under a temporary name and rename it, so that the previous one survives a failure.

        Raises:
            OSError: it cannot be written.
        """
        if self.distributed.rank:
            return
        state = {
            "settings": self.settings,
            "step": self.step,
            "weighed": self.gate_is_fitted,
            "heads": {name: model.state_dict() for name, model in self.draft_models.items()},
            "optimisers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }
        file = self.folder / STATE_NAME
        try:
            with atomic_write(file) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError when a disk is full
            raise OSError(
                f"{file} could not be written at step {self.step}, the checkpoint before it stays: "
                f"make room and run again ({' '.join(str(error).split())[:120]})."
            ) from error

    def run(
        self,
        max_seconds: float = math.inf,
        save_every_s: float = 240.0,
        on_step: Callable[[dict[str, float]], None] = lambda metrics: None,
    ) -> bool:
        """Train until the last step or until the time is up.

        Args:
            max_seconds: time limit.
            save_every_s: seconds between checkpoints.
            on_step: called with the metrics of each step.

        Returns:
            True after the last step, False if the time was up before.
        """
        start = saved = time.monotonic()
        for model in self.draft_models.values():
            model.train()
        while self.step < self.config.max_steps:
            metrics = self._train_step()
            self.step += 1
            on_step(metrics)
            if self.step % 10 == 0 or self.step == self.config.max_steps:
                self._log(metrics)
            now = time.monotonic()
            if now - saved > save_every_s or now - start > max_seconds:
                self.save()
                saved = now
            if now - start > max_seconds:
                return False
        if not self.gate_is_fitted:
            self._fit_gates()
        self.save()
        return True

    def _fit_gates(self) -> None:
        """Fit the gates of the compressors; every process on its own sequences, then the mean of the weights."""
        for model in self.draft_models.values():
            if not isinstance(model.compressor, GatedCompressor):
                continue
            model.eval()
            num_batches = min(self.config.max_steps, GATE_BATCHES)
            batches = (self.get_batch(step).to(self.placeholder.device) for step in range(num_batches))
            with self._autocast():
                fit_gate_on_batches(model, batches, self.shared_embeddings, self.placeholder, self.config.weights)
            for name, weight in model.named_parameters():
                if name.startswith("compressor."):
                    weight.data = self.distributed.mean(weight.data)
        self.gate_is_fitted = True

    def _autocast(self) -> torch.autocast:
        device = self.placeholder.device
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16_is_faster(device))

    def _train_step(self) -> dict[str, float]:
        start = time.monotonic()
        batch = self.get_batch(self.step).to(self.placeholder.device)
        metrics: dict[str, float] = {"teacher_s": time.monotonic() - start}
        learning_rate = self.config.learning_rate_at(self.step)
        for name, model in self.draft_models.items():
            self.optimizers[name].param_groups[0]["lr"] = learning_rate
            prefix = f"{name}/" if len(self.draft_models) > 1 else ""
            model_metrics = self._train_model(model, self.optimizers[name], batch)
            metrics |= {prefix + key: value for key, value in model_metrics.items()}
        return metrics | {"rate": learning_rate, "s": time.monotonic() - start}

    def _train_model(self, model: DraftModel, optimizer: torch.optim.Optimizer, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step of one head; its metrics."""
        seed = self.config.seed * 1_000_003 + self.step
        progress = TrainProgress(self.step / self.config.max_steps, torch.Generator().manual_seed(seed))
        compute_loss = find_method(model.architecture).loss()
        # A compressor draws from torch's default generator, which is seeded for this step and restored.
        with torch.random.fork_rng(devices=[]), self._autocast():
            torch.default_generator.manual_seed(seed)
            loss, metrics = compute_loss(
                LossInputs(model, batch, self.shared_embeddings, self.placeholder, self.config.weights, progress)
            )
        parameters = list(model.parameters())
        optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:  # False if the batch has no position to learn
            loss.backward()
        if self.distributed.world_size > 1:
            for weight in parameters:
                # Every process joins every all-reduce, also without a gradient: the others would wait for it.
                weight.grad = self.distributed.mean(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        norm = nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        if torch.isfinite(norm):
            optimizer.step()
        return metrics | {"loss": float(loss.detach()), "norm": float(norm)}

    def _log(self, metrics: dict[str, float]) -> None:
        if self.distributed.rank:
            return
        row = {"step": self.step} | {name: round(value, 5) for name, value in metrics.items()}
        with (self.folder / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
