"""The shared library of the C kernels: the one that a wheel carries, else built at first use and cached.

`few_rows.c` (linear layers, stacks of decoder layers, draft heads) is compiled for one set of instructions. A wheel for
Linux on x86-64 has the libraries of all sets beside their source; elsewhere that of this processor takes a C compiler
(`CC`, else cc, gcc or clang) and ten seconds. A file is loaded if its name has the hash of what it was built from,
and its seal, the hash of name and contents, is right. Independent of models.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mmspec.files import CACHE_VARIABLE, atomic_write, cache_folder, make_private_folder

logger = logging.getLogger("mmspec")

FOLDER = Path(__file__).parent
"""Of the sources, and of the library in a wheel that carries one."""
SOURCES = {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))}
"""Read together with the Python code that declares their structs, so that neither is of another version."""
MAIN_SOURCE = "few_rows.c"
"""It includes the others."""
CPU_INFO = Path("/proc/cpuinfo")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden")
LINKED = ("-lm",)
INSTRUCTION_SETS = {1: "AVX2", 2: "AVX-512", 3: "AVX-512 with BF16", 4: "AMX"}
"""{level: its instructions}"""
FLAGS_OF_LEVELS = {1: (), 2: ("-DAVX512",), 3: ("-DAVX512", "-DPAIRS"), 4: ("-DAVX512", "-DPAIRS", "-DTILES")}
"""{level: macros that the compiler defines}"""
CPU_FLAGS = (("avx2", "fma", "f16c"), ("avx512f", "avx512dq"), ("avx512_bf16",), ("amx_tile", "amx_bf16"))
"""What the next level needs, in the words of the kernel of Linux."""
ISA_VARIABLE = "MMSPEC_ISA"
ISA_NAMES = {"avx2": 1, "avx512": 2, "avx512_bf16": 3, "amx": 4}
"""{value of the environment variable MMSPEC_ISA: level}; without it the best of the processor."""
AMX_LEVEL = 4
ARCH_PRCTL, GET_PERMISSION, ASK_PERMISSION, TILE_DATA = 158, 0x1022, 0x1023, 18
"""The system call on x86-64, two of its functions, and the state that processes get on request only."""
BUILD_TIMEOUT_S = 240.0
DIGEST_BYTES = hashlib.sha256().digest_size


class KernelUnavailableError(RuntimeError):
    """The kernel cannot be built or used here; the message says why."""


class CompilerError(KernelUnavailableError):
    """The compiler fails."""


class UntrustedFolderError(KernelUnavailableError):
    """The kernel is not loaded from a folder that others can write; the message has the command that mends it."""


def processor_level() -> int:
    """The best level of this processor, a key of `INSTRUCTION_SETS`.

    Raises:
        KernelUnavailableError: another system, or a processor without AVX2.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise KernelUnavailableError(f"it is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    found = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    has = set(found[1].split() if found else ())
    level = sum(1 for _ in itertools.takewhile(has.issuperset, CPU_FLAGS))
    if level == AMX_LEVEL and not are_tiles_permitted():
        level -= 1
    if not level:
        raise KernelUnavailableError("the processor has no AVX2")
    return level


@cache
def are_tiles_permitted() -> bool:
    """Ask Linux for the tiles of AMX, for all threads of this process and of those that it forks.

    A tile instruction without permission ends the process. Linux before 5.16 refuses, as do some containers and
    emulators, and any Linux if a thread has too small a stack for signals; then one line is logged.
    """
    mask, system = ctypes.c_ulong(), ctypes.CDLL(None, use_errno=True)
    refused = system.syscall(ARCH_PRCTL, ASK_PERMISSION, TILE_DATA) or system.syscall(
        ARCH_PRCTL, GET_PERMISSION, ctypes.byref(mask)
    )
    if refused or not mask.value >> TILE_DATA & 1:
        logger.info("mmspec: this system does not let the process use AMX (%s)", os.strerror(ctypes.get_errno()))
        return False
    return True


def chosen_level() -> int:
    """The best level of this processor, or a lower one that `ISA_VARIABLE` names; errors: `processor_level`."""
    best = processor_level()
    return min(best, ISA_NAMES.get(os.environ.get(ISA_VARIABLE, ""), best))


def load_library(level: int) -> ctypes.CDLL:
    """The library of a level that came with the package; else that of the cache folder, built if missing or damaged.

    Raises:
        KernelUnavailableError: another system, a processor without these instructions, no compiler, or one that fails.
        UntrustedFolderError: another user could replace a library in the cache folder.
        OSError: no place for the file, or it cannot be loaded.
        ValueError: the variable CC cannot be read.
        subprocess.SubprocessError: the compiler takes too long.
    """
    if level > (best := processor_level()):
        raise KernelUnavailableError(f"the processor has {INSTRUCTION_SETS[best]}, not {INSTRUCTION_SETS[level]}")
    if (shipped := shipped_file(level)).exists():
        try:
            if _is_sealed(shipped):
                return ctypes.CDLL(str(shipped))
            logger.info("mmspec: %s is damaged; the C kernels are built instead", shipped)
        except OSError as error:  # another C library than that of the wheel's tag, for example
            logger.info("mmspec: the C kernels are built, since those that were installed cannot be loaded: %s", error)
    command, file = _to_build(level)
    if not _is_own(file):
        build(command, file)
    return ctypes.CDLL(str(file))


def needs_build() -> bool:
    """Whether the first kernel needs the compiler, which takes about ten seconds of a processor."""
    try:
        level = chosen_level()
        return not shipped_file(level).exists() and not _is_own(_to_build(level)[1])
    except (KernelUnavailableError, OSError, ValueError, subprocess.SubprocessError):
        return False


def _to_build(level: int) -> tuple[list[str], Path]:
    """The command that builds the library of a level, without its output, and the file in the cache folder."""
    command = [*_compiler(), *_flags(level)]
    return command, _library_folder() / f"few_rows-{_key(command)}.so"


def _flags(level: int) -> tuple[str, ...]:
    """Of the compiler."""
    return (*FLAGS, *FLAGS_OF_LEVELS[level])


def shipped_file(level: int) -> Path:
    """Where a wheel has the library of these sources for a level; there may be none.

    The folder is that of our own code: who can write there needs no library to run code of his.
    """
    key = hashlib.sha256(b"\0".join([*SOURCES.values(), shlex.join([*_flags(level), *LINKED]).encode()])).hexdigest()
    return FOLDER / f"few_rows-{key[:40]}.so"


def ship(folder: Path) -> list[Path]:
    """Build the libraries for a wheel whose `mmspec/cpu` is `folder`; returns them. What can fail: `load_library`."""
    files = []
    for level in INSTRUCTION_SETS:
        files.append(folder / shipped_file(level).name)
        build([*_compiler(), *_flags(level), "-s"], files[-1])
    return files


def _compiler() -> list[str]:
    """The command of the C compiler, as in the variable CC or found on the path."""
    command = shlex.split(os.environ.get("CC", "")) or [name for name in COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        raise KernelUnavailableError(f"no C compiler found ({command[0] if command else ', '.join(COMPILERS)})")
    return command


def _key(command: list[str]) -> str:
    """Hash of what decides the contents of the library: sources, compiler and command."""
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=False)
    parts = [*SOURCES.values(), version.stdout, shlex.join([*command, *LINKED]).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:40]


def _library_folder() -> Path:
    """The user's cache folder, created if necessary.

    Raises:
        UntrustedFolderError: another user could replace a library in it.
    """
    folder = cache_folder()
    make_private_folder(folder)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise UntrustedFolderError(
            f"the cache folder {folder} is of another user: set {CACHE_VARIABLE} to a folder of yours"
        )
    if status.st_mode & 0o022:
        raise UntrustedFolderError(
            f"the cache folder {folder} can be written by other users: chmod go-w {shlex.quote(str(folder))}"
        )
    return folder


def build(command: list[str], file: Path) -> None:
    """Compile, append the seal, move into place: other processes see no file or a whole one."""
    with atomic_write(file) as unfinished, TemporaryDirectory() as folder:
        for name, source in SOURCES.items():
            Path(folder, name).write_bytes(source)
        compiled = subprocess.run(
            [*command, "-o", str(unfinished), str(Path(folder, MAIN_SOURCE)), *LINKED],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if compiled.returncode:
            last_line = (compiled.stderr.strip().splitlines() or ["no message"])[-1]
            raise CompilerError(f"{shlex.join(command)} failed: {last_line}")
        seal = _seal(unfinished.read_bytes(), file.name)
        with unfinished.open("ab") as stream:
            stream.write(seal)  # ELF ignores what follows the last section


def _seal(contents: bytes, name: str) -> bytes:
    """The hash of a library and of its name, which has the hash of what it was built from."""
    return hashlib.sha256(contents + name.encode()).digest()


def _is_sealed(file: Path) -> bool:
    """Whether a file ends with its seal (a truncated library could end the process)."""
    contents = file.read_bytes()
    return _seal(contents[:-DIGEST_BYTES], file.name) == contents[-DIGEST_BYTES:]


def _is_own(file: Path) -> bool:
    """Whether a file is there, this user's, and whole."""
    return file.exists() and file.stat().st_uid == os.getuid() and _is_sealed(file)
