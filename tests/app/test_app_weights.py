"""What identifies the weights of a job: a job whose model changed is not continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from input_table import line
from safetensors.numpy import load_file, save_file
from test_app_inputs import picture

from mmspec.app.caption.command import job_settings
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.cli.main import main
from mmspec.app.modeling import weights_id as module
from mmspec.app.modeling.random_models import random_model
from mmspec.app.modeling.weights_id import weights_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two shards, of which samples are read."""
    monkeypatch.setattr(module, "WHOLE_BYTES", 256)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 16)
    monkeypatch.setattr(module, "FILE_SAMPLES", 64)
    (found := tmp_path / "m").mkdir()
    for number in range(2):
        values = np.random.default_rng(number).normal(size=(40, 50)).astype(np.float32)
        tensors = {f"layer.{number}.{name}": values + index for index, name in enumerate("abc")}
        save_file(tensors | {f"norm.{number}": values[0, :8]}, found / f"model-0000{number}.safetensors")
    (found / "pytorch_model.bin").write_bytes(np.random.default_rng(0).bytes(9000))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "README.md", "trainer_state.json"):
        (found / name).write_text("{}")
    return found


def test_a_folder_is_identified_by_its_content(folder: Path, tmp_path: Path) -> None:
    first = weights_id(str(folder))
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    (folder / "README.md").write_text("new")
    (folder / "trainer_state.json").write_text("[]")
    (folder / "checkpoint-1").mkdir()
    assert first is not None and weights_id(str(tmp_path / "copy")) == weights_id(str(folder)) == first
    found = {first}
    for file in sorted(folder.glob("*.safetensors")):
        for name in load_file(file):
            tensors = load_file(file)
            save_file(tensors | {name: tensors[name] + np.float32(1e-3)}, file)
            found.add(weights_id(str(folder)))
    assert len(found) == 9, "each tensor is seen"
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "pytorch_model.bin"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes(255 - byte for byte in data))
        found.add(weights_id(str(folder)))
    (folder / "model-00001.safetensors").unlink()
    found.add(weights_id(str(folder)))
    assert len(found) == 14
    for data in (b"", b"\xff" * 4000, (300).to_bytes(8, "little") + b"{" * 4000):  # damaged: loading says it
        (folder / "model-00000.safetensors").write_bytes(data)
        found.add(weights_id(str(folder)))
    assert len(found) == 17 and None not in found


def test_a_model_of_the_hub_is_identified_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_id("owner/name") is None and weights_id("no/such/id") is None
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (refs := snapshot.parent.parent / "refs").mkdir()
    (refs / "main").write_text(COMMIT)
    assert weights_id("owner/name") == COMMIT
    monkeypatch.setattr(module, "is_offline", lambda: False)
    monkeypatch.setattr(module, "unreachable_reason", lambda: None)

    class Metadata:
        commit_hash = "f" * 40

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: Metadata)
    assert weights_id("owner/name") == "f" * 40, "the hub has a newer one, which loading would take"
    monkeypatch.setattr(module, "unreachable_reason", lambda: "no network")
    assert weights_id("owner/name") == COMMIT


def test_models_without_files_have_no_weights_to_compare() -> None:
    settings = job_settings(CaptionConfig((), "tiny"), ProcessInfo())
    assert "weights" not in settings and settings == CaptionConfig((), "tiny").fingerprint(1)
    assert "weights" in job_settings(CaptionConfig((), "scenes"), ProcessInfo())


@line("weights, tokenizer or commit of `--model` that changed")
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_job_of_other_weights_is_not_continued(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, processor = random_model("tiny")
    model.save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    (tmp_path / "a.png").write_bytes(picture())
    out = tmp_path / ("o.jsonl" if form == "jsonl" else "o")
    args = ["caption", str(tmp_path / "a.png"), "--model", str(tmp_path / "m"), "--out", str(out), "--format", form]
    args += ["--drafter", "none", "--max-new-tokens", "2", "--no-progress"]
    assert main(args) == 0
    assert main(args) == 0 and "1 skipped" in capsys.readouterr().err
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: values * np.float32(1.01) for name, values in tensors.items()}, file, {"format": "pt"})
    assert main(args) == 2
    said = capsys.readouterr().err
    assert "has captions of other weights: --model" in said and "changed since it was written" in said
    metadata = tmp_path / "o.meta.json" if form == "jsonl" else out / "_mmspec.meta.json"
    found = json.loads(metadata.read_text())
    del found["settings"]["weights"]  # of an earlier version
    metadata.write_text(json.dumps(found))
    assert main(args) == 0 and "1 skipped" in capsys.readouterr().err
