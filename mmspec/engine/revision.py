"""Whether modules are still the code and the weights that they were, and what was derived from them meanwhile.

Recordings, C and verdicts of the self-test are derived from modules of the user, who may change them at any time:
between two calls, and within a call wherever user code runs. A `Revision` is the state of modules at one time; what is
derived from them is kept by it (`Revision.cached`) and dies with it. Independent of models: which modules the rounds of
a model run, and whether their code is known at all, is in `mmspec.targets.model_state`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary

from mmspec.cpu.linear import fast_forward, is_replaced
from mmspec.cpu.weights import version_of
from mmspec.live import reread

T = TypeVar("T")

SIMPLE_TYPES = frozenset((bool, int, float, str))
"""Types of attributes that are compared: sizes, factors, modes, names of kernels and adapters."""
CAPTURING_CODE = "transformers.utils.output_capturing"
"""Module whose forward hooks return hidden states: installed in a first call that asks for them, and harmless."""
IGNORED_ATTRIBUTES = frozenset(("_output_capturing_hooks_installed", "_experts_implementation_internal"))
"""What transformers notes at modules in a first call that returns hidden states, and at configs while it decodes."""
UNREAD_ATTRIBUTES = IGNORED_ATTRIBUTES | {
    *("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"),  # described apart
    *("rope_deltas", "generation_config", "forward", "_mmspec"),  # written anew in each call; not read in a forward
}
"""Attributes that are not compared by value."""
PLAIN_TENSORS = frozenset((nn.Parameter, Tensor))
"""Classes of tensors that are described by their address."""
PLAIN_CLASS = "_mmspec_plain_class"
"""Attribute of the class of a patched model: its class before `patch`, which computes the same."""
BIT_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes: integer type}"""
_PRESENT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""{module: the revision that `revision_of` returned last}"""


class Revision:
    """The state of modules at one time. Equal ones: nothing has changed from one to the other. It holds no module.

    Seen are code, hooks, parts, numbers and texts among the attributes, configs by value, and of parameters and buffers
    where they lie and what has changed them in place; an edit through `.data` that moves nothing only by `reads_bits`.
    """

    @reread
    def __init__(
        self,
        modules: Sequence[nn.Module],
        code: Callable[[Sequence[nn.Module]], Any] = lambda modules: None,
        *,
        reads_bits: bool = False,
        reads_data: bool = False,
    ) -> None:
        """
        Args:
            modules: all that count; of parts that are not named only which they are.
            code: describes what else of their code counts.
            reads_bits: also compare the bits of all weights, for which they are read.
            reads_data: also compare all other attributes of the modules, by value (`value_of`).
        """
        self._code, self._reads_bits, self._reads_data = code, reads_bits, reads_data
        parts = (*modules, *(one for module in modules for one in (*_weights(module), _own_forward(module))))
        self._gone: list[Any] = []  # references to what is there no more: it may have left its id to another
        # Packed weights cannot be swapped, as `model.to` does, while there are weak references to them.
        self._packed = [one for one in parts if isinstance(one, Tensor) and type(one) not in PLAIN_TENSORS]
        packed = set(map(id, self._packed))
        self._parts = [
            weakref.ref(one, self._gone.append) for one in parts if one is not None and id(one) not in packed
        ]
        self._num_modules = len(modules)
        self._state = describe(modules), code(modules)
        self._data = _configs(modules), describe_data(modules) if reads_data else None
        self._checksums = _checksums(modules) if reads_bits else []
        self._entries: dict[Hashable, Any] = {}

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, called once for a key. It must not refer to the model, which would never be freed."""
        if key not in self._entries:
            self._entries.setdefault(key, make())
        found: T = self._entries[key]
        return found

    def keep(self, key: Hashable, value: Any) -> None:
        """Set an entry."""
        self._entries[key] = value

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is an entry of this key."""
        return key in self._entries

    @reread
    def is_current(self, *, reads_data: bool = False) -> bool:
        """Whether the modules are still as they were.

        Args:
            reads_data: also compare configs, and what else was asked for: before a call, not before each of its rounds.
        """
        modules: list[Any] = [ref() for ref in self._parts[: self._num_modules]]
        if self._gone or self._state != (describe(modules), self._code(modules)):
            return False
        return not reads_data or self == Revision(
            modules, self._code, reads_bits=self._reads_bits, reads_data=self._reads_data
        )

    @reread
    def is_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether a revision of these modules would equal this one, which reads neither bits nor data.

        None is made: half the time of making one goes to references to all weights.
        """
        now = (describe(modules), self._code(modules)), (_configs(modules), None)
        return (self._state, self._data) == now and not self._gone

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Revision) or self._gone or self._state != other._state or self._data != other._data:
            return False
        return _equal(self._checksums, other._checksums)

    def __hash__(self) -> int:
        return id(self)


def revision_of(
    root: nn.Module, modules: Sequence[nn.Module], code: Callable[[Sequence[nn.Module]], Any] = lambda modules: None
) -> Revision:
    """The present revision of a module: the same object as long as nothing has changed.

    Args:
        root: the module.
        modules, code: see `Revision`.
    """
    known: Revision | None = _PRESENT.get(root)
    if known is None or not known.is_of(modules):
        known = _PRESENT[root] = Revision(modules, code)
    return known


def describe(modules: Sequence[nn.Module]) -> list[Any]:
    """What a `Revision` compares of modules, but for the attributes of `describe_data`."""
    found: list[Any] = [*torch_module._global_forward_hooks, "", *torch_module._global_forward_pre_hooks]
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    found += [kind.forward for kind in kinds]
    for module in modules:  # before every round of calls with user code: no function is called for what is plain
        attributes = module.__dict__
        kind = vars(type(module)).get(PLAIN_CLASS, type(module))
        own = getattr(attributes.get("forward"), "__func__", attributes.get("forward"))
        found += id(module), kind, id(None if own is fast_forward else own)
        for key, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", None) != CAPTURING_CODE:
                found.append(key)
        found += ["", *module._forward_pre_hooks]
        found += map(id, module._modules.values())
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is None:
                found.append(None)
            elif type(weight) in PLAIN_TENSORS:
                found += id(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version
            else:  # of a packed or spread weight the class may refuse an address
                found += id(weight), type(weight), version_of(weight)
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type == "cpu" and buffer.numel() == 1:
                found.append(buffer.item())  # such as a scale, which C gets by value: `.data` edits leave no trace
        for name, value in attributes.items():
            if type(value) in SIMPLE_TYPES and name not in IGNORED_ATTRIBUTES:
                found.append((name, value))
        if "_active_adapter" in attributes:
            found += attributes["_active_adapter"]  # names of PEFT's adapters
    return found


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """The configs of modules, by value."""
    found = {id(config): config for module in modules if (config := module.__dict__.get("config")) is not None}
    return list(map(value_of, found.values()))


def _weights(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    return [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]


def _checksums(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [part for module in modules for one in _weights(module) for part in bit_checksums(one)]


def _own_forward(module: nn.Module) -> Any:
    """The function that a module has in place of its class's forward, or None."""
    forward = module.__dict__.get("forward")
    if forward is None or is_replaced(module):
        return None
    return getattr(forward, "__func__", forward)


def describe_data(modules: Sequence[nn.Module]) -> list[Any]:
    """The attributes of modules that `describe` leaves out: lists, tables, tensors."""
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
        return type(one), value_of({name: part for name, part in vars(one).items() if name not in IGNORED_ATTRIBUTES})
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
