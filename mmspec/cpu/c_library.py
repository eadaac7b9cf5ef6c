"""The shared library of the C kernels: the one that a wheel carries, else built at first use and cached.

`few_rows.c` (linear layers, stacks of decoder layers, draft heads) runs on every x86-64 processor and chooses among
AVX2 and AVX-512 when it is called, so that one library serves all. A wheel for Linux on x86-64 has it beside its
source; elsewhere it takes a C compiler (`CC`, else cc, gcc or clang) and half a minute. A file is loaded if its name
has the hash of what it was built from, and its seal, the hash of name and contents, is right. Independent of models.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
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
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden")
LINKED = ("-lm",)
BUILD_TIMEOUT_S = 240.0
DIGEST_BYTES = hashlib.sha256().digest_size


class KernelUnavailableError(RuntimeError):
    """The kernel cannot be built or used here; the message says why."""


class UntrustedFolderError(KernelUnavailableError):
    """The kernel is not loaded from a folder that others can write; the message has the command that mends it."""


def load_library() -> ctypes.CDLL:
    """The library that came with the package; else that of the cache folder, built if it is missing or damaged.

    Raises:
        KernelUnavailableError: another system or processor, no compiler, or one that fails.
        UntrustedFolderError: another user could replace a library in the cache folder.
        OSError: no place for the file, or it cannot be loaded.
        ValueError: the variable CC cannot be read.
        subprocess.SubprocessError: the compiler takes too long.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise KernelUnavailableError(f"it is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    if (shipped := shipped_file()).exists():
        try:
            if _is_sealed(shipped):
                return ctypes.CDLL(str(shipped))
            logger.info("mmspec: %s is damaged; the C kernels are built instead", shipped)
        except OSError as error:  # another C library than that of the wheel's tag, for example
            logger.info("mmspec: the C kernels are built, since those that were installed cannot be loaded: %s", error)
    command = [*_compiler(), *FLAGS]
    file = _library_folder() / f"few_rows-{_key(command)}.so"
    if not (_is_own(file) and _is_sealed(file)):
        build(command, file)
    return ctypes.CDLL(str(file))


def needs_build() -> bool:
    """Whether `load_library` would run the compiler, which takes half a minute of a processor."""
    try:
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64") or shipped_file().exists():
            return False
        file = _library_folder() / f"few_rows-{_key([*_compiler(), *FLAGS])}.so"
        return not (_is_own(file) and _is_sealed(file))
    except (KernelUnavailableError, OSError, ValueError, subprocess.SubprocessError):
        return False


def shipped_file() -> Path:
    """Where a wheel has the library of these sources; there may be none.

    The folder is that of our own code: who can write there needs no library to run code of his.
    """
    key = hashlib.sha256(b"\0".join([*SOURCES.values(), shlex.join([*FLAGS, *LINKED]).encode()])).hexdigest()
    return FOLDER / f"few_rows-{key[:40]}.so"


def ship(folder: Path) -> Path:
    """Build the library for a wheel whose `mmspec/cpu` is `folder`; returns its file. What can fail: `load_library`."""
    file = folder / shipped_file().name
    build([*_compiler(), *FLAGS, "-s"], file)
    return file


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
            raise KernelUnavailableError(f"{shlex.join(command)} failed: {last_line}")
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
    """Whether a file is there and this user's."""
    return file.exists() and file.stat().st_uid == os.getuid()
