"""Run mypy on the package as it is imported: `python tests/typecheck.py` (not a test).

Type checkers do not know that `mmspec.vision` is the folder `vision`, so this links the folders into `.types/mmspec`
and checks that. Editors find `mmspec.vision` there once it has run.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("drafters", "vision", "app")
RESEARCH = "research"
"""Not installed, but checked."""


def link_tree() -> Path:
    """Make `.types/mmspec` afresh: links to all of `mmspec/` and to the folders beside it; also to `research`."""
    tree = ROOT / ".types" / "mmspec"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for path in [*(ROOT / "mmspec").iterdir(), *(ROOT / name for name in MAPPED)]:
        if path.name != "__pycache__":
            (tree / path.name).symlink_to(path, target_is_directory=path.is_dir())
    (tree.parent / RESEARCH).unlink(missing_ok=True)
    (tree.parent / RESEARCH).symlink_to(ROOT / RESEARCH, target_is_directory=True)
    return tree


def main() -> int:
    """Check the tree with mypy, passing on arguments; from inside `.types`, so that no other `mmspec` is found."""
    tree = link_tree()
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, *sys.argv[1:], tree.name, RESEARCH]
    return subprocess.run(command, cwd=tree.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
