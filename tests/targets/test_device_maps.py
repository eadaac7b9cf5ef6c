"""Models whose weights accelerate loads layer by layer, from main memory or from a disk.

Calls are compared with plain `generate` of the same model: tokens, scores, caches, generator.
"""

from __future__ import annotations

from pathlib import Path

import adversarial as adversarial
import pytest
import tiny_heads as tiny_heads
import tiny_models as tiny
import torch
from parity import GREEDY, assert_parity, check, drafted
from transformers import PreTrainedModel

from mmspec.interfaces.target import SharedEmbeddings
from mmspec.targets.module_scan import scan_modules


def fresh_model() -> PreTrainedModel:
    return tiny.build_model(tiny.ModelSpec(seed=29))


MAP = {
    "model.vision_tower": "cpu",
    "model.multi_modal_projector": "cpu",
    "model.language_model.embed_tokens": "cpu",
    "model.language_model.rotary_emb": "cpu",
    "model.language_model.norm": "cpu",
    "model.language_model.layers.0": "cpu",
    "model.language_model.layers.1": "disk",
    "lm_head": "cpu",
}
OFFLOADED = {
    "one device": dict.fromkeys(MAP, "cpu"),
    "a layer on disk": MAP,
    "the embeddings on disk": MAP | {"model.language_model.embed_tokens": "disk", "model.vision_tower": "disk"},
    "all on disk": dict.fromkeys(MAP, "disk"),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_a_device_map(name: str, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    model = dispatch_model(fresh_model(), OFFLOADED[name], "cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert ("disk" in name) == any(weight.device.type == "meta" for weight in model.parameters())
    assert not scan_modules(model).can_use_inference_mode
    drafted(check(model))


def test_weights_in_main_memory_for_another_device() -> None:
    from accelerate import cpu_offload

    model = fresh_model()
    cpu_offload(model, torch.device("cpu"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    drafted(check(model))


def test_a_device_map_of_from_pretrained(tmp_path: Path) -> None:
    saved = fresh_model()
    saved.save_pretrained(tmp_path)
    model = type(saved).from_pretrained(tmp_path, device_map=MAP, offload_folder=str(tmp_path / "weights"))
    model.tiny_spec = saved.tiny_spec
    assert model.hf_device_map == MAP
    drafted(check(model.eval()))


@pytest.mark.parametrize("drafter", ["auto", "hybrid", "recycling"])
def test_drafters_of_an_offloaded_model(drafter: str, tmp_path: Path) -> None:
    from accelerate import disk_offload

    model = fresh_model()
    disk_offload(model, str(tmp_path), torch.device("cpu"))
    inputs = tiny.build_inputs(model, 27, 1, images=[1])
    stats = assert_parity(model, inputs, drafter, patch_options={"tree_size": 8}, do_sample=False, max_new_tokens=40)
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["decoupled", "falcon"])
def test_a_draft_head_that_shares_offloaded_embeddings(kind: str, tmp_path: Path) -> None:
    from accelerate import disk_offload

    spec = tiny.ModelSpec(seed=29)
    model, rows = tiny.build_model(spec), torch.tensor([5, 3, 90])
    expected = model.get_output_embeddings().weight[rows].detach().clone()
    disk_offload(model, str(tmp_path), torch.device("cpu"))
    shared = SharedEmbeddings(model.get_input_embeddings(), model.get_output_embeddings())
    assert torch.allclose(shared.lm_head_rows(rows), expected, atol=1e-6)
    inputs = tiny.build_inputs(model, 27, 2, images=[1, 1])
    drafter = tiny_heads.build_drafter(kind, spec)
    stats = assert_parity(model, inputs, drafter, patch_options={"tree_size": 8}, **GREEDY)
    assert stats.num_draft_tokens > 0
