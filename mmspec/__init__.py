"""mmspec: speculative decoding for Hugging Face vision-language models. Same call, same tokens, sooner.

    import mmspec
    mmspec.patch(model)
    model.generate(**inputs, ...)
    mmspec.unpatch(model)

Names are loaded when first used, so that `mmspec --help` need not wait for torch and transformers.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.comparison import Comparison as Comparison
    from mmspec.comparison import compare as compare
    from mmspec.interfaces import Compressor as Compressor
    from mmspec.interfaces import Drafter as Drafter
    from mmspec.metrics.stats import Stats as Stats
    from mmspec.patching import disabled as disabled
    from mmspec.patching import is_patched as is_patched
    from mmspec.patching import patch as patch
    from mmspec.patching import stats as stats
    from mmspec.patching import unpatch as unpatch
    from mmspec.targets.registry import UnsupportedModelError as UnsupportedModelError
    from mmspec.targets.registry import supported as supported

__version__ = "0.1.0.dev0"

_HOMES = {
    "compare": ("Comparison", "compare"),
    "interfaces": ("Compressor", "Drafter"),
    "patching": ("disabled", "is_patched", "patch", "stats", "unpatch"),
    "stats": ("Stats",),
    "targets": ("UnsupportedModelError", "supported"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """`mmspec.stats` and `mmspec.compare` are the functions, also after the modules of that name were imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'mmspec' has no attribute {name!r}")
        setattr(self, name, getattr(import_module(f"mmspec.{_HOME[name]}"), name))
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


sys.modules[__name__].__class__ = _Package
