"""`TreeCache`: a `RaggedKVCache` behind the `Cache` interface of transformers; import and export of a `DynamicCache`.

Sliding-window layers store all positions as well; the attention mask applies their window.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

from mmspec.cpu.weights import version_of
from mmspec.engine.kv_cache import RaggedKVCache

CACHE_ARGUMENT = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""Name of the KV cache among the arguments and outputs of models and of `generate`: `cache` since transformers 5.24."""

DUMMY_LAYER: type | None = getattr(cache_utils, "DummyLayer", None)
"""Layers of a cache without keys and values: those that read another layer's. Older transformers leaves them out."""


def _values_start_as_keys() -> bool:
    layer = DynamicLayer()
    layer.lazy_initialization(torch.empty(0), torch.empty(0, dtype=torch.bfloat16))
    return layer.values.dtype == torch.float32


VALUES_START_AS_KEYS = _values_start_as_keys()
"""Whether `DynamicLayer` creates its values in the dtype of the first keys (transformers before 5.24)."""


class TreeLayer(CacheLayerMixin):
    """The interface of one cache layer in transformers, backed by the buffer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, buffer: RaggedKVCache, index: int) -> None:
        super().__init__()
        self.buffer, self.index = buffer, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffer allocates on the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, N, D]; returns views [B, H, kv_len, D] of all."""
        return self.buffer.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) of the masks that transformers builds; used only if all rows have the same length."""
        return max(self.buffer.seq_lens) + query_length, 0

    def get_seq_length(self) -> int:
        """Committed length of the longest row."""
        return max(self.buffer.seq_lens)

    def get_max_length(self) -> int:
        """-1: no maximum length."""
        return -1


class TreeCache(Cache):
    """The KV cache of the target's forward inside the decode loop, recorded or not."""

    def __init__(self, buffer: RaggedKVCache, num_layers: int, user_cache: Cache | None = None) -> None:
        """
        Args:
            buffer: keys and values of the attention layers.
            num_layers: number of layers.
            user_cache: an empty cache whose recurrent layers are copied; None if there are none.
        """
        layers: list[Any] = [TreeLayer(buffer, index) for index in range(num_layers)]
        for index, layer in enumerate([] if user_cache is None else user_cache.layers):
            if is_recurrent(layer):
                layers[index] = copy.deepcopy(layer)
        super().__init__(layers=layers)
        self.buffer = buffer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed length of the longest row, the same in all layers."""
        return max(self.buffer.seq_lens)

    @property
    def is_initialized(self) -> bool:
        """Whether there are committed positions. Some models treat a forward without them as the prompt's."""
        return self.get_seq_length() > 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write to the buffer directly; this runs once per layer and forward."""
        return self.buffer.write(layer_idx, key_states, value_states)


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer has a convolution or recurrent state and no keys and values."""
    return hasattr(layer, "recurrent_states") and not isinstance(layer, DynamicLayer)


def stored_layers(cache: DynamicCache) -> dict[int, Any]:
    """{index: layer} of the layers that store keys and values."""
    return {i: layer for i, layer in enumerate(cache.layers) if DUMMY_LAYER is None or type(layer) is not DUMMY_LAYER}


def unsupported_reason(
    cache: Any, layers: int, batch: int, dtype: torch.dtype, window: int | None = None
) -> str | None:
    """Why a KV cache cannot be loaded, or None if it can.

    Args:
        cache: the KV cache of the call.
        layers: number of layers of the model that store keys and values.
        batch: number of rows.
        dtype: dtype of the model.
        window: the model's sliding window, None if it has none.
    """
    if cache is None:
        return "no key-value cache"
    if type(cache) is not DynamicCache:
        return f"a {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "an offloaded DynamicCache"
    stored = stored_layers(cache)
    if len(stored) not in (0, layers):
        return f"a DynamicCache of {len(stored)} layers for a model of {layers}"
    length = cache.get_seq_length()
    for layer in stored.values():
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a DynamicCache with {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "a DynamicCache that records its past"
        layer_window = getattr(layer, "sliding_window", window)
        if layer_window != window:  # it may have dropped positions that the model attends to
            return f"a DynamicCache of sliding_window={layer_window} for a model of sliding_window={window}"
        if layer.is_initialized and layer.keys.numel() and layer.keys.shape[0] != batch:
            return f"a DynamicCache of {layer.keys.shape[0]} rows for {batch}"
        if layer.is_initialized and layer.keys.numel() and layer.keys.dtype != dtype:
            return f"a DynamicCache of {layer.keys.dtype} for a model of {dtype}"
        if layer.get_seq_length() != length or _held(layer) != _expected(layer, length):  # `crop` has failed halfway
            return "a DynamicCache whose layers hold different positions"
    return None


def _held(layer: Any) -> tuple[int, int]:
    """Positions of the keys and of the values that a layer stores."""
    if not layer.is_initialized or not layer.keys.numel():
        return 0, 0
    return layer.keys.shape[-2], layer.values.shape[-2]


def _expected(layer: Any, length: int) -> tuple[int, int]:
    """The same of a layer that has seen so many positions."""
    kept = min(length, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else length
    return kept, kept


def unsupported_shape(input_ids: Tensor, mask: Any = None, num_cached: int = 0) -> str | None:
    """Why ids and mask of these shapes are not supported behind a cache of `num_cached` positions; None if they are."""
    if input_ids.dim() != 2 or not len(input_ids):
        return f"input_ids of shape {list(input_ids.shape)}"
    length = input_ids.shape[1]
    # What is left for the prompt's forward then is up to transformers and the model.
    is_whole = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == length)
    if num_cached and num_cached >= length and is_whole:
        return "a cache that holds all of input_ids"
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return "an attention_mask that is not [batch, length]"
    if mask.shape[1] not in (length, num_cached + length):
        return f"an attention_mask of length {mask.shape[1]} for {length} input ids"
    return None


def load_dynamic_cache(cache: DynamicCache, buffer: RaggedKVCache) -> None:
    """Copy a user's cache into an empty buffer.

    A sliding-window layer stores only the last positions; the others become zeros, which the window masks.
    """
    length = cache.get_seq_length()
    if length == 0:
        return
    buffer.begin_forward(length)
    for index, layer in stored_layers(cache).items():
        keys, values = layer.keys, layer.values
        missing = length - keys.shape[-2]
        if missing:
            keys = torch.nn.functional.pad(keys, (0, 0, missing, 0))
            values = torch.nn.functional.pad(values, (0, 0, missing, 0))
        buffer.write(index, keys, values)
    buffer.advance(length)


def export_dynamic_cache(buffer: RaggedKVCache, length: int, cache: DynamicCache, copy: bool = True) -> None:
    """Store the first `length` positions of the buffer in a user's cache, as transformers would have filled it.

    Args:
        buffer: the source.
        length: number of positions.
        cache: the user's cache, changed in place.
        copy: False stores views of the buffer, for user code that reads the cache during the call.
    """
    for index in buffer.written_layers:
        keys, values = buffer.read(index, length)
        if len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
            keys, values = (part[:, :, -layer.sliding_window + 1 :] for part in (keys, values))
        if copy:
            keys, values = (part.clone(memory_format=torch.contiguous_format) for part in (keys, values))
        layer.keys, layer.values = keys, values


class UserCacheView:
    """A user's cache during a call, filled with views of the buffer for user code that reads or writes it.

    Attributes:
        cache: the user's cache; None if no user code can access it, and then every method does nothing.
        buffer: the buffer of the call.
    """

    def __init__(self, cache: DynamicCache | None, buffer: RaggedKVCache) -> None:
        self.cache, self.buffer = cache, buffer
        self._views: list[Tensor] = []
        self._versions: list[int] = []

    def sync(self, length: int) -> None:
        """Fill the cache with views of the first `length` positions.

        Raises:
            RuntimeError: see `check`.
        """
        if self.cache is not None:
            self.check()
            export_dynamic_cache(self.buffer, length, self.cache, copy=False)
            self._views = [layer.keys for layer in stored_layers(self.cache).values()]
            self._versions = self._count_writes()

    def written(self) -> bool:
        """Whether user code wrote into the cache since `sync`, so that the next forward must use it."""
        return self._versions != self._count_writes()

    def check(self) -> None:
        """Check that the cache still contains the views.

        Raises:
            RuntimeError: user code replaced, cropped or extended keys and values.
        """
        if self.cache is None or not self._views:
            return
        if [id(layer.keys) for layer in stored_layers(self.cache).values()] != [id(view) for view in self._views]:
            raise RuntimeError(
                "past_key_values was cropped, extended or replaced by a criterion, a processor or a streamer while "
                "generate ran; call generate(..., mmspec=dict(enabled=False)) for that."
            )

    def _count_writes(self) -> list[int]:
        """Version counters of the views; inference tensors have none, and cannot be written outside inference mode."""
        return [version_of(view) for view in self._views]
