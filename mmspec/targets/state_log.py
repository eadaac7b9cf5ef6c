"""What one forward would have written into the states of recurrent layers: `StateLog`.

`StateLog.after` computes from it each row's states at the node that the row has accepted:

- a convolution: the window before the chain and the nodes' inputs lie side by side, so a state is a slice of them;
- a recurrence (gated delta rule, Mamba-2): its call is repeated from the state before the chain, with gates that let a
  rejected token neither decay nor write. It reads what is small (keys, values and gates of the nodes); a state after
  each node would be large. Where rows accept all nodes or none, the state that the forward computed is taken.

It reads no value on the host, so that it may be part of a recorded round (`mmspec.targets.lanes`).

The caches of transformers show the inputs of a convolution, but of a recurrence the last state alone. So the functions
that the layers call by name are replaced, in the Python module of the layer's class, by ones that log, or that compute
in C (`computed_in_c`); while a forward runs, and with an effect in its thread only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.decoder_types import NodeLog
from mmspec.engine.undo import Replaced, VariableSet
from mmspec.targets.c_functions import find_computation, in_c, may_be_computed

STATE_NAMES = ("initial_state", "initial_states")
"""Arguments of a recurrence that returns its last state."""
IN_PLACE_NAMES = ("state", "conv_state")
"""Arguments of one step that overwrites the state."""
NEUTRAL_GATES = ({"g": 0.0, "beta": 0.0}, {"dt": -torch.inf})
"""Arguments of the recurrences that are known, with which a token neither decays a state (g is a logarithm, the time
step softplus(dt)) nor writes."""
UNLIMITED = {"dt_limit": (0.0, float("inf"))}
"""Mamba-2's time step in rounds: transformers limits it in prompts, and not where it decodes one token."""
MAX_STEPS = 8
"""Up to so many tokens are repeated by the function that transformers decodes with, one after the other."""


@dataclass(frozen=True)
class RecurrenceCall:
    """A logged call of a recurrence.

    Attributes:
        function: what was called.
        step_function: computes the same one token after the other.
        positional: names of the positional arguments.
        values: all arguments.
    """

    function: Callable[..., Any]
    step_function: Callable[..., Any]
    positional: Sequence[str]
    values: Mapping[str, Any]

    def repeat(self, counts: Tensor, longest: int, path: Tensor) -> Tensor:
        """The last state, where row b reads its first `counts[b]` tokens alone.

        Args:
            counts: [B] int64.
            longest: the largest of them, or more.
            path: [B, n] int64, the nodes that are read; here those of a chain.
        """
        values = dict(self.values)
        gates = next(gates for gates in NEUTRAL_GATES if gates.keys() <= values.keys())
        rows_and_nodes = values[next(iter(gates))].shape[:2]
        is_rejected = torch.arange(longest, device=counts.device) >= counts[:, None]
        for name, value in values.items():
            is_sequence = isinstance(value, Tensor) and value.dim() > 2 and value.shape[:2] == rows_and_nodes
            if is_sequence and name not in STATE_NAMES:  # what was computed of rejected tokens may be nan
                rejected = is_rejected.view(*is_rejected.shape, *[1] * (value.dim() - 2))
                values[name] = value[:, :longest].masked_fill(rejected, gates.get(name, 0.0))
        function = self.step_function if longest <= MAX_STEPS else self.function
        args = [values.pop(name) for name in self.positional]
        state: Tensor = function(*args, **values)[1]
        return state

    def names_of_tensors(self, state: Tensor) -> list[str]:
        """Of the arguments that each call has anew: not of the state before it, nor of weights."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        return [name for name, value in tensors.items() if value is not state and not isinstance(value, nn.Parameter)]

    def over(self, state: Tensor, new_state: Tensor, tensors: Iterator[Tensor]) -> RecurrenceCall:
        """The same of other tensors, the next ones of `tensors`."""
        same = {name: new_state for name, value in self.values.items() if value is state}
        others = {name: next(tensors) for name in self.names_of_tensors(state)}
        return replace(self, values={**self.values, **same, **others})


@dataclass
class StateLog:
    """What one forward would have written into the states.

    Attributes:
        states: all states before it. The keys of the others are their indices here.
        windows: content of the state [B, C, K] of a convolution and the nodes' inputs, [B, C, K + N].
        updates: the state of a recurrence after all nodes, and the call that computed it or None.
        last_call: of a recurrence whose layer has not stored its state yet.
    """

    states: Sequence[Tensor]
    windows: dict[int, Tensor] = field(default_factory=dict)
    updates: dict[int, tuple[Tensor, RecurrenceCall | NodeLog | None]] = field(default_factory=dict)
    last_call: RecurrenceCall | None = None

    @contextmanager
    def active(self, functions: Sequence[UpdatingFunction]) -> Iterator[None]:
        """Context for one forward of layers that call these functions, in this thread."""
        with _replaced(functions), VariableSet(_ACTIVE, self):
            yield

    def add_window(self, state: Tensor, window: Tensor) -> None:
        """Log what a convolution reads."""
        self.windows[self._index(state)] = window

    def add_update(self, state: Tensor, new: Tensor) -> None:
        """Log the last state of a recurrence, which the last call has computed."""
        self.updates[self._index(state)] = new, self.last_call
        self.last_call = None

    def add_nodes(self, conv: Tensor, recurrent: Tensor | None, log: NodeLog) -> None:
        """Log what a forward in C has read of a layer's states."""
        self.add_window(conv, log.window)
        if recurrent is not None and log.next_state is not None:
            self.updates[self._index(recurrent)] = log.next_state, log

    def after(
        self, counts: Tensor, num_nodes: int, possible: Collection[int], path: Tensor | None = None
    ) -> list[Tensor]:
        """All states after the first `counts[b]` nodes of each row's path. Reads no value on the host.

        Args:
            counts: [B] int64.
            num_nodes: N.
            possible: numbers among which `counts` are.
            path: [B, n] int64 accepted nodes, defined up to `counts`; None for chains.

        Raises:
            RuntimeError: a row stops in the middle of the chain, and the recurrence was not seen.
        """
        found = list(self.states)
        on_device = {device: counts.to(device) for device in {state.device for state in self.states}}
        if path is None:
            path = torch.arange(num_nodes, device=counts.device).expand(len(counts), -1)
        paths = {device: path.to(device) for device in on_device}
        indices: dict[tuple[torch.device, int], Tensor] = {}
        for number, window in self.windows.items():
            state = self.states[number]
            size, device = state.shape[-1], state.device
            if (device, size) not in indices:
                held = torch.arange(size, device=device).expand(len(state), -1)
                in_window = torch.cat([held, size + paths[device]], dim=1)
                indices[device, size] = in_window.gather(1, on_device[device][:, None] + held)
            found[number] = window.gather(-1, indices[device, size][:, None].expand(state.shape))
        for number, (new, call) in self.updates.items():
            state = self.states[number]
            device_counts = on_device[state.device]
            if {*possible} == {num_nodes}:
                found[number] = new
            elif {*possible} <= {0, num_nodes}:
                found[number] = torch.where(per_row(device_counts > 0, state), new, state)
            elif call is None:
                raise RuntimeError("a recurrent layer computes its state by a function that is not known")
            else:
                found[number] = call.repeat(device_counts, max(possible), paths[state.device])
        return found

    def tensors(self) -> list[Tensor]:
        """All that a forward has computed, in one order."""
        found = list(self.windows.values())
        for number, (new, call) in self.updates.items():
            found.append(new)
            if isinstance(call, RecurrenceCall):
                found += [call.values[name] for name in call.names_of_tensors(self.states[number])]
        return found

    def over(self, states: Sequence[Tensor], tensors: Sequence[Tensor]) -> StateLog:
        """The same of other states and `tensors`, of a forward by a recording."""
        rest = iter(tensors)
        windows = {number: next(rest) for number in self.windows}
        updates: dict[int, tuple[Tensor, RecurrenceCall | NodeLog | None]] = {
            number: (
                next(rest),
                call.over(self.states[number], states[number], rest) if isinstance(call, RecurrenceCall) else None,
            )
            for number, (_, call) in self.updates.items()
        }
        return StateLog(states, windows, updates)

    def without_data(self) -> StateLog:
        """The same on the meta device, for `over`."""
        return self.over([state.to("meta") for state in self.states], [tensor.to("meta") for tensor in self.tensors()])

    def _index(self, state: Tensor) -> int:
        for number, one in enumerate(self.states):
            if one is state:
                return number
        raise RuntimeError("a recurrent layer writes a state that its cache does not have")


_ACTIVE: ContextVar[StateLog | None] = ContextVar("mmspec_state_log", default=None)


_KERNEL: ContextVar[CKernel | None] = ContextVar("mmspec_state_kernel", default=None)


def active_log() -> StateLog | None:
    """The log of the forward that runs in this thread, or None."""
    return _ACTIVE.get()


# --- the functions that layers call -----------------------------------------------------------------------------------


@contextmanager
def computed_in_c(kernel: CKernel, functions: Sequence[UpdatingFunction]) -> Iterator[None]:
    """Context for a forward without gradients, in this thread: those of these functions that C knows run there."""
    known = [one for one in functions if find_computation(kernel, one.current)]
    with _replaced(known), VariableSet(_KERNEL, kernel):
        yield


def _replaced(functions: Sequence[UpdatingFunction]) -> Replaced:
    names = ((one.namespace, one.name) for one in functions)
    return Replaced(names, lambda index, function: _standing_in(functions[index], function))


@dataclass(frozen=True)
class UpdatingFunction:
    """A function that updates a state, or that C may compute.

    Attributes:
        namespace: names of the Python module whose layers call it.
        name: under which they do.
        parameters: their names.
        step_name: of the function there that computes the same one token after the other, or of this one.
    """

    namespace: dict[str, Any]
    name: str
    parameters: tuple[str, ...]
    step_name: str

    @property
    def key(self) -> tuple[int, str]:
        """What distinguishes it from others."""
        return id(self.namespace), self.name

    @property
    def current(self) -> Callable[..., Any]:
        """What stands there now but for calls in other threads."""
        return _original(self.namespace[self.name])


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "replaced_function", function)


def updating_functions(classes: Iterable[Any]) -> list[UpdatingFunction]:
    """The functions that update a state, or that C may compute, and that forwards of these classes call by name."""
    found = {}
    for kind in set(classes):
        parameters = dict(_parameters_of(kind))
        for name in parameters:
            step = next((other for other in parameters if "recurrent" in other), name)
            function = UpdatingFunction(inspect.unwrap(kind.forward).__globals__, name, parameters[name], step)
            found[function.key] = function
    return list(found.values())


@functools.lru_cache(maxsize=256)
def _parameters_of(kind: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name, names of the parameters) of these functions of a class of modules."""
    forward = inspect.unwrap(kind.forward)
    found = []
    for name in forward.__code__.co_names if inspect.isfunction(forward) else ():
        function = forward.__globals__.get(name)
        if isinstance(function, nn.Module):  # what `kernels` makes of a function
            function = function.forward
        if inspect.isroutine(function) and not inspect.isbuiltin(function):
            try:
                parameters = tuple(inspect.signature(function).parameters)
            except ValueError:  # a routine that does not tell
                continue
            has_gates = any(gates.keys() <= {*parameters} for gates in NEUTRAL_GATES)
            updates = (has_gates and {*STATE_NAMES} & {*parameters}) or {*IN_PLACE_NAMES} & {*parameters}
            if updates or may_be_computed(parameters):
                found.append((name, parameters))
    return tuple(found)


def _standing_in(replaced: UpdatingFunction, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does as the replaced one, and logs its calls if a log is active, or runs in C if a kernel is."""
    names = replaced.parameters
    step = _original(replaced.namespace[replaced.step_name])
    is_recurrence = bool({*STATE_NAMES} & {*names})
    in_place = next((index for index, name in enumerate(names) if name in IN_PLACE_NAMES), None)

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        log, kernel = _ACTIVE.get(), _KERNEL.get()
        if log is None and kernel is None:
            return function(*args, **kwargs)
        if log is not None:
            kwargs |= {name: value for name, value in UNLIMITED.items() if name in kwargs}
        values = dict(zip(names, args, strict=False)) | kwargs
        if log is not None and is_recurrence:
            log.last_call = RecurrenceCall(function, step, names[: len(args)], values)
        if kernel is not None and (found := in_c(kernel, function, values)) is not None:
            return found
        if log is None or in_place is None:
            return function(*args, **kwargs)
        state = values[names[in_place]]
        values[names[in_place]] = new = state.clone()
        log.add_update(state, new)
        positional = [values.pop(name) for name in names[: len(args)]]
        return function(*positional, **values)

    run.__dict__["replaced_function"] = function
    return run


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B] that broadcasts over a state [B, ...]."""
    return mask.view(-1, *[1] * (like.dim() - 1))
