"""`mmspec caption` from end to end: real files, the tiny random model, the real decode loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job_rows import rows_of
from PIL import Image

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.modeling.random_models import random_model
from research.synthetic_images import write_images

COLUMNS = """id file_name file_stamp caption prompt prompt_sha1 model model_revision drafter gen n_prompt_tokens
n_new_tokens n_rounds tau ttft_s seconds finish_reason identical plain error mmspec_version index"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_images(folder, 10)
    return folder


def caption(*args: object) -> int:
    return main(["caption", *map(str, args), "--no-progress"])


def test_rows_are_right_and_identical_to_plain_generate(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert caption(pictures, "--model", "tiny", "--out", out, "--max-new-tokens", 24, "--compare") == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "identical: 10/10" in captured.err
    found = rows_of(out)
    assert len(found) == 10 and all(set(row) == set(COLUMNS.split()) for row in found)
    assert all(row["identical"] and not row["error"] for row in found)
    assert [row["index"] for row in found] == list(range(10))

    model, processor = random_model("tiny")
    first = found[0]
    inputs = Captioner(model, processor).build_inputs(
        [Image.open(sorted(pictures.iterdir())[0])], ["Describe the image."]
    )
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert first["caption"] == processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert (first["n_prompt_tokens"], first["n_new_tokens"]) == (inputs["input_ids"].shape[1], len(ids))
    assert first["tau"] == pytest.approx((len(ids) - 1) / first["n_rounds"], abs=1e-3)
    assert first["finish_reason"] == ("eos" if 2 in ids.tolist() else "length")


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter", ["none", "lookup", "recycling", "hybrid"])
def test_every_drafter_gives_the_same_captions(pictures: Path, tmp_path: Path, drafter: str) -> None:
    for name in ("none", drafter):
        args = ("--model", "tiny", "--drafter", name, "--max-new-tokens", 16, "--batch-size", 3)
        assert caption(pictures, "--out", tmp_path / f"{name}.jsonl", *args) == 0
    plain, drafted = rows_of(tmp_path / "none.jsonl"), rows_of(tmp_path / f"{drafter}.jsonl")
    assert [row["caption"] for row in plain] == [row["caption"] for row in drafted]


def test_stdout_holds_nothing_but_rows(pictures: Path, capfdbinary: Any) -> None:
    assert caption(*sorted(pictures.iterdir())[:2], "--model", "tiny", "--max-new-tokens", 4) == 0
    out, err = capfdbinary.readouterr()
    assert [json.loads(line)["n_new_tokens"] for line in out.splitlines()] == [4, 4]
    assert b"2 captioned" in err and b"\r" not in err


def test_every_kind_of_bad_file(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    good = sorted(pictures.iterdir())[0]
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "torn.png").write_bytes(good.read_bytes()[:900])
    Image.new("CMYK", (30, 30)).save(tmp_path / "cmyk.jpg")
    Image.new("1", (9000, 8000)).save(tmp_path / "large.png")
    paths = (*sorted(tmp_path.iterdir()), tmp_path / "gone.png", good)
    args = ("--model", "tiny", "--out", tmp_path / "o.jsonl", "--max-new-tokens", 4)
    assert caption(*paths, *args) == 1
    found = rows_of(tmp_path / "o.jsonl")
    kinds = {Path(row["file_name"]).name: (row["error"] or {}).get("type") for row in found}
    assert all(row["caption"] is None and row["finish_reason"] == "error" for row in found if row["error"])
    assert kinds == {
        "cmyk.jpg": None,
        "empty.png": "Empty",
        "gone.png": "Missing",
        "large.png": "TooLarge",
        "text.jpg": "NotAnImage",
        "torn.png": "BrokenImage",
        good.name: None,
    }
    assert "2 captioned, 5 failed" in capsys.readouterr().err


def test_an_unsupported_model_is_named_with_what_is_supported(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise mmspec.UnsupportedModelError("no adapter for 'blip'; supported: llava")

    monkeypatch.setattr(mmspec, "patch", refuse)
    assert caption(pictures, "--model", "tiny") == 2
    assert "supported: llava" in capsys.readouterr().err


def test_a_model_folder_loads_by_the_auto_classes(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for part in random_model("tiny"):
        part.save_pretrained(folder)
    model, processor = load_model(str(folder))
    again, _ = random_model("tiny", 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert processor.tokenizer.padding_side == "left" and processor.chat_template
    args = (sorted(pictures.iterdir())[0], "--max-new-tokens", 8, "--out")
    assert caption(*args, tmp_path / "a.jsonl", "--model", folder) == 0
    assert caption(*args, tmp_path / "b.jsonl", "--model", "tiny") == 0
    assert rows_of(tmp_path / "a.jsonl")[0]["caption"] == rows_of(tmp_path / "b.jsonl")[0]["caption"]


def test_random_models_spare_the_generators_and_differ_by_seed() -> None:
    state = torch.get_rng_state()
    one, two = (random_model("tiny", seed)[0].lm_head.weight for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(one, two)
    with pytest.raises(ValueError, match="random models are tiny"):
        random_model("large")


@pytest.fixture
def captioner() -> Captioner:
    model, processor = load_model("tiny")
    return Captioner(mmspec.patch(model, "lookup", processor=processor), processor, max_new_tokens=12)


IMAGES = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "white")]


def test_finish_reasons(captioner: Captioner) -> None:
    prompts = ["describe the image", "what is it ?", "a"]
    free = captioner.caption(IMAGES, prompts, 0)
    assert {result.finish_reason for result in free} == {"length"} and {result.n_new_tokens for result in free} == {12}
    pieces = free[0].caption.split()
    captioner.stop = (f" {pieces[3]}",)
    stopped = captioner.caption(IMAGES, prompts, 0, [True] * 3)
    assert stopped[0].finish_reason == "stop" and stopped[0].caption == " ".join(pieces[:3])
    assert stopped[0].n_new_tokens < 12 and all(result.identical for result in stopped)
    captioner.stop = ()
    inputs = captioner.build_inputs(IMAGES, prompts)
    token = captioner.model.generate(**inputs, max_new_tokens=12)[0, inputs["input_ids"].shape[1] + 4].item()
    captioner.model.generation_config.eos_token_id = [2, token]
    ended = captioner.caption(IMAGES, prompts, 0, [True] * 3)
    assert ended[0].finish_reason == "eos" and ended[0].n_new_tokens <= 5 and all(result.identical for result in ended)


def test_rows_of_a_ragged_batch_are_those_of_single_calls(captioner: Captioner) -> None:
    prompts = ["a", "describe the image in one long sentence please", "what is it ?"]
    together = captioner.caption(IMAGES, prompts, 0)
    alone = [captioner.caption([image], [prompt], 0)[0] for image, prompt in zip(IMAGES, prompts, strict=True)]
    assert [result.caption for result in together] == [result.caption for result in alone]
    assert [result.n_prompt_tokens for result in together] == [result.n_prompt_tokens for result in alone]


def test_a_planted_difference_is_found_and_located(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Captioner._generate

    def generate_with_fault(self: Captioner, inputs: dict[str, Any], seed: int) -> tuple[torch.Tensor, float]:
        ids, seconds = original(self, inputs, seed)
        if mmspec.stats(self.model).calls == 1 and not faults:
            faults.append(True)
            ids[1, -3] += 1
        return ids, seconds

    faults: list[bool] = []
    monkeypatch.setattr(Captioner, "_generate", generate_with_fault)
    result = captioner.caption(IMAGES, ["a"] * 3, 0, [True] * 3)
    assert [one.identical for one in result] == [True, False, True]
    assert (captioner.comparison.rows, captioner.comparison.identical) == (
        3,
        2,
    ) and captioner.comparison.first_difference


def test_without_a_chat_template(captioner: Captioner) -> None:
    captioner.processor.chat_template = None
    inputs = captioner.build_inputs(IMAGES[:1], ["what is {it} ?"])
    text = captioner.processor.tokenizer.decode(inputs["input_ids"][0]).replace("<image>", "")
    assert text.split() == "user: what is {it} ? assistant:".replace("{it}", "<unk>it<unk>").split()
    assert captioner.caption(IMAGES, ["a"] * 3, 0)[0].n_new_tokens == 12
