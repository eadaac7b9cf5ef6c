"""The measured costs of a patched model's drafters, loaded from and stored in the user's cache folder."""

from __future__ import annotations

import torch

from mmspec.cpu.c_kernel import load_kernel
from mmspec.economy.kernels import KernelChoices
from mmspec.economy.known import Economy
from mmspec.economy.store import CostStore, device_description
from mmspec.forks import Locked
from mmspec.interfaces import Drafter
from mmspec.interfaces.drafter import modules_of
from mmspec.targets.base import ModelAdapter

TIMING_VERSION = 1
"""Of the C kernels and of how they are timed: choices of other versions are not taken."""


class DrafterCosts(Locked):
    """One `Economy` for each drafter, by name. Threads may share the object.

    A new one starts with the costs that an earlier process stored for the same kind of target, drafter and device.
    They are stored after 2, 4, 8, ... calls with a drafter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._economies: dict[str, Economy] = {}
        self._num_calls: dict[str, int] = {}

    def economy(self, drafter: Drafter, adapter: ModelAdapter) -> Economy:
        """What is known of rounds with this drafter, on the model's current kind of device."""
        kind = "cpu" if adapter.model.device.type == "cpu" else "other"
        with self.lock:
            found = self._economies.get(drafter.name)
            if found is None or found.device != kind:  # the model was moved
                found = self._economies[drafter.name] = Economy(kind)
                if CostStore.is_enabled():
                    CostStore(cost_key(drafter, adapter)).read(found.restore)
            return found

    def count_call(self, drafter: Drafter, adapter: ModelAdapter) -> None:
        """Count a call with this drafter, and store its costs if that is due."""
        with self.lock:
            num_calls = self._num_calls[drafter.name] = self._num_calls.get(drafter.name, 0) + 1
        if num_calls > 1 and num_calls & (num_calls - 1) == 0 and CostStore.is_enabled():
            CostStore(cost_key(drafter, adapter)).write(self.economy(drafter, adapter).snapshot())


def load_kernel_choices(choices: KernelChoices) -> None:
    """Let a process begin with the kernels that earlier ones have found on this machine; asked once."""
    if not choices.is_loaded:
        choices.is_loaded = True
        if CostStore.is_enabled():
            _kernel_store().read(choices.restore)


def store_kernel_choices(choices: KernelChoices) -> None:
    """Store what was timed in this process, if anything was."""
    if choices.has_news and choices.is_loaded and CostStore.is_enabled():
        choices.has_news = False
        _kernel_store().write(choices.snapshot())


def _kernel_store() -> CostStore:
    """The file of this processor and these versions; the numbers of threads are in it."""
    kernel = load_kernel()
    device = device_description(torch.device("cpu")).rsplit(" ", 2)[0]
    level = 0 if kernel is None else kernel.level
    return CostStore({"kernels": TIMING_VERSION, "device": device, "torch": torch.__version__, "level": level})


def cost_key(drafter: Drafter, adapter: ModelAdapter) -> dict[str, object]:
    """What the costs depend on."""
    return {
        "target": [adapter.model_type, adapter.num_layers, adapter.text_config.hidden_size, adapter.vocab_size],
        "dtype": str(adapter.model.dtype),
        "attention": adapter.attention,
        "device": device_description(adapter.model.device),
        "drafter": [drafter.name, sum(weight.numel() for part in modules_of(drafter) for weight in part.parameters())],
        "torch": torch.__version__,
    }
