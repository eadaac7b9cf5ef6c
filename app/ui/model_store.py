"""Models and drafters that pages may choose, and the loaded model.

Names are checked against a fixed list, since input of a page is not trusted: a path or hub id that is not named on the
command line is never opened. Torch and transformers are imported with the first model, in the worker's thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import DEFAULT_MODEL, SCENES_MODEL
from mmspec.app.errors import UsageError
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.ui.credit import PLAIN_GENERATE
from mmspec.drafters.registry import drafter_names

if TYPE_CHECKING:
    from mmspec.app.ui.loaded_model import LoadedModel

logger = logging.getLogger("mmspec")

COMPRESSOR_CHOICES = ("none", "measured", "drop", "stride:16", "pool:16", "relevant:16", "salient:16", "diverse:16")


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run.

    Attributes:
        model: name from `ModelStore.model_names`.
        drafter: name from `ModelStore.drafter_names`.
        compressor: name with argument, such as "pool:16"; None for none.
        temperature: 0 is greedy decoding.
        seed: of torch's generator.
        max_new_tokens: per answer.
        tree_size: nodes of every draft tree, root included; None lets the controller choose.
        more_drafters: drafters of further lanes of a comparison.
        baseline: what the answers of mmspec are compared with, one of `credit.BASELINES`.
    """

    model: str
    drafter: str = "auto"
    compressor: str | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    tree_size: int | None = None
    more_drafters: tuple[str, ...] = ()
    baseline: str = PLAIN_GENERATE


class ModelStore:
    """The offered names, and the loaded model; one at a time."""

    def __init__(
        self, model: str = DEFAULT_MODEL, drafter: str = "auto", *, dtype: str = "auto", device: str = "auto"
    ) -> None:
        """`model` and `drafter` of the command line are the defaults; `dtype` and `device` hold for all models.

        The other built-in models are offered beside a built-in one, and not beside a model of the user's: a page could
        only have it loaded again.
        """
        builtin, drafters = [SCENES_MODEL, *SIZES], drafter_names()
        self.is_builtin = model in builtin
        self._folders: dict[str, str] = {}
        self.model_names = list(dict.fromkeys([model, *builtin])) if self.is_builtin else [self._shown(model, builtin)]
        self.drafter_names = list(dict.fromkeys([self._shown(drafter, drafters), *drafters]))
        self.dtype, self.device = dtype, device
        self.is_loading = False  # while a model is loaded and warmed up
        self.descriptions: dict[str, str] = {}  # of the models that were loaded
        self.answer_seconds: dict[str, float] = {}  # of the last answer of mmspec by each model
        self._loaded: LoadedModel | None = None

    @property
    def default_names(self) -> tuple[str, str, str]:
        """Model, drafter and device of the command line."""
        return self.model_names[0], self.drafter_names[0], self.device

    def check_names(self, model: str, drafter: str) -> None:
        """Check names sent by a page.

        Raises:
            UsageError: a name is not offered.
        """
        for kind, name, offered in (("model", model, self.model_names), ("drafter", drafter, self.drafter_names)):
            if name not in offered:
                raise UsageError(f"There is no {kind} {str(name)[:60]!r} here; choose one of {_format_names(offered)}.")

    def get(self, name: str) -> LoadedModel:
        """The model of that name; loads it if another is loaded.

        Raises:
            UsageError: it cannot be loaded.
        """
        if self._loaded is None or self._loaded.name != name:
            self.is_loading = True
            try:
                from mmspec.app.ui.loaded_model import free_device_memory, load_patched_model

                self._loaded = None  # free the old model first: both may not fit
                free_device_memory()
                self._loaded = load_patched_model(name, self.dtype, self.device, self._folders)
            finally:
                self.is_loading = False
            self.descriptions[name] = self._loaded.description
            logger.info("mmspec: model %s is ready", name)
        return self._loaded

    def forget(self, visitor: str) -> None:
        """Free what is kept of a visitor's conversation. Thread-safe."""
        loaded = self._loaded
        if loaded is not None and visitor:
            loaded.forget(visitor)

    def _shown(self, name: str, others: Sequence[str]) -> str:
        """What a page calls a model or drafter: a folder by its name, for visitors learn no paths of the server."""
        if name in others or not os.path.isdir(name):
            return name
        shown = Path(name).resolve().name
        shown += " (folder)" * (shown in others)
        self._folders[shown] = name
        return shown


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(Path(name).name for name in names)
