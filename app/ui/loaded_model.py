"""A loaded and patched model, ready to be asked. All of it in the worker's thread."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import mmspec
from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.config import resolve_drafter
from mmspec.interfaces import Compressor, Drafter
from mmspec.vision.registry import build_compressor

WARMUP_TOKENS = 12


@dataclass
class LoadedModel:
    """One model."""

    name: str
    model: Any
    processor: Any
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    def get_drafter(self, name: str) -> Drafter:
        """A drafter that has seen nothing yet: no run may learn from another's words.

        Raises:
            UsageError: it does not fit this model.
        """
        if name not in self._drafters:
            tokenizer = getattr(self.processor, "tokenizer", None)
            family = self.model.__dict__["_mmspec"].adapter
            try:
                self._drafters[name] = resolve_drafter(name, family, tokenizer)
            except (OSError, TypeError, ValueError) as error:
                raise UsageError(f"Drafter {Path(name).name}: {one_line(error, 200)}") from error
        made = self._drafters[name]
        trained = any(isinstance(part, nn.Module) for part in vars(made).values())
        return made if trained else copy.deepcopy(made)  # weights are not copied; they do not learn here

    def get_compressor(self, name: str | None) -> Compressor | None:
        """A compressor of that name; None stands for none.

        Raises:
            UsageError: there is none of that name.
        """
        try:
            return build_compressor(name) if name else None
        except ValueError as error:
            raise UsageError(one_line(error)) from error

    def warm_up(self) -> None:
        """Run both ways once, so that nobody's first answer pays for what is done once."""
        maker = Captioner(self.model, self.processor, WARMUP_TOKENS)
        inputs = maker.build_inputs([Image.new("RGB", (64, 64), "gray")], ["Describe the image."])
        self.model.generate(
            **inputs, **maker.generation_kwargs(), mmspec={"drafter": self.get_drafter("fused"), "tree_size": 4}
        )
        with mmspec.disabled(self.model):
            self.model.generate(**inputs, **maker.generation_kwargs())


def load_patched_model(name: str, dtype: str, device: str) -> LoadedModel:
    """The model of that name, patched and warm.

    Raises:
        UsageError: it cannot be loaded, or mmspec does not know its family.
    """
    desk = LoadedModel(name, *load_model(name, dtype, device))
    try:
        mmspec.patch(desk.model, "none", processor=desk.processor)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Model {name}: {one_line(error, 300)}") from error
    desk.warm_up()
    return desk


def free_device_memory() -> None:
    """Give back what a model that is gone has left on the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["LoadedModel", "free_device_memory", "load_patched_model"]
