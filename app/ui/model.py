"""The model of the demo: loaded and patched once, in the worker's thread, with the drafters that it can run."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

import mmspec
from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.cli.arguments import DEFAULT_MODEL
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.chat import build_inputs
from mmspec.app.modeling.load import load_model, load_text_model, read_model_config
from mmspec.app.modeling.text import is_text_model
from mmspec.app.scenes import WEIGHTS_FOLDER
from mmspec.comparison import replicate
from mmspec.cpu import c_kernel, c_library
from mmspec.drafters.mtp.build import own_drafter
from mmspec.drafters.registry import OWN_NAMES, drafter_names
from mmspec.economy.store import unchanged_costs
from mmspec.interfaces import Drafter
from mmspec.messages import description_of
from mmspec.patching import patch_state
from mmspec.resolve import resolve_drafter, target_info

logger = logging.getLogger("mmspec")

NO_DRAFTS = "none"
"""Name of the drafter that proposes nothing."""
COMPRESSORS = ("none", "drop", "pool:16", "relevant:16")
LARGE = ("self", "quantized")
"""Drafters that copy or read the whole model, so that they are not tried before somebody chooses them."""
WARMUP_TOKENS = 12


class ModelUnusableError(UsageError):
    """The model of the command line cannot be used."""


class DemoModel:
    """A model of the command line, loaded by `load`. Names and folders are shown without the server's paths.

    Attributes:
        name: as pages show it.
        phase: "starting", "building" (the C kernels), "loading", "ready" or "failed".
        model: patched with the drafter "none"; each run passes its own. None before `load`.
        processor: of the model; of a text model its tokenizer.
        drafters: names that pages may choose, the one of the command line first.
    """

    def __init__(
        self, source: str = DEFAULT_MODEL, drafter: str = "auto", *, dtype: str = "auto", device: str = "auto"
    ) -> None:
        """Raises ModelUnusableError if `source` is a folder that is not there, or one without a model."""
        self.source, self._folder_drafter, self.dtype, self.device = source, drafter, dtype, device
        self.name, default = _shown(source), _shown(drafter)
        self.phase, self.phase_since = "starting", time.monotonic()
        self.model: Any = None
        self.processor: Any = None
        self.drafters: tuple[str, ...] = (default,)
        self._built: dict[str, Drafter] = {}
        try:
            self.is_text = is_text_model(source)
        except UsageError as error:
            raise ModelUnusableError(f"--model {error}") from error
        self._config = read_model_config(str(WEIGHTS_FOLDER) if self.is_toy else source)

    @property
    def is_toy(self) -> bool:
        """Whether it is the bundled model of drawn scenes."""
        return self.source == SCENES_MODEL

    @property
    def description(self) -> str:
        """What the model is: what its config says, or its type, then its size and dtype."""
        said = description_of(SimpleNamespace(**self._config) if self.model is None else self.model.config)
        if self.model is None:
            return said or ""
        count = sum(weight.numel() for weight in self.model.parameters())
        kind = f"{format_model_size(count)} parameters, {str(self.model.dtype).removeprefix('torch.')}"
        return f"{said} ({kind})" if said else f"{self.model.config.model_type}, {kind}"

    @property
    def tokenizer(self) -> Any:
        """Of the processor, or the processor itself of a text model."""
        return getattr(self.processor, "tokenizer", self.processor)

    def load(self) -> None:
        """Build the kernels if they are missing, load and patch the model, and generate once, so that no one-time cost
        is part of a measured run.

        Raises:
            ModelUnusableError: it cannot be loaded, or its family is not supported.
        """
        try:
            self._load()
        except BaseException as error:
            self._set_phase("failed")
            if isinstance(error, UsageError):
                raise ModelUnusableError(str(error)) from error
            raise
        self._set_phase("ready")
        logger.info("mmspec: model %s is ready", self.name)

    def _load(self) -> None:
        if self.device in ("auto", "cpu") and c_library.needs_build():
            self._set_phase("building")
            c_kernel.load_kernel()
        self._set_phase("loading")
        load = load_text_model if self.is_text else load_model
        model, self.processor = load(self.source, self.dtype, self.device)
        try:
            mmspec.patch(model, NO_DRAFTS, processor=self.processor)
        except (TypeError, ValueError) as error:
            raise ModelUnusableError(f"--model {self.source}: {one_line(error, 200)}") from error
        self.model = model
        if self._folder_drafter not in drafter_names():
            self._build(self.drafters[0])
        self.drafters = tuple(dict.fromkeys([*self.drafters, *filter(self._can_run, drafter_names())]))
        with unchanged_costs():
            self._warm_up()

    def _set_phase(self, phase: str) -> None:
        self.phase, self.phase_since = phase, time.monotonic()

    def _can_run(self, name: str) -> bool:
        """Whether a drafter of this name drafts here, and no other in its place."""
        if name in LARGE:
            return name != "quantized" or self.model.device.type == "cpu"
        try:
            if name in OWN_NAMES:
                info = target_info(patch_state(self.model).adapter, self.tokenizer)
                return own_drafter(name, info, is_asked_for=False) is not None
            self._build(name)
        except UsageError:
            return False
        return True

    def _build(self, name: str) -> Drafter:
        if name not in self._built:
            source = self._folder_drafter if name == self.drafters[0] else name
            try:
                self._built[name] = resolve_drafter(source, patch_state(self.model).adapter, self.tokenizer)
            except (OSError, TypeError, ValueError) as error:
                raise UsageError(f"--drafter {name}: {one_line(error, 200)}") from error
        return self._built[name]

    def comparable(self, chosen: str) -> list[str]:
        """The drafters of `drafters` but those that need the whole model once more and were not chosen yet."""
        return [name for name in self.drafters if name not in LARGE or name in self._built or name == chosen]

    def get_drafter(self, name: str) -> Drafter:
        """A drafter without state of earlier runs, so that no run depends on another; weights are shared.

        Raises:
            UsageError: the drafter does not fit this model.
        """
        return replicate(self._build(name))

    def prompt_options(self, page: str, drafter: str) -> dict[str, Any]:
        """Options of a call of `generate` that shares a page's earlier prompts in the lane of a drafter.

        In half precision a prompt that is read in two parts may give other tokens, so that nothing is shared. The name
        of the page, which a client chooses, may be any text.
        """
        is_full = self.model.dtype in (torch.float32, torch.float64)
        return {"reuse_prefix": f"{page_scope(page)} {drafter}"} if page and is_full else {}

    def forget(self, page: str) -> None:
        """Free what is kept of a page's prompts. Thread-safe."""
        if self.model is not None:
            patch_state(self.model).prefixes.forget(page_scope(page))

    def _warm_up(self) -> None:
        image = Image.new("RGB", (64, 64), "gray")
        for question in ("What is it?", "What is it made of?"):  # the second shares the prompt of the first
            inputs = build_inputs(self.model, self.processor, [image], [question])
            options = {"drafter": self.get_drafter(self.drafters[0]), **self.prompt_options("warm-up", "")}
            self.model.generate(**inputs, max_new_tokens=WARMUP_TOKENS, do_sample=False, mmspec=options)
        with mmspec.disabled(self.model):
            self.model.generate(**inputs, max_new_tokens=WARMUP_TOKENS, do_sample=False)
        self.forget("warm-up")


def page_scope(page: str) -> str:
    """How all scopes of a page begin."""
    return hashlib.sha256(page.encode(errors="replace")).hexdigest()


def _shown(name: str) -> str:
    """A folder or file by its name, for visitors learn no paths of the server; a hub id as it is."""
    return Path(name).resolve().name if os.path.exists(name) else name


def format_model_size(count: int) -> str:
    """A number of parameters, such as "7.1 billion"."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
    return f"{count:,}"
