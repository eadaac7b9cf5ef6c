"""The class of a patched model: a subclass of its own, of the same name, with another `generate`.

An attribute of the instance would not do: whoever copies `__dict__` (`torch.nn.parallel.replicate`) would copy a method
that is bound to the original, and run on its weights. A method of the class is given the object that it is called on.
An object whose `KEY` holds the state of another one is not patched.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from mmspec.engine.revision import PLAIN_CLASS
from mmspec.targets.capture_hooks import remove_capture_hooks

KEY = "_mmspec"
"""Attribute of a patched model that holds its state, of which `model` and `generate` are used here."""


def state_of(model: Any) -> Any:
    """The state of a patched model; None for others, copies of `__dict__` among them."""
    state = getattr(model, "__dict__", {}).get(KEY)
    return state if state is not None and state.model is model else None


def own_generate(model: Any) -> Any:
    """`generate` of the model's class, as it is without `patch`."""
    return getattr(plain_class(model), "generate", None)


def plain_class(model: Any) -> Any:
    """The class of the model before `patch`."""
    return next((vars(kind)[PLAIN_CLASS] for kind in type(model).__mro__ if PLAIN_CLASS in vars(kind)), type(model))


def change_class(model: Any, state: Any) -> None:
    """Make a model one of its patched class."""
    model.__class__ = _patched_class(plain_class(model))
    model.__dict__[KEY] = state


def restore_class(model: Any) -> None:
    """Back to the class before; a class that others have put above it (FSDP does) stays, and calls what was."""
    if PLAIN_CLASS in vars(type(model)):
        model.__class__ = plain_class(model)


@functools.cache
def _patched_class(plain: Any) -> type:
    @functools.wraps(plain.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if state is None:  # a copy, or a method that was bound before `unpatch`
            kwargs.pop("mmspec", None)
            return own_generate(self)(self, *args, **kwargs)
        return state.generate(*args, **kwargs)

    members = {
        "generate": generate,
        "__reduce_ex__": _reduce,
        "__deepcopy__": _deepcopy,
        PLAIN_CLASS: plain,
        **{name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    kind: type = type(plain)(plain.__name__, (plain,), members)
    return kind


def _reduce(self: Any, _: Any) -> tuple[Any, ...]:
    """`__reduce_ex__`: a copy is another model. A shallow copy and a pickled model are not patched."""
    plain = plain_class(self)
    function, arguments, attributes, *rest = plain.__reduce_ex__(self, 1)  # later protocols insist on `type(self)`
    arguments = tuple(plain if one is type(self) else one for one in arguments)
    return function, arguments, _Attributes(attributes, state_of(self)), *rest


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """`__deepcopy__`: a deep copy is patched, with a state of its own."""
    function, arguments, attributes, *_ = self.__reduce_ex__(4)
    twin = memo[id(self)] = function(*arguments)
    twin.__setstate__(copy.deepcopy(dict(attributes), memo))
    if (state := state_of(self)) is not None:
        change_class(twin, copy.deepcopy(state, memo))
    return twin


class _Attributes(dict[str, Any]):
    """The attributes of a patched model without those of the patch."""

    def __init__(self, attributes: dict[str, Any], state: Any) -> None:
        super().__init__({name: value for name, value in attributes.items() if name != KEY})
        if getattr(self.get("generate"), "__self__", None) is getattr(state, "model", self):
            del self["generate"]  # bound to the original
        self.model = None if state is None else state.model

    def __reduce__(self) -> tuple[Any, ...]:
        if self.model is not None:
            remove_capture_hooks(self.model)  # they cannot be pickled
        return dict, (dict(self),)
