"""What may be chosen, and the model that is loaded (in the worker's thread; torch and transformers come with it).

Names come from a fixed list, since whatever a page sends is not trusted: a path or hub id that was not named on the
command line is never opened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import DEFAULT_MODEL, SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.modeling.random_models import SIZES
from mmspec.drafters.registry import drafter_names

if TYPE_CHECKING:
    from mmspec.app.ui.loaded_model import LoadedModel

logger = logging.getLogger("mmspec")

COMPRESSOR_CHOICES = ("none", "measured", "drop", "stride:16", "pool:16", "relevant:16", "salient:16", "diverse:16")


@dataclass(frozen=True)
class RunSettings:
    """What may be chosen for one answer. `nodes` of every tree, the root counted; None lets the controller choose."""

    model: str
    drafter: str = "auto"
    compressor: str | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    tree_size: int | None = None


class ModelStore:
    """What may be chosen, and the model in use. One is kept loaded."""

    def __init__(
        self, model: str = DEFAULT_MODEL, drafter: str = "auto", *, dtype: str = "auto", device: str = "auto"
    ) -> None:
        """`model` and `drafter`: what the command line names, offered first."""
        self.model_names = list(dict.fromkeys([model, SCENES_MODEL, *SIZES]))
        self.drafter_names = list(dict.fromkeys([drafter, *drafter_names()]))
        self.dtype, self.device = dtype, device
        self.is_loading = False  # true while a model is read and warmed up
        self._loaded: LoadedModel | None = None

    def check_names(self, model: str, drafter: str) -> None:
        """Refuse what is not on the lists.

        Raises:
            UsageError: it is not.
        """
        for what, name, known in (("model", model, self.model_names), ("drafter", drafter, self.drafter_names)):
            if name not in known:
                raise UsageError(f"There is no {what} {str(name)[:60]!r} here; choose one of {_format_names(known)}.")

    def get(self, name: str) -> LoadedModel:
        """The model of that name, loaded if it is not the one in use.

        Raises:
            UsageError: it cannot be loaded.
        """
        if self._loaded is None or self._loaded.name != name:
            self.is_loading = True
            try:
                from mmspec.app.ui.loaded_model import free_device_memory, load_patched_model

                self._loaded = None  # the old one goes first: two may not fit
                free_device_memory()
                self._loaded = load_patched_model(name, self.dtype, self.device)
            finally:
                self.is_loading = False
            logger.info("mmspec: model %s is ready", name)
        return self._loaded


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(Path(name).name for name in names)


__all__ = ["COMPRESSOR_CHOICES", "ModelStore", "RunSettings"]
