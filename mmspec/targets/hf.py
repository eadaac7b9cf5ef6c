"""The target of one call: a transformers model behind a cache with a length per row.

Works through `prepare_inputs_for_generation` and `forward` only. What differs between model families is in `Family`
(one per `mmspec/target_<family>.py`). Knows nothing of drafting, picking or stopping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import BUCKETS, DraftTree
from mmspec.engine.tree_cache import Lent, TreeCache, export_dynamic_cache, load_dynamic_cache, unsupported_reason
from mmspec.interfaces import VerifyResult, VisualGrid
from mmspec.targets.module_scan import scan_modules
from mmspec.targets.vision_attention import AttentionCapture

TREE_ATTENTION_KERNELS = ("sdpa", "eager")
"""Attention kernels that take a mask per node."""
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "selected_hidden_states")
"""Whether transformers can be asked for some hidden states only; older ones keep them all."""
STATIC_ROPE_TYPES = frozenset(("default", "axial", "mrope", "linear", "llama3", "yarn", "proportional"))
"""Rotary scalings whose frequencies are the same in every forward."""
TOKEN_TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs as long as the sequence that transformers lengthens with every new token."""


class ModelAdapter:
    """What mmspec knows of one model family. One object per patched model; it holds no state of a call.

    Subclasses say where the visual tokens are (`segments`) and which inputs tell (`vision_args`).
    """

    model_type: str = ""
    vision_args: tuple[str, ...] = ()
    """Arguments of `generate` that describe the visual inputs; transformers drops them before the loop starts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers: int = self.text_config.num_hidden_layers
        self.vocab_size: int = self.text_config.vocab_size
        names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
        known = (getattr(model.config, name, None) for name in names)
        self.media_token_ids = tuple(dict.fromkeys(token for token in known if isinstance(token, int)))

    @property
    def text_config(self) -> Any:
        """The text model's config, read afresh since the model may be a copy by now."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def sliding_window(self) -> int | None:
        """Positions that a layer with a sliding window looks back, read afresh since users change it."""
        return _windows(self._masked_by)[0]

    @property
    def layer_types(self) -> frozenset[str]:
        """Kinds of attention layers, read afresh."""
        return _windows(self._masked_by)[1]

    @property
    def _masked_by(self) -> Any:
        """The config that the text model reads its masks from: its own, wherever it differs from the whole model's."""
        own = getattr(self.text_model, "config", None)
        return self.text_config if own is None or self.text_model is self.model else own

    def unsupported_reason(self) -> str | None:
        """Why this model, as it is now, cannot be served exactly; None if it can."""
        if getattr(self.model, "_is_stateful", False):
            return "a stateful model"
        unknown = self.layer_types - {"full_attention", "sliding_attention"}
        if unknown:
            return f"layers of type {', '.join(sorted(unknown))}"
        scaling = _rope_types(self.text_config) - STATIC_ROPE_TYPES
        if scaling:
            return f"rope_type={min(scaling)!r} (its frequencies depend on the longest position of a forward)"
        if self.attention not in TREE_ATTENTION_KERNELS:
            return f"attn_implementation={self.attention!r} of the text model (it cannot take a mask per node)"
        return None

    @property
    def text_model(self) -> Any:
        """The module that does the decoding steps, or the whole model where transformers cannot tell."""
        return self.model.get_decoder() or self.model

    @property
    def num_embeddings(self) -> int:
        """Number of ids that have an embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def attention(self) -> str:
        """The text model's attention kernel, read afresh since users switch it."""
        return str(self.text_config._attn_implementation)

    def can_use_inference_mode(self) -> bool:
        """Whether a forward creates no tensor that outlives it, so that it may run in inference mode.

        Inference mode saves about a tenth of the time of launch-bound steps, but tensors made in it can never be
        trained with. Quantised or offloaded weights, replaced forwards and user hooks may keep such tensors.
        """
        return scan_modules(self.model).can_use_inference_mode

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """The grids that the visual tokens of a prompt form. `vision` holds the recorded `vision_args`."""
        return ()

    def attention_capture(self) -> AttentionCapture | None:
        """Hears what the vision tower attends to; None where what it says cannot be told apart by visual tokens."""
        return None

    def token_saliency(self, shares: Tensor, vision: Mapping[str, Any]) -> Tensor | None:
        """[M] of the visual tokens of all rows, in reading order; None if the numbers do not fit.

        Args:
            shares: [P, N] of the pictures (or tiles) as the tower read them, and their patches.
        """
        return shares.flatten()

    def visual_saliency(
        self, heard: AttentionCapture | None, visual: Tensor, vision: Mapping[str, Any]
    ) -> Tensor | None:
        """[B, L] float32, how much the tower attends to what stands where visual [B, L] is; None if nobody can tell."""
        shares = None if heard is None else heard.scores()
        flat = None if shares is None else self.token_saliency(shares, vision)
        if flat is None or len(flat) != int(visual.sum()):  # once per prompt
            return None
        flat = flat.to(visual.device)
        return flat.new_zeros(visual.shape).masked_scatter_(visual, flat)

    def placeholder_runs(self, input_ids: Tensor, token: int) -> list[tuple[int, int, int]]:
        """(row, start, length) of each unbroken run of a placeholder, in reading order."""
        found: list[tuple[int, int, int]] = []
        for row, ids in enumerate(input_ids.tolist()):
            start = None
            for place, value in enumerate([*ids, None]):
                if value == token and start is None:
                    start = place
                elif value != token and start is not None:
                    found.append((row, start, place - start))
                    start = None
        return found


def _rope_types(text_config: Any) -> set[str]:
    """Kinds of rotary scaling of a text model, of all kinds of its layers."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return {str(kind.get("rope_type", kind.get("type", "default"))) for kind in kinds}


def _windows(text_config: Any) -> tuple[int | None, frozenset[str]]:
    """(sliding window or None, kinds of layers) of a text model."""
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None else "full_attention"]
    if getattr(text_config, "attention_chunk_size", None) is not None and "chunked_attention" not in kinds:
        kinds = [*kinds, "chunked_attention"]
    return window, frozenset(kinds)


class HFTarget:
    """Implements `mmspec.interfaces.Target` for one call of `generate`."""

    def __init__(
        self,
        adapter: ModelAdapter,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        config: Any,
        max_new_tokens: int,
        inference_mode: bool | None = None,
        cache_is_observed: bool = False,
    ) -> None:
        """
        Args:
            input_ids: [B, L] int64. model_kwargs: what transformers prepared for its own loop.
            config: the prepared generation config. most: new tokens that may ever be emitted per row.
            quiet: whether forwards may run in inference mode; looked up in the model's modules if None.
            watched: user code runs during the call and may look at the user's cache.
        """
        self.adapter, self.model = adapter, adapter.model
        self.vocab_size = adapter.vocab_size
        self.input_ids, self.kwargs, self.config = input_ids, dict(model_kwargs), config
        self.user_cache = self.kwargs.pop("past_key_values")
        past = self.user_cache.get_seq_length()
        self.max_new_tokens = max_new_tokens
        self.buffer = RaggedKVCache(input_ids.shape[0], past + input_ids.shape[1] + max_new_tokens + BUCKETS[-1])
        self.cache = TreeCache(self.buffer, adapter.num_layers)
        self.prompt_length = 0  # positions after the prefill
        self.device = self.model.device  # `input_ids` may live elsewhere, transformers allows that
        if self.device.type == "meta":  # offloaded weights, brought in layer by layer
            self.device = input_ids.device
        self._template: dict[str, Any] = {}
        self.inference_mode = adapter.can_use_inference_mode() if inference_mode is None else inference_mode
        # Code that looks at the user's cache in mid-call may write into it, too: not into tensors of inference mode.
        self.lent = Lent(self.user_cache if cache_is_observed and self.keeps_cache else None, self.buffer)
        self._mode = torch.inference_mode if self.inference_mode and self.lent.cache is None else torch.no_grad
        self._fed = 0  # columns that transformers would have fed by now
        self._window, self._layer_types = adapter.sliding_window, adapter.layer_types

    @staticmethod
    def unsupported_reason(adapter: ModelAdapter, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
        """Why the cache or the attention mask of this call cannot be served, or None."""
        cache = model_kwargs.get("past_key_values")
        mask, length = model_kwargs.get("attention_mask"), input_ids.shape[1]
        window = adapter.sliding_window if "sliding_attention" in adapter.layer_types else None
        if (
            reason := unsupported_reason(cache, adapter.num_layers, input_ids.shape[0], adapter.model.dtype, window)
        ) is not None:
            return reason
        assert cache is not None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                return "an attention_mask that is not [batch, length]"
            if mask.shape[1] not in (length, cache.get_seq_length() + length):
                return f"an attention_mask of length {mask.shape[1]} for {length} input ids"
        return None

    def prefill(self, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Read the prompt as `GenerationMixin._prefill` does: last logits [B, V], and {index: [B, L, D]} states."""
        past = self.user_cache.get_seq_length()
        load_dynamic_cache(self.user_cache, self.buffer)
        mask = self.kwargs.get("attention_mask")
        seen = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", -1)
        # `input_ids` are the whole conversation or only what is new, told apart by the mask's length.
        fresh = self.input_ids.shape[1] - past if seen == self.input_ids.shape[1] else None
        inputs = self.model.prepare_inputs_for_generation(
            self.input_ids,
            next_sequence_length=fresh,
            is_first_iteration=not self.config.is_assistant,
            past_key_values=self.cache,
            **self.kwargs,
        )
        nodes = (inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]).shape[1]
        self.buffer.begin_forward(nodes)
        outputs = self._forward(inputs, hidden_state_indices)
        self.buffer.advance(nodes)
        self.prompt_length = self.buffer.seq_lens[0]
        self._prepare_rounds()
        return outputs.logits[:, -1], {index: outputs.hidden_states[index] for index in hidden_state_indices}

    def decoding(self) -> AbstractContextManager[Any]:
        """What transformers wraps around its decoding steps: it may change kernels of experts for them."""
        switch = getattr(self.model, "_optimize_model_for_decode", nullcontext)
        return switch()

    def score(self, tree: DraftTree, hidden_state_indices: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """See `mmspec.interfaces.Target.score`."""
        tree = tree.to(self.device)
        assert tree.depths is not None
        self.buffer.begin_forward(tree.num_nodes)
        lengths = torch.tensor(self.buffer.seq_lens, device=self.device)
        steps = (lengths - self.prompt_length + 1)[:, None] + tree.depths  # tokens since the prompt's last one
        steps = steps.clamp(max=self.max_new_tokens)  # guesses beyond the end may be beyond the model's positions
        inputs = dict(self._template)
        inputs["input_ids"] = tree.tokens
        inputs["position_ids"] = self._last_position + steps
        inputs["attention_mask"] = self._mask(tree, lengths)
        for name, last in self._token_types.items():
            inputs[name] = last.expand(*last.shape[:-1], tree.num_nodes)
        outputs = self._forward(inputs, hidden_state_indices)
        return outputs.logits, {index: outputs.hidden_states[index] for index in hidden_state_indices}

    def commit(self, result: VerifyResult) -> None:
        """See `mmspec.interfaces.Target.commit`."""
        with self._mode():
            self.buffer.keep_path(result.path, result.counts, result.accepted_nodes)

    def crop(self, lengths: Sequence[int], zero_tail: bool = False) -> None:
        """See `mmspec.interfaces.Target.rewind`."""
        self.buffer.crop([self.prompt_length + length for length in lengths])
        if zero_tail:
            with self._mode():
                self.buffer.zero_tail()

    def export_cache(self, columns: int) -> Any:
        """Fill transformers' own cache as if it had decoded `columns` columns, and return it."""
        self.lent.check()
        export_dynamic_cache(self.buffer, self.prompt_length + columns - 1, self.user_cache)
        return self.user_cache

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache is the user's own, who looks at it after the call."""
        return bool(getattr(self.user_cache, "_is_user_defined", False))

    def show(self, columns: int) -> None:
        """Let user code that runs next find `columns` emitted columns in its cache, as transformers feeds them."""
        self._fed = columns
        self.lent.show(self.prompt_length + columns)

    def leave(self) -> None:
        """Fill the user's cache as transformers leaves it where a call is interrupted."""
        if self.keeps_cache and self.prompt_length:
            export_dynamic_cache(self.buffer, self.prompt_length + self._fed, self.user_cache)

    @property
    def position_ids(self) -> Tensor:
        """[B, L] or [axes, B, L] position ids of the prompt."""
        positions: Tensor = self.kwargs["position_ids"]
        return positions

    def _forward(self, inputs: dict[str, Any], taps: Sequence[int]) -> Any:
        if taps:
            inputs = inputs | {"output_hidden_states": sorted(taps) if CAN_SELECT_HIDDEN_STATES else True}
        with self._mode():
            return self.model(**inputs, return_dict=True)

    def _prepare_rounds(self) -> None:
        """Learn from transformers which arguments a decoding step passes on, and where positions and padding stand."""
        batch = self.input_ids.shape[0]
        step = dict(self.kwargs)
        positions = step["position_ids"]
        positions = positions.expand(*positions.shape[:-2], batch, positions.shape[-1])
        self._last_position = positions[..., -1:].to(self.device)
        step["position_ids"] = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        types = [name for name in TOKEN_TYPE_INPUTS if name in step]
        for name in types:
            # New tokens are text: zeros for the multimodal types; the others go on with their last value.
            last = step[name][..., -1:] if name == "token_type_ids" else torch.zeros_like(step[name][..., -1:])
            step[name] = torch.cat([step[name], last], dim=-1)
        mask = step.pop("attention_mask", None)
        self._padding = None if mask is None or bool(mask.all()) else mask.to(self.device, torch.bool)
        inputs = self.model.prepare_inputs_for_generation(
            torch.nn.functional.pad(self.input_ids, (0, 1)),
            next_sequence_length=1,
            is_first_iteration=False,
            past_key_values=self.cache,
            **step,
        )
        self._token_types = {
            name: step[name][..., -1:].to(self.device) for name in types if inputs.pop(name, None) is not None
        }
        for name in ("input_ids", "position_ids", "attention_mask"):
            inputs.pop(name, None)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0
        self._template = inputs

    def _mask(self, tree: DraftTree, lengths: Tensor) -> Any:
        """What each node may look at: its row's committed positions but padding, and its ancestors.

        Additive, since eager attention adds it as it is and sdpa takes either kind. [B, 1, N, end], one per kind of
        layer if there are several; None where transformers' own causal mask says the same.
        """
        plain = tree.num_nodes == 1 and self.buffer.is_uniform and self._padding is None
        if plain:
            return None
        assert tree.ancestor_mask is not None and tree.depths is not None
        batch, nodes = tree.tokens.shape
        place = torch.arange(self.buffer.kv_len, device=self.device)
        seen = place < lengths[:, None]
        if self._padding is not None:
            seen[:, : self._padding.shape[1]] &= self._padding
        seen = seen[:, None].expand(batch, nodes, -1).contiguous()
        own = (lengths[:, None] + torch.arange(nodes, device=self.device))[:, None].expand(batch, nodes, nodes)
        seen.scatter_(2, own, tree.ancestor_mask)
        kinds = self._layer_types
        if "sliding_attention" not in kinds:
            return self._to_mask(seen)
        # Windows count places in the sequence, pads included, as transformers' own masks do.
        depth = torch.where(tree.valid, tree.depths, 0)
        at = place.expand(batch, -1).scatter(1, own[:, 0], lengths[:, None] + depth)
        assert self._window is not None
        near = (lengths[:, None] + tree.depths)[:, :, None] - at[:, None] < self._window
        sliding = self._to_mask(seen & near)
        if kinds == {"sliding_attention"}:
            return sliding
        return {"full_attention": self._to_mask(seen), "sliding_attention": sliding}

    def _to_mask(self, seen: Tensor) -> Tensor:
        """Bool for sdpa (which then does not care about autocast); eager attention adds its mask, so numbers there."""
        if self.adapter.attention == "sdpa":
            return seen[:, None]
        dtype = self.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
