"""The registry of draft heads: a method in a folder of its own, of this package or of another one."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import HEAD_CONFIG, NUM_LAYERS, new_trainer
from fuzz import patch_model
from recorded_rounds import SPEC, build_inputs, build_model, drafts_only, generate, recording
from recorders import record_trace

import mmspec
from mmspec.app.cli.main import build_parser
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.heads import registry
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.heads.registry import HeadClasses, HeadMethod, TrainSizes, find_method, method_of, register
from mmspec.drafters.training.batch import DraftModel

trace_drafts = drafts_only(record_trace)
ROOT = Path(__file__).parents[3]
FOLDER = "drafters/heads/fan/"


def toy_files() -> dict[str, str]:
    """{path: content} of the toy head in docs/extending.md."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    files: dict[str, str] = {}
    for line in diff.splitlines():
        assert line.startswith("+"), "it only adds"
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
            files[path] = ""
        else:
            files[path] += line[1:] + "\n"
    return files


def install(folder: Path, name: str, files: dict[str, str], value: str) -> None:
    """A package with an entry point, as pip would leave it."""
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    info = folder / f"{name}_head-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-head\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mmspec.drafters]\n{name} = {value}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; what they register is forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    registry.methods()
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.split(".")[0].endswith("_head"):
            del sys.modules[name]


@pytest.fixture
def fan(packages: Path) -> HeadMethod:
    """The toy head, installed as a package of its own."""
    files = {
        path.replace(FOLDER, "fan_head/"): text.replace("mmspec.drafters.heads.fan", "fan_head")
        for path, text in toy_files().items()
    }
    install(packages, "fan", files, "fan_head.recipe")
    importlib.invalidate_caches()
    return find_method("fan")


def test_a_head_touches_one_folder() -> None:
    files = toy_files()
    assert len(files) == 5 and all(path.startswith(FOLDER) for path in files)


def new_head(method: HeadMethod, **sizes: int) -> Any:
    """A head with the shape of a recipe and random weights."""
    classes = method.classes()
    shape = EagleConfig(**{name: getattr(HEAD_CONFIG, name) for name in HEAD_CONFIG.__dataclass_fields__} | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        return classes.head(method.train_config(shape, method.recipes[0], TrainSizes(NUM_LAYERS)))


def test_a_toy_head_is_trained_saved_and_loaded(fan: HeadMethod, target: Any, tmp_path: Path) -> None:
    head = new_head(fan)
    assert head.config.block_size == 4 and find_method("fan") is fan
    losses, models = list[float](), {"fan": DraftModel(head, "decoupled", "fan")}
    trainer = new_trainer(target, tmp_path / "run", models, max_steps=12)
    assert trainer.run(on_step=lambda metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0] and trainer.settings["draft_models"]["fan"]["architecture"] == "fan"
    metadata = HeadMetadata(head.config, "decoupled", NUM_LAYERS, architecture="fan")
    save_head(tmp_path / "fan", head, metadata, torch.float32)
    again, found = load_head(tmp_path / "fan")
    assert type(again) is type(head) and found.config == head.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    drafter = load_trained(tmp_path / "fan")
    assert type(drafter).__name__ == "FanDrafter" and drafter.name == "fan"
    assert method_of(drafter) is fan


def test_a_toy_head_drafts_recorded_and_not(fan: HeadMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of `generate`; its drafts are traced, which a subclass that only inherits does not get."""
    model = build_model()
    head = new_head(fan, hidden_size=SPEC.hidden, vocab_size=model.config.get_text_config().vocab_size)
    metadata = HeadMetadata(head.config, "decoupled", SPEC.layers, architecture="fan")
    save_head(tmp_path / "fan", head, metadata, torch.float32)
    inputs = build_inputs(model, 0, 1)
    plain = generate(model, inputs, True, max_new_tokens=12)
    with patch_model(model, str(tmp_path / "fan"), tree_size=8):
        assert (
            torch.equal(generate(model, inputs, True, max_new_tokens=12), plain)
            and mmspec.stats(model).num_draft_tokens > 0
        )
    monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    drafter = load_trained(tmp_path / "fan")
    inherits = type("Inherits", (type(drafter),), {})(drafter.head, "decoupled", num_layers=SPEC.layers)
    for own, is_recorded in ((drafter, True), (inherits, False)):
        with recording(trace_drafts) as recorder, patch_model(model, own, tree_size=8):
            assert torch.equal(generate(model, inputs, True, max_new_tokens=12), plain)
            assert (recorder.draft_recordings > 0) is is_recorded


def test_the_command_line_lists_installed_heads(fan: HeadMethod, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["train", "--help"])
    shown = capsys.readouterr().out
    assert re.search(r"^  fan +4 tokens per forward by linear maps$", shown, re.MULTILINE)
    assert all(f"\n  {name} " in shown for name in registry.recipes())
    assert parser.parse_args(["train", "--out", "run", "--drafter", "fan,msd"]).drafter == ("fan", "msd")
    with pytest.raises(SystemExit):
        parser.parse_args(["export", "--help"])
    assert "eagle3    vLLM and speculators" in capsys.readouterr().out


def test_packages_that_fail_or_take_a_name(packages: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken package costs a warning, and only where it is asked for; a taken name is refused."""
    install(packages, "broken", {"broken_head/__init__.py": "raise RuntimeError('gone')\n"}, "broken_head")
    taken = """
from mmspec.drafters.heads.registry import HeadMethod, register
@register
class Mine(HeadMethod):
    name = "eagle"
    def classes(self): ...
"""
    install(packages, "taken", {"taken_head/__init__.py": taken}, "taken_head")
    importlib.invalidate_caches()
    assert find_method("eagle").name == "eagle" and not caplog.records, "nothing of others is imported"
    with (
        pytest.raises(ValueError, match=r"architecture must be one of .*eagle.*; got 'nothing'"),
        caplog.at_level(logging.WARNING),
    ):
        find_method("nothing")
    assert not caplog.records
    assert type(registry.methods()["eagle"]).__module__ == "mmspec.drafters.heads.eagle.recipe"
    text = " ".join(record.message for record in caplog.records)
    assert "'broken' of broken_head cannot be loaded (RuntimeError: gone)" in text
    assert "a method 'eagle' is registered by mmspec.drafters.heads.eagle.recipe" in text


def test_what_a_method_is_is_said_when_it_is_registered(packages: Path) -> None:
    with pytest.raises(TypeError, match=r"that defines classes\(\); got 3"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"that defines classes\(\); got <class .*Unfinished"):

        @register
        class Unfinished(HeadMethod):
            name = "unfinished"

    with pytest.raises(TypeError, match=r"has a name \(str\), which the config .*; got <class .*Nameless"):

        @register
        class Nameless(HeadMethod):
            def classes(self) -> HeadClasses:
                return find_method("eagle").classes()

    assert "unfinished" not in registry.METHODS


def test_wrong_configs_of_a_registered_head(fan: HeadMethod, tmp_path: Path) -> None:
    """Its own fields are checked by their types; a name that nobody registers is named."""
    head = new_head(fan)
    save_head(tmp_path, head, HeadMetadata(head.config, "decoupled", NUM_LAYERS, architecture="fan"))
    file = tmp_path / "config.json"
    text = file.read_text()
    file.write_text(text.replace('"block_size": 4', '"block_size": "4"'))
    with pytest.raises(ValueError, match="block_size"):
        load_head(tmp_path)
    file.write_text(text.replace('"architecture": "fan"', '"architecture": "fun"'))
    with pytest.raises(ValueError, match=r"architecture must be one of .*; got 'fun'"):
        load_head(tmp_path)
    with pytest.raises(ValueError, match="--set layers is for heads that read several hidden states"):
        fan.train_config(HEAD_CONFIG, fan.recipes[0], TrainSizes(NUM_LAYERS, layers=(1, 2)))


def test_every_method_states_what_it_is() -> None:
    """Unique drafters, with help; classes that fit each other; heads that are trained have a loss."""
    names = [recipe.name for method in registry.methods().values() for recipe in method.recipes]
    assert len(set(names)) == len(names) and all(recipe.help for _, recipe in registry.recipes().values())
    for name, method in registry.methods().items():
        classes = method.classes()
        assert method.name == name and bool(method.recipes) == (classes.loss is not None)
    assert method_of(EagleDrafter(EagleHead(HEAD_CONFIG), num_layers=NUM_LAYERS)) is find_method("eagle")


def test_the_page_lists_every_method_as_it_is() -> None:
    """Read as published, drafting in C, trained, and exported for the engines that `mmspec export` names."""
    lines = (
        (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").split("| method |")[1].split("\n\n")[0].splitlines()
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    listed = {name: row for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}
    known = registry.methods()
    assert known.keys() <= listed.keys() and len(rows) == len(known)
    for name, method in known.items():
        _, what, read, drafts, in_c, trained, exported, checked = listed[name]
        assert (
            what and drafts and (in_c != "no") is bool({"c_draft", "c_classes"} & vars(method.classes().drafter).keys())
        )
        assert bool(checked) is (read == "yes")
        is_read = type(method).load_published is not HeadMethod.load_published or method.is_of_target
        assert (read == "yes") is is_read and (trained != "no") is bool(method.recipes)
        assert all((engine in exported) is (engine in method.served) for engine in ("vLLM", "SGLang", "speculators"))


def test_layers_of_a_head_are_an_option_of_blocks_over_several_layers() -> None:
    """Others would ignore it."""
    for method, recipe in registry.recipes().values():
        sizes = TrainSizes(num_layers=NUM_LAYERS, head_layers=2)
        if method.is_of_target:
            continue
        if method.trains_layers:
            assert method.train_config(HEAD_CONFIG, recipe, TrainSizes(8, head_layers=2)).num_hidden_layers == 2  # type: ignore[attr-defined]
            continue
        with pytest.raises(
            ValueError, match="head_layers is for dspark and dflash2 and lilicorr heads; this one has one layer, got 2"
        ):
            method.train_config(HEAD_CONFIG, recipe, sizes)
