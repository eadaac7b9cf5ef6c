"""Tiny random vision-language models, their inputs as tensors, and a tokenizer whose tokens do not end at spaces.

Everything is computed from a `ModelSpec` and a seed; nothing is downloaded. Independent of mmspec.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import zoo
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = tuple(zoo.FIRST)
VIDEO_FAMILIES = tuple(name for name, row in zoo.FIRST.items() if row.videos is not None)
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ModelSpec:
    """One tiny model. `text` "" is the family's usual one; `window` 0 is none; `tail` puts the special ids last.

    A `calm` model has weak attention, so that its greedy output soon repeats.
    """

    family: str = "llava"
    text: str = ""
    vocab: int = 120
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    mixed: bool = False
    tied: bool = False
    attention: str = "sdpa"
    dtype: str = "float32"
    tail: bool = False
    calm: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SpecialIds:
    """The special ids of a model; `text` are all others."""

    pad: int
    bos: int
    eos: int
    image: int
    video: int
    start: int
    end: int
    text: tuple[int, ...]


def special_ids(spec: ModelSpec) -> SpecialIds:
    """The special ids of `spec`: at the front, or (as after adding tokens to a finished vocabulary) at the end."""
    v = spec.vocab
    special = (v - 1, 1, 2, v - 5, v - 4, v - 3, v - 2) if spec.tail else (0, 1, 2, 3, 4, 5, 6)
    return SpecialIds(*special, text=tuple(i for i in range(v) if i not in special))


def _randomize_weights(model: PreTrainedModel, seed: int, calm: bool) -> None:
    """Weights large enough that attention, images and history all change the next token."""
    rng = torch.Generator().manual_seed(seed)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=rng)
        if weight.ndim >= 2:
            gain = 3.0 if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            gain *= 0.1 if calm and "language_model" in name and "o_proj" in name else 1.0
            scale = gain / (weight[0].numel() ** 0.5)
            if "embed" in name and "patch" not in name:
                scale = 0.5 if tied else 1.0
        else:
            scale = 0.1 if name.endswith("bias") or "norm" in name else 0.7
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        weight.data.copy_(offset + scale * noise)


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """A new model of `spec`, in eval mode; its generation config knows the special ids and nothing else."""
    state = torch.get_rng_state()
    model = zoo.FAMILIES[spec.family].build(spec, special_ids(spec))
    torch.set_rng_state(state)
    _randomize_weights(model, spec.seed, spec.calm)
    special = special_ids(spec)
    config = model.generation_config
    config.pad_token_id, config.bos_token_id, config.eos_token_id = special.pad, special.bos, special.eos
    model.tiny_spec = spec
    return model.to(getattr(torch, spec.dtype)).eval()


def _build_row(
    special: SpecialIds, media: list[list[int]], num_tokens: int, rng: random.Random, num_ids: int
) -> list[int]:
    """A prompt row: `num_tokens` ids out of the first `num_ids` text ids, with the placeholder runs in between."""
    text = [rng.choice(special.text[:num_ids]) for _ in range(num_tokens)]
    if len(text) >= 6 and rng.random() < 0.6:  # a repeated n-gram for prompt lookup
        text[-3:] = text[:3]
    cuts = sorted(rng.randint(0, max(0, num_tokens - 1)) for _ in media)
    row: list[int] = []
    for begin, end, run in zip([0, *cuts], [*cuts, num_tokens], [*media, []], strict=True):
        row += text[begin:end] + run
    return row


def _pad(rows: list[list[int]], pad: int, side: str, extra: int) -> tuple[Tensor, Tensor]:
    length = max(len(row) for row in rows) + extra
    gaps = [length - len(row) for row in rows]
    before = [gap if side == "left" else 0 for gap in gaps]
    padded = [[pad] * b + row + [pad] * (g - b) for row, b, g in zip(rows, before, gaps, strict=True)]
    mask = [[0] * b + [1] * len(row) + [0] * (g - b) for row, b, g in zip(rows, before, gaps, strict=True)]
    return torch.tensor(padded), torch.tensor(mask)


def build_inputs(
    target: PreTrainedModel,
    seed: int = 0,
    batch: int = 1,
    *,
    images: Sequence[int] | None = None,
    videos: Sequence[int] | None = None,
    padding: str = "left",
    mask: bool = True,
    num_text_tokens: tuple[int, int] = (4, 14),
    num_distinct_ids: int = 40,
) -> Inputs:
    """Keyword arguments for `target.generate`: a random batch of prompts.

    Args:
        images, videos: how many in each row; None draws 0 to 3 images, one at least in the batch, and no video.
        padding: "left", "right" (both with at least one pad somewhere if anything is ragged), "none" (equal lengths).
        mask: False leaves `attention_mask` to HF.
        num_text_tokens: bounds of the number of text tokens of a row.
        num_distinct_ids: number of different text ids.
    """
    rng, spec = random.Random(seed), target.tiny_spec
    special, family = special_ids(spec), zoo.FAMILIES[spec.family]
    counts = list(images) if images is not None else [rng.randint(0, 3) for _ in range(batch)]
    if family.images is None:
        counts = [0] * batch
    elif not any(counts) and (images is None or family.needs_image):
        counts[rng.randrange(batch)] = 1
    clips = list(videos) if videos is not None else [0] * batch
    if any(clips) and not family.mixes_media:
        counts = [0] * batch
    given, image_runs = family.images(target, sum(counts), rng, seed) if family.images and any(counts) else ({}, [])
    more, video_runs = family.videos(target, sum(clips), rng, seed) if family.videos and any(clips) else ({}, [])
    still, moving, media = iter(image_runs), iter(video_runs), []
    for count, clip in zip(counts, clips, strict=True):
        media.append([next(still) for _ in range(count)] + [next(moving) for _ in range(clip)])
    lengths = [rng.randint(*num_text_tokens) for _ in range(batch)]
    if padding == "none":
        visual_lengths = [sum(map(len, runs)) for runs in media]
        lengths = [max(visual_lengths) + lengths[0] - own for own in visual_lengths]
    rows = [_build_row(special, runs, size, rng, num_distinct_ids) for runs, size in zip(media, lengths, strict=True)]
    extra = 0 if padding == "none" else rng.randint(0, 2)
    prompt, padded = _pad(rows, special.pad, padding, extra)
    inputs = {"input_ids": prompt, **given, **more}
    if mask:
        inputs["attention_mask"] = padded
    return inputs | family.derived(target, prompt)


def build_next_turn(
    previous: Inputs, sequences: Tensor, seed: int, spec: ModelSpec, *, hide_pads: bool = False
) -> Inputs:
    """Inputs of the next turn: all tokens so far and a few random ones. The images are in the cache."""
    rng, special = random.Random(seed), special_ids(spec)
    batch, longer = sequences.shape[0], rng.randint(2, 5)
    new_ids = torch.tensor([[rng.choice(special.text[:40]) for _ in range(longer)] for _ in range(batch)])
    prompt = torch.cat([sequences, new_ids], dim=1)
    mask = torch.ones_like(prompt)
    old = previous.get("attention_mask", (previous["input_ids"] != special.pad).long())
    mask[:, : old.shape[1]] = old.repeat_interleave(batch // old.shape[0], dim=0)
    if hide_pads:
        mask &= (prompt != special.pad).long()
    return {"input_ids": prompt, "attention_mask": mask}


def token_texts(spec: ModelSpec) -> list[str]:
    """The text of each id: one to three letters of a to f, lengths mixed, so that stop strings span tokens."""
    special = special_ids(spec)
    strings = list("abcdef") + ["".join(w) for n in (2, 3) for w in product("abcdef", repeat=n)]
    random.Random(7).shuffle(strings)
    text = strings[: len(special.text)]
    for letter in "abcdef":
        if letter not in text:
            text[next(i for i, string in enumerate(text) if len(string) == 3)] = letter
    spelled = [""] * spec.vocab
    for i, string in zip(special.text, text, strict=True):
        spelled[i] = string
    for name in ("pad", "bos", "eos", "image", "video", "start", "end"):
        spelled[getattr(special, name)] = f"<{name}>"
    return spelled


def build_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerFast:
    """A tokenizer for the whole vocabulary of `spec`."""
    backend = Tokenizer(BPE({word: i for i, word in enumerate(token_texts(spec))}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
