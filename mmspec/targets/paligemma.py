"""PaliGemma 1 and 2: one square grid of visual tokens per image."""

from __future__ import annotations

from mmspec.targets.llava import LlavaAdapter


class PaliGemmaAdapter(LlavaAdapter):
    """`PaliGemmaForConditionalGeneration`. Images may be adjacent; Gemma 2 as text model has sliding layers.

    `PaliGemmaModel.forward` builds the masks of both layer types from one `attention_mask`.
    """

    model_types: tuple[str, ...] = ("paligemma",)
    vision_args: tuple[str, ...] = ()
    accepts_mask_per_layer_type = False
    response_token_type = 1  # 0 is the bidirectional prefix

    def attention_capture(self) -> None:
        """None: the capture is for towers that LLaVA selects a layer of."""
