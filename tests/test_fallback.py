"""Requests that transformers decodes alone: same output, and one warning that names the reason."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import adversarial as adversarial
import fuzz as fuzz
import pytest
import tiny_models as tiny
import torch
from parity import (
    FAMILIES,
    GREEDY,
    Kwargs,
    count_vision_calls,
    generate_plain,
    get_model,
    speculate,
)
from torch import Tensor
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)

import mmspec
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.fallback import reason_before_prepare
from mmspec.targets.module_scan import scan_modules

# --- requests that transformers decodes alone -------------------------------------------------------------------------


def _kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _own_loop(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any
) -> Tensor:
    return torch.cat([input_ids, input_ids[:, :2]], dim=1)


def _assistant() -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(vocab_size=120, pad_token_id=0, bos_token_id=1, eos_token_id=2, **small)).eval()


class OwnCache(DynamicCache):
    """User code with unknown effects."""


PLAIN_WAYS: dict[str, tuple[str, Kwargs]] = {
    "beams": ("num_beams", {"num_beams": 2}),
    "beam sampling": ("num_beams", {"num_beams": 2, "do_sample": True}),
    "beam groups": ("num_beam", {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    "contrastive": ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 3}),
    "assistant_model": ("assistant_model", {"assistant_model": _assistant}),
    "prompt lookup": ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    "custom_generate": ("custom_generate", {"custom_generate": _own_loop}),
    "token_healing": ("token_healing", {"token_healing": True, "tokenizer": tiny.build_tokenizer(tiny.ModelSpec())}),
    "guidance_scale": ("guidance_scale", {"guidance_scale": 1.5}),
    "watermarking": ("watermarking_config", {"watermarking_config": {"greenlist_ratio": 0.3}}),
    "output_attentions": ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    "output_hidden_states": ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    "no cache": ("use_cache", {"use_cache": False}),
    "prefill_chunk_size": ("prefill_chunk_size", {"prefill_chunk_size": 4}),
    "synced_gpus": ("synced_gpus", {"synced_gpus": True}),
    "quantised cache": ("Quantized|quantized", {"cache_implementation": "quantized"}),
    "static cache": ("Static|static", {"cache_implementation": "static"}),
    "offloaded cache": ("offload", {"cache_implementation": "offloaded"}),
    "a static cache object": ("StaticCache", {CACHE_ARGUMENT: StaticCache}),
    "a cache of one's own": ("OwnCache", {CACHE_ARGUMENT: OwnCache}),
}


def _arguments(model: PreTrainedModel, more: Kwargs) -> Kwargs:
    """The arguments of one call; models and caches are built anew."""
    arguments = dict(more)
    if "assistant_model" in arguments:
        arguments["assistant_model"] = arguments["assistant_model"]()
    if (kind := arguments.get(CACHE_ARGUMENT)) is not None:
        room = {"max_cache_len": 80} if kind is StaticCache else {}
        arguments[CACHE_ARGUMENT] = kind(config=model.config.get_text_config(), **room)
    return arguments


def _attempt(model: PreTrainedModel, given: tiny.Inputs, more: Kwargs, greedy: Kwargs) -> tuple[Any, str, Tensor]:
    arguments = _arguments(model, more)
    torch.manual_seed(2)
    try:
        result: Any = model.generate(**{**given, **greedy, **arguments})
        return result if isinstance(result, Tensor) else result.sequences, "", torch.get_rng_state()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", torch.get_rng_state()


def _went_plain(
    model: PreTrainedModel,
    given: tiny.Inputs,
    word: str,
    more: Kwargs,
    caplog: pytest.LogCaptureFixture,
    images: int = 1,
) -> None:
    greedy = {} if "do_sample" in more else {"do_sample": False}
    greedy["max_new_tokens"] = 8
    with count_vision_calls(model) as calls:
        wanted, error, state = _attempt(model, given, more, greedy)
        encoded = len(calls)
        with caplog.at_level(logging.WARNING, "mmspec"), fuzz.patch_model(model, adversarial.BranchingDrafter(1)):
            for _ in range(2):
                calls.clear()
                mine, mine_error, mine_state = _attempt(model, given, more, greedy)
                assert mine_error == error
                assert (mine is None) == (wanted is None)
                assert mine is None or torch.equal(mine, wanted)
                assert torch.equal(state, mine_state)
                assert len(calls) == encoded, "images were encoded again"
            if not error:
                assert mmspec.stats(model, last=True).fallback_reason, "no reason in the statistics"
    if error:
        return  # what HF refuses, it refuses; nothing to be warned of
    assert encoded == images
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("mmspec")]
    assert len(messages) == 1, messages
    assert any(part in messages[0] for part in word.split("|")), messages


@pytest.mark.parametrize("name", PLAIN_WAYS)
def test_falls_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    word, more = PLAIN_WAYS[name]
    eager = "output_attentions" in more
    model = get_model(seed=29, attention="eager" if eager else "sdpa")
    batch = 1 if name in ("assistant_model", "prompt lookup") else 2
    given = tiny.build_inputs(model, 27, batch, images=[1] * batch, padding="none")
    _went_plain(model, given, word, more, caplog)


@FAMILIES
def test_falls_back_in_every_family(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = get_model(family, seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 2])
    _went_plain(model, given, "use_cache", {"use_cache": False}, caplog)


def test_an_option_in_a_passed_or_own_config_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    config = GenerationConfig(num_beams=2, max_new_tokens=8)
    _went_plain(model, given, "num_beams", {"generation_config": config}, caplog)
    caplog.clear()
    with fuzz.override_generation_config(model, [2], {"guidance_scale": 1.5}):
        _went_plain(model, given, "guidance_scale", {}, caplog)


def test_a_length_beyond_what_one_mask_serves_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = get_model("paligemma", seed=29, window=16, mixed=True)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    _went_plain(model, given, "a length limit beyond sliding_window=16", {}, caplog)


def test_inputs_embeds_as_the_prompt_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = get_model(seed=29)
    ids = tiny.build_inputs(model, 27, 2, images=[0, 0], padding="none")["input_ids"]
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    _went_plain(model, given, "inputs_embeds", {}, caplog, images=0)


def test_train_mode_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    model.train()
    try:
        _went_plain(model, given, "train", {}, caplog)
    finally:
        model.eval()


def test_an_unknown_attention_kernel_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("of_my_own", _kernel)
    AttentionMaskInterface.register("of_my_own", sdpa_mask)
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    model.set_attn_implementation("of_my_own")
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    _went_plain(model, given, "of_my_own", {}, caplog)


def test_a_kernel_changed_after_patch(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    plain = generate_plain(model, given, **GREEDY)
    with speculate(model, "bush", plain):
        model.set_attn_implementation("eager")
        assert torch.equal(generate_plain(model, given, **GREEDY), plain)
        assert mmspec.stats(model, last=True).num_accepted_tokens > 0


def test_a_kernel_registered_under_the_name_of_another(caplog: pytest.LogCaptureFixture) -> None:
    def doubled(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _kernel(module, 2 * query, *args, **kwargs)

    model = tiny.build_model(tiny.ModelSpec(seed=29))
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    before = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register("sdpa", doubled)
    try:
        _went_plain(model, given, "replaced by", {}, caplog)
    finally:
        AttentionInterface.register("sdpa", before)


def test_errors_of_transformers_are_unchanged() -> None:
    model = get_model(seed=29)
    given = tiny.build_inputs(model, 27, 2, images=[1, 1])
    wrong: list[Kwargs] = [
        {"num_return_sequences": 2, "do_sample": False},
        {"stop_strings": ["ab"]},
        {"no_such_argument": 1},
        {"max_new_tokens": 0},
        {"do_sample": True, "temperature": -1.0},
        {"attention_mask": torch.ones(2, 1, 3, 3)},
    ]
    for more in wrong:
        _, error, state = _attempt(model, given, more, {"max_new_tokens": 5})
        assert error
        with fuzz.patch_model(model, "auto"):
            _, mine, mine_state = _attempt(model, given, more, {"max_new_tokens": 5})
        assert mine == error and torch.equal(state, mine_state)


# --- models that are not quite transformers' own ----------------------------------------------------------------------


def _check(model: PreTrainedModel, word: str, caplog: pytest.LogCaptureFixture) -> None:
    given = tiny.build_inputs(model, 27, 2, images=[1, 1], padding="none")
    _went_plain(model, given, word, {}, caplog)
    caplog.clear()
    _went_plain(model, given, word, {"do_sample": True, "top_k": 0}, caplog)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_follow_the_length(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A tree has larger positions than the next token, which would change the frequencies of all nodes."""
    config = copy.deepcopy(get_model(seed=29).config)
    text = config.text_config
    text.max_position_embeddings = 24
    text.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        half = text.hidden_size // text.num_attention_heads // 2
        factors = {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
        text.rope_parameters |= factors | {"original_max_position_embeddings": 24}
    torch.manual_seed(4)
    model = type(get_model())(config).eval()
    model.tiny_spec = tiny.ModelSpec(seed=29)  # type: ignore[assignment]
    _check(model, kind, caplog)


@pytest.mark.parametrize("name", ["_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_overridden_methods(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the class or on the instance: their effect is unknown."""
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    base = type(model)
    original = getattr(base, name)
    model.__class__ = type("Own", (base,), {name: lambda self, *a, **k: original(self, *a, **k), "__module__": "own"})
    _check(model, name, caplog)
    model.__class__ = base
    caplog.clear()
    if name != "_sample":
        setattr(model, name, functools.partial(original, model))
        _check(model, name, caplog)


def test_a_submodule_in_train_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    model.model.language_model.layers[1].self_attn.train()
    _check(model, "train mode of model.language_model.layers.1.self_attn (LlamaAttention", caplog)


def test_a_compiled_submodule(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    part = model.model.language_model
    part._compiled_call_impl = part._call_impl
    _check(model, "compiled", caplog)


def test_a_decoder_within_a_compiled_module() -> None:
    """The wrapper of `torch.compile` has no `len`, so it must not be asked for its truth value."""
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    model.model.language_model = torch.compile(model.model.language_model, backend="eager")
    modules = scan_modules(model)
    assert modules.compiled and reason_before_prepare({}, model, lambda name: None, modules) == "a compiled forward"


class Noisy(torch.nn.Linear):
    """Draws in eval mode too."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out + 3 * torch.rand(out.shape)


def test_a_forward_that_draws_random_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """It draws once per step of transformers' loop, so transformers decodes, from the initial generator state."""
    model = tiny.build_model(tiny.ModelSpec(seed=29))
    model.lm_head.__class__ = Noisy
    _check(model, "random numbers", caplog)
