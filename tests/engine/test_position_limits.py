"""Calls around the last position of a model: tokens, random numbers, streamer and errors as of plain `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import adversarial as adversarial
import pytest
import torch
import transformers
from fuzz import patch_model
from parity import MODES, Kwargs
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import mmspec

LIMIT = 24
TABLES: dict[str, tuple[str, str, Kwargs]] = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_positions": LIMIT, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        *("OPT", "OPTForCausalLM"),
        {"max_position_embeddings": LIMIT, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "word_embed_proj_dim": 32},
    ),
    "gptj": (
        "GPTJ",
        "GPTJForCausalLM",
        {"n_positions": LIMIT, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "biogpt": (
        *("BioGpt", "BioGptForCausalLM"),
        {"max_position_embeddings": LIMIT, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 4},
    ),
    "xglm": (
        *("XGLM", "XGLMForCausalLM"),
        {"max_position_embeddings": LIMIT, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    ),
    "ctrl": ("CTRL", "CTRLLMHeadModel", {"n_positions": LIMIT, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4}),
    "llama": (
        *("Llama", "LlamaForCausalLM"),
        {"max_position_embeddings": LIMIT, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        | {"num_attention_heads": 4},
    ),
}


def new_model(kind: str, config: str, **sizes: Any) -> PreTrainedModel:
    """A model whose weights are loud, so that texts differ."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**ids, **sizes))
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.35)
    model.generation_config = GenerationConfig(**ids)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


@cache
def build(name: str) -> PreTrainedModel:
    config, kind, sizes = TABLES[name]
    return new_model(kind, config, vocab_size=100, **sizes)


def prompts(length: int, padded: int | None, batch: int) -> dict[str, Tensor]:
    """Prompts that repeat themselves; one row may begin with padding."""
    ids = torch.randint(3, 20, (batch, length), generator=torch.Generator().manual_seed(length))
    ids[:, length // 2 :] = ids[:, : length - length // 2].clone()
    mask = torch.ones_like(ids)
    if padded is not None:
        ids[padded, :3] = mask[padded, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def outcome(model: PreTrainedModel, given: dict[str, Tensor], options: Kwargs) -> list[Any]:
    """Sequences or error, the generator's state, and what a streamer saw."""
    log = adversarial.CallLog()
    streamer = {"streamer": adversarial.RecordingStreamer(log)} if len(given["input_ids"]) == 1 else {}
    torch.manual_seed(1)
    try:
        found: Any = model.generate(**given, **options, **streamer).tolist()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return [found, torch.get_rng_state().tolist(), repr(log.calls)]


def calls(model: PreTrainedModel, mode: Kwargs) -> Iterator[tuple[dict[str, Tensor], Kwargs]]:
    """Inputs and options of calls that end before, at and behind the limit."""
    for length, num_new in ((12, LIMIT - 12), (12, LIMIT - 11), (12, LIMIT - 9), (LIMIT - 1, 4), (LIMIT, 2)):
        for batch, padded in ((1, None), (2, 0), (2, 1)):
            given = prompts(length, padded, batch)
            options = {**mode, "max_new_tokens": num_new, "eos_token_id": None}
            yield given, options
            if batch == 2 and num_new > LIMIT - 12:  # the first row ends early, and is padded up to the limit
                ended = outcome(model, given, {**options, "max_new_tokens": 4})[0]
                yield given, {**options, "eos_token_id": ended[0][-1]}


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("biogpt", "ctrl", "xglm") else []) for name in TABLES],
)
def test_calls_around_the_limit(name: str, mode: Kwargs) -> None:
    model = build(name)
    wanted = [(given, options, outcome(model, given, options)) for given, options in calls(model, mode)]
    assert any(isinstance(found[0], str) for *_, found in wanted) == (name not in ("llama", "xglm"))
    with patch_model(model, "hybrid", tree_size=8):
        for number, (given, options, expected) in enumerate(wanted):
            assert outcome(model, given, options) == expected, (number, given["input_ids"].shape, options)
        assert mmspec.stats(model).num_draft_tokens


WINDOW = 12
_SMALL: Kwargs = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWS: dict[str, Kwargs] = {
    "Moshi": {"ffn_dim": 64, "audio_vocab_size": 90, "num_codebooks": 2},
    "Llama": {"intermediate_size": 64},
    "Olmo2": {"intermediate_size": 64},
    "Olmoe": {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "Gemma": {"intermediate_size": 64, "head_dim": 8},
}


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter", ["none", "hybrid"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_of_the_config_that_the_masks_do_not_know(kind: str, drafter: str) -> None:
    """Caches follow it, so that plain `generate` forgets what the masks of the prompt show."""
    sizes = {"vocab_size": 90, "sliding_window": WINDOW, **_SMALL, **WINDOWS[kind]}
    model = new_model(f"{kind}ForCausalLM", kind, **sizes)
    prompts = [torch.tensor([[5, 6, 7, 8] * (length // 4)]) for length in (8, 20)]
    calls = [(prompt, length) for prompt in prompts for length in (3, 30)]
    options: Kwargs = {"do_sample": False, "eos_token_id": None}
    plain = [model.generate(prompt, max_new_tokens=length, **options) for prompt, length in calls]
    mmspec.patch(model, drafter=drafter)
    for (prompt, length), expected in zip(calls, plain, strict=True):
        assert torch.equal(model.generate(prompt, max_new_tokens=length, **options), expected)
