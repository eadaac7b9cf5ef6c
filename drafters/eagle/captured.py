"""Drafts of a call as recorded functions (`mmspec.engine.recordings`): on a GPU one launch each, in place of hundreds.

`StaticDraft` runs the drafter's own code over a state of static shapes: the keys and values in one tensor at a fixed
address, of which a prefix of one of a few lengths is read; lengths, positions and counts as tensors on the device.

    position  0 ............... bucket ............. C
              [ committed      ][ nodes of a draft  ]

(`RecordedKVCache`: committed positions are written behind each row's own, the nodes of a draft behind the bucket.)
`DraftTensors` are those at fixed addresses, `CapturedDraft` replays the two functions in one call. Whatever is unusual
(`find_captured_draft`) runs as without recordings, over the same keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspec.drafters.eagle.native import run_plain_forwards
from mmspec.drafters.eagle.state import DraftState, Pending
from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import RESERVED_TOKENS, RaggedKVCache, RecordedKVCache, length_bucket
from mmspec.engine.recordings import Recordings, WeightWatch, recordable_mode
from mmspec.engine.tree import BUCKETS, DraftTree, bucket_size
from mmspec.interfaces import Prompt, SharedEmbeddings

if TYPE_CHECKING:
    from mmspec.drafters.eagle.base import HeadDrafter

KNOWN_CODE = "mmspec.drafters."
"""Package whose drafters declare `records_drafts` for themselves; a subclass of the user inherits it."""


class StaticDraft:
    """The two operations of a drafter as functions of tensors: they read no value on the host.

    Both take the tensors of `DraftTensors`, then [B] int64 `lengths` of the context, [B, D] `last_hidden` and, if the
    architecture has one, [B, ...] `extra` (see `DraftState`).
    """

    def __init__(
        self, drafter: HeadDrafter, shared_embeddings: SharedEmbeddings, names: Sequence[str], bucket: int
    ) -> None:
        """
        Args:
            drafter: whose code runs.
            shared_embeddings: of the target.
            names: of the arguments.
            bucket: positions of the context that are read.
        """
        self.drafter = drafter
        self.shared_embeddings = shared_embeddings
        self.names = tuple(names)
        self.bucket = bucket

    def extend_context(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the head over emitted tokens: further arguments as in `Pending`, `counts` [B] int64.

        Returns:
            The new `last_hidden`, and `extra` if there is one.
        """
        named = dict(zip(self.names, tensors, strict=True))
        state = self._state(named)
        inputs, position_ids = self.drafter.pending_inputs(state, named["tokens"], named["hidden_states"])
        self.drafter.extend_rows(state, inputs, position_ids, named["counts"])
        outputs = (state.last_hidden,) if state.extra is None else (state.last_hidden, state.extra)
        # An output of a graph must not be an input of it: DSpark heads change neither of the two.
        return tuple(part.clone() if any(part is tensor for tensor in tensors) else part for part in outputs)

    def extend_and_grow(self, max_nodes: int, num_levels: int, *tensors: Tensor) -> tuple[DraftTree, Sequence[Tensor]]:
        """`extend_context`, then `HeadDrafter.draft_tree` from its outputs, which are returned with the tree."""
        named = dict(zip(self.names, tensors, strict=True))
        state = self._state(named)
        self.drafter.follow_tokens(state, named["tokens"], named["counts"])
        followed = {} if state.extra is None else {"extra": state.extra}
        kept = self.extend_context(*(named | followed).values())
        kept_by_name = dict(zip(("last_hidden", "extra"), kept, strict=False))
        lengths = named["lengths"] + named["counts"]
        after = self._state(named | kept_by_name | {"lengths": lengths})
        return self.drafter.draft_tree(after, max_nodes, num_levels), kept

    def tree(self, max_nodes: int, num_levels: int) -> Callable[..., tuple[Tensor, ...]]:
        """`HeadDrafter.draft_tree`; a further argument when sampling is `noise` [B, depth, V].

        Returns:
            Function that returns scores, tokens, parents and node mask of the tree, each [B, N].
        """

        def grow(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(self.names, tensors, strict=True))
            tree = self.drafter.draft_tree(self._state(named), max_nodes, num_levels)
            assert tree.scores is not None
            return tree.scores, tree.tokens, tree.parents, tree.node_mask

        return grow

    def _state(self, named: dict[str, Tensor]) -> DraftState:
        noise = named.get("noise")
        return DraftState(
            shared_embeddings=self.shared_embeddings,
            kv_cache=RecordedKVCache(
                [(layer,) for layer in named["keys_values"].unbind()], named["lengths"], self.bucket
            ),
            logit_bias=named["logit_bias"],
            prompt=None,
            next_positions=[0] * len(named["lengths"]),  # not used but for the size of the rotary table
            last_hidden=named["last_hidden"],
            noise=None if noise is None else lambda depth: noise[:, :depth],
            temperature=named["temperature"],
            cos=named["cos"],
            sin=named["sin"],
            draft_ids=named.get("draft_ids"),
            draft_lm_head=named.get("draft_lm_head"),
            extra=named.get("extra"),
            position_offset=named["position_offset"],
        )


class DraftTensors:
    """What the recorded drafts of one drafter and number of rows have at fixed addresses. Reset by every call.

    Attributes:
        named: the tensors. `keys_values` [layers, 2, B, H', C, d], `cos` and `sin` [P, d], and of the call `logit_bias`
            [V'], `temperature`, `position_offset` [B] int64, and what it has of `draft_ids` and `draft_lm_head`.
        failure: whether recording failed with these weights.
    """

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self.failure = False
        self._weights: list[Tensor] = []  # held, since graphs read their memory
        self._watch = WeightWatch()

    def begin_call(self, drafter: HeadDrafter, state: DraftState, recordings: Recordings) -> None:
        """Take over the state of a call after its prompt; drop the recordings if weights or shapes have changed."""
        values = self._values(drafter, state, recordings.capacity)
        layout = {name: (value.shape, value.dtype) for name, value in values.items()}
        weights: list[Tensor] = list(drafter.head.parameters())
        modules = [id(module) for module in (*drafter.head.modules(), *_shared_modules(state.shared_embeddings))]
        changed = self._watch.changed(weights, recordings.contain_weights, (modules, drafter.visual_mode))
        if changed or layout != {name: (value.shape, value.dtype) for name, value in self.named.items()}:
            recordings.clear(self)
            self.failure = False
            self._weights = weights
            self.named = {name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()}
        else:
            for name, tensor in self.named.items():
                tensor.copy_(values[name])
        state.kv_cache = RaggedKVCache.over(self.named["keys_values"], state.kv_cache.seq_lens)

    def _values(self, drafter: HeadDrafter, state: DraftState, capacity: int) -> dict[str, Tensor]:
        device, dtype = state.last_hidden.device, state.last_hidden.dtype
        lengths = state.kv_cache.seq_lens
        caches = [torch.stack(state.kv_cache.read(layer, max(lengths))) for layer in range(len(state.kv_cache))]
        layers = torch.stack(caches)
        length = capacity + drafter.max_depth * drafter.top_k_on(device)
        # Zeros, since 0 * nan of another call would be nan.
        keys_values = layers.new_zeros(*layers.shape[:4], length, layers.shape[5])
        keys_values[..., : max(lengths), :] = layers
        table = torch.arange(capacity + BUCKETS[-1] + drafter.max_depth + 1, device=device)
        cos, sin = drafter.head.rotary_embedding(table, dtype)
        offset = [position - n for position, n in zip(state.next_positions, lengths, strict=True)]
        named = {
            "keys_values": keys_values,
            "cos": cos,
            "sin": sin,
            "logit_bias": state.logit_bias,
            "temperature": torch.tensor(state.temperature, device=device, dtype=torch.float32),
            "position_offset": from_host(offset, device),
        }
        optional = {"draft_ids": state.draft_ids, "draft_lm_head": state.draft_lm_head}
        return named | {name: value for name, value in optional.items() if value is not None}


class CapturedDraft:
    """The drafts of one call, replayed. Implements `mmspec.drafters.eagle.state.DraftBackend`."""

    def __init__(self, drafter: HeadDrafter, recordings: Recordings, tensors: DraftTensors, min_length: int) -> None:
        """
        Args:
            drafter: whose drafts they are.
            recordings: of the call.
            tensors: after `begin_call`.
            min_length: positions for which the first bucket has room.
        """
        self.tensors = tensors
        self._drafter = drafter
        self._recordings = recordings
        self._min_length = min_length

    def extend_context(self, state: DraftState, pending: Pending) -> bool:
        """See `DraftBackend`. Tokens are padded to a common number, so that few shapes occur."""
        num_new = pending.tokens.shape[1]
        if num_new > BUCKETS[-1]:
            return False
        width = max(bucket_size(self._drafter.max_depth + 1), bucket_size(num_new))
        counts = pending.counts_on(state.last_hidden.device)
        inputs = {
            "tokens": nn.functional.pad(pending.tokens, (0, width - num_new)),
            "hidden_states": nn.functional.pad(pending.hidden_states, (0, 0, 0, width - num_new)),
            "counts": counts,
        }
        outputs = self._run(state, ("extend", width), width, lambda draft: draft.extend_context, inputs)
        if outputs is None:
            return False
        state.last_hidden, *extra = outputs
        state.extra = extra[0] if extra else None
        state.kv_cache.append(pending.counts, counts)
        return True

    def tree(self, state: DraftState, top_k: int, max_nodes: int, num_levels: int) -> DraftTree | None:
        """See `DraftBackend`."""
        inputs = {}
        if state.noise is not None:
            depth = num_levels * self._drafter.depth_controller.tokens_per_level
            inputs["noise"] = state.noise(min(depth, self._drafter.max_depth)).to(state.last_hidden.device)
        key = "tree", top_k, max_nodes, num_levels, state.noise is not None
        outputs = self._run(state, key, 0, lambda draft: draft.tree(max_nodes, num_levels), inputs)
        if outputs is None:
            return None
        scores, tokens, parents, node_mask = outputs
        return DraftTree(tokens=tokens, parents=parents, node_mask=node_mask, scores=scores)

    def bucket(self, state: DraftState, num_new: int) -> int | None:
        """Positions that a function reads, with room for `num_new` more; None if it must run unrecorded."""
        kv_cache, capacity = state.kv_cache, self._recordings.capacity
        length = max(kv_cache.seq_lens) + num_new + self._drafter.max_depth  # a block may write its positions as well
        if self.tensors.failure or length > capacity or not kv_cache.is_packed:
            return None
        return min(length_bucket(max(length, self._min_length)), capacity)

    def _run(
        self,
        state: DraftState,
        key: tuple[object, ...],
        num_new: int,
        function: Callable[[StaticDraft], Callable[..., tuple[Tensor, ...]]],
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, ...] | None:
        """Outputs of one of the functions, with room for `num_new` positions; None if it must run unrecorded."""
        tensors, kv_cache = self.tensors, state.kv_cache
        bucket = self.bucket(state, num_new)
        if bucket is None:
            return None
        inputs = {"lengths": kv_cache.lengths_on(state.last_hidden.device), "last_hidden": state.last_hidden} | inputs
        if state.extra is not None:
            inputs["extra"] = state.extra
        draft = StaticDraft(self._drafter, state.shared_embeddings, (*tensors.named, *inputs), bucket)
        try:
            with recordable_mode():
                return self._recordings.run(
                    tensors, (*key, bucket), function(draft), list(tensors.named.values()), list(inputs.values())
                )
        except Exception as error:  # of the compiler, the capture or the replay: only speed is lost
            tensors.failure = True
            reason = str(error).strip().splitlines()[:1]
            self._recordings.warn(f"drafts are not recorded, but run as before ({type(error).__name__}: {reason})")
            return None


def find_captured_draft(drafter: HeadDrafter, state: DraftState, prompt: Prompt) -> CapturedDraft | None:
    """The recorded drafts of a call after its prompt; None if nothing is recorded in it, or not its drafts.

    Not recorded: architectures that do not declare `records_drafts`, drafters of other packages, heads with hooks or
    forwards of their own, calls that learn (weights change), autocast, and a text that may exceed the capacity.
    """
    recordings = prompt.recordings
    is_known = drafter.records_drafts and type(drafter).__module__.startswith(KNOWN_CODE)
    if recordings is None or not is_known or state.recorder is not None:
        return None
    modules = (*drafter.head.modules(), *_shared_modules(state.shared_embeddings))
    if not run_plain_forwards(modules) or torch.is_autocast_enabled(state.last_hidden.device.type):
        return None
    longest = max(max(state.kv_cache.seq_lens), max(state.next_positions))
    if not min(state.kv_cache.seq_lens) or longest + BUCKETS[-1] > recordings.capacity:
        return None
    tensors = recordings.attachment(drafter, DraftTensors)
    with recordable_mode():
        tensors.begin_call(drafter, state, recordings)
    reserved = RESERVED_TOKENS if prompt.max_new_tokens is None else min(RESERVED_TOKENS, prompt.max_new_tokens)
    return CapturedDraft(drafter, recordings, tensors, longest + reserved)


def _shared_modules(shared_embeddings: SharedEmbeddings) -> tuple[nn.Module, nn.Module]:
    return shared_embeddings.embed_tokens, shared_embeddings.lm_head


__all__ = ["CapturedDraft", "DraftTensors", "StaticDraft", "find_captured_draft"]
