"""One pass over the modules of a model: everything that decides how a call of `generate` may be decoded.

Reads attributes only, runs nothing. Modules that run once per call (the vision tower and its projector) may be of any
kind; what counts is the decoder, the output embeddings and the modules around them, which run in every forward.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from mmspec.cpu.linear import is_replaced

LIBRARIES = ("transformers", "torch", "peft", "accelerate", "bitsandbytes", "mmspec")
"""Packages whose hooks and functions do the same to a token whatever else is in the forward."""
MODULES = ("transformers", "torch.nn", "peft", "accelerate", "bitsandbytes", "mmspec")
"""Packages whose modules do. `torch.ao` is none of them: its dynamic layers share one scale among all tokens."""
PARAMETERS = ("transformers", "torch.nn", "torch.distributed", "peft", "accelerate", "bitsandbytes")
"""Packages whose parameters do; those of torchao may quantise activations, which the self-test finds out."""
SAME_IN_TRAINING = (nn.Linear, nn.Embedding)
"""Modules that do the same in train mode; `resize_token_embeddings` leaves new ones in it."""
LEAVE_NOTHING = ("transformers.utils.output_capturing", "mmspec.targets.vision_attention")
"""Modules whose hooks may run in inference mode: none of their tensors outlives a call."""


@dataclass(frozen=True)
class ModuleScan:
    """What one pass over a model's modules found.

    Attributes:
        training: the first module in train mode, or None. compiled: whether a part is compiled.
        hook: the first hook or replaced forward of user code in the decoder, or None; it may count its calls.
        foreign: modules in the decoder that no known library wrote or that hold parameters of an unknown kind.
        quiet: whether a forward creates no tensor that outlives it, so that it may run in inference mode.
        linears: the `nn.Linear` layers of the decoder and of the output embeddings.
    """

    training: str | None = None
    compiled: bool = False
    hook: str | None = None
    foreign: tuple[nn.Module, ...] = ()
    can_use_inference_mode: bool = True
    linear_layers: tuple[nn.Linear, ...] = ()


@dataclass
class _Pass:
    """What is collected on the way; (module, what it is) pairs are few."""

    training: nn.Module | None = None
    compiled: bool = False
    quiet: bool = True
    hooked: list[tuple[nn.Module, str]] = field(default_factory=list)
    foreign: list[nn.Module] = field(default_factory=list)
    linears: list[nn.Linear] = field(default_factory=list)
    types: dict[type, str] = field(default_factory=dict)

    def visit(self, module: nn.Module, decoding: bool) -> None:
        """Look at one module. `decoding`: it is the decoder, the output embeddings, or a part of them."""
        kind = type(module)
        if self.training is None and module.training and kind not in SAME_IN_TRAINING:
            self.training = module
        if decoding and kind is nn.Linear:
            self.linears.append(module)  # type: ignore[arg-type]
        self._forward(module)
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in module.__dict__:
            self._hooks(module)
        if kind not in self.types:
            self.types[kind] = _judged(kind)
        judged = self.types[kind]
        if judged == "replaced":
            self.hooked.append(
                (module, f"a forward that refers to variables around it ({callable_name(kind.forward)})")
            )
        elif judged == "foreign" or any(map(_is_foreign, module._parameters.values())):
            self.foreign.append(module)

    def _forward(self, module: nn.Module) -> None:
        """`module.compile()`, `torch.compile` and forwards replaced on the instance."""
        forward = module.__dict__.get("forward")
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            self.compiled = True
        if forward is None or is_replaced(module):
            return
        self.quiet = False
        if is_library_code(forward):
            return
        if isinstance(forward, types.MethodType) and not _has_memory(forward.__func__):
            self.foreign.append(module)
        else:
            self.hooked.append((module, f"a replaced forward ({callable_name(forward)})"))

    def _hooks(self, module: nn.Module) -> None:
        self.quiet = self.quiet and "_hf_hook" not in module.__dict__
        for kind, hooks in (("hook", module._forward_hooks), ("pre-hook", module._forward_pre_hooks)):
            for hook in hooks.values():
                self.quiet = self.quiet and getattr(hook, "__module__", None) in LEAVE_NOTHING
                if not is_library_code(hook):
                    self.hooked.append((module, f"a forward {kind} ({callable_name(hook)})"))
        device_hook = module.__dict__.get("_hf_hook")
        for part in getattr(device_hook, "hooks", (device_hook,)):
            if part is not None and not is_library_code(part):
                self.hooked.append((module, f"a forward hook ({callable_name(part)})"))


def scan_modules(model: Any) -> ModuleScan:
    """Look at every module of a transformers model once."""
    roots = [part for part in (model.get_decoder() or model, model.get_output_embeddings()) if part is not None]
    known, found = {id(root) for root in roots}, _Pass()
    for module, decoding in _modules(model, known):
        found.visit(module, decoding)
    hooks = {**torch_module._global_forward_hooks, **torch_module._global_forward_pre_hooks}
    strange = [hook for hook in hooks.values() if not is_library_code(hook)]
    hook = f"a global forward hook ({callable_name(strange[0])})" if strange else None
    foreign: list[nn.Module] = []
    if found.hooked or found.foreign:
        running = {id(module) for module in _running(model, roots)}
        foreign = [module for module in found.foreign if id(module) in running]
        hooked = [(module, what) for module, what in found.hooked if id(module) in running]
        if hooked and hook is None:
            hook = f"{hooked[0][1]} on {describe_module(model, hooked[0][0])}"
    kept = getattr(model, "hf_quantizer", None) is not None or hasattr(model, "hf_device_map") or bool(hooks)
    return ModuleScan(
        training=None if found.training is None else describe_module(model, found.training),
        compiled=found.compiled,
        hook=hook,
        foreign=tuple(foreign),
        can_use_inference_mode=found.quiet and not kept and not foreign,
        linear_layers=tuple(found.linears),
    )


def describe_module(model: nn.Module, module: nn.Module) -> str:
    """Name and class of a module, and the classes of unknown parameters, for messages."""
    name = next((name for name, part in model.named_modules() if part is module), "")
    weights = sorted({type(weight).__name__ for weight in module._parameters.values() if _is_foreign(weight)})
    kind = ", ".join([type(module).__name__, *weights])
    return f"{name or 'the model'} ({kind})"


def is_library_code(code: Any) -> bool:
    """Whether a function, with all that it wraps, or the class of a callable is of a known library."""
    pending = [code]
    while pending:
        one = pending.pop()
        if "__wrapped__" in getattr(one, "__dict__", {}):
            pending.append(one.__wrapped__)
        if isinstance(one, functools.partial):
            pending.append(one.func)
        elif isinstance(one, types.MethodType):
            pending.append(one.__func__)
        elif not _within(_origin(one), LIBRARIES):
            return False
    return True


def callable_name(code: Any) -> str:
    """Name of a function or of the class of a callable, for messages."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__qualname__", type(code).__name__)).replace("<locals>.", "")


def _modules(model: nn.Module, roots: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """Every module once, and whether it is one of the roots or below one."""
    seen: set[int] = set()
    pending = [(model, id(model) in roots)]
    while pending:
        module, inside = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module, inside
        parts = [part for part in module._modules.values() if part is not None]
        pending += [(part, inside or id(part) in roots) for part in reversed(parts)]


def _running(model: nn.Module, roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The modules that run in every forward: the roots, what is below them, and what is around them."""
    for root in roots:
        yield from root.modules()
    for module in model.modules():
        if any(part is root for part in module.modules() for root in roots):
            yield module


def _is_foreign(weight: nn.Parameter | None) -> bool:
    """Whether a parameter is of a class that no known library made."""
    kind = type(weight)
    return kind is not nn.Parameter and weight is not None and not _within(kind.__module__, PARAMETERS)


def _judged(kind: type) -> str:
    """`known`, `foreign` (someone else's), or `replaced` (its forward is a function with a memory of its own)."""
    forward = kind.forward  # type: ignore[attr-defined]
    if not is_library_code(forward):
        return "replaced" if _has_memory(forward) else "foreign"
    return "known" if _within(kind.__module__, MODULES) else "foreign"


def _has_memory(function: Any) -> bool:
    """Whether a function may keep state where nobody finds it: in variables around it or in its defaults."""
    code = getattr(function, "__code__", None)
    if code is None or not set(code.co_freevars) <= {"__class__"} or _writes_globals(code):
        return True
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(isinstance(default, (list, dict, set, deque)) for default in defaults)


@functools.lru_cache(maxsize=256)
def _writes_globals(code: types.CodeType) -> bool:
    return any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code))


def _origin(code: Any) -> str:
    """The Python module that a function's code, or a callable's class, is of. Decorators do not change it."""
    if isinstance(code, types.FunctionType):
        return str(code.__globals__.get("__name__", ""))
    return str((code if isinstance(code, type) else type(code)).__module__)


def _within(module: str | None, packages: Sequence[str]) -> bool:
    return any(module == package or (module or "").startswith(package + ".") for package in packages)
