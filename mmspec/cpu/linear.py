"""Linear layers on a CPU, computed by whichever kernel is fastest on this machine (`mmspec/economy/kernels.py`).

The float32 kernel behind `nn.Linear` is slow for products of a few rows, which reduces the gain of scoring several
nodes per forward; and MKL leaves half of some AMD cores unused in products of many rows, which are prompts. Three other
kernels compute the same product:

- *transposed*: weight times rows, so that the kernel's wide dimension is the weight's. Needs a transposed copy of the
  result only.
- *c*: our own C code, on the weight where it lies (`mmspec/cpu/c_kernel.py`), for up to 32 rows: with more MKL takes
  up to a tenth less. Needs a C compiler.
- *oneDNN*: for more than 32 rows, on the weight where it lies.

These are for float32. In bfloat16 and float16 two kernels, the C kernel's and torch's, differ by a rounding that is
large enough to decide near-ties. So one kernel computes all products of 1 to 32 rows of a layer. Products of more rows,
such as a prompt's, are decided apart: torch may have instructions that pay with many rows only, or may emulate the
type. With the C kernel a row's result is the same bits whatever the other rows.

Replaces the forward of layers of exact type `nn.Linear` within `use_fast_linears` only. A context variable limits the
effect to the current thread: training, other threads and `mmspec.disabled()` run plain layers. Independent of models.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, load_kernel
from mmspec.cpu.weights import FLOAT_TYPES
from mmspec.economy.kernels import IN_C, KERNEL_CHOICES, ONEDNN, PLAIN, TRANSPOSED, KernelChoices, ProductKey
from mmspec.engine.undo import Replaced, VariableSet
from mmspec.live import all_modules, reread

logger = logging.getLogger("mmspec")

MAX_ROWS = 128
"""Inputs with more rows are of prompts: unless `deterministic`, the plain kernel and oneDNN compute them in float32."""

TIMED_ROWS = (1, 8, MAX_C_ROWS, MAX_ROWS, 2 * MAX_ROWS)
"""Numbers of rows in float32 up to which one kernel is chosen, and with which it is timed; the last for all beyond."""
MANY_ROWS = 1 << 16
"""In half precision: stands for all numbers of rows that are not few."""
FEW_TIMED, MANY_TIMED = (1, 8), (64,)
"""Numbers of rows in half precision with which a layer is timed: one token and the nodes of a usual tree; a prompt."""
FLOAT_PRODUCTS, NARROW_PRODUCTS = 32 << 20, 8 << 20
"""Multiplications of a timed run at most, in float32 and in half precision, which takes 10 ms where torch emulates it:
out features beyond are left out."""
ROUNDED_FEATURES = 1024
"""Layers with as many out features or more share their choice."""


class LinearAutotuner:
    """Computes linear layers by the kernels that are chosen. One per patched model, shared by the threads of its calls.

    Attributes:
        choices: the kernel of each kind of product.
        allow_c: the C kernel may be used (False to compare with).
        kernel: the C kernel; None where it is not available, and before the first call.
        has_onednn: oneDNN may be tried for more than 32 rows; False once it has failed.
    """

    def __init__(self, choices: KernelChoices | None = None) -> None:
        """`choices` are those of the process unless given."""
        self.choices = KERNEL_CHOICES if choices is None else choices
        self.has_onednn = torch.backends.mkldnn.is_available()
        self.allow_c = True
        self.kernel: CKernel | None = None

    def linear(self, layer: nn.Linear, rows: Tensor, deterministic: bool = False) -> Tensor:
        """`layer(rows)` by the kernel that is fastest.

        Args:
            layer: the layer.
            rows: [..., in_features].
            deterministic: do not choose by timing: the C kernel, with which a row's result is the same bits whatever
                the other rows; where there is none, by the number of rows in float32.

        Returns:
            [..., out_features].
        """
        num_rows = rows.numel() // max(1, rows.shape[-1])
        is_served = rows.dtype in FLOAT_TYPES and rows.dtype is layer.weight.dtype
        if not num_rows or torch.is_grad_enabled() or not is_served or _is_autocast():
            return functional.linear(rows, layer.weight, layer.bias)
        is_narrow = rows.dtype is not torch.float32
        if is_narrow:  # torch 2.13 computes rows that lie apart, such as those of the last tokens, 90 times slower
            rows = rows.contiguous()
        if self.kernel is None and is_narrow:
            kernel = PLAIN
        else:
            kernel = self._fixed_kernel(num_rows) if deterministic else self._chosen_kernel(layer.weight, num_rows)
        return self._run_kernel(kernel, layer.weight, layer.bias, rows)

    def _chosen_kernel(self, weight: Tensor, num_rows: int) -> str:
        """The kernel of products of so many rows."""
        cases: tuple[int, ...]
        if weight.dtype is torch.float32:
            kernels = self._candidates(num_rows)
            max_rows = next((count for count in TIMED_ROWS if num_rows <= count), TIMED_ROWS[-1])
            cases = (max_rows,)
        else:
            is_few = num_rows <= MAX_C_ROWS
            kernels = _narrow_kernels(weight.dtype, is_few)
            max_rows, cases = (MAX_C_ROWS, FEW_TIMED) if is_few else (MANY_ROWS, MANY_TIMED)
        key = choice_key(weight, max_rows)
        chosen = self.choices.used(key)
        if chosen is None or chosen not in kernels:
            chosen = self.choices.choose(key, kernels, cases, lambda name, count: self._time(name, weight, count))
        return chosen

    def _time(self, kernel: str, weight: Tensor, num_rows: int) -> Tensor:
        max_products = FLOAT_PRODUCTS if weight.dtype is torch.float32 else NARROW_PRODUCTS
        num_features = max(64, max_products // (num_rows * weight.shape[1]))
        return self._run_kernel(kernel, weight[:num_features], None, weight.new_ones(num_rows, weight.shape[1]))

    def _fixed_kernel(self, num_rows: int) -> str:
        """The kernel of calls with `deterministic=True`."""
        if self.kernel is not None:
            return IN_C
        return TRANSPOSED if 1 < num_rows <= MAX_ROWS else PLAIN

    def _candidates(self, num_rows: int) -> tuple[str, ...]:
        """The kernels that may compute a product of so many rows in float32."""
        return _kernels(
            is_prompt=num_rows > MAX_ROWS,
            with_c=self.kernel is not None and num_rows <= MAX_C_ROWS,
            with_onednn=self.has_onednn and num_rows > MAX_C_ROWS,
        )

    def _run_kernel(self, kernel: str, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        if kernel == IN_C and self.kernel is not None:
            result = self.kernel.linear(weight, bias, rows)
            if result is not None:
                return result
        if kernel == TRANSPOSED:
            return transposed_linear(weight, bias, rows)
        if kernel == ONEDNN and (blocked := self._onednn_linear(weight, bias, rows)) is not None:
            return blocked
        return functional.linear(rows, weight, bias)

    def _onednn_linear(self, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor | None:
        """The product by oneDNN, which reorders the weight in each call; None if this torch cannot."""
        try:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            # A private operator of torch, which may be missing or refuse a build or a shape: only speed is lost.
            self.has_onednn = False
            logger.debug("linear layers do not use oneDNN: %s", error)
            return None
        return out


@lru_cache(maxsize=16)
def _kernels(*, is_prompt: bool, with_c: bool, with_onednn: bool) -> tuple[str, ...]:
    """The kernels to choose from, the likeliest to be the fastest first."""
    kernels = ((IN_C, with_c), (PLAIN, True), (TRANSPOSED, not is_prompt), (ONEDNN, with_onednn))
    return tuple(name for name, is_there in kernels if is_there)


@lru_cache(maxsize=16)
def _narrow_kernels(dtype: torch.dtype, is_few: bool) -> tuple[str, ...]:
    """The same in half precision: torch's first where it has instructions for the many rows, as far as it tells."""
    try:
        ops = torch.ops.mkldnn
        is_native = ops._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported
        return (IN_C, PLAIN) if is_few or not is_native() else (PLAIN, IN_C)
    except (AttributeError, RuntimeError):
        return IN_C, PLAIN


def choice_key(weight: Tensor, max_rows: int) -> ProductKey:
    """The key of products with a weight: layers of similar size share it, to be timed once."""
    out_features, in_features = weight.shape
    rounded = min(ROUNDED_FEATURES, 1 << max(0, out_features - 1).bit_length())
    return torch.get_num_threads(), weight.dtype, max_rows, rounded, in_features


def transposed_linear(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """[..., out_features], `linear(rows, weight, bias)` computed as weight times rows.

    The result has the memory layout of a plain one, since callers may view it. A single row is duplicated: some kernels
    (MKL on an AMD EPYC) take three times as long for a matrix-vector product as for a matrix of two columns.
    """
    num_rows = rows.numel() // rows.shape[-1]
    flat = rows.reshape(-1, rows.shape[-1])
    columns = (flat.repeat(2, 1) if num_rows == 1 else flat).t()
    out = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
    return out[:, :num_rows].t().contiguous().view(*rows.shape[:-1], len(weight))


def _is_autocast() -> bool:
    """Whether CPU autocast is enabled, under which a plain layer computes in half precision."""
    return torch.is_autocast_enabled("cpu")


@dataclass(frozen=True)
class _Context:
    """Settings of one `use_fast_linears`."""

    autotuner: LinearAutotuner
    deterministic: bool
    layers_only: bool


ACTIVE_CONTEXT: ContextVar[_Context | None] = ContextVar("mmspec_fast_linears", default=None)
_LINEAR_FORWARD = nn.Linear.forward


def fast_forward(self: nn.Linear, rows: Tensor) -> Tensor:
    """What stands in place of the forward of a linear layer while calls run."""
    context = ACTIVE_CONTEXT.get()
    if context is None or type(self).forward is not _LINEAR_FORWARD:  # user code may change the class
        return type(self).forward(self, rows)
    return context.autotuner.linear(self, rows, context.deterministic)


def active_kernel() -> CKernel | None:
    """The C kernel within `use_fast_linears`, for drafts in C; None outside, and with `layers_only`."""
    context = ACTIVE_CONTEXT.get()
    return None if context is None or context.layers_only else context.autotuner.kernel


@reread
def find_linear_layers(roots: Iterable[nn.Module], device_type: str = "cpu") -> list[nn.Linear]:
    """The layers whose forward may be replaced: exact type, float32 or half precision, on a device, no own forward."""
    linear = [module for module in all_modules(roots) if type(module) is nn.Linear]
    return [layer for layer in linear if not why_not_replaced(layer, device_type)]


def is_replaced(module: nn.Module) -> bool:
    """Whether the forward of a module is replaced by this module's, for a call in any thread."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is fast_forward


def why_not_replaced(layer: nn.Module, device_type: str) -> str:
    """What about a layer forbids to replace its forward; "" if nothing does."""
    attributes = layer.__dict__  # asked for each layer in each call: `layer.weight` is found by a function in Python
    weight: Any = None if "weight" in attributes else layer._parameters.get("weight")
    if type(layer) is not nn.Linear or type(weight) is not nn.Parameter:
        return "in layers or tensors of other classes (experts, or quantised already)"
    if "forward" in attributes and not is_replaced(layer):
        return "in layers whose forward was replaced"
    if weight.dtype not in FLOAT_TYPES:
        return f"in {weight.dtype}".replace("torch.", "")
    if weight.device.type != device_type:
        return f"on {weight.device.type}, not {device_type}"
    if weight.is_inference():
        return "made under torch.inference_mode, so no change is noticed"
    return "" if weight.is_contiguous() else "not contiguous"


@contextlib.contextmanager
def use_fast_linears(
    autotuner: LinearAutotuner, layers: Iterable[nn.Linear], deterministic: bool = False, layers_only: bool = False
) -> Iterator[None]:
    """Within the context, this thread computes these layers by the autotuner's kernels. Restored afterwards.

    Args:
        autotuner: chooses the kernels.
        layers: of `find_linear_layers`.
        deterministic: see `LinearAutotuner.linear`.
        layers_only: drafts are not to run in C, so that `active_kernel` is None.
    """
    replaced = list(layers)
    autotuner.kernel = load_kernel() if autotuner.allow_c else None
    with (
        Replaced(
            ((layer.__dict__, "forward") for layer in replaced),
            lambda index, _: types.MethodType(fast_forward, replaced[index]),
        ),
        VariableSet(ACTIVE_CONTEXT, _Context(autotuner, deterministic, layers_only)),
    ):
        yield
