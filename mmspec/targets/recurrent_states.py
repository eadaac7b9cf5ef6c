"""States of recurrent layers, which each row advances by as many tokens as it accepts.

A forward over a chain of nodes leaves the states as they are. It logs what their updates read, and `StateLog.commit`
brings each row to the node that it has accepted:

- a convolution: the window before the chain and the nodes' inputs lie side by side, so a state is a slice of them;
- a recurrence (gated delta rule, Mamba-2): its call is repeated from the state before the chain, with gates that let a
  rejected token neither decay nor write. It reads what is small (keys, values and gates of the nodes); a state after
  each node would be large. Where rows accept all nodes or none, the state that the forward computed is taken.

The caches of transformers show the inputs of a convolution, but of a recurrence the last state alone. So the functions
that the layers call by name are replaced, in the Python module of the layer's class, by ones that log; while a forward
runs, and with an effect in its thread only.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from mmspec.engine.host_copy import from_host
from mmspec.engine.tree_cache import is_recurrent

STATE_NAMES = ("initial_state", "initial_states")
"""Arguments of a recurrence that returns its last state."""
IN_PLACE_NAMES = ("state", "conv_state")
"""Arguments of one step that overwrites the state."""
NEUTRAL_GATES = ({"g": 0.0, "beta": 0.0}, {"dt": -torch.inf})
"""Arguments of the recurrences that are known, with which a token neither decays a state (g is a logarithm, the time
step softplus(dt)) nor writes."""
MAX_STEPS = 8
"""Up to so many tokens are repeated by the function that transformers decodes with, one after the other."""


@dataclass
class RecurrenceCall:
    """A logged call of a recurrence.

    Attributes:
        function: what was called.
        step_function: computes the same one token after the other.
        names: of the parameters.
        args: positional arguments.
        kwargs: the others.
    """

    function: Callable[..., Any]
    step_function: Callable[..., Any]
    names: Sequence[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, counts: Tensor, longest: int) -> Tensor:
        """The last state, where row b reads its first `counts[b]` tokens alone.

        Args:
            counts: [B] int64.
            longest: the largest of them.
        """
        values = dict(zip(self.names, self.args, strict=False)) | self.kwargs
        gates = next(gates for gates in NEUTRAL_GATES if gates.keys() <= values.keys())
        rows_and_nodes = values[next(iter(gates))].shape[:2]
        is_rejected = torch.arange(longest, device=counts.device) >= counts[:, None]
        for name, value in values.items():
            is_sequence = isinstance(value, Tensor) and value.dim() > 2 and value.shape[:2] == rows_and_nodes
            if is_sequence and name not in STATE_NAMES:  # what was computed of rejected tokens may be nan
                rejected = is_rejected.view(*is_rejected.shape, *[1] * (value.dim() - 2))
                values[name] = value[:, :longest].masked_fill(rejected, gates.get(name, 0.0))
        function = self.step_function if longest <= MAX_STEPS else self.function
        args = [values.pop(name) for name in self.names[: len(self.args)]]
        state: Tensor = function(*args, **values)[1]
        return state


@dataclass
class StateLog:
    """What one forward would have written into the states.

    Attributes:
        windows: (state [B, C, K], its content and the nodes' inputs [B, C, K + N]) of each convolution.
        updates: (state, the state after all nodes, the call that computed it or None) of each recurrence.
        last_call: of a recurrence whose layer has not stored its state yet.
    """

    windows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    updates: list[tuple[Tensor, Tensor, RecurrenceCall | None]] = field(default_factory=list)
    last_call: RecurrenceCall | None = None

    @contextmanager
    def active(self, functions: Sequence[UpdatingFunction]) -> Iterator[None]:
        """Context for one forward of layers that call these functions, in this thread."""
        with _replaced(functions):
            token = _ACTIVE.set(self)
            try:
                yield
            finally:
                _ACTIVE.reset(token)

    def add_update(self, state: Tensor, new: Tensor) -> None:
        """Log the last state of a recurrence, which the last call has computed."""
        self.updates.append((state, new, self.last_call))
        self.last_call = None

    def commit(self, counts: Sequence[int], num_nodes: int) -> None:
        """Write the states after the first `counts[b]` of N nodes of each row.

        Raises:
            RuntimeError: a row stops in the middle of the chain, and the recurrence was not seen.
        """
        if set(counts) == {num_nodes}:
            for state, window in self.windows:
                state.copy_(window[..., -state.shape[-1] :])
            for state, new, _ in self.updates:
                state.copy_(new)
            return
        states = [state for state, _ in self.windows] + [state for state, *_ in self.updates]
        on_device = {device: from_host(list(counts), device) for device in {state.device for state in states}}
        for state, window in self.windows:
            index = on_device[state.device][:, None] + torch.arange(state.shape[-1], device=state.device)
            state.copy_(window.gather(-1, index[:, None].expand(state.shape)))
        for state, new, call in self.updates:
            device_counts = on_device[state.device]
            if set(counts) <= {0, num_nodes}:
                new = torch.where(_per_row(device_counts > 0, state), new, state)
            elif call is None:
                raise RuntimeError("a recurrent layer computes its state by a function that is not known")
            else:
                new = call.repeat(device_counts, max(counts))
            state.copy_(new)


_ACTIVE: ContextVar[StateLog | None] = ContextVar("mmspec_state_log", default=None)


class HeldLayer(LinearAttentionLayer):
    """A cache layer whose states a forward within `StateLog.active` leaves as they are; else as transformers'."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        log = _ACTIVE.get()
        if log is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        state = self.conv_states[state_idx]
        window = torch.cat([state, conv_states], dim=-1)
        log.windows.append((state, window))
        return window

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        log = _ACTIVE.get()
        if log is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        log.add_update(self.recurrent_states[state_idx], recurrent_states)
        return recurrent_states


class RecurrentStates:
    """The states of all recurrent layers of one call.

    Attributes:
        layers: {index: cache layer}.
        log: of the forward that has not been committed.
    """

    def __init__(self, cache: Cache, decoder: nn.Module) -> None:
        """
        Args:
            cache: of the call; its recurrent layers, which are empty, are replaced.
            decoder: the module with the layers.
        """
        self.layers: dict[int, HeldLayer] = {}
        for index, layer in enumerate(cache.layers):
            if is_recurrent(layer):
                held = self.layers[index] = HeldLayer()
                held.__dict__.update(layer.__dict__)
                cache.layers[index] = held
        self.log = StateLog()
        self._functions = updating_functions(type(module) for module in decoder.modules())
        self._prompt: list[tuple[Tensor, Tensor]] = []

    def hold(self) -> None:
        """After the prefill: from now on forwards leave the states as they are. They are kept, for `restore`."""
        for layer in self.layers.values():
            layer.record_past = True  # forwards of one token show their input of a convolution, too
            states = (*layer.conv_states.values(), *layer.recurrent_states.values())
            self._prompt += [(state, state.clone()) for state in states if state is not None]

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Context for a forward, whose log replaces the last one."""
        self.log = StateLog()
        with self.log.active(self._functions):
            yield

    def restore(self, rows: Sequence[bool]) -> None:
        """Back to the states after the prompt, in some rows."""
        chosen = torch.tensor(rows)
        for state, before in self._prompt:
            state.copy_(torch.where(_per_row(chosen.to(state.device), state), before, state))

    def export(self, cache: DynamicCache) -> None:
        """Copy the states into a user's cache, as tensors that may be written outside inference mode."""
        for index, layer in self.layers.items():
            states = {name: dict(getattr(layer, name)) for name in ("conv_states", "recurrent_states")}
            for parts in states.values():
                parts.update((i, state.clone()) for i, state in parts.items() if state is not None)
            cache.layers[index].__dict__.update(layer.__dict__, record_past=False, **states)


# --- the functions that layers call -----------------------------------------------------------------------------------

_LOCK = threading.Lock()
_USERS: dict[tuple[int, str], int] = {}
"""{(id of a Python module's names, name of a function that is replaced there): forwards that run with it}"""


@dataclass(frozen=True)
class UpdatingFunction:
    """A function that updates a state.

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


def updating_functions(classes: Iterable[Any]) -> list[UpdatingFunction]:
    """The functions that update a state and that the forwards of these classes of modules call by name."""
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
            parameters = tuple(inspect.signature(function).parameters)
            has_gates = any(gates.keys() <= {*parameters} for gates in NEUTRAL_GATES)
            if (has_gates and {*STATE_NAMES} & {*parameters}) or {*IN_PLACE_NAMES} & {*parameters}:
                found.append((name, parameters))
    return tuple(found)


@contextmanager
def _replaced(functions: Sequence[UpdatingFunction]) -> Iterator[None]:
    """Within the context layers call functions that log, in threads with an active log."""
    with _LOCK:
        for one in functions:
            _USERS[one.key] = _USERS.get(one.key, 0) + 1
            if _USERS[one.key] == 1:
                one.namespace[one.name] = _logging(one)
    try:
        yield
    finally:
        with _LOCK:
            for one in functions:
                _USERS[one.key] -= 1
                if not _USERS[one.key]:
                    del _USERS[one.key]
                    current = one.namespace[one.name]  # user code may have replaced it in the meantime
                    one.namespace[one.name] = getattr(current, "logged_function", current)


def _logging(replaced: UpdatingFunction) -> Callable[..., Any]:
    """A function that does as the replaced one and logs its calls."""
    function, names = replaced.namespace[replaced.name], replaced.parameters
    step = getattr(replaced.namespace[replaced.step_name], "logged_function", replaced.namespace[replaced.step_name])
    in_place = next((index for index, name in enumerate(names) if name in IN_PLACE_NAMES), None)

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        log = _ACTIVE.get()
        if log is None:
            return function(*args, **kwargs)
        if in_place is None:
            log.last_call = RecurrenceCall(function, step, names, args, kwargs)
            return function(*args, **kwargs)
        values = dict(zip(names, args, strict=False)) | kwargs
        state = values[names[in_place]]
        values[names[in_place]] = new = state.clone()
        log.updates.append((state, new, None))
        positional = [values.pop(name) for name in names[: len(args)]]
        return function(*positional, **values)

    run.__dict__["logged_function"] = function
    return run


def _per_row(mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B] that broadcasts over a state [B, ...]."""
    return mask.view(-1, *[1] * (like.dim() - 1))
