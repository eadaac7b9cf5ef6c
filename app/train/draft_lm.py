"""`mmspec train --drafter draft-lm`: a small language model that drafts for a target, by FastDraft's recipe.

FastDraft (arXiv 2411.11055) pretrains a small model with the target's vocabulary, and fine-tunes it on texts that the
target writes. Here the pretraining is light: the model begins as a few decoder layers of the target with the target's
embeddings, which stay fixed, and learns the target's answers by cross-entropy (sequence-level distillation). It reads
no images: visual tokens are left out of the prompts, as when it drafts (`mmspec.drafters.model.model_drafter`).
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.app.errors import UsageError
from mmspec.app.train.sampler import LengthGroupedSampler
from mmspec.drafters.training.trainer import warmup_cosine
from mmspec.targets.layer_access import decoder_layers_path
from mmspec.targets.registry import find_adapter

STATE_FILE = "draft-lm.pt"
"""Checkpoint in the folder of the run."""
CHECKPOINT_EVERY_S = 60.0
WARMUP_SHARE = 0.05
"""Share of the steps with a rising learning rate."""
FINAL_SCALE = 0.05
"""Last learning rate, as a fraction of the highest."""
IGNORED = -100
"""Label of positions that are not part of an answer."""


@dataclass(frozen=True)
class TextSample:
    """One sequence: a prompt without visual tokens, and the target's answer."""

    prompt_ids: list[int]
    answer_ids: list[int]


def draft_layer_indices(num_layers: int, count: int) -> list[int]:
    """Decoder layers of the target that the draft model begins with: evenly spread, the first one included.

    Raises:
        ValueError: `count` is not 1 to `num_layers`.
    """
    if not 1 <= count <= num_layers:
        raise ValueError(f"--set draft_layers must be 1 to the target's {num_layers}; got {count}.")
    return [round(index * (num_layers - 1) / max(1, count - 1)) for index in range(count)]


def default_num_layers(num_layers: int) -> int:
    """Layers of a draft model for a target of `num_layers`: an eighth."""
    return max(1, num_layers // 8)


def init_draft_model(target: Any, count: int) -> Any:
    """A language model of `count` decoder layers of the target, with its embeddings and its final norm.

    Args:
        target: the model that the draft model is for.
        count: decoder layers.

    Raises:
        UsageError: transformers has no language model of the target's text config, or its layers differ.
    """
    from transformers import AutoModelForCausalLM

    adapter = find_adapter(target)
    try:
        indices = draft_layer_indices(adapter.num_layers, count)
        path = decoder_layers_path(adapter)
        config = copy.deepcopy(adapter.text_config)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[index] for index in indices]
        config.tie_word_embeddings = _is_tied(target)
        config.vocab_size = adapter.num_embeddings
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        layers = target.get_submodule(".".join(path))
        draft_decoder = draft.get_decoder()
        draft_layers = draft_decoder.get_submodule(path[-1])
        for draft_layer, index in zip(draft_layers, indices, strict=True):
            draft_layer.load_state_dict(layers[index].state_dict())
        for name, module in target.get_submodule(".".join(path[:-1])).named_children():
            if name != path[-1]:  # embeddings and norm
                draft_decoder.get_submodule(name).load_state_dict(module.state_dict())
        draft.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
    except (ValueError, RuntimeError, AttributeError) as error:
        text = str(error).strip().splitlines()[0][:300]
        raise UsageError(
            f"--drafter draft-lm begins with layers of the target, which failed for model_type {adapter.model_type!r}: "
            f"{text}"
        ) from error
    draft.get_input_embeddings().requires_grad_(False)
    draft.get_output_embeddings().requires_grad_(False)
    return draft.to(target.device)


def collate_samples(samples: Sequence[TextSample], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, attention mask, labels), each [B, L] int64, padded on the right; labels of the answers only."""
    rows = [sample.prompt_ids + sample.answer_ids for sample in samples]
    length = max(map(len, rows))
    ids = [row + [0] * (length - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    labels = [
        [IGNORED] * len(sample.prompt_ids) + sample.answer_ids + [IGNORED] * (length - len(row))
        for sample, row in zip(samples, rows, strict=True)
    ]
    return tuple(torch.tensor(part, device=device) for part in (ids, mask, labels))  # type: ignore[return-value]


def answer_loss(draft: Any, samples: Sequence[TextSample]) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy, share of right argmaxes) over the tokens of the answers.

    The LM head runs at these positions only: its logits would be the largest tensor by far.
    """
    ids, mask, labels = collate_samples(samples, draft.device)
    hidden_states = draft.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :-1]
    labels = labels[:, 1:]
    is_answer = labels != IGNORED
    hidden_states, labels = hidden_states[is_answer], labels[is_answer]
    logits = find_adapter(draft).shared_embeddings.logits(hidden_states).float()
    return nn.functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


class DraftLMTrainer:
    """Trains a draft model on the target's answers; resumes from the checkpoint in its folder.

    Attributes:
        draft: the draft model.
        step: steps done.
    """

    def __init__(
        self,
        folder: Path,
        draft: Any,
        samples: Sequence[TextSample],
        *,
        max_steps: int,
        batch_size: int,
        lr: float,
        seed: int,
    ) -> None:
        """
        Args:
            folder: of the run.
            draft: the draft model, from `init_draft_model`.
            samples: the training sequences.
            max_steps: steps in all.
            batch_size: sequences per step.
            lr: highest learning rate.
            seed: of the order of the sequences.

        Raises:
            UsageError: the folder holds a checkpoint of another shape or of another number of steps.
        """
        self.folder, self.draft, self.samples = folder, draft, samples
        self.max_steps, self.lr = max_steps, lr
        self.step = 0
        self._weights = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
        lengths = {index: len(one.prompt_ids) + len(one.answer_ids) for index, one in enumerate(samples)}
        self._sampler = LengthGroupedSampler(len(samples), batch_size, seed, lengths)
        self._settings = {"steps": max_steps, "batch_size": batch_size, "lr": lr, "seed": seed, "samples": len(samples)}
        self._load()

    def run(self, seconds: float, on_step: Callable[[dict[str, float]], None] = lambda metrics: None) -> bool:
        """Train until the last step, or for so many seconds; returns whether all steps are done."""
        start = saved = time.monotonic()
        self.draft.train()
        while self.step < self.max_steps and time.monotonic() - start < seconds:
            metrics = self._train_step()
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({"step": self.step, **metrics}) + "\n")
            on_step(metrics)
            if time.monotonic() - saved >= CHECKPOINT_EVERY_S:
                self.save()
                saved = time.monotonic()
        self.draft.eval()
        self.save()
        return self.step >= self.max_steps

    def save(self) -> None:
        """Write the checkpoint, under another name first."""
        file = self.folder / STATE_FILE
        state = {
            "settings": self._settings,
            "step": self.step,
            "weights": {name: weight.detach() for name, weight in self._weights.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def _train_step(self) -> dict[str, float]:
        for group in self._optimizer.param_groups:
            warmup_steps = max(1, math.ceil(WARMUP_SHARE * self.max_steps))
            group["lr"] = warmup_cosine(
                self.step, peak=self.lr, warmup_steps=warmup_steps, max_steps=self.max_steps, final_scale=FINAL_SCALE
            )
        samples = [self.samples[index] for index in self._sampler.batch_indices(self.step)]
        loss, accuracy = answer_loss(self.draft, samples)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        self._optimizer.step()
        self.step += 1
        return {"loss": round(float(loss.detach()), 4), "accuracy": round(float(accuracy), 4)}

    def _load(self) -> None:
        file = self.folder / STATE_FILE
        if not file.is_file():
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        found = {name: tuple(weight.shape) for name, weight in state["weights"].items()}
        if state["settings"] != self._settings or shapes != found:
            raise UsageError(
                f"{self.folder} holds a draft-lm run with other settings ({state['settings']}, now {self._settings}) "
                "or --set draft_layers; choose another --out, or repeat its command"
            )
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _is_tied(model: Any) -> bool:
    """Whether the input and output embeddings of a model are one tensor."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight
