"""EAGLE-3 heads with the keys that their trainers publish, against a slow reader; embeddings of their own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from parity import assert_parity
from published_heads import check_changed
from safetensors.torch import load_file, save_file
from test_export import TARGET, H, N, V, build, draft_chain, embeddings, read_eagle3, sequences_of
from test_published import folder_of, load_fixture
from torch import Tensor, nn

from mmspec.drafters.checkpoints.export import export_head
from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.checkpoints.state_dict import to_stored
from mmspec.drafters.heads.eagle.checkpoint import is_msd
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.interfaces import SharedEmbeddings, TargetInfo

__all__ = ["embeddings"]  # a fixture
DRAFT_IDS = [1, 2, *range(6, 40, 2)]
OWN = 16
"""Hidden size of a narrow head."""
SLIDES = {"architectures": ["Eagle3Speculator"], "sliding_window": None}
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, layers: int = 3, **settings: Any) -> Path:
    """A head as vLLM reads it, with further settings and the tensors that they need."""
    export_head(folder, build("eagle3"), TARGET, "vllm")
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    config |= settings
    nested = config | config["eagle_config"]
    if nested.get("norm_before_fc"):
        weights["input_norm.weight"] = random(1, layers * H)
    if nested.get("fc_norm"):
        weights |= {f"fc_norm.{index}.weight": random(2 + index, H) for index in range(layers)}
    if config["model_type"] == "qwen3":
        weights |= {f"midlayer.self_attn.{name}_norm.weight": random(6, 8) for name in "qk"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def check(folder: Path, shared: SharedEmbeddings, target: TargetInfo = TARGET, own: Tensor | None = None) -> Any:
    """Compare a greedy chain of four drafts and its logits; returns the drafter."""
    drafter = load_published(folder, target)
    assert isinstance(drafter.head, Eagle3Head)
    drafter.top_k, weight = 1, shared.embed_tokens.weight
    assert isinstance(weight, Tensor)
    ids, states = (
        torch.randint(6, V, (10,), generator=torch.Generator().manual_seed(2)),
        random(3, 3, 9, target.hidden_size),
    )
    tokens, logits = draft_chain(drafter, shared, weight[ids], states, ids)
    rows = weight if own is None else own
    text = sequences_of(drafter, shared, states, ids, embeds=rows[ids], embedding=rows)
    read, expected = read_eagle3(folder, drafter, text)
    assert tokens == read and torch.allclose(logits[:4], expected, atol=2e-4)
    return drafter


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_before_fc": True},
        {"eagle_config": {"norm_before_fc": True}},
        {"fc_norm": True},
        {"norm_output": True},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},  # EAGLE-3.1
        {"model_type": "qwen3"},  # the layer of speculators
        {"model_type": "qwen3", "norm_before_fc": True, "norm_output": True},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
    ],
)
@torch.no_grad()
def test_settings_of_the_network(settings: dict[str, Any], embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    drafter = check(write(tmp_path, **settings), embeddings)
    if "rope_scaling" not in settings:
        assert drafter.c_weights(None) is None, "C does not know it"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),  # SGLang, NVIDIA
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "eagle_config": {}}, (1, 3, 6)),  # vLLM
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
            },
            (1, 3, 6),
        ),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
        ({"eagle_config": None}, (2, 4, 5)),
    ],
)
def test_ids_of_layers(settings: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    folder = write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert load_published(folder, TARGET).hidden_state_indices == layers
    (folder / "config.json").write_text(
        json.dumps(config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, N]}})
    )
    with pytest.raises(ValueError, match=r"eagle_config.eagle_aux_hidden_state_layer_ids \[1, 3, 8\] are not all"):
        load_published(folder, TARGET)


def test_what_is_exported_for_sglang_is_read_as_it_was_written(tmp_path: Path) -> None:
    export_head(tmp_path, build("eagle3", (1, 3, 7)), TARGET, "sglang")
    assert load_published(tmp_path, TARGET).hidden_state_indices == (1, 3, 7)


@torch.no_grad()
def test_trained_embeddings_are_kept(embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    """Those of the target would change every draft; a copy of the target's is dropped."""
    folder, target = write(tmp_path), replace(TARGET, shared_embeddings=embeddings)
    weights = load_file(folder / "model.safetensors")
    rows: Tensor = embeddings.embed_tokens.weight.detach()  # type: ignore[assignment,union-attr]
    trained = rows + random(5, V, H)
    save_file(weights | {"embed_tokens.weight": trained}, folder / "model.safetensors")
    drafter = check(folder, embeddings, target, own=trained)
    assert drafter.own_embeddings is not None
    for copy in (rows, rows.bfloat16(), rows[: V - 5]):
        save_file(weights | {"embed_tokens.weight": copy.clone()}, folder / "model.safetensors")
        assert check(folder, embeddings, target).own_embeddings is None
    save_file(weights | {"embed_tokens.weight": trained[: V - 5].clone()}, folder / "model.safetensors")
    padded = torch.cat((trained[: V - 5], rows[V - 5 :]))
    check(folder, embeddings, target, own=padded)


def test_trained_embeddings_of_other_layouts(tmp_path: Path) -> None:
    """An EAGLE head too: without the target at hand its own are kept."""
    folder = folder_of("eagle", tmp_path)
    target = TargetInfo("llava", 16, 48, 8)
    embedding = load_fixture("eagle")[1]["embedding"]
    drafter = load_published(folder, target)
    assert drafter.own_embeddings is not None and torch.equal(drafter.own_embeddings.weight, embedding)
    shared = SharedEmbeddings(nn.Embedding.from_pretrained(embedding), nn.Linear(16, 48))
    assert load_published(folder, replace(target, shared_embeddings=shared)).own_embeddings is None


@torch.no_grad()
def test_a_head_that_is_narrower_than_its_target(embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    folder = write(tmp_path, hidden_size=OWN, target_hidden_size=H, head_dim=8)
    shapes = {
        "fc.weight": (OWN, 3 * H), "norm.weight": (OWN,), "lm_head.weight": (len(DRAFT_IDS), OWN),
        "embed_tokens.weight": (V, OWN), "midlayer.self_attn.q_proj.weight": (32, 2 * OWN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * OWN), "midlayer.self_attn.v_proj.weight": (16, 2 * OWN),
        "midlayer.self_attn.o_proj.weight": (OWN, 32), "midlayer.mlp.gate_proj.weight": (40, OWN),
        "midlayer.mlp.up_proj.weight": (40, OWN), "midlayer.mlp.down_proj.weight": (OWN, 40),
        **{f"midlayer.{name}.weight": (OWN,) for name in NORMS},
    }  # fmt: skip
    kept = load_file(folder / "model.safetensors")
    weights = {name: 0.5 * random(index, *shape) for index, (name, shape) in enumerate(shapes.items())}
    save_file(weights | {name: kept[name] for name in ("d2t", "t2d")}, folder / "model.safetensors")
    check(folder, embeddings, replace(TARGET, shared_embeddings=embeddings), own=weights["embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"of hidden_size 32 \(its own: 16\); the target has 64"):
        load_published(folder, replace(TARGET, hidden_size=64))
    del weights["embed_tokens.weight"]
    save_file(weights | {name: kept[name] for name in ("d2t", "t2d")}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is missing: the embeddings of the target, 32 wide"):
        load_published(folder, TARGET)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": OWN, "target_hidden_size": 32},
        {"qk_norm": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
    ],
)
def test_whole_calls_with_images(changes: dict[str, Any], tmp_path: Path) -> None:
    """Two rows of other lengths, greedy and sampled: the same tokens, and drafts were scored."""
    model = tiny.build_model(tiny.ModelSpec(family="llava"))
    size = model.config.get_text_config().vocab_size
    config = Eagle3Config(**{
        "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": size, "head_dim": 8, "draft_vocab_size": size,
        "hidden_state_layers": (0, 1, 2),
    } | changes)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        head = Eagle3Head(config)
        weights = to_stored(head) | {"embed_tokens.weight": torch.randn(size, config.hidden_size)}
    save_file(weights, tmp_path / "model.safetensors")
    values = asdict(config) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    values |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "target_hidden_size": 32, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    inputs = tiny.build_inputs(model, seed=3, batch=2)
    for sample in (False, True):
        stats = assert_parity(
            model, inputs, str(tmp_path), patch_options={"tree_size": 12}, max_new_tokens=16, do_sample=sample
        )
        assert stats.num_draft_tokens > 100


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (SLIDES | {"layer_types": ["sliding_attention"]}, {}, "sliding_window must be a number of positions for"),
        (SLIDES | {"layer_types": ["full_attention"] * 2}, {}, "layer_types must be one of full_attention, sliding_"),
        (SLIDES | {"layer_types": ["linear_attention"]}, {}, "layer_types must be one of full_attention, sliding_"),
        ({"num_hidden_layers": 2}, {"layers.1.input_layernorm.weight": (H,)}, "an EAGLE-3 head lacks layers.1.mlp"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, {}, "rope_scaling of type 'longrope' is not supported"),
        ({"speculators_model_type": "peagle"}, {}, "speculators_model_type 'peagle' is not supported"),
        ({}, {"embed_tokens.weight": (V, 5)}, r"embed_tokens.weight must be \[V, 32\]; got \[48, 5\]"),
        ({}, {"norm.weight": (5,)}, r"norm.weight must be \[32\] for this config; got \[5\]"),
    ],
)  # fmt: skip
def test_what_stays_refused(
    settings: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    """By the key and its value, or by the tensor and both shapes."""
    check_changed(write(tmp_path, **settings), TARGET, message, tensors=tensors)


def test_msd_of_qwen2_5_vl_is_known_by_its_layer(caplog: pytest.LogCaptureFixture) -> None:
    """MSD's layer for Qwen has an input norm, EAGLE's has none."""
    weights = load_fixture("msd")[0]
    assert not is_msd({"model_type": "qwen2_5_vl"}, weights) and not caplog.records
    normed = weights | {"layers.0.input_layernorm.weight": torch.ones(16)}
    assert is_msd({"model_type": "qwen2_5_vl"}, normed) and "is taken as MSD's" in caplog.text
    assert not is_msd({"model_type": "llama"}, normed) and is_msd({"model_type": "llava"}, weights)
