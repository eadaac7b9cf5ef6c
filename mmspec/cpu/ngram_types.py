"""What ngrams.h reads and writes: constants, structs, functions.

Independent of models and drafters.
"""

from __future__ import annotations

import ctypes
from functools import cache

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.structs import fields_of

MAX_TABLE_CONTEXT, MAX_TABLE_SUCCESSORS = 8, 64
NO_TOKEN = -2
"""In a context, in front of the tokens where there are too few."""


class ContextStruct(ctypes.Structure):
    """`ngram_context` of ngrams.h."""

    _fields_ = fields_of("ngram_context")


class SuccessorStruct(ctypes.Structure):
    """`ngram_successor` of ngrams.h."""

    _fields_ = fields_of("ngram_successor")


class TableStruct(ctypes.Structure):
    """`ngram_table` of ngrams.h."""

    _fields_ = fields_of("ngram_table")


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
