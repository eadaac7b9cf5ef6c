"""The training loop of draft heads: steps, checkpoints that survive any cut, a log. Several heads may share a teacher.

Lesson n is the same in every run, and the target's states come with it (`training_losses.TrainBatch`), so nothing is dumped
to disk. Knows neither where lessons come from nor what drafts.
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
from mmspec.drafters.architectures import ARCHITECTURES
from mmspec.drafters.training.gate import fit_gate_on_batches
from mmspec.drafters.training.losses import DraftModel, LossWeights, Progress, TrainBatch
from mmspec.drafters.training.schedule import warmup_cosine
from mmspec.files import atomic_write
from mmspec.interfaces import GatedCompressor, SharedEmbeddings
from mmspec.metrics.compression_stats import compressor_label

STATE_NAME, LOG_NAME = "state.pt", "log.jsonl"
GATE_BATCHES = 32
"""Batches of which a compressor that chooses is told at the end what each of its ways cost."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        steps, batch: optimiser steps, and texts in each. rate: highest learning rate. warmup: steps.
        clip: largest norm of the gradient. noise: width of uniform noise on the states, as EAGLE has it (0.2; 0 none).
    """

    max_steps: int = 1000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    max_grad_norm: float = 0.5
    hidden_noise: float = 0.0
    seed: int = 0
    weights: LossWeights = field(default_factory=LossWeights)

    def learning_rate_at(self, step: int) -> float:
        """Warm-up, then a cosine down to a hundredth."""
        return warmup_cosine(
            step,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
            final_scale=0.01,
        )


@dataclass(frozen=True)
class DistributedContext:
    """The processes that train together, each on its part of every batch.

    Attributes:
        rank, world: which one this is, and of how many. mean: [..] -> the mean over all of them.
    """

    rank: int = 0
    world_size: int = 1
    mean: Callable[[Tensor], Tensor] = lambda value: value


class SettingsError(ValueError):
    """The folder holds a run that cannot be gone on with: of other settings, or damaged."""


def check_resume(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Compare the settings of the run in a folder with those of this one.

    Raises:
        SettingsError: names those that differ.
    """
    differs = sorted(name for name in {*ours, *theirs} if theirs.get(name) != ours.get(name))
    if differs:
        raise SettingsError(
            f"{folder} holds a run with other settings ({', '.join(differs)}); name another folder, or repeat the "
            "settings."
        )


class Trainer:
    """One run in a folder: knows where it is, does a step, writes checkpoints."""

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
            lesson: step -> its texts (this process's part of them).
            placeholder: [D] embedding of the picture's placeholder id.
            facts: whatever else must be the same for a run to go on (JSON values).

        Raises:
            SettingsError: another run is in the folder, or a damaged one.
        """
        self.folder, self.draft_models, self.config, self.shared_embeddings = (
            folder,
            dict(draft_models),
            config,
            shared_embeddings,
        )
        self.get_batch, self.placeholder, self.distributed = get_batch, placeholder, distributed or DistributedContext()
        self.settings = json.loads(json.dumps({"plan": asdict(config), **facts, "pupils": self._shapes()}))
        self.step, self.gate_is_fitted = 0, False
        folder.mkdir(parents=True, exist_ok=True)
        self.optimizers = {
            name: torch.optim.AdamW(
                pupil.modules().parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )
            for name, pupil in self.draft_models.items()
        }
        if (folder / STATE_NAME).exists():
            self._resume()

    def _shapes(self) -> dict[str, Any]:
        return {
            name: {
                "kind": pupil.architecture,
                "rule": pupil.visual_mode,
                **_compressor_settings(pupil),
                **asdict(pupil.head.config),
            }
            for name, pupil in self.draft_models.items()
        }

    def _resume(self) -> None:
        device = self.placeholder.device
        file = self.folder / STATE_NAME
        try:
            state = torch.load(file, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
            raise SettingsError(
                f"{file} is damaged ({str(error).splitlines()[0][:120]}); delete it to train again from the start."
            ) from error
        check_resume(self.folder, state["settings"], self.settings)
        for name, pupil in self.draft_models.items():
            pupil.modules().load_state_dict(state["heads"][name])
            self.optimizers[name].load_state_dict(state["optimisers"][name])
        self.step, self.gate_is_fitted = state["step"], state.get("weighed", False)

    def save(self) -> None:
        """Write the checkpoint under another name first, so that a cut, or a full disk, leaves the last good one.

        Raises:
            OSError: it could not be written.
        """
        if self.distributed.rank:
            return
        state = {
            "settings": self.settings,
            "step": self.step,
            "weighed": self.gate_is_fitted,
            "heads": {name: pupil.modules().state_dict() for name, pupil in self.draft_models.items()},
            "optimisers": {name: optimiser.state_dict() for name, optimiser in self.optimizers.items()},
        }
        try:
            with atomic_write(self.folder / STATE_NAME) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as error:  # torch's own writer says RuntimeError when a disk is full
            raise OSError(
                f"{self.folder / STATE_NAME} could not be written at step {self.step}, the checkpoint before it stays: "
                f"make room and run again ({' '.join(str(error).split())[:120]})."
            ) from error

    def run(
        self,
        max_seconds: float = math.inf,
        save_every_s: float = 240.0,
        on_step: Callable[[dict[str, float]], None] = lambda figures: None,
    ) -> bool:
        """Train until all is done (True) or the time is up (False). `tick` is told each step's figures."""
        began = saved = time.monotonic()
        for pupil in self.draft_models.values():
            pupil.modules().train()
        while self.step < self.config.max_steps:
            figures = self._step()
            self.step += 1
            on_step(figures)
            if self.step % 10 == 0 or self.step == self.config.max_steps:
                self._log(figures)
            now = time.monotonic()
            if now - saved > save_every_s or now - began > max_seconds:
                self.save()
                saved = now
            if now - began > max_seconds:
                return False
        if not self.gate_is_fitted:
            self._fit_gates()
        self.save()
        return True

    def _fit_gates(self) -> None:
        """Compressors that choose are told what their ways cost; every process by its own texts, and the mean of it."""
        choosers = [pupil for pupil in self.draft_models.values() if isinstance(pupil.compressor, GatedCompressor)]
        for pupil in choosers:
            pupil.modules().eval()
            lessons = (
                self.get_batch(step).to(self.placeholder.device)
                for step in range(min(self.config.max_steps, GATE_BATCHES))
            )
            with self._autocast():
                fit_gate_on_batches(pupil, lessons, self.shared_embeddings, self.placeholder, self.config.weights)
            for weight in pupil.compressor.parameters():
                weight.data = self.distributed.mean(weight.data)
        self.gate_is_fitted = True

    def _autocast(self) -> torch.autocast:
        device = self.placeholder.device
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16_is_faster(device))

    def _step(self) -> dict[str, float]:
        began, plan = time.monotonic(), self.config
        lesson = self.get_batch(self.step).to(self.placeholder.device)
        if plan.hidden_noise:
            lesson = self._add_noise(lesson)
        figures: dict[str, float] = {"teacher_s": time.monotonic() - began}
        rate = plan.learning_rate_at(self.step)
        for name, pupil in self.draft_models.items():
            optimiser = self.optimizers[name]
            optimiser.param_groups[0]["lr"] = rate
            seed = plan.seed * 1_000_003 + self.step
            when = Progress(self.step / plan.max_steps, torch.Generator().manual_seed(seed))
            # A compressor is handed no dice: what it draws comes from torch's own, seeded for this step and put back.
            with (
                torch.random.fork_rng(devices=[]),
                self._autocast(),
            ):
                torch.default_generator.manual_seed(seed)
                taught = ARCHITECTURES[pupil.architecture].compute_loss
                loss, told = taught(pupil, lesson, self.shared_embeddings, self.placeholder, plan.weights, when)
            optimiser.zero_grad(set_to_none=True)
            if loss.requires_grad:  # there was something to learn
                loss.backward()
            if self.distributed.world_size > 1:
                for weight in pupil.modules().parameters():
                    # Every process joins every mean, even one whose texts teach nothing: else the others wait for it.
                    weight.grad = self.distributed.mean(
                        torch.zeros_like(weight) if weight.grad is None else weight.grad
                    )
            norm = nn.utils.clip_grad_norm_(pupil.modules().parameters(), plan.max_grad_norm)
            if torch.isfinite(norm):
                optimiser.step()
            prefix = f"{name}/" if len(self.draft_models) > 1 else ""
            told |= {"loss": float(loss.detach()), "norm": float(norm)}
            figures |= {prefix + key: value for key, value in told.items()}
        return figures | {"rate": rate, "s": time.monotonic() - began}

    def _add_noise(self, lesson: TrainBatch) -> TrainBatch:
        """Uniform noise on the states (EAGLE: 0.2 wide at 512 tokens, less for longer texts)."""
        rng = torch.Generator(lesson.hidden_states.device).manual_seed(self.config.seed * 1_000_003 + self.step)
        width = self.config.hidden_noise * 512 / lesson.input_ids.shape[1]
        shape = lesson.hidden_states.shape
        noise = torch.rand(shape, generator=rng, device=lesson.hidden_states.device, dtype=torch.float32) - 0.5
        parts = {name: getattr(lesson, name) for name in lesson.__dataclass_fields__}
        return TrainBatch(
            **parts | {"hidden_states": lesson.hidden_states + (noise * width).to(lesson.hidden_states.dtype)}
        )

    def _log(self, figures: dict[str, float]) -> None:
        if self.distributed.rank:
            return
        row = {"step": self.step} | {name: round(value, 5) for name, value in figures.items()}
        with (self.folder / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _compressor_settings(pupil: DraftModel) -> dict[str, str]:
    compressor = pupil.compressor
    return {} if compressor is None else {"compressor": compressor_label(compressor)}


__all__ = ["Party", "Pupil", "SettingsError", "TrainConfig", "Trainer", "refuse_other"]
