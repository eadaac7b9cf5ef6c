"""Targets and requests of the study of online learning: a fine-tuned scenes model, a text model and its prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.tasks import SceneRequest, generate_requests

LORA_RANK = 8
LORA_LAYERS = ("q_proj", "v_proj", "o_proj", "down_proj")
TUNING_LEARNING_RATE = 1e-3
TUNING_BATCH = 4
TUNING_SEED = 15_000_000
"""Seed of the first scene of the fine-tuning, far from those that are measured."""


class LoraDelta(nn.Module):
    """A weight plus a product of low rank (LoRA, arXiv 2106.09685), which is zero at the start."""

    def __init__(self, weight: Tensor, rng: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(LORA_RANK, weight.shape[1], generator=rng) * weight.shape[1] ** -0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], LORA_RANK))

    def forward(self, weight: Tensor) -> Tensor:
        """[out, in] -> [out, in]."""
        return weight + self.up @ self.down


def other_style(answer: str) -> str:
    """The same description with other articles."""
    return re.sub(r"\bA\b", "One", re.sub(r"\bThe\b", "This", re.sub(r"\ba\b", "one", answer)))


def fine_tune_scenes(model: Any, processor: Any, steps: int) -> Any:
    """The model after some LoRA steps on descriptions in another style, merged into its weights."""
    captioner = Captioner(model, processor)
    rng = torch.Generator().manual_seed(0)
    model.requires_grad_(False)
    layers = [
        layer
        for name, layer in model.named_modules()
        if name.rsplit(".", 1)[-1] in LORA_LAYERS and "language_model" in name
    ]
    deltas = [LoraDelta(layer.weight, rng) for layer in layers]
    for layer, delta in zip(layers, deltas, strict=True):
        parametrize.register_parametrization(layer, "weight", delta)
    parameters = [weight for delta in deltas for weight in delta.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=TUNING_LEARNING_RATE, weight_decay=0.0)
    requests = generate_requests("describe", TUNING_SEED)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = TUNING_LEARNING_RATE * (1 - step / steps)
        loss = _response_loss(model, processor, captioner, list(islice(requests, TUNING_BATCH)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return model.requires_grad_(False).eval()


def _response_loss(model: Any, processor: Any, captioner: Captioner, requests: list[SceneRequest]) -> Tensor:
    """Cross-entropy of the answers in the other style."""
    total = torch.zeros(())
    for request in requests:
        inputs = captioner.build_inputs([request.images], [request.question])
        answer = processor.tokenizer(" " + other_style(request.answer), add_special_tokens=False).input_ids
        ids = torch.tensor([[*answer, *captioner.eos_ids[:1]]])
        length = inputs["input_ids"].shape[1]
        inputs = dict(inputs) | {
            "input_ids": torch.cat((inputs["input_ids"], ids), dim=1),
            "attention_mask": torch.ones(1, length + ids.shape[1], dtype=torch.long),
        }
        logits = model(**inputs).logits[0, length - 1 : -1].float()
        total = total + nn.functional.cross_entropy(logits, ids[0])
    return total / len(requests)


TOPICS = (
    "a river", "a kitchen", "the moon", "a bicycle", "a school", "a dog", "the sea", "a garden", "a train", "a market",
    "a book", "a storm", "a bridge", "a violin", "a farm", "a city", "a forest", "a clock", "a ship", "a teacher",
)  # fmt: skip
ASPECTS = ("colour", "sound", "history", "use", "weather", "people", "size", "price", "shape", "age")


def text_requests(tokenizer: Any, count: int, first: int) -> Iterator[Mapping[str, Any]]:
    """Prompts of one kind, all different."""
    for number in range(first, first + count):
        rng = random.Random(f"text {number}")
        topic, aspects = rng.choice(TOPICS), rng.sample(ASPECTS, 2)
        question = (
            f"Write a short product review about {topic}. Mention the {aspects[0]} and the {aspects[1]}. ({number})"
        )
        chat = [{"role": "user", "content": question}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            yield {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
        else:
            yield dict(tokenizer(question, return_tensors="pt"))


__all__ = ["fine_tune_scenes", "text_requests"]
