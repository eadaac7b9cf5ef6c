"""`VisionModelDrafter`: a smaller vision-language model of the target's family drafts, with the images.

It encodes the media itself; with a compressor its visual tokens are reduced before its decoder reads them, as in
SpecVLM (arXiv 2508.16201). Text and the remaining visual tokens keep their order and their position ids.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.heads.base.compressed_inputs import prompt_grids
from mmspec.drafters.heads.base.visual_inputs import packed_indices
from mmspec.drafters.model.model_drafter import UNLIMITED_TOKENS, ModelDrafter, ModelState
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import Compressor, DrafterRequirements, Prompt, VisualTokens

logger = logging.getLogger("mmspec")


class VisionModelDrafter(ModelDrafter):
    """Drafts with a model that has the target's tokenizer and placeholders; prompts without media are read as text."""

    requirements = DrafterRequirements(media_inputs=True)

    def begin(self, prompt: Prompt) -> ModelState:
        """See `ModelDrafter.begin`.

        Raises:
            ValueError: the compressor has weights for another hidden size than the draft model's.
        """
        size = getattr(prompt.compressor, "hidden_size", None)
        expected = self.model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
        if size is not None and size != expected:
            raise ValueError(
                f"compressor has weights for hidden size {size}, the draft model {self.name} has {expected}; "
                "choose a compressor without weights."
            )
        return super().begin(prompt)

    def _read_prompt(self, state: ModelState) -> None:
        """Open the model with the prompt and its media; with the text alone where it rejects them."""
        prompt = state.prompt
        has_media = bool(prompt.media_inputs) and prompt.position_ids.shape[-1] == prompt.input_ids.shape[1]
        if has_media:
            try:
                self._read_media(state, prompt)
            except (ValueError, RuntimeError) as error:  # as models reject images that do not match the placeholders
                logger.warning("mmspec: drafter %s reads no images: %s", self.name, str(error).splitlines()[0][:200])
        if state.target is None:
            super()._read_prompt(state)

    def _read_media(self, state: ModelState, prompt: Prompt) -> None:
        max_new_tokens = prompt.max_new_tokens or UNLIMITED_TOKENS
        inputs: dict[str, Any] = {"position_ids": prompt.position_ids, **prompt.media_inputs}
        ids = prompt.input_ids.masked_fill(prompt.input_ids >= self.source.num_embeddings, 0)
        mask = prompt.attention_mask.long()
        embeds = None
        if prompt.compressor is not None and prompt.position_ids.dim() == 2:  # one position axis, which orders tokens
            embeds = self.source.embed({"input_ids": ids, "attention_mask": mask, **inputs})
        if embeds is not None and prompt.compressor is not None:
            embeds, mask, position_ids = compress_prompt(prompt, embeds, prompt.compressor)
            ids, inputs = torch.zeros_like(mask), {"inputs_embeds": embeds, "position_ids": position_ids}
        elif not bool(prompt.attention_mask[:, -1].all()):
            return  # padded on the right, which the model's own positions do not allow
        state.target = self.source.open(ids, mask, max_new_tokens, inputs)
        state.cached_ids = [[] for _ in ids]


def compress_prompt(prompt: Prompt, embeds: Tensor, compressor: Compressor) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt with fewer visual tokens, padded on the left.

    Args:
        prompt: the prompt.
        embeds: [B, L, D] its input embeddings in the draft model.
        compressor: reduces the visual tokens.

    Returns:
        [B, n, D] embeddings, [B, n] int64 mask and [B, n] position ids, in the order of the position ids.
    """
    is_visual, is_text = prompt.visual_mask & prompt.attention_mask, ~prompt.visual_mask & prompt.attention_mask
    parts = []
    for selected in (is_visual, is_text):
        counts = selected.sum(1)
        index = packed_indices(selected)[:, : int(counts.max())]
        valid = torch.arange(index.shape[1], device=index.device) < counts[:, None]
        parts.append((gather_rows(embeds, index), valid, gather_rows(prompt.position_ids, index)))
    visual_embeds, visual_mask, visual_positions = parts[0]
    tokens = VisualTokens(
        inputs_embeds=visual_embeds,
        hidden_states=visual_embeds,
        mask=visual_mask,
        position_ids=visual_positions,
        grids=prompt_grids(prompt, prompt.input_ids.shape[1]),
    )
    compressed = compressor.compress(tokens, None, compressor.max_tokens)
    text_embeds, text_mask, text_positions = parts[1]
    joined = torch.cat((compressed.inputs_embeds, text_embeds), 1)
    mask = torch.cat((compressed.mask, text_mask), 1)
    position_ids = torch.cat((compressed.position_ids, text_positions), 1)
    order = position_ids.masked_fill(~mask, -1).sort(dim=1, stable=True).indices  # padding first
    return gather_rows(joined, order), gather_rows(mask, order).long(), gather_rows(position_ids, order)
