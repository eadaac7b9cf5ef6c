"""The model that ships: it loads without mmspec, sees what is there, and is what the commands use by default."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.app import examples as demo
from mmspec.app import scenes
from mmspec.app.caption.command import build_captioner
from mmspec.app.cli.main import main
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes import WEIGHTS_FOLDER, verify_checksums
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.scenes.model_card import TRAINING_FILE
from mmspec.app.scenes.tasks import generate_requests
from mmspec.app.scenes.training import evaluate
from mmspec.app.scenes.training.build_model import format_prompt
from mmspec.app.scenes.training.stages import STAGES
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, generate_clip, generate_scene
from mmspec.drafters import registry
from mmspec.vision.compressors.elastic import Elastic


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return scenes.load_scenes_model()


def test_it_is_whole_and_small_enough() -> None:
    verify_checksums(WEIGHTS_FOLDER)
    size = sum(file.stat().st_size for file in WEIGHTS_FOLDER.iterdir())
    assert size < 44e6, "38 MB of text, 6 of vision"
    assert "Accuracy" in (WEIGHTS_FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_card_tells_the_recipe_that_ships() -> None:
    facts = json.loads((WEIGHTS_FOLDER / TRAINING_FILE).read_text(encoding="utf-8"))
    told = [(stage["name"], stage["steps"], stage["batch"], stage["rate"]) for stage in facts["stages"]]
    card = (WEIGHTS_FOLDER / "README.md").read_text(encoding="utf-8")
    if told != [(stage.name, stage.steps, stage.batch, stage.rate) for stage in STAGES]:
        assert facts["note"] in card, "weights that were made in another way than by the recipe say so"


def test_it_loads_without_mmspec() -> None:
    code = f"""
import sys
from transformers import AutoModelForImageTextToText, AutoProcessor
model = AutoModelForImageTextToText.from_pretrained({str(WEIGHTS_FOLDER)!r})
processor = AutoProcessor.from_pretrained({str(WEIGHTS_FOLDER)!r}, backend="pil")
assert not any(name.split(".")[0] == "mmspec" for name in sys.modules)
print(type(model).__name__, model.dtype, type(processor).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, check=True
    )
    assert done.stdout.split() == ["LlavaForConditionalGeneration", "torch.float32", "LlavaProcessor"]


def test_it_sees(shipped: tuple[Any, Any]) -> None:
    """A handful of scenes, to notice weights that are not what they were; the table is in docs/results."""
    result = evaluate.evaluate_scenes_model(*shipped, FIRST_HELD_OUT_SEED + 7000, 2, batch_size=16)
    for name in ("things_named", "named_are_there", "places", "yes_no", "backgrounds"):
        assert result[name] > 0.8, (name, result)
    assert result["control_things_named"] < 0.3 and result["control_backgrounds"] < 0.4


def test_pictures_that_questions_share_are_read_once_and_change_no_answer(
    shipped: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `generate` of each question alone, with nothing in its cache."""
    model, processor = shipped
    items = [
        item
        for seed in (0, 1)
        for item in evaluate.build_scene_questions(generate_scene(FIRST_HELD_OUT_SEED + seed), random.Random(seed))
    ]
    items.append(evaluate.build_clip_question(generate_clip(FIRST_HELD_OUT_SEED), random.Random(0)))
    read, original = list[int](), type(model.model).get_image_features

    def spy(self: Any, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        read.append(len(pixel_values))
        return original(self, pixel_values, **kwargs)

    monkeypatch.setattr(type(model.model), "get_image_features", spy)
    said = evaluate.generate_answers(model, processor, items, 8, lambda count: None)
    frames = len(items[-1].images)
    assert sum(read) < len(items) / 2 + frames, "pictures of one scene that stand in one batch"
    for item, answer in zip(items, said, strict=True):
        text = "<s>" + format_prompt(item.question, len(item.images))
        given = processor(images=[list(item.images)], text=[text], return_tensors="pt")
        out = model.generate(**given, max_new_tokens=item.max_new_tokens, do_sample=False)
        alone = processor.tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert answer == alone, item.question


def test_auto_is_a_drafter_that_ships(shipped: tuple[Any, Any]) -> None:
    model, processor = shipped
    mmspec.patch(model, processor=processor)
    try:
        drafter = model.__dict__["_mmspec"].config.drafter
    finally:
        mmspec.unpatch(model)
    assert drafter.name == next(iter(registry.bundled_drafters()))
    assert size_of(drafter.head) <= 0.15 * size_of(model)


def size_of(module: Any) -> int:
    """Bytes of its weights."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def test_drafters_that_ship_guess_well_and_change_no_word(shipped: tuple[Any, Any]) -> None:
    model, processor = shipped
    maker, asked = (
        Captioner(model, processor),
        list(islice(generate_requests("describe", FIRST_HELD_OUT_SEED + 300), 3)),
    )

    def said(inputs: dict[str, Any], sample: bool) -> Any:
        torch.manual_seed(5)
        return model.generate(**inputs, max_new_tokens=32, do_sample=sample)

    for batch, sample in product((asked[:1], asked), (False, True)):
        inputs = maker.build_inputs([one.images for one in batch], [one.question for one in batch])
        plain = said(inputs, sample)
        for name in registry.bundled_drafters():
            mmspec.patch(model, name, processor=processor, nodes=16)
            try:
                assert torch.equal(said(inputs, sample), plain), (name, len(batch), sample)
                tau = mmspec.stats(model).tau
            finally:
                mmspec.unpatch(model)
            assert tau > (1.0 if sample else 2.5), (name, len(batch), sample, tau)


def test_a_gate_that_ships_chooses(shipped: tuple[Any, Any]) -> None:
    """With its drafter, whether it is asked for or not; beside another drafter `elastic` goes by costs."""
    model, processor = shipped
    maker = Captioner(model, processor)
    [one] = islice(generate_requests("clip", FIRST_HELD_OUT_SEED), 1)
    inputs = maker.build_inputs([one.images], [one.question])
    ways: dict[str, tuple[str, int]] = {}
    for drafter, compressor in (("msd-elastic", None), ("msd-elastic", "elastic"), ("msd", "elastic")):
        mmspec.patch(model, drafter, compressor=compressor, processor=processor, nodes=16)
        try:
            model.generate(**inputs, max_new_tokens=4, do_sample=False)
            [row] = mmspec.stats(model, last=True).compression
            ways[f"{drafter}, {compressor}"] = row.choice, row.num_compressed_tokens
            gate = getattr(model.__dict__["_mmspec"].config.drafter, "compressor", None)
            assert isinstance(gate, Elastic) == (drafter == "msd-elastic")
            if isinstance(gate, Elastic):
                assert (
                    row.choice in gate.branch_labels()
                    and row.num_compressed_tokens <= gate.max_tokens < row.num_visual_tokens
                )
        finally:
            mmspec.unpatch(model)
    assert ways["msd-elastic, None"] == ways["msd-elastic, elastic"]
    assert ways["msd, elastic"][0].startswith("salient:")


def test_the_demo(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[Captioner] = []
    monkeypatch.setattr(demo, "build_captioner", lambda *args: makers.append(build_captioner(*args)) or makers[-1])
    assert demo.main([str(list_example_files()[0]), str(list_example_files()[-1]), "--max-new-tokens", "40"]) == 0
    told = capsys.readouterr().out
    assert "2 of 2 texts identical to plain generate" in told
    assert told.count("plain ") >= 2 and told.count("identical; ") == 2 and "tokens/s" in told
    assert makers[0].model.__dict__["_mmspec"].config.drafter.name == next(iter(registry.bundled_drafters()))
    assert float(re.findall(r"tau ([0-9.]+)", told)[-1]) >= 1  # how much hangs on this machine's times


def test_it_is_the_default_of_the_commands(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "o.jsonl"
    assert (
        main(
            [
                "caption",
                str(list_example_files()[1]),
                "--model",
                "scenes",
                "--out",
                str(out),
                "--max-new-tokens",
                "8",
                "--compare",
                "--no-progress",
            ]
        )
        == 0
    )
    assert json.loads(out.read_text())["model"] == "scenes"
    assert main(["bench", "--count", "1", "--drafters", "none", "--new-tokens", "5"]) == 0
    assert " NO " not in capsys.readouterr().out
