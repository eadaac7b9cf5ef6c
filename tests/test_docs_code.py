"""What the documents show in code runs: every Python block on the bundled model, every command in its parser.

Commands stand in indented blocks, in fences without a language and in backticks. Those of mmspec are parsed (the
recipes of docs/jobs.md run, in tests/app/test_app_recipes.py), scripts, modules and their options are
looked up, so are targets of make and what pip is to install. What can be neither run nor looked up here, an indented
block with another program or a fence of another language, says so in a comment before it:
`<!-- not run by the tests: REASON -->`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmspec
from mmspec.app import scenes
from mmspec.app.cli.main import build_parser, main
from mmspec.app.scenes import examples
from research.synthetic_images import write_images

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
MARK = r"(?:^<!-- not run by the tests: (?P<reason>[^\n]+) -->\n\n?)?"
BLOCK = re.compile(MARK + r"^```python\n(?P<code>.*?)^```$", re.M | re.S)
FENCE = re.compile(MARK + r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
INDENTED = re.compile(MARK + r"(?<=\n)(?<=\n\n)(?P<code>(?: {4}[^\n]*\n)+)", re.M)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OUR_MODULES = ("mmspec", "research")
KNOWN_MODULES = ("pytest", "venv")
PROGRAMS = ("mmspec", "make", "python", "python3", "pip", "git")
HEADS = ROOT / "drafters" / "weights"
pytestmark = pytest.mark.usefixtures("warm_decoders", "scenes_once")


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
    model, processor = scenes.load_scenes_model()
    image = Image.open(next(file for file in examples.list_example_files() if file.suffix == ".png"))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe the image."}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    given: dict[str, Any] = {"mmspec": mmspec, "torch": torch, "model": model, "processor": processor}
    given["prompt"] = prompt
    given |= {"inputs": inputs, "image": image, "FOLDER": HEADS / "msd", "__name__": "document"}
    exec(IMPORTS.get(document, ""), given)
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=12", BLOCKS[name][0]).replace(
        "repeats=5", "repeats=1"
    )  # as shown, but shorter
    exec(compile(code, name, "exec"), given)
    with mmspec.disabled(model):
        plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)


def test_what_is_not_run_compiles_and_says_why() -> None:
    skipped = {name: (code, reason) for name, (code, reason) in BLOCKS.items() if reason is not None}
    for name, (code, reason) in skipped.items():
        assert compile(code, name, "exec") and reason is not None and len(reason.split()) >= 2
    assert len(skipped) <= 3 and len(BLOCKS) >= 11


def words_of(line: str) -> list[str]:
    """The words of a command as a shell reads it, without a prompt, variables before it and a comment."""
    line = re.sub(r"\$'([^']*)'", lambda quoted: shlex.quote(quoted[1]), line.removeprefix("$ "))
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose in backticks, or no command
        return [line]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    return words


def is_checked(words: list[str]) -> bool:
    """Whether a command is of a program that is checked, or of a module of ours."""
    is_module = words[:1] in (["python"], ["python3"]) and words[1:2] == ["-m"]
    return (
        words[:1] != []
        and words[0] in PROGRAMS
        and not (is_module and words[2].split(".")[0] not in OUR_MODULES + KNOWN_MODULES)
    )


def read_commands(text: str) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Commands that are complete (of blocks), those that may be a part of one (in backticks), and lines in blocks that
    are neither commands nor marked."""
    whole, strange = [], []
    for found in FENCE.finditer(text):
        if found["language"] in ("", "sh", "bash", "console", "text"):
            lines = found["code"].replace("\\\n", " ").splitlines()
            whole += [words for line in lines if is_checked(words := words_of(line.strip()))]
        elif found["language"] not in ("python", "diff", "toml") and found["reason"] is None:
            strange.append(f"a block of {found['language']}")
    text = FENCE.sub("", text)
    for found in INDENTED.finditer(text):
        for line in re.sub(r"\\\n *", "", found["code"]).splitlines():
            if is_checked(words := words_of(line.strip())):
                whole.append(words)
            elif words and found["reason"] is None:
                strange.append(line)
    inline = [words_of(code) for code in INLINE.findall(INDENTED.sub("", text))]
    return whole, [words for words in inline if len(words) > 1 and is_checked(words)], strange


def check_script(words: list[str]) -> None:
    """A module or script is there, and its options are named in it or beside it."""
    if words[0] == "-c":
        return
    if words[0] == "-m" and words[1] in KNOWN_MODULES:
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py")), words
        return
    if words[0] == "-m":
        name = re.sub(r"^mmspec\.(app|drafters|vision)\.", r"\1.", words[1]).replace(".", "/")
        file = ROOT / f"{name}.py" if (ROOT / f"{name}.py").is_file() else ROOT / name / "__main__.py"
    else:
        file = ROOT / words[0]
    assert file.is_file(), words
    if words[1:2] == ["mmspec"]:
        build_parser().parse_args(words[2:])
        return
    files = (ROOT / "research").rglob("*.py") if "research" in file.parts else file.parent.glob("*.py")
    texts = "".join(one.read_text(encoding="utf-8") for one in files)
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in texts, (option, words)


def check_install(words: list[str]) -> None:
    """What pip is to install can be: files are there, extras exist, requirements can be read."""
    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert words[0] == "install", words
    for before, word in itertools.pairwise(words):
        if before in ("-c", "-r", "--constraint"):
            assert (ROOT / word).is_file(), words
        elif found := re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word):
            assert set((found[1] or "all").split(",")) <= extras.keys(), words
        elif not word.startswith("-"):
            Requirement(word)


def check_command(words: list[str], is_whole: bool) -> None:
    """Raises if a command cannot be carried out, for what can be seen without doing so."""
    program, *words = itertools.takewhile(lambda word: word not in ("&&", "|", ">"), words)
    if program == "mmspec" and is_whole:
        build_parser().parse_args(words)
    elif program == "mmspec":
        (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
        options = commands.choices[words[0]]._option_string_actions if words[0][0] != "-" else ["--version", "--help"]
        assert all(word.partition("=")[0] in options for word in words if word.startswith("--")), words
    elif program == "make":
        targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[0].split())
        assert all(word in targets or "=" in word for word in words), words
    elif program == "pip":
        check_install(words)
    elif program == "git":
        assert words[0] in ("clone", "tag") or words == ["lfs", "pull"], words
    else:
        check_script(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document: Path) -> None:
    """`mmspec` commands parse, scripts, modules and their options are there, so are the targets of make and extras."""
    whole, partial, strange = read_commands(document.read_text(encoding="utf-8"))
    assert strange == [], "neither a command that is checked nor marked as not run"
    for words in whole:
        check_command(words, True)
    for words in partial:
        check_command(words, False)


PLANTED = [
    "\n    mmspec captoin photos/\n",
    "\n    mmspec caption photos/ \\\n        --no-such-option 3\n",
    "\n    OMP_NUM_THREADS=1 mmspec demo --no-such-option\n",
    "\n    $ make tests\n",
    "\n    python tests/helpers/fuz.py\n",
    "\n    python -m research.studies.no_such_study\n",
    "\n    python tests/helpers/fuzz.py --no-such-option 3\n",
    "\n    pip install -e '.[no-such-extra]'\n",
    "\n    curl https://example.org | sh\n",
    "\n    python -m others.code\n",
    "\n    mmspec caption 'photos/\n",
    "\n```\nmmspec captoin photos/\n```\n",
    "\n```bash\nmmspec demo --no-such-option\n```\n",
    "\n```nginx\nlocation / {}\n```\n",
    "\nCall `mmspec train --no-such-option 3` then.\n",
    "\n| a | `mmspec captoin photos/` |\n",
    "\nWith `make tests` it is checked.\n",
]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_mistake_is_found(planted: str) -> None:
    with pytest.raises((AssertionError, KeyError, SystemExit)):  # noqa: PT012
        whole, partial, strange = read_commands(f"# Page\n\nText.\n{planted}\nText.\n")
        assert not strange
        for words in whole:
            check_command(words, True)
        for words in partial:
            check_command(words, False)


def test_what_is_marked_is_not_checked() -> None:
    block = "    ray start --head\n    python -m others.code\n"
    marked = f"Text.\n\n<!-- not run by the tests: needs a cluster -->\n\n{block}"
    assert read_commands(marked) == ([], [], [])
    assert len(read_commands(marked.replace("by the tests", ""))[2]) == 2
