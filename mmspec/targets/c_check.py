"""Which calls have forwards in C: those of a model are tested against its own, once per state of its modules.

Both score a small random tree behind the prompt of a call: at the far end of the model's positions and, where layers
have a window, with one that is shorter than the prompt, so that nothing that depends on either stays unseen. Logits
must agree up to rounding; in half precision up to what one unit more or less in the outputs of all linear layers does
to the model's own. Only positions behind the committed ones are written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.bf16_copies import WeightCopies
from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.decoder import MAX_DECODER_ROWS, CDecoder
from mmspec.cpu.layers import DecoderShape
from mmspec.cpu.linear import find_linear_layers
from mmspec.engine.tree import DraftTree, sanitize
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.agreement import HALF_TYPES, MAX_OWN, TOLERANCE, Rounding, equal_logits
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_forwards import CForwards, NodeCall
from mmspec.targets.c_traits import DecoderParts, Rotary, read_parts
from mmspec.targets.forward import NodeForward
from mmspec.targets.layer_access import layer_access, with_forwards

PARENTS = (-1, 0, 0, 1, 3, 1)
"""The tree that both score."""
FEW_PARENTS = (-1, 0)
"""That of wide batches."""
GROUP_SIZE = 2
"""Decoder layers that are compared at once where all together cannot be."""
COMPARED_SHARE = 0.5
"""Share of the nodes that must be comparable: others amplify one rounding to another answer."""
MIN_ROUTED_SHARE = 0.6
"""Of the nodes that must agree in half precision in a model with experts. Of two near-ties the router chooses the other
for some, as between two forwards of the model itself; a trait that is wrong would change them all."""
IGNORED_INPUTS = frozenset(
    (CACHE_ARGUMENT, "use_cache", "logits_to_keep", "return_dict", "image_sizes", "image_num_crops")
)
"""Inputs of a round that do not change what such a forward computes: it has no images."""
WEIGHT_COPIES = WeightCopies()
"""Of the weights of all models of this process."""


def find_c_forwards(kernel: CKernel, call: NodeCall, runs_user_code: bool) -> CForwards | None:
    """The forwards in C of a call; None if C does not compute what the model does, or the call is not for it.

    Args:
        kernel: the C kernel.
        call: the call, after its prefill.
        runs_user_code: user code runs during the call.
    """
    inputs = frozenset(name for name, value in call.template.items() if value is not None)
    if inputs - IGNORED_INPUTS or call.position_base is None:
        return None
    key = "C", kernel.level, inputs, frozenset(call.tensors.token_types), call.has_media
    if key not in call.revision and len(_parents(call)) * len(call.kv_cache.seq_lens) > MAX_DECODER_ROWS:
        return None  # too wide a call to test with
    shape = call.revision.cached(key, lambda: _agreeing_shape(kernel, call))
    parts = None if shape is None else next(read_parts(call.adapter, shape), None)
    if parts is None:
        return None
    try:
        copies = None if runs_user_code else WEIGHT_COPIES
        decoder = CDecoder(kernel, parts.shape, parts.layers, parts.ends, parts.rotaries, copies)
    except ValueError:  # weights of other types, devices or shapes
        return None
    return CForwards(decoder, parts, call, runs_user_code)


def _agreeing_shape(kernel: CKernel, call: NodeCall) -> DecoderShape | None:
    """Of the first reading of the modules that computes what the model does."""
    try:
        for parts in read_parts(call.adapter):
            if all(_agree(kernel, *view, parts) for view in _views(call, parts.ends.embeddings.dtype)):
                return parts.shape
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):  # modules with parts that are not known
        pass
    return None


def _views(call: NodeCall, dtype: torch.dtype) -> list[tuple[NodeCall, int]]:
    """What is compared: [(the call, positions by which the tree is moved)].

    Far from the prompt, nodes that attend to it are no input that a model was trained for: trained weights amplify
    rounding in half precision there until nothing can be compared. There they attend to one another alone.
    """
    lengths = call.kv_cache.seq_lens
    assert call.position_base is not None
    last = max(lengths) + len(PARENTS)
    far = int(getattr(call.adapter.text_config, "max_position_embeddings", 0) or 0) - last - max(call.position_base)
    shift = max(0, far - 1)
    if dtype not in HALF_TYPES:
        return [(call, shift)]
    hidden = torch.zeros(len(lengths), max(lengths), dtype=torch.bool, device="cpu")
    return [(call, 0), (replace(call, tensors=replace(call.tensors, padding=hidden)), shift)]


def _agree(kernel: CKernel, call: NodeCall, shift: int, parts: DecoderParts) -> bool:
    """Whether the model and the C decoder score the tree alike.

    Where rounding is amplified so much that the logits of all layers cannot be compared, groups of layers are.
    """
    adapter, cache, tree = call.adapter, call.kv_cache, _random_tree(call)
    window, dtype = max(1, min(cache.seq_lens) // 2), parts.ends.embeddings.dtype
    narrowed = _narrowed(parts, window, shift)
    tensors = replace(call.tensors, position_base=call.tensors.position_base + shift)
    is_routed, own = bool(parts.shape.num_experts), list[Rounding]()
    share = MIN_ROUTED_SHARE if is_routed else 1.0

    def agree(layers: tuple[int, ...] | None) -> bool:
        model = (
            adapter.model if layers is None else layer_access(adapter, call.revision).restrict(adapter.model, layers)
        )

        def score(model: Any) -> Tensor:
            cache.begin_forward(tree.num_nodes)
            forward = NodeForward(adapter, call.template, lambda: model, window if parts.shape.windows else None)
            with call.logged():
                return forward(tree, cache, tensors, ())[0].float()

        def own_rounding() -> Rounding:
            own.append(Rounding.between(expected, score(_with_rounding(model)), COMPARED_SHARE))
            return own[-1]

        expected, states = score(model), _states_behind(call, tree)
        found = _score(kernel, call, narrowed, tree, layers)
        if found is None or not _equal_states(states, _states_behind(call, tree), dtype):
            return False
        if bool(expected.isnan().any()):  # of which nothing can be compared
            return False
        return equal_logits(expected, found.float(), dtype, None if is_routed else own_rounding, share)

    if agree(None):
        return True
    groups = _layer_groups(adapter) if own == [Rounding()] or (is_routed and dtype in HALF_TYPES) else []
    return bool(groups) and all(map(agree, groups))


def _layer_groups(adapter: ModelAdapter) -> list[tuple[int, ...]]:
    """The decoder layers in groups; empty where the layers cannot be run apart."""
    count = adapter.num_layers
    if adapter.num_cache_layers != count or adapter.is_recurrent:
        return []  # layers that read the keys and values of others
    return [tuple(range(first, min(first + GROUP_SIZE, count))) for first in range(0, count, GROUP_SIZE)]


def _with_rounding(model: Any) -> Any:
    """A shallow copy of a model in which the outputs of linear layers are moved by up to a unit of their type."""
    generator = torch.Generator().manual_seed(0)

    def forward(layer: nn.Linear, rows: Tensor) -> Tensor:
        outputs = functional.linear(rows, layer.weight, layer.bias)
        signs = torch.randint(-1, 2, outputs.shape, generator=generator, device="cpu").to(outputs.dtype)
        return outputs * (1 + torch.finfo(outputs.dtype).eps * signs)

    found = set(find_linear_layers([model]))
    return with_forwards(model, {name: forward for name, module in model.named_modules() if module in found})


def _score(
    kernel: CKernel, call: NodeCall, parts: DecoderParts, tree: DraftTree, layers: Sequence[int] | None
) -> Tensor | None:
    """Logits of the C decoder, or of some of its layers."""
    decoder = CDecoder(kernel, parts.shape, parts.layers, parts.ends, parts.rotaries)
    caches = call.kv_cache.common_buffers()
    if caches is None or (call.states is not None and layers is not None):
        return None
    if layers is not None:
        decoder, caches = decoder.restrict(layers), [caches[index] for index in layers]
    scored = decoder.forward(call.inputs(tree, caches))
    if scored is not None and call.states is not None:
        call.states.record(decoder.logs)
    return None if scored is None else parts.shared.scale_logits(scored[0])


def _states_behind(call: NodeCall, tree: DraftTree) -> list[Tensor]:
    """Recurrent states behind some nodes, and behind all, of the last forward."""
    if call.states is None:
        return []
    found, batch = list[Tensor](), len(tree.tokens)
    for count in (tree.num_nodes // 2, tree.num_nodes):
        counts = torch.full((batch,), count, device="cpu")
        found += [state.clone() for state in call.states.log.after(counts, tree.num_nodes, {count})]
    return found


def _equal_states(expected: Sequence[Tensor], found: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether states are equal up to rounding, relative to their largest number."""
    for one, other in zip(expected, found, strict=True):
        difference, largest = (one.float() - other.float()).abs(), float(one.abs().max())
        error = float(difference.max() if dtype not in HALF_TYPES else difference.mean())
        if not error <= max(largest, 1e-9) * (MAX_OWN if dtype in HALF_TYPES else TOLERANCE):
            return False
    return True


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
    if call.states is not None:  # a chain
        parents = tuple(range(-1, len(parents) - 1))
    rng, ids = random.Random(0), range(min(adapter.num_embeddings, adapter.vocab_size))
    media = set(adapter.media_token_ids)
    rows = []
    for _ in range(batch):
        rows.append([next(one for one in iter(lambda: rng.choice(ids), None) if one not in media) for _ in parents])
    tokens = torch.tensor(rows, device="cpu")
    columns = torch.tensor([list(parents)] * batch, device="cpu")
    tree = DraftTree(tokens, columns, torch.ones_like(columns, dtype=torch.bool))
    return sanitize(tree, tokens[:, 0], torch.ones(adapter.num_embeddings, dtype=torch.bool, device="cpu"))
