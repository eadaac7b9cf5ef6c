"""A smaller transformers model as the source of drafts: a draft model is decoded as a target, by `HFTarget`.

Reads text: the model's own `prepare_inputs_for_generation` and `forward` with a KV cache of its own. Which tokens it
reads is up to the drafter (`mmspec.drafters.model.model_drafter`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mmspec.cpu.c_kernel import load_kernel
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.files import snapshot_id
from mmspec.interfaces import DraftTarget
from mmspec.targets.base import ModelAdapter
from mmspec.targets.forward import unsupported_length
from mmspec.targets.hf import HFTarget
from mmspec.targets.layer_access import layer_access
from mmspec.targets.model_state import unknown_code
from mmspec.targets.module_scan import scan_modules
from mmspec.targets.registry import find_adapter
from mmspec.weight_files import HEAD_TENSOR, holds_head, weights_file

logger = logging.getLogger("mmspec")

CONFIG_FILE = "config.json"
MODEL_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")
"""Of the classes that generate text."""


class HFDraftModel:
    """Implements `mmspec.interfaces.DraftModelSource`.

    Attributes: see there.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str = "") -> None:
        """
        Args:
            model: a decoder-only model in eval mode.
            tokenizer: its tokenizer, if known.
            name: for messages; by default the folder or hub id that the model was loaded from.

        Raises:
            ValueError: the model is in train mode, or cannot be decoded with a KV cache.
        """
        if model.training:
            raise ValueError(f"drafter={type(model).__name__} is in train mode; call its eval() first.")
        self.adapter = find_adapter(model)
        reason = "recurrent layers" if self.adapter.is_recurrent else self.adapter.unsupported_reason()
        if reason is not None:
            raise ValueError(f"drafter={type(model).__name__} cannot draft: {reason}. Use another model.")
        self.model: nn.Module = model
        self.tokenizer = tokenizer
        self.name = name or os.path.basename(str(model.config._name_or_path or "")) or type(model).__name__
        self.vocab_size = self.adapter.vocab_size
        self.num_embeddings = self.adapter.num_embeddings
        self.media_token_ids = self.adapter.media_token_ids

    def embed(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """See `mmspec.interfaces.DraftModelSource`. Runs a copy of the model without layers."""
        access = layer_access(self.adapter)
        model = access.restrict(self.adapter.model, ())
        recorder = model.get_submodule(".".join(access.path))[0]
        with torch.no_grad():
            model(**inputs, use_cache=False, return_dict=True)
        embeds = recorder.last_input
        assert isinstance(embeds, Tensor)
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        is_text = mask & ~torch.isin(ids, torch.tensor(self.media_token_ids, device=ids.device))
        expected = self.adapter.model.get_input_embeddings()(ids[is_text])
        return embeds if embeds.dim() == 3 and torch.allclose(embeds[is_text], expected) else None

    def open(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> DraftTarget | None:
        if input_ids.device != self.adapter.model.device:  # the target was moved after `patch`
            return None
        limit = getattr(self.adapter.text_config, "max_position_embeddings", None)
        if limit is not None and input_ids.shape[1] + min(max_new_tokens, limit) > limit:
            return None
        if unsupported_length(self.adapter, input_ids.shape[1] + max_new_tokens) is not None:
            return None
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        target = HFTarget(
            self.adapter,
            input_ids,
            {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                CACHE_ARGUMENT: DynamicCache(config=self.adapter.text_config),
                "use_cache": True,
                **(extra or {}),
            },
            SimpleNamespace(is_assistant=False, _mask_length=-1),
            max_new_tokens,
        )
        target.prefill()
        if input_ids.device.type == "cpu" and (kernel := load_kernel()) is not None:
            target.use_c(kernel, unknown_code(self.adapter, scan_modules(self.adapter.model)))
        return target


def is_model(drafter: object) -> bool:
    """Whether `drafter=` is a model of transformers."""
    return isinstance(drafter, PreTrainedModel)


def config_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `config.json` of a folder says; nothing where it cannot be read, which whoever loads the folder reports."""
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_model_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a model of transformers that generates text, and not a draft head."""
    names = config_of(folder).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name.endswith(MODEL_SUFFIXES) or not hasattr(transformers, name):
        return False
    try:
        return not holds_head(folder)
    except (OSError, ValueError):
        return False


def load_draft_model(folder: str | os.PathLike[str], target: ModelAdapter) -> HFDraftModel:
    """The model in a folder, in the target's precision and on its device, with its tokenizer if the folder has one.

    Raises:
        ValueError: see `HFDraftModel`; or the weights are not all of the model's, which would be random numbers.
        OSError: a file is missing or damaged.
    """
    config = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    is_vlm = config.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto: Any = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    weights_file(folder)
    model, report = auto.from_pretrained(
        folder, dtype=target.model.dtype, local_files_only=True, output_loading_info=True
    )
    check_complete(folder, report)
    model = model.to(target.model.device).eval().requires_grad_(False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        logger.info("mmspec: no tokenizer in %s (%s)", folder, str(error).splitlines()[0][:200])
        tokenizer = None
    return HFDraftModel(model, tokenizer, snapshot_id(folder) or os.path.basename(os.path.normpath(folder)))


def check_complete(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> None:
    """Refuse a model of which transformers found no weights for some tensors and drew them at random.

    Raises:
        ValueError: names a tensor.
    """
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(map(str, report.get("mismatched_keys") or ()))
    if missing or mismatched:
        name = missing[0] if missing else mismatched[0]
        raise ValueError(
            f"drafter={os.fspath(folder)}: its weights lack {len(missing) + len(mismatched)} tensors of the model that "
            f"its config.json names, such as {name[:80]}; a head has {HEAD_TENSOR}. Use a complete model."
        )


def check_draft_model(source: HFDraftModel, target: ModelAdapter) -> None:
    """Compare a draft model with the target.

    Raises:
        ValueError: it is on another device.
    """
    device, expected = source.adapter.model.device, target.model.device
    if device != expected:
        raise ValueError(
            f"drafter={source.name} is on {device}, the target on {expected}; move it there: .to({str(expected)!r})."
        )
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (source.model, target.text_model)]
    if sizes[0] >= sizes[1] and source.model is not target.model:
        logger.warning(
            "mmspec: drafter=%s has %d parameters, the target's text model %d: it will hardly save time",
            source.name,
            *sizes,
        )
