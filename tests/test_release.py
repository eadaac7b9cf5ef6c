"""The files of a release: sizes, contents, and each wheel used from an environment of its own, without a compiler.

`make dist` builds them and names their folder in `MMSPEC_DIST`; without it they are built here, but for the wheel with
compiled kernels, for which auditwheel is needed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL = 60e6
SOURCES = ("mmspec", "drafters", "vision", "app", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in",
           "constraints.txt", "CHANGELOG.md", "SECURITY.md")  # fmt: skip
BUILD = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"

pytestmark = pytest.mark.slow


KINDS = {"pure": "*-none-any.whl", "kernels": "*-py3-none-manylinux_*_x86_64.whl"}
ROUNDS = """
import logging, torch
from mmspec.app.scenes import load_scenes_model
from mmspec.cpu.c_kernel import describe_kernel
import mmspec
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("mmspec").addHandler(handler)
model, processor = load_scenes_model()
ids = torch.arange(5, 17)[None]
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
plain = model.generate(ids, **options)
mmspec.patch(model, processor=processor, backend="c")
assert torch.equal(model.generate(ids, **options), plain)
print(describe_kernel(), said)
"""
"""One call whose rounds are asked for in C: a line is said if they do not run there."""


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder, without variables that lead Python elsewhere; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
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


def find_wheel(dist: Path, kind: str) -> Path:
    """The wheel of a kind; the test is skipped where none could be built."""
    wheels = list(dist.glob(KINDS[kind]))
    if not wheels and kind == "kernels":
        assert "MMSPEC_DIST" not in os.environ or not is_native(), "make dist builds it here"
        pytest.skip("built by `make dist`, on Linux on x86-64")
    (wheel,) = wheels
    return wheel


def is_native() -> bool:
    """Whether the kernels are for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.mark.parametrize("kind", KINDS)
def test_a_wheel_is_small_enough(dist: Path, kind: str) -> None:
    assert find_wheel(dist, kind).stat().st_size < MAX_WHEEL


def test_the_wheels_differ_in_the_library_alone(dist: Path) -> None:
    names, tags = {}, {}
    for kind in KINDS:
        with zipfile.ZipFile(find_wheel(dist, kind)) as archive:
            names[kind] = {name for name in archive.namelist() if ".dist-info/" not in name and name[-1] != "/"}
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
            tags[kind] = set(archive.read(metadata).decode().splitlines())
    libraries = names["kernels"] - names["pure"]
    assert names["pure"] < names["kernels"] and len(libraries) == 4, "for each set of instructions"
    assert all(re.fullmatch(r"mmspec/cpu/few_rows-[0-9a-f]{40}\.so", library) for library in libraries)
    assert {"Root-Is-Purelib: true", "Tag: py3-none-any"} <= tags["pure"]
    assert "Root-Is-Purelib: false" in tags["kernels"]
    assert [tag for tag in tags["kernels"] if re.fullmatch(r"Tag: py3-none-manylinux_2_\d+_x86_64", tag)]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_wheel_is_used_from_an_empty_environment(dist: Path, tmp_path: Path, kind: str) -> None:
    """Its requirements are those of this environment; mmspec itself is not among them, since it is editable here."""
    wheel = find_wheel(dist, kind)
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
    no_compiler = {"PATH": str(python.parent), "CC": "", "MMSPEC_CACHE": str(tmp_path / "cache")}
    printed = run([str(python), "-c", ROUNDS], tmp_path, **no_compiler)
    if kind == "pure":
        assert printed.startswith("none: no C compiler found") and "no C compiler found" in printed.partition("[")[2]
    else:
        assert re.fullmatch(r"AVX[^,]+, installed with mmspec \[\]\n", printed)
        assert not list((tmp_path / "cache").glob("*.so"))
