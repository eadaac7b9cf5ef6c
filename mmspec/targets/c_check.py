"""Tests the C decoder of a model against the model's own forward, once per state of its modules.

Both score a small random tree behind the prompt of a call: at the far end of the model's positions and, where layers
have a window, with one that is shorter than the prompt, so that nothing that depends on either stays unseen. Logits
must agree up to rounding. Only positions behind the committed ones are written.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.decoder import MAX_DECODER_ROWS, CDecoder, DecoderInputs
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree, sanitize
from mmspec.targets.agreement import HALF_TYPES, equal_logits
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_traits import DecoderParts, Rotary, read_parts
from mmspec.targets.forward import CallTensors, NodeForward
from mmspec.targets.guard import describe_rounds
from mmspec.targets.layer_access import layer_access

PARENTS = (-1, 0, 0, 1, 3, 1)
"""The tree that both score."""
FEW_PARENTS = (-1, 0)
"""That of wide batches."""
GROUP_SIZE = 2
"""Decoder layers that are compared at once where all together differ by more than rounding does in one."""
MIN_ROUTED_SHARE = 0.6
"""Of the tokens that must agree in half precision in a model with experts. Of two near-ties the router of some tokens
chooses the other, as between two forwards of the model itself; a trait that is wrong would change all tokens."""
_VERDICTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""{model: (its state, the shape that passed or None)}"""


@dataclass(frozen=True)
class NodeCall:
    """A call of a model after its prefill.

    Attributes:
        adapter: of the model.
        template: inputs of every round that do not change.
        tensors: what the forwards read besides the nodes.
        kv_cache: with the prompt.
        has_media: whether the prompt has images or videos.
    """

    adapter: ModelAdapter
    template: Mapping[str, Any]
    tensors: CallTensors
    kv_cache: RaggedKVCache
    has_media: bool

    @functools.cached_property
    def position_base(self) -> list[int] | None:
        """Position id of each row's cache position 0 if all positions were text; None if the axes differ."""
        base = self.tensors.position_base
        if base.dim() == 3:
            axes = base[1:] if len(base) == 4 else base  # the first of four is for masks only
            if not bool((axes == axes[:1]).all()):
                return None
            base = axes[0]
        return [int(position) for position in base[:, 0].expand(len(self.kv_cache.seq_lens))]

    def inputs(self, tree: DraftTree, caches: Sequence[Tensor]) -> DecoderInputs:
        """A forward over nodes behind what is committed now.

        Args:
            tree: the sanitized tree.
            caches: keys and values of the decoder's layers.
        """
        assert tree.depths is not None and tree.ancestor_mask is not None and self.position_base is not None
        return DecoderInputs(
            tokens=tree.tokens,
            depths=tree.depths,
            ancestor_mask=tree.ancestor_mask,
            lengths=self.kv_cache.seq_lens,
            position_base=self.position_base,
            max_position=self.tensors.last_position,
            padding=self.tensors.padding,
            caches=caches,
        )


def verified_parts(kernel: CKernel, call: NodeCall) -> DecoderParts | None:
    """The parts of the model's decoder, if the C decoder computes what the model does; else None."""
    adapter = call.adapter
    try:
        old_state, shape = _VERDICTS.get(adapter.model, (None, None))
        if old_state == _state(kernel, call):
            return None if shape is None else next(read_parts(adapter, shape), None)
        if len(_parents(call)) * len(call.kv_cache.seq_lens) > MAX_DECODER_ROWS:
            return None  # such a call has no rounds in C anyway
        parts = next(_agreeing(kernel, call), None)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # of modules with other parts than are known
        parts = None
    _VERDICTS[adapter.model] = _state(kernel, call), None if parts is None else parts.shape
    return parts


def _state(kernel: CKernel, call: NodeCall) -> list[Any]:
    """What the result of a test depends on."""
    adapter = call.adapter
    inputs = sorted(name for name, value in call.template.items() if value is not None)
    config = adapter.layer_types, adapter.sliding_window, adapter.attention, repr(vars(adapter.text_config))
    return [describe_rounds(adapter), inputs, sorted(call.tensors.token_types), call.has_media, config, kernel.level]


def _agreeing(kernel: CKernel, call: NodeCall) -> Iterator[DecoderParts]:
    """The readings of the modules that compute what the model does."""
    adapter, cache, tree = call.adapter, call.kv_cache, _random_tree(call)
    assert call.position_base is not None
    window, last = max(1, min(cache.seq_lens) // 2), max(cache.seq_lens) + len(PARENTS)
    far = int(getattr(adapter.text_config, "max_position_embeddings", 0) or 0) - last - max(call.position_base)
    shift = max(0, far - 1)
    tensors = replace(call.tensors, position_base=call.tensors.position_base + shift)

    @functools.cache
    def expected(has_windows: bool, layers: tuple[int, ...] | None) -> Tensor:
        model = None if layers is None else layer_access(adapter).restrict(adapter.model, layers)
        cache.begin_forward(tree.num_nodes)
        forward = NodeForward(adapter, call.template, model, window if has_windows else None)
        return forward(tree, cache, tensors, ())[0].float()

    for parts in read_parts(adapter):
        dtype, narrowed = parts.ends.embeddings.dtype, _narrowed(parts, window, shift)

        def agree(layers: tuple[int, ...] | None, parts: DecoderParts, dtype: torch.dtype) -> bool:
            found = _score(kernel, call, parts, tree, layers)
            share = MIN_ROUTED_SHARE if parts.shape.num_experts and dtype in HALF_TYPES else 1
            return found is not None and _agree(expected(bool(parts.shape.windows), layers), found, dtype, share)

        groups = _layer_groups(adapter) if dtype in HALF_TYPES else []
        if agree(None, narrowed, dtype) or (groups and all(agree(group, narrowed, dtype) for group in groups)):
            yield parts


def _agree(expected: Tensor, found: Tensor, dtype: torch.dtype, share: float) -> bool:
    """Whether the logits [B, N, V] of at least this share of the tokens agree."""
    if share == 1:
        return equal_logits(expected, found.float(), dtype)
    pairs = zip(expected.flatten(0, 1).split(1), found.float().flatten(0, 1).split(1), strict=True)
    return sum(equal_logits(*pair, dtype) for pair in pairs) >= share * expected.shape[:2].numel()


def _layer_groups(adapter: ModelAdapter) -> list[tuple[int, ...]]:
    """The decoder layers in groups: through all of a trained model, rounding in half precision is amplified.

    Empty where the layers cannot be run apart.
    """
    count = adapter.num_layers
    if adapter.num_cache_layers != count or adapter.is_recurrent:
        return []  # layers that read the keys and values of others
    return [tuple(range(first, min(first + GROUP_SIZE, count))) for first in range(0, count, GROUP_SIZE)]


def _score(
    kernel: CKernel, call: NodeCall, parts: DecoderParts, tree: DraftTree, layers: Sequence[int] | None
) -> Tensor | None:
    """Logits of the C decoder, or of some of its layers."""
    decoder = CDecoder(kernel, parts.shape, parts.layers, parts.ends, parts.rotaries)
    caches = call.kv_cache.common_buffers()
    if caches is None:
        return None
    if layers is not None:
        decoder, caches = decoder.restrict(layers), [caches[index] for index in layers]
    scored = decoder.forward(call.inputs(tree, caches))
    return None if scored is None else parts.finish_logits(scored[0])


def _narrowed(parts: DecoderParts, window: int, shift: int) -> DecoderParts:
    """The same with another window of the layers that have one, at positions behind `shift`."""
    windows = tuple(window if one else 0 for one in parts.shape.windows)
    rotaries = [replace(one, shift=shift) if isinstance(one, Rotary) else one for one in parts.rotaries]
    return replace(parts, shape=replace(parts.shape, windows=windows), rotaries=rotaries)


def _parents(call: NodeCall) -> tuple[int, ...]:
    return PARENTS if len(PARENTS) * len(call.kv_cache.seq_lens) <= MAX_DECODER_ROWS else FEW_PARENTS


def _random_tree(call: NodeCall) -> DraftTree:
    """The tree, of text tokens."""
    parents, batch, adapter = _parents(call), len(call.kv_cache.seq_lens), call.adapter
    rng, ids = random.Random(0), range(min(adapter.num_embeddings, adapter.vocab_size))
    media = set(adapter.media_token_ids)
    rows = []
    for _ in range(batch):
        rows.append([next(one for one in iter(lambda: rng.choice(ids), None) if one not in media) for _ in parents])
    tokens = torch.tensor(rows, device="cpu")
    columns = torch.tensor([list(parents)] * batch, device="cpu")
    tree = DraftTree(tokens, columns, torch.ones_like(columns, dtype=torch.bool))
    return sanitize(tree, tokens[:, 0], torch.ones(adapter.num_embeddings, dtype=torch.bool, device="cpu"))
