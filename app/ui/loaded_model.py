"""A loaded and patched model. Used in the worker's thread only."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import mmspec
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone, load_model
from mmspec.app.ui.credit import NO_DRAFTS
from mmspec.app.ui.kept_media import KeptMedia, visitor_scope
from mmspec.control.cost_store import unchanged_costs
from mmspec.interfaces import Compressor, Drafter
from mmspec.interfaces.drafter import modules_of
from mmspec.patching import patch_state
from mmspec.resolve import resolve_drafter
from mmspec.vision.registry import build_compressor

WARMUP_TOKENS = 12


@dataclass
class LoadedModel:
    """A patched model with its processor and the drafters built for it.

    Attributes:
        name: as offered by `ModelStore`.
        model: patched with the drafter "none"; each run passes its own drafter.
        processor: of the model.
        folders: {name: path} of models and drafters that are folders.
        kept_media: encoded pictures of conversations.
    """

    name: str
    model: Any
    processor: Any
    folders: Mapping[str, str] = field(default_factory=dict)
    kept_media: KeptMedia = field(default_factory=KeptMedia)
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """What the model is: its type, its size, the dtype of its weights."""
        count = sum(weight.numel() for weight in self.model.parameters())
        return f"{self.model.config.model_type}, {format_model_size(count)} parameters, {dtype_name(self.model.dtype)}"

    def get_drafter(self, name: str) -> Drafter:
        """A drafter without state of earlier runs, so that no run depends on another.

        Raises:
            UsageError: the drafter does not fit this model.
        """
        if name not in self._drafters:
            tokenizer = getattr(self.processor, "tokenizer", None)
            adapter = self.model.__dict__["_mmspec"].adapter
            try:
                self._drafters[name] = resolve_drafter(self.folders.get(name, name), adapter, tokenizer)
            except (OSError, TypeError, ValueError) as error:
                raise UsageError(f"Drafter {Path(name).name}: {one_line(error, 200)}") from error
        drafter = self._drafters[name]
        return drafter if modules_of(drafter) else copy.deepcopy(drafter)  # trained drafters have no state between runs

    def get_compressor(self, name: str | None) -> Compressor | None:
        """A new compressor; None for no name.

        Raises:
            UsageError: the name or its argument is invalid.
        """
        try:
            return build_compressor(name) if name else None
        except ValueError as error:
            raise UsageError(one_line(error)) from error

    def prompt_options(self, visitor: str, drafter: str | None) -> dict[str, Any]:
        """Options of a call of `generate` that shares the visitor's earlier prompts in the lane of a drafter.

        In half precision a prompt that is read in two parts may give other tokens, so that nothing is shared.
        """
        is_full = self.model.dtype in (torch.float32, torch.float64)
        return {"reuse_prefix": f"{visitor_scope(visitor)} {drafter}"} if visitor and is_full else {}

    def forget(self, visitor: str) -> None:
        """Free what is kept of a visitor's conversation. Thread-safe."""
        self.kept_media.forget(visitor)
        patch_state(self.model).prefixes.forget(visitor_scope(visitor))

    def clone(self) -> Any:
        """A model that is not patched, with modules of its own on the same weights."""
        mmspec.unpatch(self.model)
        try:
            return clone(self.model)
        finally:
            mmspec.patch(self.model, "none", processor=self.processor)

    def warm_up(self) -> None:
        """Generate once with and without mmspec, so that one-time costs are not part of a measured run."""
        captioner = Captioner(self.model, self.processor, WARMUP_TOKENS)
        image = Image.new("RGB", (64, 64), "gray")
        inputs = captioner.build_inputs([image], ["Describe the image."])
        options = {"drafter": self.get_drafter("hybrid"), "tree_size": 4}
        self.model.generate(**inputs, **captioner.generation_kwargs(), mmspec=options)
        self._try_reuse(image)
        with mmspec.disabled(self.model):
            self.model.generate(**inputs, **captioner.generation_kwargs())

    def _try_reuse(self, image: Image.Image) -> None:
        """Ask twice about a picture: the first prompt that could be shared is computed both ways, once per model."""
        visitor, captioner = "warm-up", Captioner(self.model, self.processor, 1)
        for question in ("What is it?", "What is it made of?") if self.prompt_options(visitor, None) else ():
            inputs = captioner.build_inputs([image], [question])
            options = {"drafter": self.get_drafter(NO_DRAFTS)} | self.prompt_options(visitor, None)
            self.model.generate(**inputs, **captioner.generation_kwargs(), mmspec=options)
        self.forget(visitor)


def load_patched_model(name: str, dtype: str, device: str, folders: Mapping[str, str] | None = None) -> LoadedModel:
    """Load, patch and warm up a model; of one that is a folder, `folders` has the path.

    Raises:
        UsageError: it cannot be loaded, or its family is not supported.
    """
    folders = folders or {}
    loaded = LoadedModel(name, *load_model(folders.get(name, name), dtype, device), folders)
    try:
        mmspec.patch(loaded.model, "none", processor=loaded.processor)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Model {name}: {one_line(error, 300)}") from error
    with unchanged_costs():
        loaded.warm_up()
    return loaded


def format_model_size(count: int) -> str:
    """A number of parameters, such as "7.1 billion"."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
    return f"{count:,}"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without its package, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def free_device_memory() -> None:
    """Release cached device memory of a deleted model."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
