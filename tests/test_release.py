"""The files of a release: sizes, contents, and the wheel used from an environment of its own.

`make dist` builds them and names their folder in `MMSPEC_DIST`; without it they are built here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL = 60e6
SOURCES = ("mmspec", "drafters", "vision", "app", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in",
           "constraints.txt", "CHANGELOG.md", "SECURITY.md")  # fmt: skip
BUILD = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"

pytestmark = pytest.mark.slow


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, without variables that lead Python elsewhere; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    if "MMSPEC_DIST" in os.environ:
        return (ROOT / os.environ["MMSPEC_DIST"]).resolve()
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    run([sys.executable, "-c", BUILD, str(out)], tree)
    return out


def test_the_wheel_is_small_enough(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < MAX_WHEEL


def test_the_sdist_has_no_weights_twice_and_no_tests(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = [member for member in archive if member.isfile()]
        large = [member for member in files if member.size > 100_000]
        digests = Counter(hashlib.sha256(archive.extractfile(member).read()).hexdigest() for member in large)  # type: ignore[union-attr]
    names = {member.name.partition("/")[2] for member in files}
    assert large and max(digests.values()) == 1
    assert {"README.md", "LICENSE", "CHANGELOG.md", "app/scenes/weights/model.safetensors"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]


def test_the_wheel_is_used_from_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    """Its requirements are those of this environment; mmspec itself is not among them, since it is editable here."""
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    requirements = [path for path in sys.path if path.endswith("site-packages")]
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path)
    (site / "requirements.pth").write_text("\n".join(requirements), encoding="utf-8")
    where = run([str(python), "-c", "import mmspec.app; print(mmspec.app.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(site)
    assert "mmspec 0." in run([str(python.with_name("mmspec")), "--version"], tmp_path)
    run([str(python), str(ROOT / "examples" / "batch_job.py"), "captions.jsonl"], tmp_path)
    assert len((tmp_path / "captions.jsonl").read_text(encoding="utf-8").splitlines()) == 6
