"""The head of the target's checkpoint (MTP): jobs, positions and its files. Its drafts: `test_own_drafters`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import torch
from parity import build_cached_model
from safetensors.torch import save_file
from tiny_processor import TinyProcessor
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mmspec.app.cli.main import main
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.drafters import registry
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.head import last_visible
from mmspec.interfaces import OwnHeadError
from mmspec.resolve import resolve_drafter
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILY = pytest.mark.parametrize("family", own.FAMILIES)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec(family, **{"seed": 3, "layers": 3, **changes}))


def with_head(
    model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    tensors = own.head_tensors(model) if tensors is None else dict(tensors)
    own.write_checkpoint(model, folder, tensors, **options)
    return tensors


def read(model: PreTrainedModel, **options: Any) -> MTPDrafter:
    return MTPDrafter(read_own_head(find_adapter(model)), **options)


def test_a_job_runs_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mmspec caption` with a recurrent target and its head: the captions are those of single rows without drafts."""
    model = model_of(own.FAMILIES[0], calm=True)
    with_head(model, tmp_path / "model", own.head_tensors(model, echo=2.0))
    monkeypatch.setattr("mmspec.app.modeling.load.load_model", lambda *args, **options: (model, TinyProcessor(model)))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(5):
        render_scene(generate_scene(number)).save(pictures / f"{number}.png")
    given = ["caption", str(pictures), "--model", str(tmp_path / "model"), "--prompt", "abc", "--dtype", "float32"]
    found = []
    for drafter, size in (("none", "1"), ("auto", "3")):
        out = tmp_path / f"{drafter}.jsonl"
        flags = ["--drafter", drafter, "--batch-size", size, "--max-new-tokens", "10", "--out", str(out)]
        assert main([*given, *flags, "--no-progress"]) == 0
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert len({row["caption"] for row in found[0]}) > 1 and {row["drafter"] for row in found[1]} == {"mtp"}
    assert [row["caption"] for row in found[0]] == [row["caption"] for row in found[1]]


def test_pictures_and_positions_reach_the_drafts(tmp_path: Path) -> None:
    """In text all visual modes and axes are one function; with images they are not."""
    model = model_of("glm_ocr")
    with_head(model, tmp_path)
    drafter = read(model)
    text = tiny.build_inputs(model, 5, 1, images=[0], padding="none")
    image = tiny.build_inputs(model, 5, 1, images=[1], padding="none")
    scores: dict[str, list[Tensor]] = {}
    for mode in ("coupled", "placeholder"):
        drafter.fix_visual_mode(mode)
        scores[mode] = [own.trees_of(model, drafter, given)[0].scores for given in (text, image)]  # type: ignore[misc]
    torch.testing.assert_close(scores["coupled"][0], scores["placeholder"][0])
    assert not torch.allclose(scores["coupled"][1], scores["placeholder"][1])


def test_the_window_counts_what_a_row_sees() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    assert last_visible(mask, 2).int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1]]


def test_a_copy_shares_the_weights_only(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    drafter = read(model)
    twin = drafter.replicate()
    assert twin is not drafter and twin.head is drafter.head


# --- files ------------------------------------------------------------------------------------------------------------


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(read_own_head(find_adapter(model)).block.state_dict())


@FAMILY
@pytest.mark.parametrize("indexed", [True, False])
def test_fused_and_split_tensors_are_one_head(family: str, indexed: bool, tmp_path: Path) -> None:
    model = model_of(family)
    tensors = with_head(model, tmp_path / "fused", indexed=indexed)
    fused = weights(model)
    with_head(model, tmp_path / "split", own.split_experts(tensors), indexed=indexed)
    split = weights(model)
    assert fused.keys() == split.keys() and all(torch.equal(fused[name], split[name]) for name in fused)


def test_fp8_blocks_are_dequantised(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    tensors = own.head_tensors(model)
    name = "mtp.layers.0.mlp.up_proj.weight"
    scale = tensors[name].abs().amax() / 448
    quantised = {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(1, 1)}
    with_head(model, tmp_path, tensors | quantised)
    found = weights(model)["layer.mlp.up_proj.weight"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), tensors[name], rtol=0.1, atol=float(scale))
    with_head(model, tmp_path, tensors | {name: quantised[name]})
    with pytest.raises(OwnHeadError, match="without scales"):
        weights(model)
    with_head(model, tmp_path, tensors | quantised | {f"{name}_scale_inv": torch.ones(2, 1)})
    with pytest.raises(OwnHeadError, match="scale for each block"):
        weights(model)


def test_a_head_with_its_own_lm_head(tmp_path: Path) -> None:
    """A copy of the target's is shared; another one is used."""
    model = model_of("glm_ocr")
    prefix, tensors = own.head_prefix(model), own.head_tensors(model)
    lm_head = model.get_output_embeddings().weight.detach()
    embeds = {f"{prefix}embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
    with_head(model, tmp_path / "copy", tensors | embeds | {f"{prefix}shared_head.head.weight": lm_head.clone()})
    assert read(model).head.lm_head is None
    with_head(model, tmp_path / "own", tensors | {f"{prefix}shared_head.head.weight": lm_head + 1})
    drafter = read(model)
    hidden = torch.randn(1, 1, lm_head.shape[1])
    own_logits = drafter.head.logits(hidden, find_adapter(model).shared_embeddings, None)
    torch.testing.assert_close(own_logits, drafter.head.output_norm(hidden) @ (lm_head + 1).T)


def broken(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint with a fault."""
    some = "mtp.layers.0.mlp.up_proj.weight"
    if kind == "none":
        return {"other": torch.zeros(1)}
    if kind == "half":
        return {name: value for name, value in tensors.items() if "mlp" not in name}
    if kind == "shape":
        return tensors | {some: tensors[some][:-1].clone()}
    if kind == "nan":
        return tensors | {some: tensors[some] * torch.nan}
    if kind == "integers":
        return tensors | {some: tensors[some].to(torch.int8)}
    return tensors | {"mtp.hyper_connection_mixer.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("none", "has dropped its head"),
        ("half", "lacks 3 of 15 tensors"),
        ("shape", "must have the shape"),
        ("integers", "without scales"),
        ("nan", "not finite"),
        ("further", "a part that is not known"),
    ],
)
def test_a_bad_checkpoint_is_one_line_and_hybrid(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path, broken(kind, own.head_tensors(model)))
    registry.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mmspec"):
        assert resolve_drafter("mtp", find_adapter(model)).name == "hybrid"
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1 and reason in lines[0] and "hybrid" in lines[0]
    assert resolve_drafter("auto", find_adapter(model)).name == "arbitrated"


def test_files_that_lead_elsewhere_or_are_damaged(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    folder = tmp_path / "model"
    tensors = with_head(model, folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    save_file(tensors, tmp_path / "head.safetensors")
    for name in ("../head.safetensors", str(tmp_path / "head.safetensors")):
        changed = {key: name if key.startswith("mtp.") else value for key, value in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(OwnHeadError, match="files of its own folder"):
            weights(model)
    pickled = {key: "head.bin" if key.startswith("mtp.") else value for key, value in content["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": pickled}))
    torch.save(tensors, folder / "head.bin")
    with pytest.raises(OwnHeadError, match="has no tensors"):
        weights(model)
    index.write_text(json.dumps(content))
    (folder / "head.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(OwnHeadError, match="damaged"):
        weights(model)
    (folder / "head.safetensors").unlink()
    with pytest.raises(OwnHeadError, match="missing"):
        weights(model)


def test_where_the_checkpoint_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, or the snapshot of the model's own revision; nothing is fetched."""
    model = model_of("qwen3_5")
    monkeypatch.setattr(model.config, "_name_or_path", "")
    with pytest.raises(OwnHeadError, match="not loaded from a checkpoint") as raised:
        read(model)
    assert not raised.value.is_expected
    monkeypatch.setattr(model.config, "_name_or_path", "some-owner/some-model")
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options)
        raise OSError("offline")

    monkeypatch.setattr("mmspec.targets.own_checkpoint.snapshot_download", snapshot)
    monkeypatch.setattr(model.config, "_commit_hash", "abc", raising=False)
    with pytest.raises(OwnHeadError, match="not in the local cache"):
        read(model)
    assert asked == {"revision": "abc", "local_files_only": True}


def test_dedicated_embeddings_and_other_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    monkeypatch.setattr(model.config.get_text_config(), "mtp_use_dedicated_embeddings", True, raising=False)
    with pytest.raises(OwnHeadError, match="mtp_use_dedicated_embeddings"):
        read(model)
    with pytest.raises(OwnHeadError, match="no draft head of llava is known"):
        read(model_of("llava"))
    with pytest.raises(ValueError, match="comes with the checkpoint"):
        registry.build_drafter("mtp")


def test_auto_takes_the_checkpoints_head_of_a_loaded_model(tmp_path: Path) -> None:
    """transformers loads the target without it."""
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    drafter = resolve_drafter("auto", find_adapter(loaded))
    assert isinstance(drafter, MTPDrafter) and "15 tensors" in drafter.description
    state = torch.random.get_rng_state()
    read(model)
    assert torch.equal(torch.random.get_rng_state(), state)
