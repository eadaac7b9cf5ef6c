"""The files around the code: workflows, hooks, forms and make targets refer to what exists."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kept_result import write_results

import mmspec
from mmspec.app.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    """The steps of all jobs."""
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_exists(workflow: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        words = shlex.split(command.replace('"$SHAPE"', "llava-1.5-7b").split("|")[0])
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets
        if words[0].endswith("bin/mmspec"):
            build_parser().parse_args(words[1:])
        if "pytest" in words:
            assert [word for word in words if word.endswith(".py")]
        assert not [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()]


def test_workflows_may_only_read() -> None:
    for workflow in WORKFLOWS:
        read = yaml.safe_load(workflow.read_text(encoding="utf-8"))
        assert read["permissions"] == {"contents": "read"} and all(
            "timeout-minutes" in job for job in read["jobs"].values()
        )
        checkouts = [step for step in steps(workflow) if step.get("uses", "").startswith("actions/checkout@")]
        assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)
        assert "pull_request_target" not in workflow.read_text(encoding="utf-8")


def test_the_gpu_job_runs_by_hand_and_runs_what_needs_one() -> None:
    read = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8"))
    assert list(read[True]) == ["workflow_dispatch"]  # YAML 1.1 reads `on` as True
    text = "\n".join(step.get("run", "") for step in steps(ROOT / ".github" / "workflows" / "gpu.yml"))
    assert "research.bench --shape" in text and "tests/engine/test_exactness.py" in text
    assert "sh research/gpu_trial.sh" in text
    from research.bench.shape.models import TEXT_SHAPES

    shapes = read[True]["workflow_dispatch"]["inputs"]["shape"]["options"]
    assert shapes == [name for name in TEXT_SHAPES if name.endswith("7b")]  # smaller ones are measured on a CPU


def test_hooks_run_what_exists() -> None:
    read = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in read["repos"] for hook in repo["hooks"]]
    assert [entry.split()[0] for entry in entries] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/python"]
    assert all((ROOT / word).is_file() for entry in entries for word in entry.split() if word.endswith(".py"))


def test_forms_ask_for_the_versions() -> None:
    assert len(FORMS) == 3
    for form in FORMS:
        read = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= read.keys()
        assert any("`mmspec env" in part["attributes"].get("label", "") for part in read["body"])
    assert "mmspec env" in (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")


def test_no_text_holds_both_sides_of_a_merge() -> None:
    """Python would not run; a page reads on."""
    tops = ("*", "docs/**/*", "app/**/*", "examples/**/*", "research/**/*", ".github/**/*")
    pages = [
        file
        for top in tops
        for file in ROOT.glob(top)
        if file.suffix in {".md", ".yml", ".toml", ".js", ".css", ".html", ".json"}
    ]
    assert len(pages) > 30
    found = [file for file in pages if re.search(r"^(<{7} |>{7} )", file.read_text(encoding="utf-8"), re.MULTILINE)]
    assert not found


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert mmspec.__version__ == version
    assert f"## {version} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_some_parameters_are_slow_and_each_value_is_fast_once(pytestconfig: pytest.Config) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    values = [["a", "b"], [("c", 1), ("d", 2), ("e", 3), ("f", 4)]]
    marks = [pytest.mark.parametrize("one", values[0]).mark, pytest.mark.parametrize(("two", "three"), values[1]).mark]
    items, every = [], pytest.mark.every(2).mark
    for one, (two, three) in itertools.product(*values):
        params = {"one": one, "two": two, "three": three}
        item = SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda _: marks, slow=False)
        item.get_closest_marker = lambda _: every
        item.add_marker = lambda mark, item=item: setattr(item, "slow", mark.name == "slow")
        items.append(item)
    conftest.pytest_collection_modifyitems(items)
    fast = [item.callspec.params for item in items if not item.slow]
    assert [(row["one"], row["two"]) for row in fast] == [("a", "c"), ("a", "e"), ("b", "d"), ("b", "f")]


def test_the_results_of_the_slow_tests_are_kept_by_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.txt"
    write_results(
        file, {"tests/a.py": {"passed": 3, "failed": 1, "deselected": 9}, "tests/b.py": {"passed": 2}}, {}, {}
    )
    write_results(file, {"tests/a.py": {"passed": 4}}, {"tests/a.py": 61.5}, {"tests/a.py": ["tests/a.py::test_b[c]"]})
    _, _, first, second = file.read_text(encoding="utf-8").splitlines()
    start = r"\d{4}-\d\d-\d\d \| \w+.* \| torch [\d.]+\S*, transformers [\d.]+ \| "
    assert re.fullmatch(start + r"4 passed, 0 failed, 0 error, 0 skipped; test_b\[c\] \| 62 s \| tests/a.py", first)
    assert second.endswith("2 passed, 0 failed, 0 error, 0 skipped | 0 s | tests/b.py")
