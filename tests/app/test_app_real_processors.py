"""Families whose processors need torchvision, end to end with the processors of transformers.

Slow, and skipped without torchvision, of which PyPI has no build for the CPU build of torch: `make newest` installs it
in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from real_processors import BUILDERS, save_model
from transformers import AutoModelForImageTextToText, AutoProcessor
from video_files import write_video

import mmspec
from mmspec.app.cli.main import main

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)

NEEDS = {"smolvlm": "num2words"}


@pytest.fixture(params=BUILDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model with its processor."""
    needed = NEEDS.get(request.param)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return save_model(request.param, tmp_path / request.param)


def write_inputs(folder: Path) -> Path:
    """Pictures of several sizes and kinds, and a clip."""

    folder.mkdir()
    for name, size in (
        ("wide.png", (320, 90)),
        ("tall.jpg", (60, 200)),
        ("small.webp", (30, 30)),
        ("gray.png", (64, 64)),
    ):
        Image.new("L" if name.startswith("gray") else "RGB", size, 90).save(folder / name)
    write_video(folder / "clip.mp4", 12)
    return folder


def test_a_caption_job_equals_generate(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--max-new-tokens", "12", "--no-progress", "--dtype", "float32", "--batch-size", "2"]
    args = ["caption", str(write_inputs(tmp_path / "in")), "--model", str(folder), "--out", str(out), *words]
    assert main([*args, "--prompt", "describe it"]) == 0
    rows = {Path(row["file_name"]).name: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 5 and not any(row["error"] for row in rows.values())
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    for name, row in rows.items():
        if name == "clip.mp4":
            continue
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "describe it"}]}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        image = Image.open(tmp_path / "in" / name).convert("RGB")
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert row["caption"] == processor.decode(ids, skip_special_tokens=True).strip(), name


def test_a_patched_call_equals_generate(folder: Path) -> None:
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a red ball"}]}]
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True)] * 2
    images = [
        [Image.effect_mandelbrot((130, 70), (-2, -1, 1, 1), 40).convert("RGB")],
        [Image.new("RGB", (50, 80), "red")],
    ]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    for kwargs in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_k": 20}):
        results = []
        for patched in (False, True):
            if patched:
                mmspec.patch(model, "hybrid", processor=processor)
            torch.manual_seed(7)
            results.append(model.generate(**inputs, max_new_tokens=24, **kwargs))
        assert torch.equal(*results)
        assert mmspec.stats(model, last=True).fallback_reason is None
        mmspec.unpatch(model)


def test_env_says_that_it_is_served(folder: Path, capsys: Any) -> None:
    assert main(["env", "--model", str(folder)]) == 0
    assert "passed" in capsys.readouterr().out
