"""Drafts of a call as a recorded function (`mmspec.engine.recordings`): on a GPU one launch, in place of hundreds.

`DraftFunction` runs the drafter's own code over a state of static shapes: the head reads what was emitted, then grows a
tree. Keys and values are at a fixed address, of which a prefix of one of a few lengths is read; lengths, positions and
counts are tensors on the device.

    position  0 ............... bucket ............. C
              [ committed      ][ nodes of a draft  ]

(`RecordedKVCache`: committed positions are written behind each row's own, the nodes of a draft behind the bucket.)
`DraftTensors` are those at fixed addresses. `RecordedDraft` makes the function a part of the recorded round, or replays
it alone where the size of the tree depends on it. Whatever is unusual (`find_recorded_draft`) runs as without
recordings, over the same keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.drafters.heads.registry import method_of
from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import RESERVED_TOKENS, RaggedKVCache, RecordedKVCache, length_bucket
from mmspec.engine.recordings import Recordings, recordable_mode
from mmspec.engine.revision import Revision, revision_of, run_plain_forwards
from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.interfaces import Prompt, SharedEmbeddings, TargetKeys
from mmspec.interfaces.round import DraftPart

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.drafter import HeadDrafter


@dataclass(frozen=True)
class DraftFunction:
    """The draft of a round as a function of tensors: it reads no value on the host. See `DraftPart.function`.

    Attributes:
        drafter: whose code runs.
        shared_embeddings: of the target.
        target_keys: of the call, if the drafter reads them.
        names: of the tensors at fixed addresses, then of those that differ from round to round.
        bucket: positions of the context that are read.
        max_nodes: size of the tree, the root included.
        num_levels: as in `HeadDrafter.draft_tree`.
        chains_only: see `Prompt`, in this draft.
    """

    drafter: HeadDrafter
    shared_embeddings: SharedEmbeddings
    target_keys: TargetKeys | None
    names: tuple[str, ...]
    bucket: int
    max_nodes: int
    num_levels: int
    chains_only: bool

    def __call__(
        self, fixed: Sequence[Tensor], changing: Sequence[Tensor], numbers: Tensor, noise: Tensor | None
    ) -> tuple[DraftTree, Sequence[Tensor]]:
        """Read the emitted tokens, then draft.

        Args:
            fixed: of `DraftTensors`.
            changing: `tokens` [B, n] and `hidden_states` [B, n, S] as in `Pending`, then `DraftState.kept_tensors`.
            numbers: [B, 2] int64 committed positions of the head, and how many of the tokens are valid.
            noise: [B, depth, V] of the next steps, or None.

        Returns:
            The tree, and the new `DraftState.kept_tensors`.
        """
        named = dict(zip(self.names, (*fixed, *changing), strict=True))
        lengths, counts = numbers.unbind(1)
        drafter, state = self.drafter, self._state(named, lengths, noise)
        drafter.follow_tokens(state, named["tokens"], counts)
        inputs, position_ids = drafter.pending_inputs(state, named["tokens"], named["hidden_states"])
        drafter.extend_rows(state, inputs, position_ids, counts)
        outputs = state.kept_tensors()
        # An output of a graph must not be an input of it: DSpark heads do not change `last_hidden`.
        kept = {
            name: part.clone() if any(part is tensor for tensor in changing) else part for name, part in outputs.items()
        }
        state = self._state(named | kept, lengths + counts, noise)
        return drafter.draft_tree(state, self.max_nodes, self.num_levels), tuple(kept.values())

    def _state(self, named: Mapping[str, Tensor], lengths: Tensor, noise: Tensor | None) -> DraftState:
        layers = [(layer,) for layer in named["keys_values"].unbind()] if "keys_values" in named else []
        return DraftState(
            shared_embeddings=self.shared_embeddings,
            kv_cache=RecordedKVCache(layers, lengths, self.bucket),
            logit_bias=named["logit_bias"],
            prompt=None,
            next_positions=[0] * len(lengths),  # not used but for the size of the rotary table
            last_hidden=named["last_hidden"],
            carry=named.get("carry"),
            noise=None if noise is None else lambda depth: noise[:, :depth],
            temperature=named["temperature"],
            cos=named.get("cos"),
            sin=named.get("sin"),
            draft_ids=named.get("draft_ids"),
            draft_lm_head=named.get("draft_lm_head"),
            position_offset=named["position_offset"],
            target_keys=None if self.target_keys is None else self.target_keys.over(named, lengths, self.bucket),
            chains_only=lambda: self.chains_only,
        )


class DraftTensors:
    """What the recorded drafts of one drafter and number of rows have at fixed addresses. Reset by every call.

    Attributes:
        named: the tensors. `keys_values` [layers, 2, B, H', C, d], `cos` and `sin` [P, d], or for drafters without a
            cache `TargetKeys.call_tensors`; of the call `logit_bias` [V'], `temperature`, `position_offset` [B] int64,
            and what it has of `draft_ids` and `draft_lm_head`.
        failure: whether recording failed with these weights.
    """

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self.failure = False
        self._revision: Revision | None = None  # of the head and the embeddings
        self._visual_mode = ""

    def begin_call(self, drafter: HeadDrafter, state: DraftState, recordings: Recordings) -> None:
        """Take over the state of a call after its prompt; drop the recordings if weights or shapes have changed."""
        values = self._values(drafter, state, recordings.capacity)
        layout = {name: (value.shape, value.dtype) for name, value in values.items()}
        modules = (*drafter.head.modules(), *_shared_modules(state.shared_embeddings))
        revision = revision_of(drafter.head, modules)
        changed = revision is not self._revision or drafter.visual_mode != self._visual_mode
        self._revision, self._visual_mode = revision, drafter.visual_mode
        if changed or layout != {name: (value.shape, value.dtype) for name, value in self.named.items()}:
            recordings.clear(self)
            self.failure = False
            self.named = {name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()}
        else:
            for name, tensor in self.named.items():
                tensor.copy_(values[name])
        if "keys_values" in self.named:
            state.kv_cache = RaggedKVCache.over(self.named["keys_values"], state.kv_cache.seq_lens)

    def _values(self, drafter: HeadDrafter, state: DraftState, capacity: int) -> dict[str, Tensor]:
        device, lengths = state.last_hidden.device, state.kv_cache.seq_lens
        offset = [position - n for position, n in zip(state.next_positions, lengths, strict=True)]
        keys = state.target_keys
        named = {
            **(_own_context(drafter, state, capacity) if keys is None else keys.call_tensors(capacity)),
            "logit_bias": state.logit_bias,
            "temperature": torch.tensor(state.temperature, device=device, dtype=torch.float32),
            "position_offset": from_host(offset, device),
        }
        optional = {"draft_ids": state.draft_ids, "draft_lm_head": state.draft_lm_head}
        return named | {name: value for name, value in optional.items() if value is not None}


class RecordedDraft:
    """The recorded drafts of one call."""

    def __init__(self, drafter: HeadDrafter, recordings: Recordings, tensors: DraftTensors, min_length: int) -> None:
        """
        Args:
            drafter: whose drafts they are.
            recordings: of the call.
            tensors: after `begin_call`.
            min_length: positions for which the first bucket has room.
        """
        self._drafter = drafter
        self._recordings = recordings
        self._tensors = tensors
        self._min_length = min_length
        self._read: Pending  # of the last `part`

    def part(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftPart | None:
        """The draft of the coming round; None if it must run in the head's own code.

        Tokens are padded to the number that a round emits at most, so that there is one shape.

        Args:
            state: of the call, after its prompt.
            max_nodes: size of the tree, the root included.
            num_levels: as in `HeadDrafter.draft_tree`.
        """
        drafter, width = self._drafter, self._drafter.max_depth + 1
        if sum(part.tokens.shape[1] for part in state.pending) > width:  # of several rounds
            drafter.read_pending(state)
        bucket = self._bucket(state, width)
        if bucket is None:
            return None
        self._read = pending = Pending.concatenate(state.pending or [_nothing(state)])
        state.pending = [pending] if state.pending else []
        tokens, hidden_states, missing = pending.tokens, pending.hidden_states, width - pending.tokens.shape[1]
        if missing:
            tokens = nn.functional.pad(tokens, (0, missing))
            hidden_states = nn.functional.pad(hidden_states, (0, 0, 0, missing))
        changing = {"tokens": tokens, "hidden_states": hidden_states, **state.kept_tensors()}
        named = self._tensors.named | (_target_tensors(state) or {})
        names = (*named, *changing)
        function = DraftFunction(
            drafter,
            state.shared_embeddings,
            state.target_keys,
            names,
            bucket,
            max_nodes,
            num_levels,
            state.chains_only(),
        )
        return DraftPart(
            owner=self._tensors,
            key=(drafter.top_k_of(state), max_nodes, num_levels, bucket, names),
            state=list(named.values()),
            inputs=list(changing.values()),
            numbers=[list(pair) for pair in zip(state.kv_cache.seq_lens, pending.counts, strict=True)],
            max_depth=drafter.max_depth,
            hidden_state_indices=drafter.hidden_state_indices,
            function=function,
            select_hidden_states=drafter.select_hidden_states,
        )

    def tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree | None:
        """The tree of `part` alone; None if it must be drafted in the head's own code."""
        part = self.part(state, max_nodes, num_levels)
        if part is None:
            return None
        device = state.last_hidden.device
        counts = self._read.counts_on(device)
        inputs = [*part.inputs, torch.stack((state.kv_cache.lengths_on(device), counts), dim=1)]
        if state.noise is not None:
            inputs.append(state.noise(part.max_depth).to(device))
        try:
            with recordable_mode():
                outputs = self._recordings.run(part.owner, ("draft", part.key), part, part.state, inputs)
        except Exception as error:  # of the compiler, the capture or the replay: only speed is lost
            self._tensors.failure = True
            reason = str(error).strip().splitlines()[:1]
            self._recordings.warn(f"drafts are not recorded, but run as before ({type(error).__name__}: {reason})")
            return None
        scores, tokens, parents, node_mask, *kept = outputs
        state.kv_cache.append(self._read.counts, counts)
        self._keep(state, kept)
        return DraftTree(tokens=tokens, parents=parents, node_mask=node_mask, scores=scores)

    def follow(self, state: DraftState, emitted: Pending | None, kept: Sequence[Tensor]) -> None:
        """Update the state after a round with `part`: what it has read, and the tokens that it emitted."""
        counts = self._read.counts
        state.kv_cache.seq_lens = [n + count for n, count in zip(state.kv_cache.seq_lens, counts, strict=True)]
        self._keep(state, kept)
        state.pending = [] if emitted is None else [emitted]

    def _keep(self, state: DraftState, kept: Sequence[Tensor]) -> None:
        """Store what a draft returned, and that it has read the pending tokens."""
        for name, value in zip(state.kept_tensors(), kept, strict=True):
            setattr(state, name, value)
        state.next_positions = [n + count for n, count in zip(state.next_positions, self._read.counts, strict=True)]
        state.pending = []

    def _bucket(self, state: DraftState, num_new: int) -> int | None:
        """Positions that a function reads, with room for `num_new` more; None if it must run unrecorded."""
        kv_cache, capacity = state.kv_cache, self._recordings.capacity
        length = max(kv_cache.seq_lens) + num_new + self._drafter.max_depth  # a block may write its positions as well
        is_fixed = bool(kv_cache.groups) if state.target_keys is None else _target_tensors(state) is not None
        if self._tensors.failure or length > capacity or not is_fixed:
            return None
        return min(length_bucket(max(length, self._min_length)), capacity)


def _own_context(drafter: HeadDrafter, state: DraftState, capacity: int) -> dict[str, Tensor]:
    """Keys and values of the head's own layers, with room for the nodes of a draft, and its rotary table."""
    device, longest = state.last_hidden.device, max(state.kv_cache.seq_lens)
    layers = torch.stack([torch.stack(state.kv_cache.read(i, longest)) for i in state.kv_cache.written_layers])
    length = capacity + drafter.max_depth * drafter.top_k_of(state)
    # Zeros, since 0 * nan of another call would be nan.
    keys_values = layers.new_zeros(*layers.shape[:4], length, layers.shape[5])
    keys_values[..., :longest, :] = layers
    table = torch.arange(capacity + BUCKETS[-1] + drafter.max_depth + 1, device=device)
    cos, sin = drafter.head.rotary_embedding(table, state.last_hidden.dtype)
    return {"keys_values": keys_values, "cos": cos, "sin": sin}


def _target_tensors(state: DraftState) -> dict[str, Tensor] | None:
    """The target's keys and values where its recorded forward writes them; None if they are not read or elsewhere."""
    return None if state.target_keys is None else state.target_keys.fixed_tensors()


def _nothing(state: DraftState) -> Pending:
    """No tokens, as between the prompt and the first draft."""
    batch = len(state.last_hidden)
    tokens = torch.zeros(batch, 0, dtype=torch.long, device=state.last_hidden.device)
    return Pending(tokens, state.last_hidden.new_zeros(batch, 0, state.hidden_size), [0] * batch)


def find_recorded_draft(drafter: HeadDrafter, state: DraftState, prompt: Prompt) -> RecordedDraft | None:
    """The recorded drafts of a call after its prompt; None if nothing is recorded in it, or not its drafts.

    Not recorded: drafters that do not declare `records_drafts`, or only inherit it (a subclass that is not registered
    as a method), heads with hooks or forwards of their own, autocast, and a text
    that may exceed the capacity.
    """
    recordings = state.recordings
    is_known = vars(type(drafter)).get("records_drafts") or (drafter.records_drafts and method_of(drafter) is not None)
    if recordings is None or not is_known:
        return None
    modules = (*drafter.head.modules(), *_shared_modules(state.shared_embeddings))
    if not run_plain_forwards(modules) or torch.is_autocast_enabled(state.last_hidden.device.type):
        return None
    if state.target_keys is not None and state.target_keys.fixed_tensors() is None:
        return None
    longest = max(max(state.kv_cache.seq_lens), max(state.next_positions))
    if not min(state.kv_cache.seq_lens) or longest + BUCKETS[-1] > recordings.capacity:
        return None
    tensors = recordings.attachment(drafter, DraftTensors)
    with recordable_mode():
        tensors.begin_call(drafter, state, recordings)
    reserved = RESERVED_TOKENS if prompt.max_new_tokens is None else min(RESERVED_TOKENS, prompt.max_new_tokens)
    return RecordedDraft(drafter, recordings, tensors, longest + reserved)


def _shared_modules(shared_embeddings: SharedEmbeddings) -> tuple[nn.Module, nn.Module]:
    return shared_embeddings.embed_tokens, shared_embeddings.lm_head
