"""`AssistantDrafter`: drafts with Gemma 4's assistant, a small model over the target's own keys and values.

It has no cache: nothing is read of the prompt or rolled back, and nodes never see each other, so that a tree of
any shape is one forward per level over B x W nodes at one position. It is that of the last token that
the target has read, as in vLLM and SGLang (transformers takes the one behind it).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspec.cpu.angles import RotaryFn
from mmspec.cpu.draft_types import AssistantWeights, HeadWeights
from mmspec.drafters.heads.base.attention import select_last
from mmspec.drafters.heads.base.c_draft import CDraft, own_lm_head, shared_weights
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.expand import LevelExpander, expand_levels
from mmspec.drafters.heads.base.head import DraftHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.drafters.mtp.vocabulary import RowCache
from mmspec.engine.gather import gather_rows
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import AssistantParts, Prompt, SharedEmbeddings

logger = logging.getLogger("mmspec")

CHECKED_TOP_K = 3
"""Children of a node of the tree by which drafts in C are compared with the assistant's own."""


class AssistantHead(DraftHead):
    """The assistant's projections, layers and LM head."""

    def __init__(self, parts: AssistantParts) -> None:
        super().__init__(HeadConfig(parts.hidden_size, 0, 1, 1, parts.vocab_size))
        self.fc = cast(nn.Linear, parts.pre_projection)
        self.body = parts.body
        self.post_projection = parts.post_projection
        self.lm_head = parts.lm_head
        self.centroids = parts.centroids
        self.register_buffer("token_ordering", parts.token_ordering, persistent=False)
        self.top_centroids = parts.top_centroids
        self.row_cache = RowCache()

    def carried(self, outputs: Tensor) -> Tensor:
        carried: Tensor = self.post_projection(outputs)
        return carried

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        return self.row_cache.rows(weight, draft_ids, lambda ids: weight[ids])

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None = None
    ) -> Tensor:
        """[..., V or V'] logits of the next token, -inf for ids of centroids that are not among the best ones.

        Args:
            hidden_states: [..., d] outputs of the body.
            shared_embeddings: not used, the LM head is the assistant's.
            draft_lm_head: [V', d] rows of the LM head; None for all.
        """
        if draft_lm_head is not None:
            return nn.functional.linear(hidden_states, draft_lm_head)
        if self.centroids is None:
            logits: Tensor = self.lm_head(hidden_states)
            return logits
        best = self.centroids(hidden_states).topk(self.top_centroids, dim=-1).indices
        ordering = self.token_ordering
        assert isinstance(ordering, Tensor)
        ids = ordering[best].flatten(-2)  # [..., C' V / C]
        weight = self.lm_head.weight
        assert isinstance(weight, Tensor)
        some = (weight[ids] @ hidden_states[..., None])[..., 0]
        all_ids = some.new_full((*some.shape[:-1], weight.shape[0]), float("-inf"))
        return all_ids.scatter(-1, ids, some)


class AssistantExpander(LevelExpander):
    """Levels of nodes that see the target's text alone."""

    def __init__(self, drafter: AssistantDrafter, state: DraftState) -> None:
        """
        Args:
            drafter: whose head runs.
            state: of the call; its `last_hidden` is the projected input of the root.
        """
        self.drafter = drafter
        self.state = state
        target_keys = state.target_keys
        assert target_keys is not None
        kinds: tuple[str, ...] = cast("tuple[str, ...]", drafter.head.body.layer_types)
        self.cache = {kind: target_keys.read(kind) for kind in dict.fromkeys(kinds)}
        self.position_ids = state.first_positions() - 1
        self.root_hidden = self._run(state.last_hidden[:, None])

    def _run(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.drafter.head.body(inputs, self.position_ids, self.cache)
        return outputs

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        head = self.drafter.head
        hidden_states = head.carried(parent_hidden)
        return self._run(head.fuse(inputs_embeds.to(hidden_states.dtype), hidden_states))

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        return self.drafter.logits(self.state, hidden_states)


class AssistantDrafter(OwnDrafter):
    """Drafts with an `AssistantHead`.

    Attributes:
        suppressed_ids: ids that it must not draft.
    """

    noun = "assistant"
    head: AssistantHead
    c_classes = None
    records_drafts = True

    def __init__(self, parts: AssistantParts, **options: Any) -> None:
        """
        Args:
            parts: of the assistant, with its weights.
            options: further arguments of `OwnDrafter`.

        Raises:
            ValueError: a reduced LM head of an assistant that has one.
        """
        if parts.centroids is not None and any(options.get(key) is not None for key in ("draft_ids", "frequent_ids")):
            raise ValueError(
                "this assistant scores the ids of its best centroids alone, so that its LM head is reduced already; "
                "got further ids to choose from. Use drafter='assistant'."
            )
        options |= {"name": "assistant", "num_layers": parts.num_layers}
        super().__init__(AssistantHead(parts), "coupled", parts.description, **options)
        self.suppressed_ids = parts.suppressed_ids
        self.requirements = replace(self.requirements, target_keys=True)

    @property
    def compressor_hidden_size(self) -> int | None:
        """See `HeadDrafter`: it reads no visual tokens."""
        return None

    @InferenceMode()
    def begin(self, prompt: Prompt) -> DraftState:
        state = super().begin(prompt)
        state.target_keys = prompt.target_keys
        suppressed = torch.tensor(self.suppressed_ids, dtype=torch.long, device=state.logit_bias.device)
        ids = torch.arange(prompt.vocab_size, device=suppressed.device) if state.draft_ids is None else state.draft_ids
        state.logit_bias[torch.isin(ids, suppressed)] = float("-inf")
        return state

    def expander(self, state: DraftState, top_k: int) -> AssistantExpander:
        return AssistantExpander(self, state)

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """See `HeadDrafter`: its layers must compute as the target's do, where these run in C."""
        head: Any = self.head
        body, layers, shape, keys = head.body, head.body.c_weights(), state.c_shape(), state.target_keys
        linears = [one for one in (head.fc, head.post_projection, head.lm_head, head.centroids) if one is not None]
        if shape is None or layers is None or keys is None or any(type(one) is not nn.Linear for one in linears):
            return None
        kinds, dtype = tuple(body.layer_types), state.last_hidden.dtype
        if (caches := keys.buffers(kinds)) is None or any(one.bias is not None for one in linears):
            return None
        angles: dict[str, RotaryFn] = {kind: partial(body.angles, kind, dtype=dtype) for kind in kinds}
        rotated = {kind: angle(state.first_positions()[:1, 0])[0].shape[-1] for kind, angle in angles.items()}
        sizes = [
            (one.shape[2], one.shape[4], rotated[kind])
            for one, kind in zip(caches, kinds, strict=True)
            if one is not None
        ]
        heads = {layer.q.shape[0] // size[1] for layer, size in zip(layers, sizes, strict=True)}
        if len(heads) != 1 or body.eps != {shape.eps} or state.last_hidden.device.type != "cpu":
            return None
        window = 0 if keys.window is None else keys.window + 1  # it reads one position more than it sees: its own
        assistant = AssistantWeights(kinds, head.post_projection.weight, None, None, 0)
        if head.centroids is not None:
            clusters = head.token_ordering, head.top_centroids
            assistant = AssistantWeights(kinds, head.post_projection.weight, head.centroids.weight, *clusters)
        lm_head = head.lm_head.weight if state.draft_lm_head is None else state.draft_lm_head
        return HeadWeights(
            head.fc.weight,
            None,
            layers,
            final_norm=body.norm.weight,
            assistant=assistant,
            shape=replace(
                shape,
                hidden_size=head.fc.out_features,
                intermediate_size=max(layer.gate.shape[0] for layer in layers),
                num_heads=heads.pop(),
                num_kv_heads=max(size[0] for size in sizes),
                head_dim=max(size[1] for size in sizes),
                rotary_size=max(size[2] for size in sizes),
                head_sizes=tuple(sizes),
                windows=tuple(window * (kind == "sliding_attention") for kind in kinds),
                owners=(),
                num_experts=0,
                expert_size=0,
                experts_per_token=0,
                is_eager=False,
            ),
            rotaries=[angles[kind] for kind in kinds],
            **{**shared_weights(state), **own_lm_head(lm_head)},
        )

    def c_draft(self, state: DraftState) -> CDraft | None:
        found = super().c_draft(state)
        if found is None or found.revision.cached("C", lambda: self._agrees(state, found)):
            return found
        logger.info("mmspec: the assistant drafts in torch: its layers compute other than its target's")
        return None

    def _agrees(self, state: DraftState, backend: CDraft) -> bool:
        """Whether a small tree in C is that of the assistant's own forward, up to rounding and near-ties."""
        top_k, max_nodes, num_levels = CHECKED_TOP_K, 1 + CHECKED_TOP_K + CHECKED_TOP_K**2, 2
        mine = None if len(state.logit_bias) < top_k else backend.tree(state, top_k, max_nodes, num_levels)
        if mine is None:
            return False
        want = expand_levels(state, AssistantExpander(self, state), top_k, max_nodes=max_nodes, num_levels=num_levels)
        assert mine.scores is not None and want.scores is not None
        is_half = state.last_hidden.dtype is not torch.float32
        likely = mine.node_mask & want.node_mask
        if not torch.equal(mine.node_mask, want.node_mask):
            return False
        difference = (mine.scores.log() - want.scores.log())[likely].abs().mean()
        same = (mine.tokens == want.tokens)[likely].float().mean()
        return float(difference) <= (0.1 if is_half else 1e-3) and float(same) >= (0.5 if is_half else 0.9)

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        """See `HeadDrafter`: only the last input of each row is kept, for the root of the next draft."""
        state.last_hidden = select_last(inputs, counts, state.last_hidden)

    def _prefill(self, state: DraftState, prompt: Prompt, first_ids: Tensor) -> None:
        """The input of the first draft; nothing else is read of the prompt."""
        hidden_states = self.select_hidden_states(prompt.hidden_states)
        state.hidden_size, n = hidden_states.shape[-1], hidden_states.shape[1]
        index = torch.arange(prompt.attention_mask.shape[1], device=hidden_states.device)
        last = index.where(prompt.attention_mask, 0).amax(1)[:, None]
        behind = (last - (len(index) - n)).clamp(min=0)  # a cache is continued: states of its new positions alone
        embeds = state.shared_embeddings.embed(first_ids)[:, None].to(hidden_states.dtype)
        state.last_hidden = self.fuse(state, embeds, gather_rows(hidden_states, behind))[:, 0]
        assert state.target_keys is not None
        lengths = state.target_keys.lengths  # what it has committed since is still to be read
        unread = [
            sum(counts) for counts in zip([0] * len(lengths), *(part.counts for part in state.pending), strict=True)
        ]
        state.kv_cache.seq_lens = [n - count for n, count in zip(lengths, unread, strict=True)]
        state.next_positions = (prompt.position_ids.expand(len(last), -1).gather(1, last)[:, 0] + 1).tolist()
