"""Imports point one way: app -> patching -> (drafters, vision); engine -> its rooms -> tree, sampling, kv -> torch.

Reads the sources only; imports nothing of them. The last tests plant violations, so that a blind check cannot pass.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mmspec", "drafters", "vision", "app")

# A room may import rooms of a lower layer, or of its own where that makes no cycle. New rooms are entered here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("tree", "kv", "rows", "cpu", "pace", "tower"),
    ("module_scan",),
    ("sampling", "interfaces"),
    ("verify", "cache", "shown", "stats", "budget", "columns"),
    ("drafters", "vision"),
    ("targets", "target_*", "fallback", "options"),
    ("engine", "selftest"),
    ("serve",),
    ("calls",),
    ("patching",),
    ("compare",),
    ("__init__",),
    ("app",),
    ("__main__",),
)
ENGINE = {"verify", "cache", "budget", "columns", "stats", "interfaces", "tree", "sampling", "kv"}
KNOW_TRANSFORMERS = {
    "calls",
    "serve",
    "selftest",
    "cache",
    "sampling",
    "columns",
    "compare",
    "targets",
    "target_*",
    "app",
}
KNOW_MEDIA = {"app", "vision"}
MEDIA = {"gradio", "decord", "av", "matplotlib"}
BARE = {"vision", "drafters", "app"}
PARTS = {"vision", "drafters"}
KNOW_PARTS = {"options", "app"}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name; `eager` if importing the file runs it."""

    module: str
    line: int
    eager: bool


def room(module: str) -> str:
    """The room a module of ours belongs to: `mmspec.target_llava` -> `target_*`, `mmspec.app.cli` -> `app`."""
    name = module.split(".")[1] if "." in module else "__init__"
    return "target_*" if name.startswith("target_") else name


def module_name(path: Path) -> str:
    """The name under which a file is imported: `vision/frames.py` -> `mmspec.vision.frames`."""
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
    """Modules that a `from` statement names: `from mmspec import kv` names `mmspec.kv`, `import patch` does not."""
    base = "." * node.level + (node.module or "")
    if base != "mmspec":
        return [base]
    return [f"mmspec.{alias.name}" if alias.name in room_names() else base for alias in node.names]


def room_names() -> set[str]:
    """Names of all rooms but the public surface."""
    return {path.stem for path in (ROOT / "mmspec").glob("*.py")} - {"__init__"} | BARE


def layer(name: str) -> int:
    """Number of a room's layer."""
    for number, rooms in enumerate(LAYERS):
        if name in rooms:
            return number
    raise AssertionError(f"room {name!r} has no layer: enter it in LAYERS of tests/test_layers.py (design: rooms)")


def violations(module: str, source: str) -> list[str]:
    """The rules that a module breaks, one line each."""
    tree = ast.parse(source)
    broken = [f"line {use.line}: {text}" for use in imports(tree) if (text := forbidden(room(module), use))]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    if room(module) != "app":
        broken += [f"line {call.lineno}: print below app/" for call in calls if ast.unparse(call.func) == "print"]
    return [f"{module}, {text}" for text in broken]


def forbidden(here: str, use: Import) -> str | None:
    """Why room `here` may not make this import, or None if it may."""
    top = use.module.split(".")[0]
    if top in BARE:
        return f"import mmspec.{use.module}, not {use.module}"
    if not top:
        return f"relative import {use.module!r}; write it in full"
    if top == "transformers" and here not in KNOW_TRANSFORMERS:
        return f"{here} must not know transformers"
    if top in MEDIA and here not in KNOW_MEDIA:
        return f"{here} must not know {top}"
    return forbidden_room(here, use) if top == "mmspec" else None


def forbidden_room(here: str, use: Import) -> str | None:
    """The same for imports among our own rooms."""
    there = room(use.module)
    if there == here:
        return None
    if {here, there} == PARTS:
        return f"{here} must not import {there}: a compressor is handed to a drafter"
    if here == "engine" and there not in ENGINE:
        return f"engine knows only {', '.join(sorted(ENGINE))}; not {there}"
    if there in PARTS and here not in KNOW_PARTS:
        return f"{here} must not import {there}: only {' and '.join(sorted(KNOW_PARTS))} do"
    if there in PARTS and here == "patching" and use.eager:
        return f"patching imports {there} by name inside a function, when it is asked for"
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


def sources() -> dict[str, str]:
    """All modules of the package and their sources."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {module_name(path): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("module", sources())
def test_imports_point_one_way(module: str) -> None:
    layer(room(module))
    assert violations(module, sources()[module]) == []


def test_no_cycle_among_modules() -> None:
    eager = {name: {use.module for use in imports(ast.parse(text)) if use.eager} for name, text in sources().items()}
    assert cycle({name: used & eager.keys() for name, used in eager.items()}) == []


def test_tests_import_the_packaged_names() -> None:
    uses = [(p.name, use) for p in (ROOT / "tests").glob("*.py") for use in imports(ast.parse(p.read_text("utf-8")))]
    assert [(name, use.line) for name, use in uses if use.module.split(".")[0] in BARE] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmspec.engine", "import vision.frames"),
        ("mmspec.engine", "from app import cli"),
        ("mmspec.engine", "from . import verify"),
        ("mmspec.engine", "import transformers"),
        ("mmspec.engine", "from mmspec.patching import patch"),
        ("mmspec.engine", "def f():\n    from mmspec.drafters.lookup import Lookup"),
        ("mmspec.verify", "if TYPE_CHECKING:\n    from transformers import Cache"),
        ("mmspec.tree", "from mmspec import verify"),
        ("mmspec.kv", "from mmspec import patch"),
        ("mmspec.patching", "from mmspec.drafters.lookup import Lookup"),
        ("mmspec.target_llava", "from mmspec.vision.pool import Pool"),
        ("mmspec.drafters.lookup", "from mmspec.vision.pool import Pool"),
        ("mmspec.vision.pool", "import mmspec.drafters.lookup"),
        ("mmspec.drafters.lookup", "from mmspec.app.jobs import Job"),
        ("mmspec.stats", "import matplotlib.pyplot as plt"),
        ("mmspec.drafters.lookup", "def f():\n    print(1)"),
    ],
)
def test_planted_violations_are_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmspec.engine", "from mmspec.verify import verify\nfrom mmspec import kv"),
        ("mmspec.options", "def f():\n    from mmspec.drafters.lookup import Lookup"),
        ("mmspec.target_llava", "import transformers\nfrom mmspec.target_hf import HFTarget"),
        ("mmspec.drafters.fused", "from mmspec.drafters.lookup import Lookup\nfrom mmspec.interfaces import Prompt"),
        ("mmspec.app.cli", "import mmspec\nfrom mmspec import patch\nimport gradio\nprint(1)"),
        ("mmspec.vision.frames", "import decord"),
    ],
)
def test_what_is_allowed_is_let_through(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_planted_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []
