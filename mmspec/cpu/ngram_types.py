"""What ngrams.h reads and writes: constants, structs, functions.

Independent of models and drafters.
"""

from __future__ import annotations

import ctypes
from functools import cache

from mmspec.cpu.c_kernel import CKernel

MAX_TABLE_CONTEXT, MAX_TABLE_SUCCESSORS = 8, 64
NO_TOKEN = -2
"""In a context, in front of the tokens where there are too few."""


class ContextStruct(ctypes.Structure):
    """`ngram_context` of ngrams.h."""

    _fields_ = [
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("total", "distinct", "first", "unused")),
    ]


class SuccessorStruct(ctypes.Structure):
    """`ngram_successor` of ngrams.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("token", "count", "next")]


class TableStruct(ctypes.Structure):
    """`ngram_table` of ngrams.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("context_places", "successor_places", "num_contexts", "num_successors"),
                *("max_context", "max_successors"),
            )
        ),
        *((name, ctypes.c_void_p) for name in ("contexts", "successors")),
    ]


class NgramFunctions:
    """The functions of ngrams.h."""

    def __init__(self, kernel: CKernel) -> None:
        library, pointer, size = kernel.library, ctypes.c_void_p, ctypes.c_int64
        self.add = library.few_rows_ngrams_add
        self.add.argtypes, self.add.restype = [pointer, pointer, size, size], size
        self.copy = library.few_rows_ngrams_copy
        self.copy.argtypes, self.copy.restype = [pointer, pointer, size], None
        self.probs = library.few_rows_ngrams_probs
        self.probs.argtypes = [pointer, pointer, ctypes.c_double, pointer, pointer, pointer]
        self.probs.restype = size


@cache
def ngram_functions(kernel: CKernel) -> NgramFunctions:
    return NgramFunctions(kernel)
