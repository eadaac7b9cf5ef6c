"""`TreeCache`: same logits as a `DynamicCache`, and import from and export to a user's cache."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import tiny_models as tiny
import torch
from parity import get_model
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import BaseQuantizedLayer, Cache, DynamicLayer, DynamicSlidingWindowLayer

import mmspec
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree_cache import (
    CACHE_ARGUMENT,
    TreeCache,
    export_dynamic_cache,
    load_dynamic_cache,
    unsupported_reason,
)

WINDOW = 7
SPECS = {
    "llama": tiny.ModelSpec("llava"),
    "eager": tiny.ModelSpec("llava", attention="eager"),
    "windows": tiny.ModelSpec("llava_next", window=WINDOW),
    "some windows": tiny.ModelSpec("llava_onevision", window=WINDOW, mixed=True),
    "axes": tiny.ModelSpec("qwen2_5_vl", window=WINDOW, mixed=True, layers=3),
}
ALL = pytest.mark.parametrize("name", SPECS)


def random_ids(count: int, batch: int = 2, seed: int = 0) -> Tensor:
    """[batch, count] random text ids."""
    return torch.randint(7, 100, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Tensor, cache: Any, past: int) -> Tensor:
    """Logits of `ids` behind `past` positions, by the model's own forward; transformers builds the masks."""
    positions = torch.arange(past, past + ids.shape[1]).expand(ids.shape)
    if model.config.model_type == "qwen2_5_vl":
        positions = positions.expand(3, *ids.shape)
    return model(input_ids=ids, position_ids=positions, **{CACHE_ARGUMENT: cache}, use_cache=True).logits


def dynamic(model: PreTrainedModel, bare: bool = False) -> DynamicCache:
    """An empty cache as `generate` builds it, or without a config as users do."""
    return DynamicCache() if bare else DynamicCache(config=model.config.get_text_config())


def contents(cache: Any) -> list[Tensor]:
    """Keys and values of all layers."""
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def same_contents(a: Any, b: Any) -> None:
    """Assert that types, lengths, keys and values agree."""
    assert [type(layer) for layer in a.layers] == [type(layer) for layer in b.layers]
    assert a.get_seq_length() == b.get_seq_length()
    assert [layer.get_mask_sizes(3) for layer in a.layers] == [layer.get_mask_sizes(3) for layer in b.layers]
    for x, y in zip(contents(a), contents(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@ALL
def test_logits_are_those_of_a_dynamic_cache(name: str) -> None:
    model = tiny.build_model(SPECS[name])
    ids, layers = random_ids(26), model.config.get_text_config().num_hidden_layers
    buffer = RaggedKVCache(2, 40)
    cache, plain = TreeCache(buffer, layers), dynamic(model)
    assert cache.get_seq_length() == 0
    past = 0
    for count in (9, 1, 1, 5, 1, 4, 1, 1, 3):
        new = ids[:, past : past + count]
        buffer.begin_forward(count)
        mine = forward(model, new, cache, past)
        buffer.advance(count)
        torch.testing.assert_close(mine, forward(model, new, plain, past), rtol=1e-4, atol=1e-4)
        past += count
        assert cache.get_seq_length() == plain.get_seq_length() == past
    assert len(buffer.layers) == layers


@pytest.mark.every(2)
@ALL
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("prompt", [3, WINDOW - 1, WINDOW, 15])
def test_load_and_export(name: str, bare: bool, prompt: int) -> None:
    """Decoding continues from a user's cache, and the exported cache equals that of transformers."""
    model = tiny.build_model(SPECS[name])
    ids, layers = random_ids(prompt + 9, seed=1), model.config.get_text_config().num_hidden_layers
    plain = dynamic(model, bare)
    forward(model, ids[:, :prompt], plain, 0)
    user_cache = copy.deepcopy(plain)
    before = [part.clone() for part in contents(user_cache)]
    buffer = RaggedKVCache(2, prompt + 12)
    load_dynamic_cache(user_cache, buffer)
    assert buffer.seq_lens == [prompt, prompt]
    assert all(torch.equal(a, b) for a, b in zip(before, contents(user_cache), strict=True)), (
        "loading changed the cache"
    )
    cache = TreeCache(buffer, layers)
    for past in range(prompt, prompt + 8):
        new = ids[:, past : past + 1]
        buffer.begin_forward(1)
        mine = forward(model, new, cache, past)
        buffer.advance(1)
        torch.testing.assert_close(mine, forward(model, new, plain, past), rtol=1e-4, atol=1e-4)
    export_dynamic_cache(buffer, prompt + 8, user_cache)
    same_contents(user_cache, plain)
    last = [forward(model, ids[:, -1:], inputs, prompt + 8) for inputs in (user_cache, plain)]
    torch.testing.assert_close(*last, rtol=1e-4, atol=1e-4)
    same_contents(user_cache, plain)


@ALL
def test_an_empty_cache_is_filled(name: str) -> None:
    model = tiny.build_model(SPECS[name])
    ids, layers = random_ids(12), model.config.get_text_config().num_hidden_layers
    for bare in (False, True):
        user_cache, plain, buffer = dynamic(model, bare), dynamic(model, bare), RaggedKVCache(2, 20)
        load_dynamic_cache(user_cache, buffer)
        assert buffer.seq_lens == [0, 0] and len(buffer.layers) == 0
        buffer.begin_forward(12)
        forward(model, ids, TreeCache(buffer, layers), 0)
        buffer.advance(12)
        export_dynamic_cache(buffer, 11, user_cache)
        forward(model, ids[:, :11], plain, 0)
        same_contents(user_cache, plain)


def test_exported_tensors_are_copies() -> None:
    model = tiny.build_model(SPECS["some windows"])
    buffer, user_cache = RaggedKVCache(2, 40), dynamic(model)
    buffer.begin_forward(20)
    forward(model, random_ids(20), TreeCache(buffer, 2), 0)
    buffer.advance(20)
    export_dynamic_cache(buffer, 20, user_cache)
    before = [part.clone() for part in contents(user_cache)]
    for layer in range(2):
        for part in buffer.read(layer, 20):
            part.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(user_cache), strict=True))
    assert all(part.is_contiguous() for part in contents(user_cache))
    num_bytes = {
        layer.is_sliding: sum(part.nbytes for part in (layer.keys, layer.values)) for layer in user_cache.layers
    }
    assert num_bytes[True] < num_bytes[False], "a layer with a window stores only its window"
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in contents(user_cache)), (
        "exported tensors are views of larger ones"
    )


class OwnCache(DynamicCache):
    """A user's own: may do anything."""


class OwnLayer(DynamicLayer):
    """A user's own layer."""


class Quantised(BaseQuantizedLayer):
    """A quantised layer, as far as a check of its type can see."""

    def __init__(self) -> None:
        self.is_initialized = False

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor

    def _dequantize(self, q_tensor: Any) -> Tensor:
        return q_tensor


def test_caches_that_cannot_be_adopted() -> None:
    model = tiny.build_model(SPECS["some windows"])
    config = model.config.get_text_config()
    odd, mixed = DynamicCache(), DynamicCache(config=config)
    with mock.patch("torch.Stream"):  # torch built for CUDA makes none where there is no GPU
        offloaded = DynamicCache(config=config, offloading=True)
    odd.layers = [OwnLayer(), OwnLayer()]
    mixed.layers[1] = Quantised()
    inputs: dict[str, Any] = {
        "no key-value cache": None,
        "a StaticCache": StaticCache(config=config, max_cache_len=50),
        "a OwnCache": OwnCache(config=config),
        "a Cache": Cache(layers=[DynamicLayer(), DynamicLayer()]),
        "a EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "a DynamicCache with OwnLayer": odd,
        "a DynamicCache with Quantised": mixed,
        "an offloaded DynamicCache": offloaded,
        "a DynamicCache of 2 layers for a model of 3": (DynamicCache(config=config), 3),
        "a tuple": ((torch.zeros(1), torch.zeros(1)),),
    }
    for reason, cache in inputs.items():
        layers = 2
        if isinstance(cache, tuple) and cache[-1] == 3:
            cache, layers = cache
        assert unsupported_reason(cache, layers, 1, torch.float32) == reason
    filled = DynamicCache()
    filled.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    filled.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 1)
    assert unsupported_reason(filled, 2, 2, torch.float32) is None
    assert unsupported_reason(filled, 2, 3, torch.float32) == "a DynamicCache of 2 rows for 3"
    assert (
        unsupported_reason(filled, 2, 2, torch.bfloat16)
        == "a DynamicCache of torch.float32 for a model of torch.bfloat16"
    )
    recording = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=4))
    recording.layers[1].activate_past_recording()
    assert unsupported_reason(recording, 2, 1, torch.float32, 4) == "a DynamicCache that records its past"
    windowed = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=4))
    for window in (None, 5):
        wanted = f"a DynamicCache of sliding_window=4 for a model of sliding_window={window}"
        assert unsupported_reason(windowed, 2, 1, torch.float32, window) == wanted
    assert unsupported_reason(windowed, 2, 1, torch.float32, 4) is None


def test_supported_caches() -> None:
    for name, spec in SPECS.items():
        model = tiny.build_model(spec)
        config = model.config.get_text_config()
        layers, window = config.num_hidden_layers, spec.window or None
        filled = dynamic(model)
        forward(model, random_ids(10), filled, 0)
        for cache in (DynamicCache(), DynamicCache(config=config), filled):
            assert unsupported_reason(cache, layers, 2, torch.float32, window) is None, name
        kinds = {type(layer) for layer in filled.layers}
        assert kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


@pytest.mark.parametrize("family", ["llama", "gemma4"])
@pytest.mark.parametrize("num_left", [0, 3])
def test_a_cache_that_holds_all_of_the_ids(family: str, num_left: int) -> None:
    """Also more than them: the same tokens, the same contents, or the same error."""
    model = get_model(family)
    given = tiny.build_inputs(model, 2, 1, images=[1], padding="none")
    found = []
    for patched in (False, True):
        if patched:
            mmspec.patch(model, "hybrid", tree_size=6)
        cache = DynamicCache(config=model.config.get_text_config())
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, CACHE_ARGUMENT: cache}
        first = model.generate(**given, **options)
        if not num_left:
            cache.crop(-(cache.get_seq_length() - given["input_ids"].shape[1]))
        try:
            again: Any = model.generate(**given, **options).tolist()
        except Exception as error:
            again = f"{type(error).__name__}: {error}"
        found.append((first.tolist(), again, cache.get_seq_length(), [layer.keys.shape for layer in cache.layers]))
    mmspec.unpatch(model)
    assert found[0] == found[1]


@pytest.mark.parametrize("fault", ["crop", "one layer", "values", "twice", "reset", "size", "heads"])
def test_layers_that_hold_different_positions(fault: str) -> None:
    """`crop` raises at the first full window, and leaves the layers before it shorter; or they are of another model."""
    model = tiny.build_model(SPECS["some windows"])
    found = []
    for patched in (False, True):
        if patched:
            mmspec.patch(model, "hybrid", tree_size=6)
        cache = dynamic(model)
        forward(model, random_ids(10, 1), cache, 0)
        layer = next(one for one in cache.layers if type(one) is DynamicLayer)
        if fault == "crop":
            with pytest.raises(RuntimeError, match="crop"):
                cache.crop(-3)
        elif fault == "one layer":
            layer.crop(-2)
        elif fault == "values":
            layer.values = layer.values[:, :, :-1]
        elif fault == "twice":
            layer.update(*(part[:, :, -1:].clone() for part in (layer.keys, layer.values)))
        elif fault == "size":
            layer.keys = layer.keys[..., :-1]
        elif fault == "heads":
            layer.keys, layer.values = (part.repeat_interleave(2, 1) for part in (layer.keys, layer.values))
        else:
            layer.reset()
        try:
            ids: Any = model.generate(
                random_ids(14, 1), max_new_tokens=6, do_sample=False, eos_token_id=None, **{CACHE_ARGUMENT: cache}
            ).tolist()
        except Exception as error:
            ids = f"{type(error).__name__}: {error}"
        found.append((ids, [(one.get_seq_length(), one.keys.tolist(), one.values.tolist()) for one in cache.layers]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
