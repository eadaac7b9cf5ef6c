"""`RecurrentStates`: the states of the recurrent layers of one call, which each row advances by as many tokens as it
accepts.

A forward over a chain of nodes leaves the states as they are, and logs what their updates read (`StateLog`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from mmspec.cpu.decoder_types import LayerState, NodeLog
from mmspec.engine.tree_cache import is_recurrent
from mmspec.targets.state_log import StateLog, active_log, per_row, updating_functions


class HeldLayer(LinearAttentionLayer):
    """A cache layer whose states a forward within `StateLog.active` leaves as they are; else as transformers'."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        log = active_log()
        if log is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        state = self.conv_states[state_idx]
        window = torch.cat([state, conv_states], dim=-1)
        log.add_window(state, window)
        return window

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        log = active_log()
        if log is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        log.add_update(self.recurrent_states[state_idx], recurrent_states)
        return recurrent_states


STATES = ("conv_states", "recurrent_states")
"""Attributes of a cache layer: {index: state or None}."""


class RecurrentStates:
    """The states of all recurrent layers of one call.

    Attributes:
        layers: {index: cache layer}.
        log: of the forward that has not been committed.
        prompt: the states after the prompt, for `restore`.
    """

    def __init__(self, cache: Cache, decoder: nn.Module) -> None:
        """
        Args:
            cache: of the call; its recurrent layers, which are empty, are replaced.
            decoder: the module with the layers.
        """
        self.layers = _held({index: layer for index, layer in enumerate(cache.layers) if is_recurrent(layer)})
        for index, layer in self.layers.items():
            cache.layers[index] = layer
        self.log = StateLog([])
        self._functions = updating_functions(type(module) for module in decoder.modules())
        self.prompt: dict[Hashable, Tensor] = {}
        self._is_fixed = False

    @property
    def tensors(self) -> list[Tensor]:
        """All states, in one order."""
        return [part[number] for part, number in _places(self.layers).values()]

    def hold(self) -> None:
        """After the prefill: from now on forwards leave the states as they are. They are kept, for `restore`."""
        for layer in self.layers.values():
            layer.record_past = True  # forwards of one token show their input of a convolution, too
        self.prompt = {place: part[number].clone() for place, (part, number) in _places(self.layers).items()}

    def load(self, states: Mapping[Hashable, Tensor]) -> None:
        """Before the prefill: begin with copies of the states behind the first part of a prompt, `prompt` of a call.

        Raises:
            KeyError: there is no such layer.
        """
        for (index, name, number), state in cast(Mapping[tuple[int, str, int], Tensor], states).items():
            layer = self.layers[index]
            layer.lazy_initialization(state_idx=number, **{name: state})
            getattr(layer, name)[number].copy_(state)
            layer.has_previous_state[number] = True

    def move_to(self, tensors: Sequence[Tensor]) -> None:
        """Use these tensors, which contain the states, from now on: recordings read them where they are."""
        _move(self.layers, tensors)
        self._is_fixed = True

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Context for a forward, whose log replaces the last one."""
        self.log = StateLog(self.tensors)
        with self.log.active(self._functions):
            yield

    def of_layers(self) -> list[LayerState | None]:
        """The states of each layer up to the last recurrent one, as C reads them."""
        found: list[LayerState | None] = [None] * (max(self.layers, default=-1) + 1)
        for index, layer in self.layers.items():
            if (conv := layer.conv_states[0]) is not None:
                found[index] = LayerState(conv, layer.recurrent_states[0])
        return found

    def record(self, logs: Sequence[NodeLog | None]) -> None:
        """Let the log be that of a forward in C over `of_layers`, whose logs these are."""
        self.log = StateLog(self.tensors)
        for state, log in zip(self.of_layers(), logs, strict=False):
            if state is not None and log is not None:
                self.log.add_nodes(state.conv, state.recurrent, log)

    @contextmanager
    def logged_over(self, cache: Cache, tensors: Sequence[Tensor]) -> Iterator[StateLog]:
        """Context for a forward over other states, through `cache`; nothing here changes."""
        layers = _held(self.layers)
        _move(layers, tensors)
        for index, layer in layers.items():
            layer.record_past = True
            cache.layers[index] = layer
        log = StateLog(tensors)
        with log.active(self._functions):
            yield log

    def advance(self, states: Sequence[Tensor]) -> None:
        """Take over the states that a commit has computed."""

        def kept(state: Tensor, new: Tensor) -> Tensor:
            is_alike = new.dtype == state.dtype and new.is_contiguous() and not self._is_fixed
            return new if new is state or is_alike else state.copy_(new)

        _move(self.layers, list(map(kept, self.tensors, states)))

    def restore(self, rows: Sequence[bool]) -> None:
        """Back to the states after the prompt, in some rows."""
        chosen = torch.tensor(rows)
        for state, before in zip(self.tensors, self.prompt.values(), strict=True):
            state.copy_(torch.where(per_row(chosen.to(state.device), state), before, state))

    def export(self, cache: DynamicCache) -> None:
        """Copy the states into a user's cache, as tensors that may be written outside inference mode."""
        layers = _held(self.layers)
        _move(layers, [state.clone() for state in self.tensors])
        for index, layer in layers.items():
            cache.layers[index].__dict__.update(layer.__dict__, record_past=False)


def _held(layers: Mapping[int, Any]) -> dict[int, HeldLayer]:
    """The same layers, with the same states."""
    held = {}
    for index, layer in layers.items():
        held[index] = HeldLayer()
        held[index].__dict__.update(layer.__dict__, **{name: dict(getattr(layer, name)) for name in STATES})
    return held


def _places(layers: Mapping[int, Any]) -> dict[Hashable, tuple[dict[int, Tensor], int]]:
    """Where the states of these layers are, in one order: {(layer, one of `STATES`, index): that dict, index}."""
    parts = {(index, name): getattr(layer, name) for index, layer in layers.items() for name in STATES}
    return {
        (*place, number): (part, number)
        for place, part in parts.items()
        for number, state in part.items()
        if state is not None
    }


def _move(layers: Mapping[int, Any], tensors: Sequence[Tensor]) -> None:
    """Put these tensors in the place of the states."""
    for (part, number), tensor in zip(_places(layers).values(), tensors, strict=True):
        part[number] = tensor
