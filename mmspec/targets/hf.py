"""`HFTarget`: a transformers model as the target of one call, with a KV cache that has one length per row.

Uses `prepare_inputs_for_generation` and `forward` only. Differences between model families are in
`mmspec.targets.base.ModelAdapter`. Independent of drafting, sampling and stopping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.chain_types import ChainRequest, DraftedChains
from mmspec.cpu.layers import DecoderShape
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.prefix import Prefix
from mmspec.engine.recordings import Recordings, recordable_mode
from mmspec.engine.revision import Revision
from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.engine.tree_cache import (
    CACHE_ARGUMENT,
    VALUES_START_AS_KEYS,
    TreeCache,
    UserCacheView,
    export_dynamic_cache,
    load_dynamic_cache,
    unsupported_reason,
    unsupported_shape,
)
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import VerifyResult
from mmspec.interfaces.round import ScorePart
from mmspec.targets.base import ModelAdapter
from mmspec.targets.c_check import find_c_forwards
from mmspec.targets.c_forwards import CForwards, NodeCall
from mmspec.targets.forward import CallTensors, NodeForward, run_forward, unsupported_length
from mmspec.targets.lanes import Lane
from mmspec.targets.model_state import model_revision
from mmspec.targets.recurrent_states import RecurrentStates

TOKEN_TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Model inputs with one value per token, which transformers extends with every new token."""


class HFTarget:
    """Implements `mmspec.interfaces.Target` for one call of `generate`.

    Attributes:
        adapter: of the model's family.
        model: the transformers model.
        revision: of the model at the start of the call.
        vocab_size: V of the text model.
        input_ids: [B, L] int64.
        kwargs: model inputs that transformers prepared for its own loop, without the cache.
        config: the prepared generation config.
        user_cache: cache object of transformers, the user's own if one was passed.
        max_new_tokens: most new tokens per row.
        buffer: keys and values of all rows.
        cache: `buffer` behind transformers' cache interface.
        prompt_length: positions in the cache after the prefill.
        device: device of the forwards.
        inference_mode: whether forwards may run in inference mode.
        user_cache_view: the user's cache while user code can read it.
        chains_only, skips_rows: see `mmspec.interfaces.Target`.
        states: of recurrent layers; None if the model has none.
        recordings: where parts of a round are recorded in this call, or None.
        c_forwards: computes `score` in C where it can; None for the model's own forward.
        node_forward: that forward over nodes; set by `prefill`.
        call_tensors: what it reads of the call; set by `prefill`.
        position_steps: emitted tokens of each row from which on its last one is behind the positions that the model is
            made for; [] if no row of the call gets there; set by `prefill`.
    """

    chains_only = skips_rows = False
    states: RecurrentStates | None = None
    node_forward: NodeForward
    call_tensors: CallTensors
    position_steps: Sequence[int] = ()

    def __init__(
        self,
        adapter: ModelAdapter,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        config: Any,
        max_new_tokens: int,
        inference_mode: bool | None = None,
        cache_is_observed: bool = False,
        lane: Lane | None = None,
        revision: Revision | None = None,
    ) -> None:
        """
        Args:
            adapter: of the model's family.
            input_ids: [B, L] int64.
            model_kwargs: model inputs that transformers prepared for its own loop.
            config: the prepared generation config.
            max_new_tokens: most new tokens that may be emitted per row.
            inference_mode: whether forwards may run in inference mode; derived from the model's modules if None.
            cache_is_observed: user code runs during the call and may access the user's cache.
            lane: where functions of this call are recorded; None if nothing is recorded.
            revision: of the model; asked for if None.
        """
        self.adapter = adapter
        self.model = adapter.model
        self.revision = model_revision(adapter) if revision is None else revision
        self.vocab_size = adapter.vocab_size
        self.input_ids = input_ids
        self.kwargs = dict(model_kwargs)
        self.config = config
        self.user_cache = self.kwargs.pop(CACHE_ARGUMENT)
        self.max_new_tokens = max_new_tokens
        self._lane = lane
        self.recordings: Recordings | None = None if lane is None else lane.recordings
        self.c_forwards: CForwards | None = None
        self._runs_user_code = cache_is_observed
        capacity = self.user_cache.get_seq_length() + input_ids.shape[1] + max_new_tokens + BUCKETS[-1]
        batch = len(input_ids)
        self.buffer = RaggedKVCache(batch, capacity, VALUES_START_AS_KEYS) if lane is None else lane.kv_cache
        self.cache = TreeCache(self.buffer, adapter.num_layers, self.user_cache)
        self.prompt_length = 0
        self.device = self.model.device  # transformers allows `input_ids` on another device
        if self.device.type == "meta":  # offloaded weights, loaded layer by layer
            self.device = input_ids.device
        self.inference_mode = adapter.can_use_inference_mode() if inference_mode is None else inference_mode
        # User code that reads the cache during the call may also write into it, which inference tensors forbid.
        self.user_cache_view = UserCacheView(
            self.user_cache if cache_is_observed and self.keeps_cache else None, self.buffer
        )
        self._mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad
        if lane is not None:
            self._mode = recordable_mode
        elif self.inference_mode and self.user_cache_view.cache is None:
            self._mode = InferenceMode
        self._num_steps = 0  # output tokens per row that transformers would have fed to the model so far

    @staticmethod
    def unsupported_reason(
        adapter: ModelAdapter, input_ids: Tensor, model_kwargs: Mapping[str, Any], max_new_tokens: int
    ) -> str | None:
        """Why the cache, the attention mask or the length of a call is not supported; None if all are."""
        if (reason := unsupported_shape(input_ids)) is not None:
            return reason
        cache = model_kwargs.get(CACHE_ARGUMENT)
        window = adapter.sliding_window if "sliding_attention" in adapter.layer_types else None
        reason = unsupported_reason(cache, adapter.num_cache_layers, len(input_ids), adapter.model.dtype, window)
        if reason is not None:
            return reason
        assert cache is not None
        reason = unsupported_shape(input_ids, model_kwargs.get("attention_mask"), cache.get_seq_length())
        return reason or unsupported_length(adapter, cache.get_seq_length() + input_ids.shape[1] + max_new_tokens)

    def prefill(
        self, hidden_state_indices: Sequence[int] = (), prefix: Prefix | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Forward of the prompt, as `GenerationMixin._prefill` does it.

        Args:
            hidden_state_indices: whose hidden states are returned.
            prefix: the first positions of the prompt, computed before.

        Returns:
            The last logits [B, V], and hidden states {index: [B, L, D]}.
        """
        num_cached = self.user_cache.get_seq_length()
        load_dynamic_cache(self.user_cache, self.buffer)
        mask = self.kwargs.get("attention_mask")
        mask_length = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", -1)
        # `input_ids` are the whole conversation or its uncached part; the mask's length distinguishes the two.
        length = self.input_ids.shape[1]
        is_first = not self.config.is_assistant
        if prefix is not None:
            prefix.load(self.buffer)
            num_cached, is_first = prefix.length, False
        inputs = self.model.prepare_inputs_for_generation(
            self.input_ids,
            next_sequence_length=length - num_cached if mask_length == length else None,
            is_first_iteration=is_first,
            **{CACHE_ARGUMENT: self.cache},
            **self.kwargs,
        )
        fed = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        self.buffer.begin_forward(fed.shape[1])
        with self._mode():
            logits, *states = run_forward(self.model, self.adapter, inputs, hidden_state_indices)
        self.buffer.advance(fed.shape[1])
        self.prompt_length = self.buffer.seq_lens[0]
        self._prepare_rounds()
        if self._lane is not None:
            self._lane.begin_call(
                self.node_forward, self.call_tensors, self.prompt_length, self.max_new_tokens, self.states
            )
        if prefix is not None:
            states = [
                torch.cat([prefix.hidden_states[index], state], 1)
                for index, state in zip(hidden_state_indices, states, strict=True)
            ]
        return logits[:, -1], dict(zip(hidden_state_indices, states, strict=True))

    def use_c(self, kernel: CKernel, unknown_code: str | None) -> None:
        """After the prefill: let `score` run in C, if `find_c_forwards` says so and no code is unknown
        (`CallPlan.unknown_code`)."""
        if self._lane is not None or unknown_code is not None:
            return
        media = torch.tensor(self.adapter.media_token_ids, device=self.input_ids.device)
        has_media = bool(torch.isin(self.input_ids, media).any())
        call = NodeCall(
            self.adapter,
            self.revision,
            self.node_forward.template,
            self.call_tensors,
            self.buffer,
            has_media,
            self.states,
        )
        with self._mode():
            self.c_forwards = find_c_forwards(kernel, call, self._runs_user_code)
        self.skips_rows = self.c_forwards is not None

    @property
    def c_shape(self) -> DecoderShape | None:
        """Traits of the decoder where `score` runs in C; None where it does not."""
        return None if self.c_forwards is None else self.c_forwards.decoder.shape

    def decoding(self) -> AbstractContextManager[Any]:
        """The context that transformers applies to its decoding steps; may switch kernels of expert layers."""
        optimize = getattr(self.model, "_optimize_model_for_decode", nullcontext)
        return optimize()

    def score(
        self, tree: DraftTree, hidden_state_indices: Sequence[int] = (), active: Sequence[bool] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Target.score`: in C, which computes active rows only, else recorded, else in torch."""
        tree = tree.to(self.device)
        self.buffer.begin_forward(tree.num_nodes)
        scored = self.c_forwards and self.c_forwards.score(tree, self.buffer, hidden_state_indices, active)
        return scored or self._score_in_model(tree, hidden_state_indices)

    def _score_in_model(self, tree: DraftTree, hidden_state_indices: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """`score` by the model's own forward, recorded or not, after `RaggedKVCache.begin_forward`."""
        with self._mode():
            part, outputs = self.score_part(tree.num_nodes, hidden_state_indices), None
            if part is not None and self._lane is not None:
                outputs = self._lane.replay(part, self.buffer.lengths_on(self.device), tree)
            if outputs is None:
                outputs = self.node_forward(tree, self.buffer, self.call_tensors, hidden_state_indices)
        logits, *states = outputs
        return logits, dict(zip(hidden_state_indices, states, strict=True))

    def score_part(self, num_nodes: int, hidden_state_indices: Sequence[int]) -> ScorePart | None:
        if self._lane is None or self._lane.has_failed:
            return None
        if self._runs_user_code and not self.revision.is_current():
            return None
        return self._lane.score_part(self.node_forward, num_nodes, hidden_state_indices)

    def follow_part(self, tokens: Sequence[Sequence[int]], kept: Sequence[Tensor]) -> None:
        self.buffer.seq_lens = [length + len(row) for length, row in zip(self.buffer.seq_lens, tokens, strict=True)]

    def commit(self, result: VerifyResult) -> None:
        with self._mode():
            self.buffer.keep_path(result.path, result.counts, result.accepted_nodes)

    def draft_chain(self, request: ChainRequest) -> DraftedChains | None:
        """See `DraftTarget`."""
        drafted = None if self.c_forwards is None else self.c_forwards.chain(self.buffer, request)
        if drafted is not None:
            lengths = zip(self.buffer.seq_lens, drafted.num_read, strict=True)
            self.buffer.seq_lens = [length + read for length, read in lengths]
        return drafted

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        self.buffer.crop([self.prompt_length + length for length in lengths])
        if zero_tail:
            with self._mode():
                self.buffer.zero_tail()

    def export_cache(self, num_steps: int) -> Any:
        """Fill transformers' cache as after decoding `num_steps` output tokens per row, and return it."""
        self.user_cache_view.check()
        export_dynamic_cache(self.buffer, self.prompt_length + num_steps - 1, self.user_cache)
        return self.user_cache

    @property
    def setup_s(self) -> float:
        return 0.0 if self.recordings is None else self.recordings.setup_s

    @property
    def cached_lengths(self) -> list[int]:
        return [length - self.prompt_length for length in self.buffer.seq_lens]

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache was passed by the user, who may use it after the call."""
        return bool(getattr(self.user_cache, "_is_user_defined", False))

    def sync_user_cache(self, num_steps: int) -> None:
        """Let user code that runs next find `num_steps` output tokens per row in its cache, as in `_sample`."""
        self._num_steps = num_steps
        self.user_cache_view.sync(self.prompt_length + num_steps)

    def restore_user_cache(self) -> None:
        """Fill the user's cache as transformers leaves it when a call is interrupted by an exception."""
        if self.keeps_cache and self.prompt_length:
            export_dynamic_cache(self.buffer, self.prompt_length + self._num_steps, self.user_cache)

    @property
    def position_ids(self) -> Tensor:
        """[B, L] or [axes, B, L] position ids of the prompt."""
        position_ids: Tensor = self.kwargs["position_ids"]
        return position_ids

    def _prepare_rounds(self) -> None:
        """Derive the constant inputs of the rounds from those that transformers would prepare for its first step."""
        batch = self.input_ids.shape[0]
        step = dict(self.kwargs)
        position_ids = step["position_ids"]
        position_ids = position_ids.expand(*position_ids.shape[:-2], batch, position_ids.shape[-1])
        step["position_ids"] = torch.cat([position_ids, position_ids[..., -1:] + 1], dim=-1)
        token_types = [name for name in TOKEN_TYPE_INPUTS if name in step]
        for name in token_types:
            # New tokens are text: 0 in the multimodal types; `token_type_ids` repeat their last value.
            last = step[name][..., -1:] if name == "token_type_ids" else torch.zeros_like(step[name][..., -1:])
            step[name] = torch.cat([step[name], last], dim=-1)
        mask = step.pop("attention_mask", None)
        inputs = self.model.prepare_inputs_for_generation(
            torch.nn.functional.pad(self.input_ids, (0, 1)),
            next_sequence_length=1,
            is_first_iteration=False,
            **{CACHE_ARGUMENT: self.cache},
            **step,
        )
        types = {
            name: step[name][..., -1:].to(self.device) for name in token_types if inputs.pop(name, None) is not None
        }
        # As the model wants them: some count from 1, and some ignore those of `generate` for the cache's positions.
        next_position = inputs.pop("position_ids", None)
        if next_position is None:
            next_position = torch.full((batch, 1), self.prompt_length, device=self.device)
        position_base = next_position[..., -1:].to(self.device) - self.prompt_length
        for name in ("input_ids", "attention_mask"):
            inputs.pop(name, None)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        last_position = self.prompt_length - 1 + self.max_new_tokens
        self.position_steps = self._find_position_steps(position_base)
        self.node_forward = NodeForward(self.adapter, inputs)
        self.call_tensors = CallTensors(
            position_base=position_base,
            max_position=torch.tensor([last_position], device=self.device),
            last_position=last_position,
            padding=None if mask is None or bool(mask.all()) else mask.to(self.device, torch.bool),
            token_types=types,
            position_limit=self.adapter.num_positions if self.position_steps else None,
        )

    def _find_position_steps(self, position_base: Tensor) -> list[int]:
        """See the attribute. Models with several position axes rotate by any number."""
        limit = self.adapter.num_positions
        if limit is None or position_base.dim() != 2:
            return []
        first = limit - self.prompt_length + 1
        steps = [first - base for base in position_base.expand(len(self.input_ids), 1)[:, 0].tolist()]
        return steps if self.max_new_tokens >= min(steps) else []
