"""The training loop of draft heads: steps, checkpoints that survive any cut, a log. Several heads may share a teacher.

Lesson n is the same in every run, and the target's states come with it (`training_losses.Lesson`), so nothing is dumped
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

from mmspec.cpu.linear import bf16_is_faster
from mmspec.drafters.architectures import KINDS
from mmspec.drafters.training.gate import weigh
from mmspec.drafters.training.losses import Lesson, Pupil, Weights, When
from mmspec.drafters.training.schedule import warmup_cosine
from mmspec.files import atomic_write
from mmspec.interfaces import GatedCompressor, SharedEmbeddings
from mmspec.metrics.compression_stats import compressor_label

STATE, LOG = "state.pt", "log.jsonl"
WEIGHED = 32
"""Batches of which a compressor that chooses is told at the end what each of its ways cost."""


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        steps, batch: optimiser steps, and texts in each. rate: highest learning rate. warmup: steps.
        clip: largest norm of the gradient. noise: width of uniform noise on the states, as EAGLE has it (0.2; 0 none).
    """

    steps: int = 1000
    batch: int = 16
    rate: float = 1e-3
    warmup: int = 50
    clip: float = 0.5
    noise: float = 0.0
    seed: int = 0
    weights: Weights = field(default_factory=Weights)

    def rate_at(self, step: int) -> float:
        """Warm-up, then a cosine down to a hundredth."""
        return warmup_cosine(
            step, peak=self.rate, warmup_steps=self.warmup, max_steps=self.steps, final_scale=0.01
        )


@dataclass(frozen=True)
class Party:
    """The processes that train together, each on its part of every batch.

    Attributes:
        rank, world: which one this is, and of how many. mean: [..] -> the mean over all of them.
    """

    rank: int = 0
    world: int = 1
    mean: Callable[[Tensor], Tensor] = lambda value: value


class SettingsError(ValueError):
    """The folder holds a run that cannot be gone on with: of other settings, or damaged."""


def refuse_other(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
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


class Training:
    """One run in a folder: knows where it is, does a step, writes checkpoints."""

    def __init__(
        self,
        folder: Path,
        pupils: Mapping[str, Pupil],
        plan: Plan,
        words: SharedEmbeddings,
        lesson: Callable[[int], Lesson],
        placeholder: Tensor,
        facts: Mapping[str, Any],
        party: Party | None = None,
    ) -> None:
        """
        Args:
            lesson: step -> its texts (this process's part of them).
            placeholder: [D] embedding of the picture's placeholder id.
            facts: whatever else must be the same for a run to go on (JSON values).

        Raises:
            SettingsError: another run is in the folder, or a damaged one.
        """
        self.folder, self.pupils, self.plan, self.words = folder, dict(pupils), plan, words
        self.lesson, self.placeholder, self.party = lesson, placeholder, party or Party()
        self.settings = json.loads(json.dumps({"plan": asdict(plan), **facts, "pupils": self._shapes()}))
        self.step, self.weighed = 0, False
        folder.mkdir(parents=True, exist_ok=True)
        self.optimisers = {
            name: torch.optim.AdamW(pupil.parts().parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
            for name, pupil in self.pupils.items()
        }
        if (folder / STATE).exists():
            self._resume()

    def _shapes(self) -> dict[str, Any]:
        return {
            name: {"kind": pupil.kind, "rule": pupil.rule, **_shrinks(pupil), **asdict(pupil.head.config)}
            for name, pupil in self.pupils.items()
        }

    def _resume(self) -> None:
        device = self.placeholder.device
        file = self.folder / STATE
        try:
            state = torch.load(file, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
            raise SettingsError(
                f"{file} is damaged ({str(error).splitlines()[0][:120]}); delete it to train again from the start."
            ) from error
        refuse_other(self.folder, state["settings"], self.settings)
        for name, pupil in self.pupils.items():
            pupil.parts().load_state_dict(state["heads"][name])
            self.optimisers[name].load_state_dict(state["optimisers"][name])
        self.step, self.weighed = state["step"], state.get("weighed", False)

    def save(self) -> None:
        """Write the checkpoint under another name first, so that a cut, or a full disk, leaves the last good one.

        Raises:
            OSError: it could not be written.
        """
        if self.party.rank:
            return
        state = {
            "settings": self.settings,
            "step": self.step,
            "weighed": self.weighed,
            "heads": {name: pupil.parts().state_dict() for name, pupil in self.pupils.items()},
            "optimisers": {name: optimiser.state_dict() for name, optimiser in self.optimisers.items()},
        }
        try:
            with atomic_write(self.folder / STATE) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as error:  # torch's own writer says RuntimeError when a disk is full
            raise OSError(
                f"{self.folder / STATE} could not be written at step {self.step}, the checkpoint before it stays: "
                f"make room and run again ({' '.join(str(error).split())[:120]})."
            ) from error

    def run(
        self,
        seconds: float = math.inf,
        every: float = 240.0,
        tick: Callable[[dict[str, float]], None] = lambda figures: None,
    ) -> bool:
        """Train until all is done (True) or the time is up (False). `tick` is told each step's figures."""
        began = saved = time.monotonic()
        for pupil in self.pupils.values():
            pupil.parts().train()
        while self.step < self.plan.steps:
            figures = self._step()
            self.step += 1
            tick(figures)
            if self.step % 10 == 0 or self.step == self.plan.steps:
                self._log(figures)
            now = time.monotonic()
            if now - saved > every or now - began > seconds:
                self.save()
                saved = now
            if now - began > seconds:
                return False
        if not self.weighed:
            self._weigh()
        self.save()
        return True

    def _weigh(self) -> None:
        """Compressors that choose are told what their ways cost; every process by its own texts, and the mean of it."""
        choosers = [pupil for pupil in self.pupils.values() if isinstance(pupil.compressor, GatedCompressor)]
        for pupil in choosers:
            pupil.parts().eval()
            lessons = (self.lesson(step).to(self.placeholder.device) for step in range(min(self.plan.steps, WEIGHED)))
            with self._autocast():
                weigh(pupil, lessons, self.words, self.placeholder, self.plan.weights)
            for weight in pupil.compressor.parameters():
                weight.data = self.party.mean(weight.data)
        self.weighed = True

    def _autocast(self) -> torch.autocast:
        device = self.placeholder.device
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16_is_faster(device))

    def _step(self) -> dict[str, float]:
        began, plan = time.monotonic(), self.plan
        lesson = self.lesson(self.step).to(self.placeholder.device)
        if plan.noise:
            lesson = self._noisy(lesson)
        figures: dict[str, float] = {"teacher_s": time.monotonic() - began}
        rate = plan.rate_at(self.step)
        for name, pupil in self.pupils.items():
            optimiser = self.optimisers[name]
            optimiser.param_groups[0]["lr"] = rate
            seed = plan.seed * 1_000_003 + self.step
            when = When(self.step / plan.steps, torch.Generator().manual_seed(seed))
            # A compressor is handed no dice: what it draws comes from torch's own, seeded for this step and put back.
            with (
                torch.random.fork_rng(devices=[]),
                self._autocast(),
            ):
                torch.default_generator.manual_seed(seed)
                taught = KINDS[pupil.kind].losses
                loss, told = taught(pupil, lesson, self.words, self.placeholder, plan.weights, when)
            optimiser.zero_grad(set_to_none=True)
            if loss.requires_grad:  # there was something to learn
                loss.backward()
            if self.party.world > 1:
                for weight in pupil.parts().parameters():
                    # Every process joins every mean, even one whose texts teach nothing: else the others wait for it.
                    weight.grad = self.party.mean(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            norm = nn.utils.clip_grad_norm_(pupil.parts().parameters(), plan.clip)
            if torch.isfinite(norm):
                optimiser.step()
            prefix = f"{name}/" if len(self.pupils) > 1 else ""
            told |= {"loss": float(loss.detach()), "norm": float(norm)}
            figures |= {prefix + key: value for key, value in told.items()}
        return figures | {"rate": rate, "s": time.monotonic() - began}

    def _noisy(self, lesson: Lesson) -> Lesson:
        """Uniform noise on the states (EAGLE: 0.2 wide at 512 tokens, less for longer texts)."""
        rng = torch.Generator(lesson.states.device).manual_seed(self.plan.seed * 1_000_003 + self.step)
        width = self.plan.noise * 512 / lesson.ids.shape[1]
        shape = lesson.states.shape
        noise = torch.rand(shape, generator=rng, device=lesson.states.device, dtype=torch.float32) - 0.5
        parts = {name: getattr(lesson, name) for name in lesson.__dataclass_fields__}
        return Lesson(**parts | {"states": lesson.states + (noise * width).to(lesson.states.dtype)})

    def _log(self, figures: dict[str, float]) -> None:
        if self.party.rank:
            return
        row = {"step": self.step} | {name: round(value, 5) for name, value in figures.items()}
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _shrinks(pupil: Pupil) -> dict[str, str]:
    compressor = pupil.compressor
    return {} if compressor is None else {"compressor": compressor_label(compressor)}


__all__ = ["Party", "Plan", "Pupil", "SettingsError", "Training", "refuse_other"]
