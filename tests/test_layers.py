"""Imports point one way: app -> patching -> decode -> engine.loop -> drafters, vision -> interfaces -> engine.tree.

Reads the sources only; imports nothing of them. The last tests plant violations, so that a blind check cannot pass.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mmspec", "drafters", "vision", "app")

# A component may import components of a lower layer, or of its own layer without a cycle. Enter new components here.
# A module of the core is a component of its own; `folder.*` stands for all modules of a folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "files",
        "hints",
        "messages",
        "forks",
        "live",
        "weight_files",
        "reference",
        "engine.tree",
        "engine.kv_cache",
        "engine.prefix",
        "engine.gather",
        "engine.host_copy",
        "engine.revision",
        "engine.draws",
        "engine.undo",
        "engine.graph",
        "engine.recordings",
        "engine.private_copy",
        "engine.constraints",
        "engine.constrained_draft",
        "cpu.*",
        "cpu.c_kernel",
        "cpu.trees",
        "economy.kernels",
        "economy.tables",
        "economy.known",
        "economy.chooser",
    ),
    (
        "engine.round_plan",
        "engine.sampler",
        "engine.rng",
        "engine.criteria",
        "interfaces.*",
        "vision.grids",
    ),
    (
        "engine.accept",
        "engine.tree_cache",
        "metrics.*",
        "engine.output",
        "engine.verifier",
        "engine.round",
    ),
    ("drafters", "vision", "economy.store"),
    ("targets.*", "config", "resolve"),
    ("engine.loop", "engine.recorded", "call", "user_code", "costs"),
    ("arguments", "fallback", "reuse"),
    ("backend",),
    ("prefill",),
    ("decode",),
    ("generate",),
    ("patching",),
    ("comparison",),
    ("__init__",),
    ("app",),
    ("__main__", "ray"),
)
LOOP_IMPORTS = {
    "engine.verifier", "engine.recorded", "engine.output", "engine.round_plan", "engine.tree",
    "engine.sampler",
    "economy.chooser", "metrics.*", "interfaces.*", "messages",
}  # fmt: skip
KNOW_TRANSFORMERS = {
    "generate", "arguments", "fallback", "prefill", "decode", "engine.tree_cache", "engine.sampler", "engine.criteria",
    "comparison", "targets.*", "vision.grids", "app",
}  # fmt: skip
KNOW_CLOCKS = {f"mmspec.{name}" for name in (
    "economy.kernels", "economy.chooser",  # decide by seconds
    "engine.loop", "engine.recordings",  # measure for them
    "generate", "decode", "comparison", "targets.selftest", "drafters.training.trainer",  # tell people
    "engine.criteria", "cpu.huge_pages", "vision.video.deadline", "vision.video.worker_process",  # end what takes long
)}  # fmt: skip
KNOW_MEDIA = {"app", "vision"}
MEDIA = {"gradio", "av", "matplotlib"}
BARE = {"vision", "drafters", "app"}
PARTS = {"vision", "drafters"}
KNOW_PARTS = {"config", "resolve", "app"}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name; `eager` if importing the file runs it."""

    module: str
    line: int
    eager: bool


def component(module: str) -> str:
    """The component of a module: `mmspec.engine.loop` -> `engine.loop`, `mmspec.targets.llava` -> `targets.*`."""
    name = module.removeprefix("mmspec").removeprefix(".")
    top = name.split(".")[0]
    if name.startswith("vision.grids"):  # what a model's prompts look like; knows neither compressors nor files
        return "vision.grids"
    if top in BARE or not name:
        return top or "__init__"
    components = {entry for entries in LAYERS for entry in entries}
    return name if name in components or f"{top}.*" not in components else f"{top}.*"


def module_name(path: Path) -> str:
    """The name under which a file is imported: `vision/video/frames.py` -> `mmspec.vision.video.frames`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "mmspec" else ("mmspec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, eager: bool = True) -> Iterator[Import]:
    """All imports below a node. Those in functions and under TYPE_CHECKING are not eager."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(name, node.lineno, eager) for name in from_names(node))
        else:
            lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from imports(node, eager and not lazy and not typing_only)


def from_names(node: ast.ImportFrom) -> list[str]:
    """Modules that a `from` statement names: `from mmspec.engine import tree` names `mmspec.engine.tree`."""
    base = "." * node.level + (node.module or "")
    found = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in module_names() else base for name in found]


@cache
def module_names() -> set[str]:
    """Names of all modules of the package."""
    return {module_name(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def layer(name: str) -> int:
    """Number of a component's layer."""
    for number, components in enumerate(LAYERS):
        if name in components:
            return number
    raise AssertionError(f"component {name!r} has no layer: enter it in LAYERS of tests/test_layers.py")


def violations(module: str, source: str) -> list[str]:
    """The rules that a module breaks, one line each."""
    tree = ast.parse(source)
    broken = [f"line {use.line}: {text}" for use in imports(tree) if (text := forbidden(component(module), use))]
    if component(module) != "app" and module not in KNOW_CLOCKS:
        clocks = "a clock: only mmspec.economy decides by measured seconds; enter what else needs one in KNOW_CLOCKS"
        broken += [
            f"line {use.line}: {clocks}" for use in imports(tree) if use.module.split(".")[0] in ("time", "timeit")
        ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    if component(module) != "app":
        broken += [f"line {call.lineno}: print below app/" for call in calls if ast.unparse(call.func) == "print"]
    return [f"{module}, {text}" for text in broken]


def forbidden(here: str, use: Import) -> str | None:
    """Why component `here` may not make this import, or None if it may."""
    top = use.module.split(".")[0]
    if top in BARE:
        return f"import mmspec.{use.module}, not {use.module}"
    if not top:
        return f"relative import {use.module!r}; write it in full"
    if top == "transformers" and here not in KNOW_TRANSFORMERS:
        return f"{here} must not know transformers"
    if top in MEDIA and here not in KNOW_MEDIA:
        return f"{here} must not know {top}"
    return forbidden_component(here, use) if top == "mmspec" else None


def forbidden_component(here: str, use: Import) -> str | None:
    """The same for imports within mmspec."""
    there = component(use.module)
    if there == here:
        return None
    if here == "vision" and there == "vision.grids":
        return None
    if {here, there} == PARTS:
        return f"{here} must not import {there}: a compressor is handed to a drafter"
    if there in {"engine", "economy", "metrics", "cpu", "targets"}:
        return None  # the package itself, a docstring
    if here == "engine.loop" and there not in LOOP_IMPORTS:
        return f"the loop knows only {', '.join(sorted(LOOP_IMPORTS))}; not {there}"
    if there in PARTS and here not in KNOW_PARTS:
        return f"{here} must not import {there}: only {' and '.join(sorted(KNOW_PARTS))} do"
    if there in PARTS and here == "patching" and use.eager:
        return f"patching imports {there} by name inside a function, on demand"
    return f"{here} must not import {there}, which lies above it" if layer(there) > layer(here) else None


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph as a path that ends where it began, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        for following in sorted(graph.get(node, set()) - done):
            if found := visit(following, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


@cache
def sources() -> dict[str, str]:
    """All modules of the package and their sources."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {module_name(path): path.read_text(encoding="utf-8") for path in paths}


def test_imports_point_one_way() -> None:
    for module in sources():
        if component(module) not in {"engine", "economy", "metrics", "cpu", "targets"}:
            layer(component(module))
    assert [broken for module, source in sources().items() for broken in violations(module, source)] == []


def test_no_cycle_among_modules() -> None:
    eager = {name: {use.module for use in imports(ast.parse(text)) if use.eager} for name, text in sources().items()}
    assert cycle({name: used & eager.keys() for name, used in eager.items()}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmspec.engine.loop", "import vision.frames"),
        ("mmspec.engine.loop", "from app.cli import main"),
        ("mmspec.engine.loop", "from . import verify"),
        ("mmspec.engine.loop", "import transformers"),
        ("mmspec.engine.loop", "from mmspec.patching import patch"),
        ("mmspec.engine.loop", "def f():\n    from mmspec.drafters.ngram.lookup import Lookup"),
        ("mmspec.engine.accept", "if TYPE_CHECKING:\n    from transformers import Cache"),
        ("mmspec.engine.tree", "from mmspec.engine import accept"),
        ("mmspec.engine.kv_cache", "from mmspec import patch"),
        ("mmspec.patching", "from mmspec.drafters.ngram.lookup import Lookup"),
        ("mmspec.targets.llava", "from mmspec.vision.pool import Pool"),
        ("mmspec.drafters.ngram.lookup", "from mmspec.vision.pool import Pool"),
        ("mmspec.vision.pool", "import mmspec.drafters.ngram.lookup"),
        ("mmspec.drafters.ngram.lookup", "from mmspec.app.caption.job import Job"),
        ("mmspec.metrics.stats", "import matplotlib.pyplot as plt"),
        ("mmspec.drafters.ngram.lookup", "def f():\n    print(1)"),
        ("mmspec.drafters.ngram.lookup", "from time import perf_counter"),
    ],
)
def test_planted_violations_are_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmspec.engine.loop", "from mmspec.engine.verifier import verify\nfrom mmspec.engine import tree"),
        ("mmspec.config", "def f():\n    from mmspec.drafters.ngram.lookup import Lookup"),
        ("mmspec.targets.llava", "import transformers\nfrom mmspec.vision.grids.llava import LlavaLayout"),
        (
            "mmspec.drafters.ngram.hybrid",
            "from mmspec.drafters.ngram.lookup import Lookup\nfrom mmspec.interfaces import Prompt",
        ),
        ("mmspec.app.cli.main", "import mmspec\nfrom mmspec import patch\nimport gradio\nprint(1)"),
        ("mmspec.vision.video.frames", "import av"),
    ],
)
def test_what_is_allowed_is_let_through(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_planted_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []
