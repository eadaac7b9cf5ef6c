"""The models that the pages may use: which there are, and the one that is loaded. All of it in the worker's thread.

Names come from a fixed list, since whatever a page sends is not trusted: a path or hub id that was not named on the
command line is never opened.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import mmspec
from mmspec.app.captioner import Captioner
from mmspec.app.errors import UsageError, one_line
from mmspec.app.load import load
from mmspec.app.models import SIZES
from mmspec.app.settings import DEFAULT, MODEL
from mmspec.drafters.registry import names
from mmspec.interfaces import Drafter
from mmspec.options import checked_drafter
from mmspec.vision.registry import make as make_compressor

logger = logging.getLogger("mmspec")

COMPRESSORS = ("none", "measured", "drop", "stride:16", "pool:16", "relevant:16", "salient:16", "diverse:16")
WARM_TOKENS = 12


@dataclass
class Desk:
    """A loaded and patched model, ready to be asked."""

    name: str
    model: Any
    processor: Any
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    def drafter(self, name: str) -> Drafter:
        """A drafter that has seen nothing yet: no run may learn from another's words.

        Raises:
            UsageError: it does not fit this model.
        """
        if name not in self._drafters:
            tokenizer = getattr(self.processor, "tokenizer", None)
            family = self.model.__dict__["_mmspec"].family
            try:
                self._drafters[name] = checked_drafter(name, family, tokenizer)
            except (OSError, TypeError, ValueError) as error:
                raise UsageError(f"Drafter {Path(name).name}: {one_line(error, 200)}") from error
        made = self._drafters[name]
        trained = any(isinstance(part, nn.Module) for part in vars(made).values())
        return made if trained else copy.deepcopy(made)  # weights are not copied; they do not learn here

    def warm(self) -> None:
        """Run both ways once, so that nobody's first answer pays for what is done once."""
        maker = Captioner(self.model, self.processor, WARM_TOKENS)
        inputs = maker.inputs([Image.new("RGB", (64, 64), "gray")], ["Describe the image."])
        self.model.generate(**inputs, **maker.options(), mmspec={"drafter": self.drafter("fused"), "nodes": 4})
        with mmspec.disabled(self.model):
            self.model.generate(**inputs, **maker.options())


class Shelf:
    """What may be chosen, and the model in use. One is kept loaded."""

    def __init__(
        self, model: str = DEFAULT, drafter: str = "auto", *, dtype: str = "auto", device: str = "auto"
    ) -> None:
        """`model` and `drafter`: what the command line names, offered first."""
        self.models = list(dict.fromkeys([model, MODEL, *SIZES]))
        self.drafters = list(dict.fromkeys([drafter, *names()]))
        self.dtype, self.device = dtype, device
        self.loading = False  # true while a model is read and warmed up
        self._desk: Desk | None = None

    def check(self, model: str, drafter: str, compressor: str | None) -> None:
        """Refuse what is not on the lists.

        Raises:
            UsageError: it is not.
        """
        for what, name, known in (("model", model, self.models), ("drafter", drafter, self.drafters)):
            if name not in known:
                raise UsageError(f"There is no {what} {str(name)[:60]!r} here; choose one of {_listed(known)}.")
        if compressor:
            try:
                make_compressor(str(compressor)[:40])
            except ValueError as error:
                raise UsageError(one_line(error)) from error

    def take(self, name: str) -> Desk:
        """The model of that name, loaded if it is not the one in use.

        Raises:
            UsageError: it cannot be loaded.
        """
        if self._desk is None or self._desk.name != name:
            self._desk = None  # the old one goes first: two may not fit
            _free()
            self.loading = True
            try:
                self._desk = self._load(name)
            finally:
                self.loading = False
            logger.info("mmspec: model %s is ready", name)
        return self._desk

    def _load(self, name: str) -> Desk:
        desk = Desk(name, *load(name, self.dtype, self.device))
        try:
            mmspec.patch(desk.model, "none", processor=desk.processor)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Model {name}: {one_line(error, 300)}") from error
        desk.warm()
        return desk


def _listed(names: Sequence[str]) -> str:
    return ", ".join(Path(name).name for name in names)


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["COMPRESSORS", "Desk", "Shelf"]
