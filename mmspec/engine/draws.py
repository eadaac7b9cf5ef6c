"""Who draws from torch's default generators: the operators of this thread, seen before they run.

The default generators belong to the whole process. That a state has moved does not say who moved it, and to set it back
would give the numbers that another thread has drawn meanwhile a second time. So draws are recognised by the operator,
in the thread that calls it (a dispatch mode is active in one thread only): `ForbidDraws` raises in place of the draw,
`PrivateDraws` lets it draw from a generator of its own. Neither touches a default generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from mmspec.engine.undo import Undoable, VariableSet

ATEN = torch.ops.aten


class DrawsRandomNumbers(RuntimeError):
    """An operator was about to draw from a default generator where none may."""


class _Argument(NamedTuple):
    """An argument of an operator."""

    position: int
    name: str
    default: Any

    def value(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Its value in a call."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name, self.default)


class _Signature(NamedTuple):
    """The arguments of an operator that decide whether it draws."""

    generator: _Argument | None
    probability: _Argument | None
    training: _Argument | None


class _ModePushed(Undoable):
    """Context of a mode, without the base class's flags, which are those of all threads and would outlive a race."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._num_before = torch._C._len_torch_dispatch_stack()

    def _make(self) -> None:
        _push_mode(self._mode)

    def _undo(self) -> None:
        while torch._C._len_torch_dispatch_stack() > self._num_before:
            _pop_mode()


class _DrawMode(TorchDispatchMode):
    """Calls `_draw` in place of each operator of this thread that would draw from a default generator."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as without the mode; the operator that draws its seeds is seen."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._active: list[Undoable] = []  # a mode may be entered within itself

    def __enter__(self) -> Self:
        self._active.append(self._change().__enter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._active[-1].__exit__()
        self._active.pop()

    def _change(self) -> Undoable:
        """What entering the context changes."""
        return _ModePushed(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        if signature is None or not _draws(signature, args, kwargs):
            return func(*args, **kwargs)
        return self._draw(func, signature, args, kwargs)

    def _draw(self, func: Any, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class ForbidDraws(_DrawMode):
    """Context in which a draw from a default generator raises `DrawsRandomNumbers` instead.

    Attributes:
        has_drawn: whether one was attempted, also where the code around it caught the error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def _draw(self, func: Any, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        self.has_drawn = True
        raise DrawsRandomNumbers(f"{func} draws from a default random generator")


class PrivateDraws(_DrawMode):
    """Context in which draws from the default generators come from generators of its own.

    These start in the state of the default ones, and follow `torch.manual_seed` within the context.
    Such a seed is undone at the end, which is the one case in which a default generator is set; it is recognised by the
    state, which no draw leaves.
    """

    def __init__(self, expected_state: Callable[[], Tensor | None] | None = None) -> None:
        """
        Args:
            expected_state: state of the CPU's (or the sampling device's) default generator as the caller leaves it, if
                it advances within the context; None: as at the beginning.
        """
        super().__init__()
        self._expected_state = expected_state
        self._generators: dict[torch.device, tuple[torch.Generator, Tensor]] = {}  # and the default one's last state

    def _change(self) -> Undoable:
        return _PrivateModePushed(self)

    def generator(self, device: torch.device) -> torch.Generator:
        """The private generator in place of the default one of a device."""
        default = _default_generator(device)
        state = default.get_state()
        if default.device not in self._generators:
            private = torch.Generator(default.device)
            private.set_state(state)
        else:
            private, last = self._generators[default.device]
            if not torch.equal(state, last):
                private.set_state(state)  # seeded within the context, or moved by other code, which loses nothing
        self._generators[default.device] = private, state
        return private

    def _draw(self, func: Any, signature: _Signature, args: Any, kwargs: dict[str, Any]) -> Any:
        generator = self.generator(_device_of(args, kwargs))
        if signature.generator is not None:
            return _call_with(func, signature.generator, generator, args, kwargs)
        twin = _with_generator(func)
        if twin is not None:
            return twin(*args, **kwargs, generator=generator)
        if func in (ATEN.native_dropout.default, ATEN.dropout.default):
            return _dropout(func, generator, *args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        default = _default_generator(generator.device)  # none of torch's operators on a CPU gets here
        state = default.get_state()
        default.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(state)


class _PrivateModePushed(_ModePushed):
    """See `PrivateDraws`."""

    def __init__(self, mode: PrivateDraws) -> None:
        super().__init__(mode)
        self._draws = mode
        self._variable = VariableSet(_PRIVATE, mode)
        self._state = torch.default_generator.get_state()

    def _make(self) -> None:
        for device, (private, _) in self._draws._generators.items():
            self._draws._generators[device] = private, _default_generator(device).get_state()
        self._variable.__enter__()
        super()._make()

    def _undo(self) -> None:
        super()._undo()
        self._variable.__exit__()
        now = torch.default_generator.get_state()
        if not torch.equal(now, self._state) and torch.equal(now, _seeded_state()):
            expected = None if self._draws._expected_state is None else self._draws._expected_state()
            torch.default_generator.set_state(self._state if expected is None else expected)


_PRIVATE: ContextVar[PrivateDraws | None] = ContextVar("mmspec_private_draws", default=None)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.multinomial` uses on `device` in this context if none is passed."""
    private = _PRIVATE.get()
    return _default_generator(device) if private is None else private.generator(device)


def unprivate() -> AbstractContextManager[Any]:
    """Context in which draws from the default generators are that, also within `PrivateDraws`."""
    return nullcontext() if _PRIVATE.get() is None else torch._C._DisableTorchDispatch()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "default_generators"):
        return torch.default_generator
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


@functools.lru_cache(maxsize=4096)
def _signature(func: Any) -> _Signature | None:
    """The arguments of an operator that may draw; None for one that does not."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    arguments = {
        argument.name: _Argument(index, argument.name, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
    }
    is_dropout = "dropout" in func._schema.name
    probability = arguments.get("dropout_p") or arguments.get("dropout") or (arguments.get("p") if is_dropout else None)
    generator = arguments.get("generator")
    if torch.Tag.nondeterministic_seeded not in func.tags and generator is None and probability is None:
        return None
    return _Signature(generator, probability, arguments.get("train") or arguments.get("training"))


def _draws(signature: _Signature, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator draws from a default generator."""
    generator, probability, training = signature
    if training is not None and training.value(args, kwargs) is False:
        return False
    if probability is not None and probability.value(args, kwargs) == 0.0:
        return False
    passed: Any = None if generator is None else generator.value(args, kwargs)
    if passed is None:
        return True
    default: Any = _default_generator(passed.device)
    return bool(passed._cdata == default._cdata)  # operators receive another object for the same generator


def _call_with(func: Any, argument: _Argument, generator: torch.Generator, args: Any, kwargs: Any) -> Any:
    if argument.position < len(args):
        return func(*args[: argument.position], generator, *args[argument.position + 1 :], **kwargs)
    return func(*args, **{**kwargs, argument.name: generator})


@functools.lru_cache(maxsize=256)
def _with_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator besides the same arguments, or None."""
    names = {argument.name for argument in func._schema.arguments}
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        if {argument.name for argument in overload._schema.arguments} == names | {"generator"}:
            return overload
    return None


def _dropout(func: Any, generator: torch.Generator, values: Tensor, p: float, train: bool | None = True) -> Any:
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    scaled = values * mask if p == 1 else values * mask / (1 - p)
    return (scaled, mask) if func is ATEN.native_dropout.default else scaled


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """The device on which an operator draws."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), torch.device("cpu"))


def _seeded_state() -> Tensor:
    """State of the CPU's default generator right after its seed."""
    return torch.Generator().manual_seed(torch.default_generator.initial_seed()).get_state()
