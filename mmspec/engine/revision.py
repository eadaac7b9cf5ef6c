"""Whether modules are still the code and the weights that they were, and what was derived from them meanwhile.

Recordings, C and verdicts of the self-test are derived from modules of the user, who may change them at any time:
between two calls, and within a call wherever user code runs. A `Revision` is the state of modules at one time; what is
derived from them is kept by it (`Revision.cached`) and dies with it. Independent of models: which modules the rounds of
a model run, and whether their code is known at all, is in `mmspec.targets.model_state`.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, itemgetter, methodcaller
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
CODE_TYPES = frozenset((types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial))
"""Classes of attributes that are code: a method of the class may stand behind one."""
COMMON_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that all modules have. Of those that are not described apart `training` alone says how a forward runs."""
WEIGHT_ATTRIBUTES = "_parameters", "_buffers"
LAYOUT = Tensor.data_ptr, attrgetter("dtype"), attrgetter("shape"), Tensor.stride
"""What is compared of plain tensors: `.data` may have been replaced, also by another view of the same memory."""
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
        own_code = (_function(one) for _, one in _own_code(modules, _own_values(modules)[1]))
        parts = (*modules, *(one for module in modules for one in _weights(module)), *own_code)
        self._gone: list[Any] = []  # references to what is there no more: it may have left its id to another
        # Packed weights cannot be swapped, as `model.to` does, while there are weak references to them.
        self._packed = [one for one in parts if isinstance(one, Tensor) and type(one) not in PLAIN_TENSORS]
        packed = set(map(id, self._packed))
        self._parts = [
            weakref.ref(one, self._gone.append)
            for one in parts
            if id(one) not in packed and type(one).__weakrefoffset__
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
        if self._gone or self._state != (describe(modules), self._code(modules)):
            return False
        return self._data == (_configs(modules), None)

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
    """What a `Revision` compares of modules, but for the attributes of `describe_data`.

    It is asked before each call, and before each round of calls with user code. So what all modules have is read of
    all at once, by functions in C.
    """
    kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
    plain_class = {kind: vars(kind).get(PLAIN_CLASS, kind) for kind in kinds}
    parts, parameters, buffers = (list(map(attrgetter(name), modules)) for name in ("_modules", *WEIGHT_ATTRIBUTES))
    weights = [*_all_values(parameters), *_all_values(buffers)]
    plain = [one for one in weights if type(one) in PLAIN_TENSORS]
    others = [one for one in weights if one is not None and type(one) not in PLAIN_TENSORS]
    scalars = [one for one in _all_values(buffers) if one is not None and one.device.type == "cpu" and one.numel() == 1]
    readers, values = _own_values(modules)
    return [
        [*torch_module._global_forward_hooks, "", *torch_module._global_forward_pre_hooks],
        [code for kind in kinds for code in (kind.forward, kind.__call__)],
        list(map(id, modules)),
        list(map(plain_class.__getitem__, map(type, modules))),
        list(map(attrgetter("training"), modules)),
        list(map(len, (*parts, *parameters, *buffers))),
        list(map(id, _all_values(parts))),
        list(map(id, weights)),
        [0 if one.is_inference() else one._version for one in plain],
        *([*map(read, plain)] for read in LAYOUT),
        [(type(one), version_of(one)) for one in others],  # the class may refuse an address
        [one.item() for one in scalars],  # such as a scale, which C gets by value: `.data` edits leave no trace
        readers,
        list(map(type, values)),
        [one for one in values if type(one) in SIMPLE_TYPES],
        [(where, id(_function(one)), id(getattr(one, "__self__", None))) for where, one in _own_code(modules, values)],
    ]


def _all_values(dicts: Iterable[Any]) -> Iterator[Any]:
    """The values of dicts one after another, most of which are empty."""
    return chain.from_iterable(map(methodcaller("values"), filter(None, dicts)))


def _own_values(modules: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
    """What reads the attributes of each module that not all modules have, one object for the same names; all values."""
    attributes = [module.__dict__ for module in modules]
    readers = list(map(_reader, map(tuple, attributes)))
    try:
        return readers, list(chain.from_iterable(map(call, readers, attributes)))
    except KeyError as error:  # for `reread`
        raise RuntimeError("attributes of a module changed during iteration") from error


@functools.lru_cache(maxsize=4096)
def _reader(names: tuple[str, ...]) -> Callable[[Any], Sequence[Any]]:
    return _reader_of(tuple(name for name in names if name not in UNREAD_ATTRIBUTES and name not in COMMON_ATTRIBUTES))


@functools.lru_cache(maxsize=4096)
def _reader_of(names: tuple[str, ...]) -> Callable[[Any], Sequence[Any]]:
    """Returns the values of these names in a dict."""
    return itemgetter(*names) if len(names) > 1 else lambda attributes: [attributes[name] for name in names]


def _own_code(modules: Sequence[nn.Module], values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(where, hook or function) of what modules run besides their classes, but for what mmspec puts there.

    Args:
        modules: the modules.
        values: of their attributes, which may be methods that their classes have too.
    """
    found = list[tuple[Any, Any]]()
    if not CODE_TYPES.isdisjoint(map(type, values)):
        found += [(None, one) for one in values if type(one) in CODE_TYPES]
    for index, module in enumerate(modules):
        attributes = module.__dict__
        if "forward" in attributes and _function(attributes["forward"]) is not fast_forward:
            found.append((index, attributes["forward"]))
        if module._forward_hooks or module._forward_pre_hooks:
            after = ((("after", key), hook) for key, hook in module._forward_hooks.items())
            before = ((("before", key), hook) for key, hook in module._forward_pre_hooks.items())
            found += [one for one in (*after, *before) if getattr(one[1], "__module__", None) != CAPTURING_CODE]
        if "_active_adapter" in attributes:
            found += [(name, None) for name in attributes["_active_adapter"]]  # of PEFT
    return found


def _function(code: Any) -> Any:
    """The function of a bound method, which is made anew each time it is asked for; else the code itself."""
    return getattr(code, "__func__", code)


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """The configs of modules, by value."""
    found = {id(config): config for module in modules if (config := module.__dict__.get("config")) is not None}
    return list(map(value_of, found.values()))


def _weights(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    return [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]


def _checksums(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [part for module in modules for one in _weights(module) for part in bit_checksums(one)]


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
