"""The C kernels, called on the memory of tensors: linear layers, stacks of decoder layers, draft heads.

Whatever fails (`mmspec.cpu.c_library`: no library and no compiler, no place for the file), `load_kernel` returns None
and torch computes instead. Independent of models.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mmspec.cpu.c_library import (
    AMX_LEVEL,
    INSTRUCTION_SETS,
    ISA_NAMES,
    ISA_VARIABLE,
    CompilerError,
    KernelUnavailableError,
    UntrustedFolderError,
    chosen_level,
    load_library,
    shipped_file,
)
from mmspec.cpu.chain_types import ChainStruct
from mmspec.cpu.draft_types import DraftStruct
from mmspec.cpu.layers import DecoderStruct, LayerStruct
from mmspec.cpu.structs import declare_functions
from mmspec.cpu.weights import FLOAT_TYPES, QuantisedWeight, Weight, WeightStruct, is_block, weight_struct
from mmspec.forks import new_lock

logger = logging.getLogger("mmspec")

CHUNK_ROWS = 16
"""`CHUNK_ROWS` of few_rows.c."""
MAX_C_ROWS = 32
"""`MAX_ROWS` of few_rows.c: rows that are few. More are computed in another way, to the same bits."""
STRUCTS = (DecoderStruct, LayerStruct, DraftStruct, WeightStruct, ChainStruct)
"""In the order of `few_rows_struct_bytes`."""
_BUILD_LOCK = new_lock()


class CKernel:
    """The functions of few_rows.c: linear layers, decoders, draft heads and chains, in float32, bfloat16 or float16.

    A row of the result does not depend on the other rows of the call, nor on the number of threads. Thread-safe.
    Products are added in float32, and rounded once to the type of the rows.

    Attributes:
        library: what it was bound from.
        level: a key of `INSTRUCTION_SETS`.
    """

    def __init__(self, level: int) -> None:
        """Load the library of a level.

        Raises:
            KernelUnavailableError: torch's OpenMP runtime is not found, or structs have other sizes than ours.
            Exception: see `load_library`.
            AttributeError: the library has no such functions.
        """
        self.level = level
        self.library = library = load_library(level)
        _check_structs(library)
        declare_functions(library)
        self._parallel, self._team_size = _openmp_entries()

    @property
    def multiplies_pairs(self) -> bool:
        """Whether products of bfloat16 with bfloat16 are those of pairs.h (with AMX of tiles.h)."""
        return self.level >= 3

    def linear(self, weight: Weight, bias: Tensor | None, rows: Tensor) -> Tensor | None:
        """`rows` times the transposed weight, plus bias.

        Args:
            weight: [out_features, in_features].
            bias: [out_features] of the dtype of the rows, or None.
            rows: [..., in_features] in float32, bfloat16 or float16; with a quantised weight at most 32, which are
                rounded to 8 bits in groups of 32 columns.

        Returns:
            [..., out_features] of the dtype of the rows; None if these tensors are not for this kernel (number of rows,
            dtype, device, memory layout, shapes that do not fit, a subclass of Tensor).
        """
        out_features, in_features = weight.shape
        shape = rows.shape
        if not in_features or shape[-1] != in_features or type(rows) is not Tensor or not is_block(rows):
            return None
        num_rows = rows.numel() // in_features
        is_served = num_rows <= MAX_C_ROWS if isinstance(weight, QuantisedWeight) else is_block(weight)
        if not num_rows or not is_served:
            return None
        bias_pointer = None
        if bias is not None:
            if not (bias.dtype is rows.dtype and is_block(bias) and bias.shape == (out_features,)):
                return None
            bias_pointer = bias.data_ptr()
        out = rows.new_empty((*shape[:-1], out_features))
        done = self.library.few_rows_linear(
            rows.data_ptr(),
            FLOAT_TYPES[rows.dtype],
            ctypes.addressof(struct := weight_struct(weight, self.multiplies_pairs and rows.dtype is torch.bfloat16)),
            bias_pointer,
            out.data_ptr(),
            num_rows,
            torch.get_num_threads(),
            self._parallel,
        )
        del struct  # lives until here
        return out if done else None

    def quantise(self, weight: Tensor, costs: Tensor | None, to: QuantisedWeight) -> None:
        """Fill the memory of `to`, for `mmspec.cpu.quantise.quantise`, which checks its arguments."""
        struct = weight_struct(to)
        cost_pointer = None if costs is None else costs.data_ptr()
        number, num_threads = FLOAT_TYPES[weight.dtype], torch.get_num_threads()
        self.library.few_rows_quantise(
            weight.data_ptr(), number, cost_pointer, ctypes.addressof(struct), num_threads, self._parallel
        )

    def copy(self, weight: Tensor) -> tuple[Tensor | None, Tensor]:
        """The bfloat16 copy of a float32 weight, or None if a number is no bfloat16, and the hashes of its chunks."""
        data = torch.empty(weight.shape, dtype=torch.bfloat16, device="cpu")
        hashes = torch.empty(-(-weight.shape[0] // CHUNK_ROWS), dtype=torch.long, device="cpu")
        struct = weight_struct(weight)
        is_copy = self.library.few_rows_copy(
            ctypes.addressof(struct), data.data_ptr(), hashes.data_ptr(), torch.get_num_threads(), self._parallel
        )
        return data if is_copy else None, hashes

    def decode_scratch(self, decoder: int, num_threads: int) -> int:
        """Floats of scratch memory that `decode` needs; `decoder` is the address of a struct of decoder_types.h."""
        num_floats: int = self.library.few_rows_decode_scratch(decoder, num_threads)
        return num_floats

    def decode(self, decoder: int, num_threads: int) -> bool:
        """Run one forward of `mmspec.cpu.decoder`; False, and nothing is done, if an id or a position has no entry."""
        return bool(self.library.few_rows_decode(decoder, num_threads, self._parallel, self._team_size))

    def advance(self, layer: int, nodes: int, path: Tensor, counts: Tensor, out: Tensor) -> None:
        """Write the states of a layer (mixers.h) behind the first `counts[b]` nodes of each row's path to `out`."""
        steps, numbers = path.contiguous(), counts.contiguous()
        self.library.few_rows_advance(
            layer, len(numbers), nodes, steps.data_ptr(), steps.shape[1], numbers.data_ptr(), out.data_ptr()
        )

    def delta_prompt(self, prompt: ctypes.Structure) -> None:
        """Compute the gated delta rule of `mmspec.cpu.mixers`, which checks its arguments."""
        self.library.few_rows_delta_prompt(ctypes.addressof(prompt), torch.get_num_threads(), self._parallel)

    def conv_prompt(self, prompt: ctypes.Structure) -> None:
        """The same for its convolution."""
        self.library.few_rows_conv_prompt(ctypes.addressof(prompt), torch.get_num_threads(), self._parallel)

    def chain(self, chain: int, num_threads: int) -> int:
        """Draft the chains of `mmspec.cpu.chain`; the number of forwards, 0 in the cases of `decode`."""
        num_forwards: int = self.library.few_rows_chain(chain, num_threads, self._parallel, self._team_size)
        return num_forwards

    def draft_scratch(self, draft: int, num_threads: int) -> int:
        """Floats of scratch memory that the following need; `draft` is the address of a struct of draft_types.h."""
        num_floats: int = self.library.few_rows_draft_scratch(draft, num_threads)
        return num_floats

    def head_forward(self, draft: int, num_threads: int) -> None:
        """Run one forward of `mmspec.cpu.draft`."""
        self.library.few_rows_head_forward(draft, num_threads, self._parallel, self._team_size)

    def draft_tree(self, draft: int, num_threads: int) -> None:
        """Grow the trees of `mmspec.cpu.draft`."""
        self.library.few_rows_draft_tree(draft, num_threads, self._parallel, self._team_size)


def load_kernel() -> CKernel | None:
    """The kernel, built if necessary; None where it cannot be had, with one log line. The same result in every call."""
    return _found_kernel()[0]


def describe_kernel() -> str:
    """Its instructions and where its library is from, or why there is none; the line may name the cache folder."""
    return _found_kernel()[1]


def find_kernel() -> tuple[CKernel | None, str]:
    """What `load_kernel` and `describe_kernel` return, found anew."""
    try:
        with _BUILD_LOCK:
            kernel = _best_kernel()
    except UntrustedFolderError as error:  # the only cause that one command of the user removes
        logger.warning("mmspec: the C kernels stay off, which is slower: %s", error)
        return None, f"none: {error}"
    except (RuntimeError, OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        # RuntimeError and ValueError besides our own: no home folder, a variable CC with an open quote.
        logger.info("linear layers run without the C kernel: %s", error)
        return None, f"none: {error}"
    is_shipped = Path(kernel.library._name) == shipped_file(kernel.level)
    origin = "installed with mmspec" if is_shipped else "built on this machine"
    return kernel, f"{INSTRUCTION_SETS[kernel.level]}, {origin}"


_found_kernel = cache(find_kernel)


def _openmp_entries() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """`GOMP_parallel` and `omp_get_num_threads` of torch's OpenMP runtime, so that there is one pool of threads.

    A second pool would compete for the cores with the threads of torch, which wait for work by spinning.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(torch_library) if torch_library.exists() else None)
    try:
        parallel, team_size = library.GOMP_parallel, library.omp_get_num_threads
        return ctypes.cast(parallel, ctypes.c_void_p), ctypes.cast(team_size, ctypes.c_void_p)
    except AttributeError as error:
        raise KernelUnavailableError(f"the OpenMP runtime of torch: {error}") from None


def _check_structs(library: ctypes.CDLL) -> None:
    """Compare the sizes of the structs that both sides declare.

    Raises:
        KernelUnavailableError: one differs.
    """
    library.few_rows_struct_bytes.restype = ctypes.c_int64
    for number, struct in enumerate(STRUCTS):
        size = library.few_rows_struct_bytes(number)
        if size != ctypes.sizeof(struct):
            raise KernelUnavailableError(
                f"{struct.__name__} has {ctypes.sizeof(struct)} bytes, its counterpart in the library {size}"
            )


def _best_kernel() -> CKernel:
    """The kernel with the best instructions whose products are right, or with those that `ISA_VARIABLE` names.

    Raises:
        KernelUnavailableError: none are.
    """
    name = os.environ.get(ISA_VARIABLE, "")
    level = chosen_level()
    if name and name not in ISA_NAMES:
        logger.warning("mmspec: %s must be one of %s; got %.40r", ISA_VARIABLE, ", ".join(ISA_NAMES), name)
    elif name and ISA_NAMES[name] > level:
        logger.warning("mmspec: %s=%s: not here, so %s is used", ISA_VARIABLE, name, INSTRUCTION_SETS[level])
    try:
        kernel = CKernel(level)
    except CompilerError as error:  # one that knows no tiles, for example
        if level < AMX_LEVEL:
            raise
        logger.info("mmspec: %s is used, since %s", INSTRUCTION_SETS[level - 1], error)
        kernel = CKernel(level - 1)
    while not _is_right(kernel):
        if kernel.level == 1:
            raise KernelUnavailableError("its products differ from those in double precision")
        logger.warning(
            "mmspec: products with %s are wrong on this machine; %s is used",
            *(INSTRUCTION_SETS[level] for level in (kernel.level, kernel.level - 1)),
        )
        kernel = CKernel(kernel.level - 1)
    return kernel


def _is_right(kernel: CKernel) -> bool:
    """Whether products are those in double precision, so that a miscompiled library is never used: odd sizes, few rows
    and many, numbers that are denormal, infinite or NaN, in every type."""
    numbers = torch.arange(37.0 * 100, device="cpu").mul_(0.37).sin_().view(37, 100)
    for dtype in FLOAT_TYPES:
        weight, bias = numbers.to(dtype), numbers[:, 0].to(dtype).contiguous()
        rows = weight[:7].flip(0).contiguous()
        special = torch.tensor([1e-40, -1e-40, math.inf, -math.inf, math.nan], device="cpu").to(dtype)
        rows[1:6, 50] = special
        want = (rows.double() @ weight.double().T + bias.double()).to(dtype).double()
        for repeats in (1, 5):
            got = kernel.linear(weight, bias, rows.repeat(repeats, 1))
            expected = want.repeat(repeats, 1)
            tolerance = 1e-4 if dtype is torch.float32 else 2e-2
            if got is None or not torch.allclose(
                got.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True
            ):
                return False
    return True
