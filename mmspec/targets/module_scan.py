"""One pass over a model's modules, for the properties that decide how a call of `generate` may be decoded.

Reads attributes only; runs nothing. Modules that run once per call (vision tower, projector) may be of any class.
Checked are the modules that run in every forward: decoder, output embeddings, and the modules that contain them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from mmspec.cpu.linear import find_linear_layers, is_replaced
from mmspec.live import reread
from mmspec.targets.activation_quantisers import quantises_activations

LIBRARIES = ("transformers", "torch", "peft", "accelerate", "bitsandbytes", "compressed_tensors", "mmspec")
"""Packages whose hooks and functions treat a token independently of the other tokens of a forward."""
TOKEN_DEPENDENT = ("peft.tuners.xlora",)
"""Parts of these packages that do not: X-LoRA computes the weights of its adapters from the whole prompt."""
POSITION_HOOKS = ("_alora_offsets_pre_forward_hook",)
"""Library hooks that act on a position: aLoRA adapts the last tokens of a forward."""
PEFT_MODULES = ("peft.tuners.lora", "peft.tuners.tuners_utils", "peft.utils")
"""Modules of PEFT that treat tokens independently. Others may not: Lily averages its router over all tokens."""
MODULES = ("transformers", "torch.nn", *PEFT_MODULES, "accelerate", "mmspec")
"""Packages whose modules do so. Not `torch.ao`: its dynamically quantised layers use one scale for all tokens. Not
bitsandbytes: on some CPUs its layers multiply float32 inputs in bfloat16."""
PARAMETERS = ("transformers", "torch.nn", "torch.distributed", "peft", "accelerate")
"""Packages whose parameter classes do so. Others (torchao, bitsandbytes) are left to the self-test."""
UNQUANTISED_MODULES = ("torch.nn.", "transformers.models.", "transformers.activations")
"""Python modules of classes that no quantiser has put there. Some only unpack what they load: then all are of these."""
INFERENCE_SAFE_HOOKS = ("transformers.utils.output_capturing", "mmspec.vision.grids.attention")
"""Python modules whose hooks may run in inference mode: none of their tensors outlives a call."""


@dataclass(frozen=True)
class ModuleScan:
    """Result of `scan_modules`.

    Attributes:
        training: description of the first module in train mode whose code asks for it, or None.
        compiled: whether a module that runs in every forward is compiled.
        distributed: description of the first module with weights that are spread over ranks (DTensor), or None.
        hook: description of the first user hook or stateful replaced forward in the decoder, or None.
        quantised_activations: description of the first decoder module that quantises its input, or None.
        has_user_code: whether any module, in the decoder or not, has a class, a forward or a hook of no known library.
        foreign: decoder modules of unknown classes or with parameters of unknown classes (see `selftest`).
        can_use_inference_mode: whether no tensor created in a forward outlives it.
        linear_layers: the `nn.Linear` layers of the decoder and of the output embeddings.
        prompt_linear_layers: those of the whole model, vision tower included, whose forward may be replaced on a CPU.
        kinds: the classes of all modules.
    """

    training: str | None = None
    compiled: bool = False
    distributed: str | None = None
    hook: str | None = None
    quantised_activations: str | None = None
    has_user_code: bool = False
    foreign: tuple[nn.Module, ...] = ()
    can_use_inference_mode: bool = True
    linear_layers: tuple[nn.Linear, ...] = ()
    prompt_linear_layers: tuple[nn.Linear, ...] = ()
    kinds: tuple[type, ...] = ()


@dataclass
class _ScanState:
    """Results collected during the pass; `hooked` has (module, description) pairs."""

    training: nn.Module | None = None
    distributed: nn.Module | None = None
    can_use_inference_mode: bool = True
    compiled: list[nn.Module] = field(default_factory=list)
    hooked: list[tuple[nn.Module, str]] = field(default_factory=list)
    quantisers: list[nn.Module] = field(default_factory=list)
    foreign: list[nn.Module] = field(default_factory=list)
    linear_layers: list[nn.Linear] = field(default_factory=list)
    prompt_linear_layers: list[nn.Linear] = field(default_factory=list)
    origins: dict[type, str] = field(default_factory=dict)

    def visit(self, module: nn.Module, in_decoder: bool) -> None:
        """Check one module.

        Args:
            module: the module.
            in_decoder: whether it is the decoder, the output embeddings, or a part of them.
        """
        kind: Any = type(module)
        if self.training is None and module.training and _reads_training(kind):
            self.training = module
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            self.prompt_linear_layers.append(module)
            if in_decoder:
                self.linear_layers.append(module)
        attributes = module.__dict__
        if "forward" in attributes or module._compiled_call_impl is not None:
            self._check_forward(module)
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in attributes:
            self._check_hooks(module)
        if quantises_activations(module):
            self.quantisers.append(module)
        if kind not in self.origins:
            self.origins[kind] = _class_origin(kind, kind.forward)
        origin = self.origins[kind]
        weights = [one for one in module._parameters.values() if type(one) is not nn.Parameter and one is not None]
        if origin == "stateful":
            name = callable_name(kind.forward)
            self.hooked.append((module, f"a forward that refers to variables around it ({name})"))
        elif origin == "foreign" or any(map(_is_foreign, weights)):
            self.foreign.append(module)
        if self.distributed is None and any(map(_is_distributed, weights)):
            self.distributed = module

    def _check_forward(self, module: nn.Module) -> None:
        """Detect `module.compile()`, `torch.compile` and forwards replaced on the instance."""
        forward = module.__dict__.get("forward")
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            self.compiled.append(module)
            self.can_use_inference_mode = False
        if forward is None or is_replaced(module):
            return
        self.can_use_inference_mode = False
        if is_library_code(forward):
            return
        if isinstance(forward, types.MethodType) and not _may_hold_state(forward.__func__):
            self.foreign.append(module)
        else:
            self.hooked.append((module, f"a replaced forward ({callable_name(forward)})"))

    def _check_hooks(self, module: nn.Module) -> None:
        """Detect user hooks, and library hooks that may store tensors."""
        self.can_use_inference_mode = self.can_use_inference_mode and "_hf_hook" not in module.__dict__
        for kind, hooks in (("hook", module._forward_hooks), ("pre-hook", module._forward_pre_hooks)):
            for hook in hooks.values():
                self.can_use_inference_mode = (
                    self.can_use_inference_mode and getattr(hook, "__module__", None) in INFERENCE_SAFE_HOOKS
                )
                if not is_library_code(hook) or callable_name(hook) in POSITION_HOOKS:
                    self.hooked.append((module, f"a forward {kind} ({callable_name(hook)})"))
        device_hook = module.__dict__.get("_hf_hook")
        for part in getattr(device_hook, "hooks", (device_hook,)):
            if part is not None and not is_library_code(part):
                self.hooked.append((module, f"a forward hook ({callable_name(part)})"))


@reread
def scan_modules(model: Any) -> ModuleScan:
    """Check every module of a transformers model once."""
    roots = [part for part in (decoder_module(model), model.get_output_embeddings()) if part is not None]
    state = _ScanState()
    for module, in_decoder in _walk_modules(model, {id(root) for root in roots}):
        state.visit(module, in_decoder)
    hooks = {**torch_module._global_forward_hooks, **torch_module._global_forward_pre_hooks}
    user_hooks = [hook for hook in hooks.values() if not is_library_code(hook)]
    hook = f"a global forward hook ({callable_name(user_hooks[0])})" if user_hooks else None
    foreign: list[nn.Module] = []
    quantisers: list[nn.Module] = []
    compiled = False
    if state.hooked or state.foreign or state.quantisers or state.compiled:
        running = {id(module) for module in _modules_of_every_forward(model, roots)}
        foreign = [module for module in state.foreign if id(module) in running]
        compiled = any(id(module) in running for module in state.compiled)
        dtype = getattr(model, "dtype", None)
        quantisers = [one for one in state.quantisers if id(one) in running and quantises_activations(one, dtype)]
        hooked = [(module, description) for module, description in state.hooked if id(module) in running]
        if hooked and hook is None:
            hook = f"{hooked[0][1]} on {describe_module(model, hooked[0][0])}"
    is_quantised = getattr(model, "hf_quantizer", None) is not None and any(map(_may_quantise, state.origins))
    may_store_tensors = is_quantised or hasattr(model, "hf_device_map") or bool(hooks) or bool(foreign)
    return ModuleScan(
        training=None if state.training is None else describe_module(model, state.training),
        compiled=compiled,
        distributed=None if state.distributed is None else describe_module(model, state.distributed),
        hook=hook,
        quantised_activations=describe_module(model, quantisers[0]) if quantisers else None,
        has_user_code=bool(user_hooks or state.hooked) or any(map(_runs_user_code, state.foreign)),
        foreign=tuple(foreign),
        can_use_inference_mode=state.can_use_inference_mode and not may_store_tensors,
        linear_layers=tuple(state.linear_layers),
        prompt_linear_layers=tuple(find_linear_layers(state.prompt_linear_layers)),
        kinds=tuple(state.origins),
    )


def _may_quantise(kind: type) -> bool:
    return not kind.__module__.startswith(UNQUANTISED_MODULES)


def decoder_module(model: Any) -> Any:
    """The decoder of a model, or the whole model where transformers does not name one."""
    decoder = model.get_decoder()
    return model if decoder is None else decoder  # `or` would call the `len` of a compiled module, which raises


def describe_module(model: nn.Module, module: nn.Module) -> str:
    """Name and class of a module, and its unknown parameter classes, for messages."""
    name = next((name for name, part in model.named_modules() if part is module), "")
    weights = sorted({type(weight).__name__ for weight in module._parameters.values() if _is_foreign(weight)})
    kind = ", ".join([type(module).__name__, *weights])
    return f"{name or 'the model'} ({kind})"


def is_library_code(code: Any) -> bool:
    """Whether a function, with all functions that it wraps, or the class of a callable is of a known library."""
    pending = [code]
    while pending:
        current = pending.pop()
        if "__wrapped__" in getattr(current, "__dict__", {}):
            pending.append(current.__wrapped__)
        if isinstance(current, functools.partial):
            pending.append(current.func)
        elif isinstance(current, types.MethodType):
            pending.append(current.__func__)
        else:
            origin = _python_module(current)
            if not _is_in_packages(origin, LIBRARIES) or _is_in_packages(origin, TOKEN_DEPENDENT):
                return False
    return True


def calls_library_code(kind: Any) -> bool:
    """Whether the functions that the forward of a class of modules calls by name are of known libraries.

    Others, such as `apply_rotary_pos_emb` in the Python module of the class, can be replaced there by anybody.
    """
    if not is_library_code(kind.__call__):
        return False
    return all(map(is_library_code, called_functions((kind,))))


Place = tuple[Any, str]
"""The globals of a Python module, or a class, and a name in them."""


def called_functions(kinds: Sequence[Any]) -> list[types.FunctionType]:
    """The functions that the forwards of classes of modules call by name: of their Python modules, of what these call
    there, and methods of the classes."""
    last = _last_found(tuple(kinds))  # asked before every round of calls with user code: names are followed once
    if last[1:] != [found := _functions_at(last[0])]:
        places = _followed_names(kinds)
        last[:] = [places, found := _functions_at(places)]
    return list(dict.fromkeys(filter(None, found)))


@functools.lru_cache(maxsize=512)
def _last_found(kinds: tuple[Any, ...]) -> list[Any]:
    """The places that `called_functions` has followed last, and what was there."""
    return [[]]


def _functions_at(places: Sequence[Place]) -> list[types.FunctionType | None]:
    """What is at each place, if it is a function. Of one that a call in another thread has replaced for a while (see
    `mmspec.targets.state_log`), the original."""
    at = [names.get(name) if type(names) is dict else getattr(names, name, None) for names, name in places]
    at = [getattr(one, "replaced_function", one) for one in at]
    return [one if isinstance(one, types.FunctionType) else None for one in at]


def _followed_names(kinds: Sequence[Any]) -> list[Place]:
    """Where the names stand that the forwards of these classes refer to, and all functions that are found there."""
    places: dict[tuple[int, str], Place] = {}
    for kind in kinds:
        pending, seen = [inspect.unwrap(kind.forward)], set[types.FunctionType]()
        places[id(kind), "forward"] = kind, "forward"
        while pending:
            function = pending.pop()
            if not isinstance(function, types.FunctionType):
                continue
            for name in _names_of(function.__code__):
                found = [(function.__globals__, name), (kind, name)]
                places.update({(id(names), name): (names, name) for names, name in found})
                for one in _functions_at(found):
                    if one is not None and one not in seen:
                        seen.add(one)
                        inner = inspect.unwrap(one)
                        if isinstance(inner, types.FunctionType) and inner.__globals__ is function.__globals__:
                            pending.append(inner)
    return list(places.values())


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code refers to, nested functions included."""
    nested = (_names_of(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for names in nested for name in names)]))


def has_library_class(module: nn.Module) -> bool:
    """Whether a module's class is of a known library. State of such modules, such as packed weights, is no output's."""
    return _is_in_packages(type(module).__module__, LIBRARIES)


def _runs_user_code(module: nn.Module) -> bool:
    return not (has_library_class(module) and is_library_code(module.forward))


def callable_name(code: Any) -> str:
    """Name of a function or of the class of a callable, for messages."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__qualname__", type(code).__name__)).replace("<locals>.", "")


def _walk_modules(model: nn.Module, roots: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """(module, whether it is a root or part of one) of every module once; `roots` are ids of modules."""
    visited: set[int] = set()
    pending = [(model, id(model) in roots)]
    while pending:
        module, inside = pending.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield module, inside
        children = [child for child in module._modules.values() if child is not None]
        pending += [(child, inside or id(child) in roots) for child in reversed(children)]


def _modules_of_every_forward(model: nn.Module, roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The roots, their parts, and the modules that contain them."""
    for root in roots:
        yield from root.modules()
    for module in model.modules():
        if any(part is root for part in module.modules() for root in roots):
            yield module


def _is_foreign(weight: nn.Parameter | None) -> bool:
    """Whether a parameter's class is not of a known library."""
    kind = type(weight)
    return kind is not nn.Parameter and weight is not None and not _is_in_packages(kind.__module__, PARAMETERS)


def _is_distributed(weight: nn.Parameter | None) -> bool:
    """Whether a parameter is a `DTensor`."""
    return _is_in_packages(type(weight).__module__, ("torch.distributed.tensor", "torch.distributed._tensor"))


@functools.lru_cache(maxsize=1024)
def _reads_training(kind: Any) -> bool:
    """Whether the code of a class of modules asks for its train mode.

    Containers, layers without dropout and what quantises a layer do not; some are created with `training=True` in a
    model in eval mode, as by `resize_token_embeddings`.
    """
    if not isinstance(inspect.unwrap(kind.forward), types.FunctionType):
        return True  # compiled code, which does not tell
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    parts = [part for base in bases for name, part in vars(base).items() if name not in ("__init__", "train")]
    functions = [inspect.unwrap(getattr(part, "fget", None) or getattr(part, "__func__", part)) for part in parts]
    return any(_mentions_training(one.__code__) for one in functions if isinstance(one, types.FunctionType))


def _mentions_training(code: types.CodeType) -> bool:
    nested = any(_mentions_training(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return nested or "training" in code.co_names or "training" in code.co_consts


@functools.lru_cache(maxsize=1024)
def _class_origin(kind: type, forward: Callable[..., Any]) -> str:
    """`known` (a known library), `foreign` (any other), or `stateful` (its forward may store state unseen).

    Args:
        kind: class of a module.
        forward: `kind.forward`, which may be replaced between calls.
    """
    if not is_library_code(forward):
        return "stateful" if _may_hold_state(forward) else "foreign"
    return "known" if _is_in_packages(kind.__module__, MODULES) else "foreign"


def _may_hold_state(function: Any) -> bool:
    """Whether a function may store state that no module holds: in closures, globals or mutable defaults."""
    code = getattr(function, "__code__", None)
    if code is None or not set(code.co_freevars) <= {"__class__"} or _writes_globals(code):
        return True
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(isinstance(default, (list, dict, set, deque)) for default in defaults)


@functools.lru_cache(maxsize=256)
def _writes_globals(code: types.CodeType) -> bool:
    return any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in dis.get_instructions(code))


def _python_module(code: Any) -> str:
    """Python module of a function's code or of a callable's class. Decorators do not change it."""
    if isinstance(code, types.FunctionType):
        return str(code.__globals__.get("__name__", ""))
    return str((code if isinstance(code, type) else type(code)).__module__)


def _is_in_packages(module: str | None, packages: Sequence[str]) -> bool:
    return any(module == package or (module or "").startswith(package + ".") for package in packages)
