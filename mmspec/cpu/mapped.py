"""Memory that is mapped from a file, such as a checkpoint's, copied into memory of the process at the same addresses.

Linux moves no mapping of a file into huge pages. A private mapping is replaced by a copy in one system call
(`mremap`), so that other threads read the same numbers before and after; a number that one of them writes in between
would be lost, so memory of weights that are trained must not be given. Independent of models.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
READ_AND_WRITE, PRIVATE, ANONYMOUS = 3, 2, 0x20
MAY_MOVE, FIXED = 1, 2
MADV_HUGEPAGE = 14
"""Of <sys/mman.h>."""
ALIGNMENT = 2 << 20
"""Of copies, which then lie in huge pages at once where the system permits it."""


@dataclass(frozen=True)
class MappedFile:
    """Where a range of memory was mapped from.

    Attributes:
        path: of the file.
        identity: its device and inode, as `maps` names them.
        offset: of the first byte in the file.
    """

    path: str
    identity: tuple[str, str]
    offset: int


def mapped_file(start: int, end: int) -> MappedFile | None:
    """The file of which one private, writable mapping holds all of a range; None if there is none."""
    for line in MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, access, offset, device, inode, *path = line.split(maxsplit=5)
        low, high = (int(number, 16) for number in addresses.split("-"))
        if low <= start and end <= high:
            if access != "rw-p" or inode == "0" or not path:
                return None
            return MappedFile(path[0], (device, inode), int(offset, 16) + start - low)
    return None


def copy_mapping(start: int, end: int) -> MappedFile | None:
    """Replace a range of whole pages by a copy of it.

    Returns:
        Where it was mapped from; None, and nothing is done, if it is no private mapping of a file or memory is short.
    """
    size, source = end - start, mapped_file(start, end)
    if source is None:
        return None
    system = _system()
    begin = system.mmap(None, size + ALIGNMENT, READ_AND_WRITE, PRIVATE | ANONYMOUS, -1, 0)
    if begin == ctypes.c_void_p(-1).value:
        return None
    copy = -(-begin // ALIGNMENT) * ALIGNMENT
    system.madvise(copy, size, MADV_HUGEPAGE)
    ctypes.memmove(copy, start, size)
    done = _replace(start, copy, size)
    if copy > begin:
        system.munmap(begin, copy - begin)
    system.munmap(copy + size, begin + ALIGNMENT - copy)
    return source if done else None


def restore_mapping(start: int, end: int, source: MappedFile) -> bool:
    """Map a range from its file again; False, and nothing is done, if the file or the range has changed."""
    size, system = end - start, _system()
    try:
        with open(source.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < source.offset + size:
                return False
            begin = system.mmap(None, size, READ_AND_WRITE, PRIVATE, file.fileno(), source.offset)
    except OSError:
        return False
    if begin == ctypes.c_void_p(-1).value:
        return False
    again = mapped_file(begin, begin + size)
    is_same = again is not None and again.identity == source.identity and not system.memcmp(begin, start, size)
    return is_same and _replace(start, begin, size)


def _replace(start: int, by: int, size: int) -> bool:
    """Let the memory at `by` be that at `start`; both are whole pages. It is freed if that fails."""
    if _system().mremap(by, size, size, MAY_MOVE | FIXED, start) == start:
        return True
    _system().munmap(by, size)
    return False


@cache
def _system() -> Any:
    """Functions of the C library."""
    system, pointer, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    system.mmap.argtypes, system.mmap.restype = [pointer, size, *3 * (ctypes.c_int,), ctypes.c_long], pointer
    system.mremap.argtypes, system.mremap.restype = [pointer, size, size, ctypes.c_int, pointer], pointer
    system.munmap.argtypes = [pointer, size]
    system.madvise.argtypes = [pointer, size, ctypes.c_int]
    system.memcmp.argtypes = [pointer, pointer, size]
    return system
