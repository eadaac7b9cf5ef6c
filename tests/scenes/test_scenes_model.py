"""The bundled scenes model: it loads without mmspec, answers correctly, and is the default of the commands."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import patch_model

import mmspec
from mmspec.app import scenes
from mmspec.app.cli.main import main
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes import CARD_FILE, WEIGHTS_FOLDER, verify_checksums
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.drafters import registry
from mmspec.vision.compressors.elastic import Elastic
from research.scenes import evaluate, model_card
from research.scenes.model_card import TRAINING_FILE
from research.scenes.stages import STAGES
from research.scenes.tasks import generate_requests

pytestmark = pytest.mark.usefixtures("warm_decoders", "scenes_once")


@pytest.fixture(scope="module")
def bundled_model() -> tuple[Any, Any]:
    return scenes.load_scenes_model()


def test_checksums_and_size() -> None:
    verify_checksums(WEIGHTS_FOLDER)
    size = sum(file.stat().st_size for file in WEIGHTS_FOLDER.iterdir())
    assert size < 44e6, "38 MB of text model, 6 of vision tower"


def test_model_card_agrees_with_its_generator(bundled_model: tuple[Any, Any]) -> None:
    model, _ = bundled_model
    training = json.loads((WEIGHTS_FOLDER / TRAINING_FILE).read_text(encoding="utf-8"))
    card = (WEIGHTS_FOLDER / CARD_FILE).read_text(encoding="utf-8")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    header = model_card.CARD_HEADER.format(parameters=num_parameters / 1e6, kinds=len(OBJECT_KINDS))
    start = "\n".join([header, model_card.format_training(training), "## Accuracy\n"])
    assert card.startswith(start) and card.endswith("\n" + model_card.LIMITATIONS)
    rows = re.findall(r"^\| (.+) \| [0-9.]+% \| [0-9.]+% \| [0-9,]+ \|$", card, re.MULTILINE)
    assert rows == list(model_card.METRIC_LABELS.values())


def test_model_card_documents_the_training_of_the_bundled_weights() -> None:
    training = json.loads((WEIGHTS_FOLDER / TRAINING_FILE).read_text(encoding="utf-8"))
    recorded = [(stage["name"], stage["steps"], stage["batch"], stage["rate"]) for stage in training["stages"]]
    card = (WEIGHTS_FOLDER / CARD_FILE).read_text(encoding="utf-8")
    if recorded != [(stage.name, stage.steps, stage.batch, stage.rate) for stage in STAGES]:
        assert training["note"] in card, "weights that differ from the recipe need a note"


def test_its_files_name_classes_of_transformers_alone() -> None:
    """So that it loads without mmspec, as `test_export_is_rounded_and_loads_without_mmspec` does with another one."""
    files = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in WEIGHTS_FOLDER.glob("*.json")}
    assert files["config.json"]["architectures"] == ["LlavaForConditionalGeneration"]
    assert files["processor_config.json"]["processor_class"] == "LlavaProcessor"
    assert not any("auto_map" in content for content in files.values())


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accuracy_on_held_out_scenes(count: int, bundled_model: tuple[Any, Any]) -> None:
    """A scene or two, to detect wrong weights; the full evaluation is in the model card."""
    result = evaluate.evaluate_scenes_model(*bundled_model, FIRST_HELD_OUT_SEED + 7000, count, batch_size=16)
    for name in ("things_named", "named_are_there", "places", "yes_no", "backgrounds"):
        assert result[name] > 0.8, (name, result)
    if count > 1:  # another picture's answers, of which a single one may fit
        assert result["control_things_named"] < 0.3 and result["control_backgrounds"] < 0.4


def test_default_drafter_is_bundled(bundled_model: tuple[Any, Any]) -> None:
    model, processor = bundled_model
    with patch_model(model, processor=processor):
        drafter = model.__dict__["_mmspec"].config.drafter
    assert drafter.name == next(iter(registry.bundled_drafters()))
    assert num_bytes(drafter.head) <= 0.15 * num_bytes(model)


def num_bytes(module: torch.nn.Module) -> int:
    """Size of a module's parameters in bytes."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


@pytest.mark.every(2)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_bundled_drafters_reach_their_tau_and_keep_the_output(
    bundled_model: tuple[Any, Any], batch: int, sample: bool
) -> None:
    model, processor = bundled_model
    caption_model = Captioner(model, processor)
    requests = list(islice(generate_requests("describe", FIRST_HELD_OUT_SEED + 300), batch))

    def generate(inputs: dict[str, Any]) -> Any:
        torch.manual_seed(5)
        return model.generate(**inputs, max_new_tokens=32, do_sample=sample)

    inputs = caption_model.build_inputs(
        [request.images for request in requests], [request.question for request in requests]
    )
    reference = generate(inputs)
    for name in registry.bundled_drafters():
        with patch_model(model, name, processor=processor, tree_size=16):
            assert torch.equal(generate(inputs), reference), name
            tau = mmspec.stats(model).tau
        assert tau > (1.0 if sample else 2.5), (name, tau)


def test_bundled_gate_chooses_a_compressor(bundled_model: tuple[Any, Any]) -> None:
    """The gate is active with its drafter, named or not; another drafter has none."""
    model, processor = bundled_model
    [request] = islice(generate_requests("clip", FIRST_HELD_OUT_SEED), 1)
    inputs = Captioner(model, processor).build_inputs([request.images], [request.question])
    choices: dict[str, tuple[str, int]] = {}
    for drafter, compressor in (("msd-elastic", None), ("msd-elastic", "elastic")):
        with patch_model(model, drafter, compressor=compressor, processor=processor, tree_size=16):
            model.generate(**inputs, max_new_tokens=4, do_sample=False)
            [row] = mmspec.stats(model, last=True).compression
            choices[f"{drafter}, {compressor}"] = row.choice, row.num_compressed_tokens
            gate = getattr(model.__dict__["_mmspec"].config.drafter, "compressor", None)
            assert isinstance(gate, Elastic) and row.choice in gate.branch_labels()
            assert row.num_compressed_tokens <= gate.max_tokens < row.num_visual_tokens
    assert choices["msd-elastic, None"] == choices["msd-elastic, elastic"]
    with pytest.raises(ValueError, match="compressor 'elastic' is one that a drafter was trained with, and 'msd' was"):
        mmspec.patch(model, "msd", compressor="elastic", processor=processor)


def test_scenes_model_is_the_default_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "captions.jsonl"
    words = ["--model", "scenes", "--max-new-tokens", "8", "--compare", "--no-progress"]
    assert main(["caption", str(list_example_files()[1]), "--out", str(out), *words]) == 0
    assert json.loads(out.read_text())["model"] == "scenes"
    assert main(["compare", "--drafters", "none", "--new-tokens", "5"]) == 0
    assert " NO " not in capsys.readouterr().out
