"""mmspec: speculative decoding for Hugging Face vision-language models. Same call, same tokens, less time.

    import mmspec
    mmspec.patch(model)
    model.generate(**inputs, ...)
    mmspec.unpatch(model)

Public names are imported on first use (PEP 562), so that `mmspec --help` does not import torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.comparison import Comparison as Comparison
    from mmspec.comparison import compare as compare
    from mmspec.engine.constraints import register_prefix_processor as register_prefix_processor
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

__version__ = "0.1.0"

_EXPORTS = {
    "comparison": ("Comparison", "compare"),
    "engine.constraints": ("register_prefix_processor",),
    "interfaces": ("Compressor", "Drafter"),
    "metrics.stats": ("Stats",),
    "patching": ("disabled", "is_patched", "patch", "stats", "unpatch"),
    "targets.registry": ("UnsupportedModelError", "supported"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mmspec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"mmspec.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
