"""The kernel of each instruction set, for all tests of this folder."""

from kernels import kernel as kernel
