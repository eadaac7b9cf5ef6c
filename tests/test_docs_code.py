"""What the documents show in code runs: every Python block on the bundled model, every command in its parser.

A block that cannot run here says so in a comment before it: `<!-- not run by the tests: REASON -->`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmspec
from mmspec.app.cli.main import build_parser, main
from mmspec.app.modeling.synthetic_images import write_images
from mmspec.app.scenes import examples, load_scenes_model

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
BLOCK = re.compile(
    r"(?:^<!-- not run by the tests: (?P<reason>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
COMMAND = re.compile(r"^(?: {4}|\$ )((?:mmspec|make|python|python3) (?:[^\n]*\\\n)*[^\n]*)$", re.M)
HEADS = ROOT / "drafters" / "weights"


def read_blocks() -> dict[str, tuple[str, str | None]]:
    """{document:line: (code, reason why it is not run)}, of every document but the README, which has its own tests."""
    blocks = {}
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("code"))
            blocks[f"{document.relative_to(ROOT)}:{line}"] = found["code"], found["reason"]
    return {name: block for name, block in blocks.items() if not name.startswith("README.md")}


BLOCKS = read_blocks()


def add_head(folder: Path) -> None:
    """A trained head where docs/training.md has one."""
    shutil.copytree(HEADS / "msd", folder / "run" / "msd")


def add_archives(folder: Path) -> None:
    """The output that docs/jobs.md reads."""
    write_images(folder / "photos", 2)
    options = ["--format", "webdataset", "--no-progress", "--max-new-tokens", "2"]
    assert (
        main(["caption", str(folder / "photos"), "--model", "tiny", "--out", str(folder / "captions"), *options]) == 0
    )


def add_clip(folder: Path) -> None:
    """The clip of docs/quickstart.md."""
    shutil.copy(next(file for file in examples.list_example_files() if file.suffix == ".mp4"), folder / "clip.mp4")


SETUPS: dict[str, Callable[[Path], None]] = {
    "docs/training.md": add_head,
    "docs/jobs.md": add_archives,
    "docs/quickstart.md": add_clip,
}
IMPORTS = {"docs/jobs.md": "import datasets\nfrom datasets import load_dataset"}
"""What a page's prose takes for imported."""


@pytest.mark.parametrize("name", [name for name, (_, reason) in BLOCKS.items() if reason is None])
def test_a_block_of_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = name.partition(":")[0]
    monkeypatch.chdir(tmp_path)
    SETUPS.get(document, lambda folder: None)(tmp_path)
    model, processor = load_scenes_model()
    image = Image.open(next(file for file in examples.list_example_files() if file.suffix == ".png"))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe the image."}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    given: dict[str, Any] = {"mmspec": mmspec, "torch": torch, "model": model, "processor": processor}
    given |= {"inputs": inputs, "image": image, "FOLDER": HEADS / "msd", "__name__": "document"}
    exec(IMPORTS.get(document, ""), given)
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=12", BLOCKS[name][0]).replace(
        "repeats=5", "repeats=1"
    )  # as shown, but shorter
    exec(compile(code, name, "exec"), given)
    plain = type(model).generate(model, **inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)


def test_what_is_not_run_compiles_and_says_why() -> None:
    skipped = {name: (code, reason) for name, (code, reason) in BLOCKS.items() if reason is not None}
    for name, (code, reason) in skipped.items():
        assert compile(code, name, "exec") and reason is not None and len(reason.split()) >= 2
    assert len(skipped) <= 3 and len(BLOCKS) >= 11


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document: Path) -> None:
    """`mmspec` commands parse, scripts and modules are there, so are the targets of make."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    if document.name == "log.md" or "before" in document.name:
        return
    for command in COMMAND.findall(document.read_text(encoding="utf-8")):
        program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
        if program == "mmspec":
            build_parser().parse_args(words)
        elif program == "make":
            assert all(word in targets or "=" in word for word in words), command
        elif words[0] == "-m":
            is_ours = words[1].split(".")[0] in ("mmspec", "research")
            name = re.sub(r"^mmspec\.(app|drafters|vision)\.", r"\1.", words[1]).replace(".", "/")
            assert not is_ours or (ROOT / f"{name}.py").is_file() or (ROOT / name / "__main__.py").is_file(), command
        elif words[0].endswith(".py"):
            assert (ROOT / words[0]).is_file(), command
