"""Checks of draft trees and the walk along the sampled ids in C (trees.h), for tensors on the CPU.

What they compute is defined by `mmspec.engine.tree.sanitize` and `mmspec.engine.accept.accept_path`, which call them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import load_kernel

SanitizedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""tokens, parents, node_mask, ancestor_mask, depths of `DraftTree`."""


def compiled_sanitize(
    tokens: Tensor, parents: Tensor, node_mask: Tensor, root_ids: Tensor, draftable: Tensor, stop_ids: Tensor | None
) -> SanitizedTensors | None:
    """See `mmspec.engine.tree.sanitize`; None if these tensors are not for C, or there is none."""
    whole = (tokens, parents, root_ids, *(() if stop_ids is None else (stop_ids,)))
    if not _are_plain(whole, torch.long) or not _are_plain((node_mask, draftable), torch.bool):
        return None
    if not _fit(tokens, (parents, node_mask), (root_ids,)):  # of a user's drafter: torch says what is wrong
        return None
    kernel = load_kernel()
    if kernel is None:
        return None
    batch, size = tokens.shape
    tokens, parents, node_mask = tokens.contiguous(), parents.contiguous(), node_mask.contiguous()
    root_ids, draftable = root_ids.contiguous(), draftable.contiguous()
    stop_ids = None if stop_ids is None else stop_ids.contiguous()
    numbers = torch.empty(3, batch, size, dtype=torch.long, device="cpu")
    masks = torch.empty(batch * size * (size + 1), dtype=torch.bool, device="cpu")
    out_mask, ancestors = masks[: batch * size].view(batch, size), masks[batch * size :].view(batch, size, size)
    out_tokens, out_parents, depths = numbers
    scratch = (ctypes.c_uint8 * (2 * size))()
    address = ctypes.addressof(scratch)
    kernel.library.few_rows_sanitize(
        batch,
        size,
        *(part.data_ptr() for part in (tokens, parents, node_mask, root_ids, draftable)),
        len(draftable),
        *_stop_arguments(stop_ids),
        *(part.data_ptr() for part in (out_tokens, out_parents, out_mask, ancestors, depths)),
        address,
        address + size,
    )
    return out_tokens, out_parents, out_mask, ancestors, depths


def compiled_accept_path(
    tree: tuple[Tensor, Tensor, Tensor],
    sampled_ids: Tensor,
    max_emit: Tensor,
    stop_ids: Tensor | None,
    finished: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See `mmspec.engine.accept.accept_path`; `tree`: tokens, parents, node_mask. None as in `compiled_sanitize`."""
    tokens, parents, node_mask = tree
    whole = (tokens, parents, sampled_ids, max_emit, *(() if stop_ids is None else (stop_ids,)))
    masks = (node_mask, *(() if finished is None else (finished,)))
    if not _are_plain(whole, torch.long) or not _are_plain(masks, torch.bool):
        return None
    if not _fit(sampled_ids, (tokens, parents, node_mask), (max_emit, *masks[1:])):
        return None
    kernel = load_kernel()
    if kernel is None:
        return None
    batch, size = sampled_ids.shape
    inputs = [part.contiguous() for part in (tokens, parents, node_mask, sampled_ids, max_emit)]
    finished = None if finished is None else finished.contiguous()
    stop_ids = None if stop_ids is None else stop_ids.contiguous()
    path, emitted = torch.empty(2, batch, size, dtype=torch.long, device="cpu")
    counts = torch.empty_like(max_emit)
    kernel.library.few_rows_accept(
        batch,
        size,
        *(part.data_ptr() for part in inputs),
        *_stop_arguments(stop_ids),
        None if finished is None else finished.data_ptr(),
        *(part.data_ptr() for part in (path, counts, emitted)),
    )
    return path, counts, emitted


def _are_plain(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> bool:
    """Whether all are of this dtype, on the CPU, and no subclasses (of a tracer, or without memory)."""
    return all(type(part) is Tensor and part.is_cpu and part.dtype is dtype for part in tensors)


def _fit(nodes: Tensor, same: tuple[Tensor, ...], per_row: tuple[Tensor, ...]) -> bool:
    """Whether `same` have the shape [B, N] of `nodes` and `per_row` that of its rows: C checks no bounds."""
    return all(part.shape == nodes.shape for part in same) and all(part.shape == nodes.shape[:1] for part in per_row)


def _stop_arguments(stop_ids: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if stop_ids is None else (stop_ids.data_ptr(), len(stop_ids))
