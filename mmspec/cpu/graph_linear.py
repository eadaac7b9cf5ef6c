"""Linear layers of a traced function in our own C kernel (`mmspec.cpu.c_kernel`), as operators of torch.

Within `CLinears`, linear layers of few float32 rows become `mmspec::few_rows_linear`, an operator that a compiler
calls and does not look into: it neither packs weights nor compiles and times a kernel for each shape. `join_linears`
then joins those that read the same rows. Weights are read where they lie. Independent of models.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, load_kernel

LINEAR = functional.linear


class CLinears(TorchFunctionMode):
    """Mode in which `functional.linear` is the operator, where the kernel computes that product. Of one thread.

    Attributes:
        num_replaced: linear layers that are the operator.
        num_left: those that are not: too many rows, another dtype or layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_replaced = 0
        self.num_left = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is LINEAR and not kwargs and 2 <= len(args) <= 3:
            rows, weight, *rest = args
            if _is_for_kernel(rows, [weight, *(part for part in rest if part is not None)]):
                self.num_replaced += 1
                biases = [rest[0] if rest else None]
                (product,) = _few_rows_linear()(rows.contiguous(), [weight], biases)
                return product
        self.num_left += func is LINEAR
        return func(*args, **(kwargs or {}))


def join_linears(graph: GraphModule) -> GraphModule:
    """One operator for all linear layers of the same rows, such as queries, keys and values. Changes the graph."""
    nodes = graph.graph
    position = {node: number for number, node in enumerate(nodes.nodes)}
    by_rows: dict[Any, list[Node]] = {}
    for node in nodes.nodes:
        if node.target is _few_rows_linear():
            by_rows.setdefault(node.args[0], []).append(node)
    for rows, group in by_rows.items():
        first = group[0]
        arguments: list[Any] = [node.args for node in group]
        weights = [weight for _, parts, _ in arguments for weight in parts]
        biases = [bias for _, _, parts in arguments for bias in parts]
        late = [part for part in (*weights, *biases) if part is not None and position[part] > position[first]]
        if len(group) == 1 or any(part.op != "get_attr" for part in late):
            continue
        for part in late:
            first.prepend(part)
        with nodes.inserting_before(first):
            joined = nodes.call_function(_few_rows_linear(), (rows, weights, biases))
            products = [nodes.call_function(operator.getitem, (joined, index)) for index in range(len(group))]
        for node, part in zip(group, products, strict=True):
            for use in list(node.users):  # the first of its outputs, the only one
                use.replace_all_uses_with(part)
                nodes.erase_node(use)
            nodes.erase_node(node)
    graph.recompile()
    return graph


@cache
def _few_rows_linear() -> Any:
    """The operator, registered when it is first needed."""
    library = _library()
    library.define("few_rows_linear(Tensor rows, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
    library.impl("few_rows_linear", _compute, "CPU")
    torch.library.register_fake("mmspec::few_rows_linear", _allocate, lib=library)
    return torch.ops.mmspec.few_rows_linear.default


@cache
def _library() -> torch.library.Library:
    """Holds the registrations: they end with this object."""
    return torch.library.Library("mmspec", "FRAGMENT")


def _compute(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """[..., out_features] of each weight [out_features, in_features] with its bias."""
    kernel = load_kernel()
    return [_product(kernel, rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _product(kernel: CKernel | None, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = None if kernel is None else kernel.linear(weight, bias, rows)
    return LINEAR(rows, weight, bias) if product is None else product


def _allocate(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Outputs without values, for tracing."""
    return [rows.new_empty(*rows.shape[:-1], weight.shape[0]) for weight in weights]


def _is_for_kernel(rows: Tensor, parameters: Sequence[Tensor]) -> bool:
    tensors = (rows, *parameters)
    is_float = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    is_plain = all(tensor.is_contiguous() for tensor in parameters)
    return is_float and is_plain and 0 < rows.numel() <= MAX_C_ROWS * rows.shape[-1]
