"""What gets installed: every sub-package and data file, under `mmspec` and nowhere else.

Knows nothing of what the package does. Works on a wheel built from a copy of the tree, since in the repository root the
folder `mmspec/` and the editable install would hide what is missing.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"mmspec": "mmspec", "drafters": "mmspec.drafters", "vision": "mmspec.vision", "app": "mmspec.app"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]


def packaged_files() -> list[Path]:
    """Files of the four folders, relative to the root, without what Python and editors leave behind."""
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(p for p in files if "__pycache__" not in p.parts and not any(x.startswith(".") for x in p.parts))


def package_of(folder: Path) -> str:
    """The name under which a folder is imported: `vision/video` -> `mmspec.vision.video`."""
    return ".".join([FOLDERS[folder.parts[0]], *folder.parts[1:]])


def data_patterns(file: Path) -> list[tuple[Path, str]]:
    """The package-data patterns that could cover a file, with the folder that each is relative to."""
    data = SETUPTOOLS["package-data"]
    return [(up, pattern) for up in file.parents if up.parts for pattern in data.get(package_of(up), [])]


def test_packages_are_the_folders_with_code() -> None:
    folders = {path.parent for path in packaged_files() if path.suffix == ".py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_of(folder) for folder in folders)
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_mapping_names_the_folders() -> None:
    assert SETUPTOOLS["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_data_files_are_listed() -> None:
    data = [path for path in packaged_files() if path.suffix != ".py"]
    missing = [
        str(file)
        for file in data
        if not any(fnmatch(str(file.relative_to(up)), pattern) for up, pattern in data_patterns(file))
    ]
    assert missing == [], "not covered by [tool.setuptools.package-data]"
    assert Path("mmspec/py.typed") in data


def test_weights_stay_small() -> None:
    """Nobody should wait for a clone."""
    heads = list((ROOT / "drafters" / "weights").glob("*/model.safetensors"))
    assert heads and max(file.stat().st_size for file in heads) <= 5e6
    tests = (ROOT / "tests").rglob("*.safetensors")
    weights = [*tests, *(ROOT / file for file in packaged_files() if file.suffix == ".safetensors")]
    assert sum(file.stat().st_size for file in weights) <= 64e6


def test_pins_satisfy_the_requirements() -> None:
    """Every direct requirement, extras included, has one exact version in constraints.txt, which it admits."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(n): v for n, v in (line.split("==") for line in lines if line and line[0] != "#")}
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [Requirement(r) for r in [*PROJECT["project"]["dependencies"], *(r for extra in extras for r in extra)]]
    for requirement in (r for r in wanted if r.name != "mmspec"):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_videos_have_a_reader_that_knows_av1_everywhere() -> None:
    from packaging.requirements import Requirement

    wanted = {one.name: one for one in map(Requirement, PROJECT["project"]["optional-dependencies"]["video"])}
    assert wanted["av"].marker is None


def copy_code(source: str, target: str) -> object:
    """Weights as empty files, since compressing them takes seconds and nothing here reads them."""
    return Path(target).touch() if source.endswith(".safetensors") else shutil.copy2(source, target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without a network, from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=copy_code)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(tree))
    return next(out.glob("*.whl"))


def pip(*arguments: str) -> None:
    """Run pip; shows its output if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"{package_of(file.parent).replace('.', '/')}/{file.name}" for file in packaged_files()}
    found = {name for name in names if ".dist-info/" not in name}
    assert found == expected
    assert {name.split("/")[0] for name in found} == {"mmspec"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_imports_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    script = f"""
import importlib, importlib.util, pathlib
site = pathlib.Path({str(site)!r})
for name in {sorted(FOLDERS.values())!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(site), (name, module.__file__)
for name in ("app", "drafters", "vision"):
    assert importlib.util.find_spec(name) is None, name
from importlib.metadata import distribution
assert pathlib.Path(distribution("mmspec").locate_file("")) == site
entry, = (e for e in distribution("mmspec").entry_points if e.group == "console_scripts")
assert (entry.name, entry.value) == ("mmspec", "mmspec.app.cli.main:main")
assert callable(entry.load())
"""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_loaded_on_first_use() -> None:
    script = """
import sys, types
import mmspec
assert "torch" not in sys.modules and type(mmspec) is types.ModuleType
assert {"patch", "compare", "stats", "Stats", "supported"} <= set(dir(mmspec))
import mmspec.comparison, mmspec.metrics.stats
assert isinstance(mmspec.compare, types.FunctionType) and isinstance(mmspec.stats, types.FunctionType)
assert mmspec.Stats is mmspec.metrics.stats.Stats
try:
    mmspec.speed
except AttributeError as error:
    assert "no attribute 'speed'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *(
            "mmspec.vision.video.frames:read_frames",
            "mmspec.vision.video.frames:Fps",
            "mmspec.vision.video.frames:Uniform",
        ),
        *("mmspec.vision.video.decoder_pool:DecoderPool", "mmspec.app.io.sidecars:SidecarOutput"),
        *("mmspec.app.io.item:Item", "mmspec.app.io.item:SourceOptions", "mmspec.app.io.manifests:read_manifest"),
        *("mmspec.app.io.left_out:LeftOut", "mmspec.app.io.images:ImageError", "mmspec.app.io.images:load_image"),
        *("mmspec.app.scenes.world:generate_scene", "mmspec.app.scenes.render:render_scene"),
        *("mmspec.app.scenes.examples:list_example_files", "mmspec.app.scenes:load_scenes_model"),
        *("mmspec.ray:CaptionActor", "mmspec.interfaces:DrafterRequirements", "mmspec.files:atomic_write"),
        *(
            "mmspec.engine.tree:build_tree",
            "mmspec.engine.tree_cache:CACHE_ARGUMENT",
            "mmspec.cpu.c_kernel:load_kernel",
        ),
        *("mmspec.app.ui.worker:CancelSignal", "mmspec.app.ui.limits:Limits"),
    ],
)
def test_names_that_scripts_import_stay(name: str) -> None:
    """Scripts of others draw scenes, read lists and frames, write files with these: rooms that move leave them."""
    module, _, attribute = name.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
