"""The draft heads that checkpoints bring along (MTP), as data: where their tensors are, and in what they differ.

Sources: the models of vLLM (`qwen3_5_mtp`, `exaone4_5_mtp`, `glm_ocr_mtp`) and the index files of the checkpoints. A
family is a row here; `own_head` knows no names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeadLayout:
    """Names of the tensors of one family's head.

    Attributes:
        prefixes: of its tensors in the files; `{layers}` is the number of the target's decoder layers.
        names: part of the head -> name of its tensor behind the prefix.
        block: prefix of the decoder layer's tensors, behind the other.
        visual_modes, zeroes_first: see `OwnHead`.
        layer_type: of the block, as the target's config names it; "" for that of the target's first layer.
        lm_head: name of an LM head of its own, which may be a copy of the target's; "" for none.
        copies: of the target's tensors, which are not read.
        served: {name: "embeddings", "lm_head" or "own_lm_head"}, what vLLM's loader reads beside the head's tensors.
        depth_key: of the config, the number of layers of the head.
        refused: flags of the config of heads that are not read.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, str]
    block: str
    visual_modes: tuple[str, ...] = ("coupled", "placeholder")
    zeroes_first: bool = False
    layer_type: str = ""
    lm_head: str = ""
    copies: tuple[str, ...] = ()
    served: Mapping[str, str] = field(default_factory=dict)
    depth_key: str = "mtp_num_hidden_layers"
    refused: tuple[str, ...] = ()


_MTP_NAMES = {
    "fc": "fc.weight",
    "embedding_norm": "pre_fc_norm_embedding.weight",
    "hidden_norm": "pre_fc_norm_hidden.weight",
    "output_norm": "norm.weight",
}
_MTP_SERVED = {"model.language_model.embed_tokens.weight": "embeddings", "lm_head.weight": "lm_head"}
_MTP_PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
_QWEN3_5 = HeadLayout(
    _MTP_PREFIXES,
    _MTP_NAMES,
    block="layers.0.",
    layer_type="full_attention",
    served=_MTP_SERVED,
    refused=("mtp_use_dedicated_embeddings",),
)
_EXAONE4_5 = HeadLayout(
    _MTP_PREFIXES, _MTP_NAMES, block="layers.0.", served=_MTP_SERVED, depth_key="num_nextn_predict_layers"
)
_GLM_OCR = HeadLayout(
    ("model.language_model.layers.{layers}.", "model.layers.{layers}.", "language_model.model.layers.{layers}."),
    {
        "fc": "eh_proj.weight",
        "embedding_norm": "enorm.weight",
        "hidden_norm": "hnorm.weight",
        "output_norm": "shared_head.norm.weight",
    },
    block="",
    lm_head="shared_head.head.weight",
    copies=("embed_tokens.weight",),
    visual_modes=("placeholder", "coupled"),
    zeroes_first=True,
    served={"{prefix}embed_tokens.weight": "embeddings", "{prefix}shared_head.head.weight": "own_lm_head"},
    depth_key="num_nextn_predict_layers",
)

LAYOUTS: dict[str, HeadLayout] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "glm_ocr": _GLM_OCR,
    "exaone4_5": _EXAONE4_5,
}
"""By `config.model_type` of the target."""
