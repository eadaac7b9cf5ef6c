"""Whether modules are still the code and the weights that they were. Independent of models.

Recordings, C and verdicts of the self-test are derived from modules of the user, who may change them at any
time: between two calls, and within a call wherever user code runs. `ModuleGuard` is the state of modules at one time.
`mmspec.targets.guard` adds which modules the rounds of a model run, and whether their code is known at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mmspec.cpu.linear import is_replaced
from mmspec.cpu.weights import version_of
from mmspec.live import reread

SIMPLE_TYPES = frozenset((bool, int, float, str))
"""Types of attributes that are compared: sizes, factors, modes, names of kernels and adapters."""
CAPTURING_CODE = "transformers.utils.output_capturing"
"""Module whose forward hooks return hidden states: installed in a first call that asks for them, and harmless."""
IGNORED_ATTRIBUTES = frozenset(("_output_capturing_hooks_installed",))
"""What transformers notes at modules in a first call that returns hidden states."""
UNREAD_ATTRIBUTES = IGNORED_ATTRIBUTES | {
    *("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"),  # described apart
    *("rope_deltas", "generation_config", "forward", "_mmspec"),  # written anew in each call; not read in a forward
}
"""Attributes that are not compared by value."""
BIT_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes: integer type}"""


class ModuleGuard:
    """The state of modules at one time. Two guards are equal if nothing has changed from one to the other."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: Iterable[Tensor] = (),
        *,
        reads_bits: bool = False,
        reads_data: bool = False,
    ) -> None:
        """
        Args:
            modules: whose structure counts (`describe_modules`). They are held, and so are the weights.
            weights: whose places and version counters count, too.
            reads_bits: also compare the weights' bits: for copies, which an edit through `.data` would leave stale, as
                it changes neither place nor version. Reads all weights.
            reads_data: also compare all other attributes of the modules, by value (`value_of`).
        """
        self._modules = modules
        self._weights = list(weights)
        self._reads_bits = reads_bits
        self._reads_data = reads_data
        self._state = self._read_state()
        self._checksums = self._read_checksums()

    def is_unchanged(self) -> bool:
        """Whether the modules and weights are as they were when the guard was made."""
        return self._state == self._read_state() and _equal(self._checksums, self._read_checksums())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleGuard):
            return NotImplemented
        return self._state == other._state and _equal(self._checksums, other._checksums)

    __hash__ = None  # type: ignore[assignment]

    @reread
    def _read_state(self) -> list[Any]:
        """What is compared, besides bits."""
        places = [(id(one), one.data_ptr(), version_of(one)) for one in self._weights]
        data = describe_data(self._modules) if self._reads_data else []
        return [*places, *describe_modules(self._modules), *data]

    def _read_checksums(self) -> list[Tensor]:
        return [part for weight in self._weights for part in bit_checksums(weight)] if self._reads_bits else []


def describe_modules(modules: Sequence[nn.Module]) -> list[Any]:
    """Code, hooks, parts and buffers of modules. Equal lists: they compute the same function of their parameters."""
    found = [
        *(*torch_module._global_forward_hooks, "", *torch_module._global_forward_pre_hooks),
        *describe_code(modules),
    ]
    for module in modules:
        hooks = module._forward_hooks.items()
        found += [key for key, hook in hooks if getattr(hook, "__module__", None) != CAPTURING_CODE]
        found += ["", *module._forward_pre_hooks]
        found += map(id, module._modules.values())
        found += map(id, module._parameters.values())
        for buffer in module._buffers.values():
            found += (id(buffer), 0) if buffer is None else (id(buffer), version_of(buffer), *_number(buffer))
    return found


def _number(buffer: Tensor) -> list[float]:
    """The number of a buffer that has one, such as a scale, which C gets by value: `.data` edits leave no trace."""
    return [buffer.item()] if buffer.numel() == 1 and buffer.device.type == "cpu" else []


def describe_code(modules: Sequence[nn.Module]) -> list[Any]:
    """Classes, forwards, classes of parameters, and attributes that are numbers or texts."""
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    found: list[Any] = [kind.forward for kind in kinds]
    for module in modules:
        attributes = module.__dict__
        forward = attributes.get("forward")
        found += id(module), type(module), None if forward is None or is_replaced(module) else forward
        found += map(type, module._parameters.values())
        found += [
            (name, value)
            for name, value in attributes.items()
            if type(value) in SIMPLE_TYPES and name not in IGNORED_ATTRIBUTES
        ]
        found += attributes.get("_active_adapter", ())  # names of PEFT's adapters
    return found


def describe_data(modules: Sequence[nn.Module]) -> list[Any]:
    """The attributes of modules that `describe_modules` leaves out: configs, lists, tables, tensors."""
    known: dict[int, Any] = {}
    found = []
    for module in modules:
        for name, value in module.__dict__.items():
            if name not in UNREAD_ATTRIBUTES:
                if id(value) not in known:
                    known[id(value)] = value_of(value)
                found.append((name, known[id(value)]))
    return found


def value_of(one: Any) -> Any:
    """What is compared of an attribute: numbers, texts, containers and configs by value, tensors by place and version,
    other objects by identity."""
    if type(one) in SIMPLE_TYPES or one is None:
        return type(one), one
    if isinstance(one, Mapping):
        return type(one), [(key, value_of(part)) for key, part in one.items()]
    if isinstance(one, (list, tuple)):
        return type(one), list(map(value_of, one))
    if isinstance(one, (set, frozenset)):
        return frozenset(one)
    if isinstance(one, (torch.dtype, torch.device)):
        return one
    if type(one).__name__.endswith("Config"):
        return type(one), value_of(vars(one))
    return (id(one), one.data_ptr(), version_of(one)) if isinstance(one, Tensor) else id(one)


@reread
def run_plain_forwards(modules: Iterable[nn.Module]) -> bool:
    """Whether modules have no hooks or forwards of their own, and plain parameters."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return all(
        ("forward" not in module.__dict__ or is_replaced(module))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and all(weight is None or type(weight) is nn.Parameter for weight in module._parameters.values())
        for module in modules
    )


def bit_checksums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the bit patterns along the first and the last dimension; of a vector the bits themselves, whose order no
    sum tells. They change where `.data` is edited in place."""
    bits = torch.atleast_1d(tensor.detach()).contiguous()
    if bits.shape[-1] * bits.element_size() % 8 == 0:
        bits = bits.view(torch.long)  # two float32 at a time: four times as fast as a sum of int32
    else:
        bits = bits.view(BIT_TYPES.get(bits.element_size(), torch.uint8))
    if bits.dim() == 1:
        return bits.clone(), bits[:0]
    return bits.sum(0, dtype=torch.long), bits.sum(-1, dtype=torch.long)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
