"""Every key of every published layout is read, has no effect, or is refused by name; quantised tensors are refused."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import write_head
from published_layouts import DRAFT_V, LAYOUTS, H, V
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.drafters.checkpoints.known_keys import BY_TENSORS, EXPECTED, READ, WITHOUT_EFFECT, check_keys
from mmspec.drafters.checkpoints.published import MASK_EMBEDDING_FILE, load_published
from mmspec.drafters.heads.registry import methods
from mmspec.interfaces import SharedEmbeddings, TargetInfo

TARGET = TargetInfo("llava", H, V, 8)
IDS = {"bos_token_id": None, "eos_token_id": [7, 9], "pad_token_id": 0}
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SpecForge, DFlash": (
        "DFlash, z-lab",
        IDS
        | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dtype": "bfloat16", "target_hidden_size": None}
        | {"num_target_layers": 8, "use_sliding_window": False, "max_window_layers": 5, "rope_scaling": None},
    ),
    "SpecForge, DSpark": (
        "DSpark, SpecForge",
        IDS | {"initializer_range": 0.02, "transformers_version": "5.5.3", "use_cache": True},
    ),
    "SpecForge, EAGLE-3.1": ("EAGLE-3, SpecForge", IDS | {"rope_theta": 1000000.0, "mlp_bias": False}),
    "speculators": (
        "DSpark, speculators",
        {"speculators_version": "0.7.0", "target_hidden_size": None, "sliding_window_non_causal": False}
        | {"confidence_head_with_markov": True, "transformers_version": "5.2.0", "has_no_defaults_at_init": False},
    ),
    "speculators, April 2026": ("DFlash, speculators", {"max_anchors": 3072, "dtype": "float32"}),
    "AngelSlim": (
        "EAGLE-3, AngelSlim, M-RoPE",
        {"norm_type": "rms", "use_cla": False, "cla_share_factor": 2, "use_qk_norm": True, "use_rotary_pos_emb": True}
        | {"dense_list": [2048, 0], "im_start_id": 4, "pool_type": "last", "class_num": 0, "org_vocab_size": V},
    ),
    "DeepSpec": (
        "DSpark, DeepSeek",
        {"target_model_type": "qwen3", "num_anchors": 512, "attention_dropout": 0.0, "attention_bias": False},
    ),
    "EAGLE": ("MSD, LLaVA-1.5", {"mm_hidden_size": 1024, "mm_vision_tower": "clip", "tune_mm_mlp_adapter": False}),
}
"""Trainer -> a layout that it publishes, and further keys of its configs."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_of_a_layout_are_known(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_published(write_head(tmp_path, LAYOUTS[name]), TARGET)
    assert "not known here" not in caplog.text


@pytest.mark.parametrize("name", TRAINERS)
def test_keys_of_a_trainer_are_known(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout, values = TRAINERS[name]
    values = {key: value for key, value in values.items() if key not in LAYOUTS[layout].config}
    load_published(write_head(tmp_path, LAYOUTS[layout], **values), TARGET)
    assert "not known here" not in caplog.text


def wrong(key: str) -> Any:
    """A value of another network."""
    return {"layer_types": ["chunked_attention"], "projector_type": "domino"}.get(key, 3.5)


@pytest.mark.parametrize("method", ["eagle", "vispec", "eagle3", "dspark", "dflash2", "domino", "lilicorr"])
def test_a_setting_of_another_network_is_refused_by_name(method: str) -> None:
    """In the config, in the layer's and in the method's own section; its harmless values are not."""
    read = methods()[method].published_keys
    for key in sorted(set(EXPECTED) - read - READ):
        for path in ("", "transformer_layer_config", "dflash_config", "eagle_config"):
            name = f"{path}.{key}" if path else key
            with pytest.raises(ValueError, match=rf"^{name} .* is not supported in such a draft head"):
                check_keys({path: {key: wrong(key)}} if path else {key: wrong(key)}, read)
        for value in (None, *EXPECTED[key]):
            check_keys({key: value}, read)


def changed(value: Any) -> Any:
    """Another value of the same kind, for a key of a config."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [changed(value[0]), *value[1:]]
    if isinstance(value, dict):
        return {key: changed(one) for key, one in value.items()}
    return value + 1 if isinstance(value, (int, float)) else "other"


def what_is_read(folder: Path) -> tuple[Any, ...]:
    """The modules and settings of a drafter, besides its weights."""
    drafter: Any = load_published(folder, TARGET)
    names = "mask_token_id", "embedding_scale", "hidden_state_indices", "block_size"
    return type(drafter), drafter.head.config, *(getattr(drafter, name) for name in names)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if "dflash_config" in layout.config])
def test_each_key_of_a_block_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Another value makes another drafter, or is refused; else the key is in the list of those without effect."""
    layout = LAYOUTS[name]
    expected, section = what_is_read(write_head(tmp_path / "as it is", layout)), layout.config["dflash_config"]
    # Names; what the tensors say; and the vocabulary, which in heads for LLaVA is that of its language model.
    others = {"architectures", "dflash_config", "model_type", "vocab_size"}
    others |= {"confidence_head_with_markov", "enable_confidence_head"}
    unread = list[str]()
    for key in sorted({*layout.config, *section} - WITHOUT_EFFECT - BY_TENSORS - others):
        changes = {"dflash_config": {**section, key: changed(section[key])}} if key in section else {}
        folder = write_head(tmp_path / key, layout)
        config = {**layout.config, **(changes or {key: changed(layout.config[key])})}
        (folder / "config.json").write_text(json.dumps(config))
        with suppress(ValueError):  # which names it: `test_what_does_not_fit` of each method
            if what_is_read(folder) == expected:
                unread.append(key)
    assert not unread


def test_lists_of_keys_do_not_overlap() -> None:
    read = READ.union(*(method.published_keys for method in methods().values()))
    assert not (READ & set(EXPECTED) or BY_TENSORS & WITHOUT_EFFECT or (BY_TENSORS | READ) & set(EXPECTED))
    assert not {"attention_value_scale", "use_gemma_norm", "quantization_config"} & (read | WITHOUT_EFFECT)


def test_an_unknown_key_is_named(caplog: pytest.LogCaptureFixture) -> None:
    check_keys({"hidden_size": 8, "novel_gate": 2.0, "dflash_config": {"twist": True, "off": False}}, ())
    assert caplog.text.count("not known here") == 1 and "dflash_config.twist, novel_gate;" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_key_in_two_places_must_agree(tmp_path: Path) -> None:
    """`target_layer_ids` and others are written flat and in a section."""
    folder = write_head(tmp_path, LAYOUTS["DFlash, z-lab"], mask_token_id=3)
    with pytest.raises(ValueError, match=rf"mask_token_id is 3, dflash_config\.mask_token_id {V - 1}: delete the one"):
        load_published(folder, TARGET)
    load_published(write_head(tmp_path, LAYOUTS["DFlash, z-lab"], mask_token_id=V - 1), TARGET)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("name", ["EAGLE-1/2, Vicuna", "ViSpec, LLaVA-NeXT", "EAGLE-3, EAGLE code", "DSpark, DeepSeek"])
@pytest.mark.parametrize("tensor", ["fc.weight", "embed_tokens.weight"])
def test_quantised_tensors_are_no_numbers(name: str, dtype: torch.dtype, tensor: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, LAYOUTS[name])
    weights = load_file(folder / "model.safetensors")
    shape = weights[tensor].shape if tensor in weights else (LAYOUTS[name].config.get("vocab_size", V), H)
    weights[tensor] = torch.ones(shape).to(dtype)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{tensor} holds {dtype} values: a quantised head is not read"):
        load_published(folder, TARGET)


def with_embeddings() -> TargetInfo:
    embed = nn.Embedding.from_pretrained(torch.randn(V, H, generator=torch.Generator().manual_seed(1)))
    shared = SharedEmbeddings(embed, nn.Linear(H, V, bias=False))
    return TargetInfo("llava", H, V, 8, shared_embeddings=shared)


@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("form", ["tensor", "row", "dict", "named"])
def test_the_embedding_of_the_mask_token_in_a_file(form: str, scale: float | None, tmp_path: Path) -> None:
    """Alone or beside its id, in place of the row of the embeddings."""
    layout = LAYOUTS["DFlash, z-lab"]
    section = layout.config["dflash_config"] | ({} if scale is None else {"input_embedding_scale": scale})
    folder, mask = (
        write_head(tmp_path, layout, dflash_config=section | {"mask_token_id": V + 50}),
        torch.arange(float(H)),
    )
    with pytest.raises(
        ValueError, match=rf"mask_token_id must be one of the {V} ids that have embeddings; got {V + 50}"
    ):
        load_published(folder, TARGET)
    forms: dict[str, Any] = {
        "tensor": mask, "row": mask[None], "dict": {"mask_token_id": V + 50, "embedding": mask},
        "named": {"mask_embedding": mask},
    }  # fmt: skip
    torch.save(forms[form], folder / MASK_EMBEDDING_FILE)
    drafter: Any = load_published(folder, with_embeddings())
    assert drafter.mask_token_id is None and torch.equal(drafter.head.mask_embedding.detach(), mask * (scale or 1.0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"mask_token_id": 7, "embedding": torch.zeros(H)},
            r"mask_embedding\.pt is of mask_token_id 7; config\.json says",
        ),
        (torch.zeros(H + 1), rf"mask_embedding must be \[{H}\]; got \[{H + 1}\]"),
        ({}, "must hold one tensor"),
        (torch.zeros(H, dtype=torch.int8), "mask_embedding holds torch.int8 values"),
    ],
)
def test_a_mask_embedding_that_does_not_fit(content: Any, message: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, LAYOUTS["DFlash, z-lab"])
    torch.save(content, folder / MASK_EMBEDDING_FILE)
    with pytest.raises(ValueError, match=message):
        load_published(folder, TARGET)
    (folder / MASK_EMBEDDING_FILE).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt is"):
        load_published(folder, TARGET)


@pytest.mark.parametrize("token", [-1, V, 10**6])
@pytest.mark.parametrize("name", ["DFlash, z-lab", "DSpark, DeepSeek", "DFlash, speculators"])
def test_a_mask_token_outside_the_embeddings(name: str, token: int, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    changes: dict[str, Any] = {"mask_token_id": token}
    if "dflash_config" in layout.config:
        changes = {"dflash_config": layout.config["dflash_config"] | changes}
    with pytest.raises(ValueError, match=f"mask_token_id must be one of the {V} ids that have embeddings; got {token}"):
        load_published(write_head(tmp_path, layout, **changes), TARGET)


def test_a_mask_token_of_its_own_embeddings(tmp_path: Path) -> None:
    """A head may have more embeddings than its target."""
    folder = write_head(tmp_path, LAYOUTS["DSpark, DeepSeek"], mask_token_id=V + 1)
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = torch.randn(V + 2, H)
    save_file(weights, folder / "model.safetensors")
    drafter: Any = load_published(folder, with_embeddings())
    assert drafter.mask_token_id == V + 1 and drafter.own_embeddings.num_embeddings == V + 2


@pytest.mark.parametrize("name", ["EAGLE-1/2, Vicuna", "EAGLE-3, EAGLE code", "DFlash, z-lab"])
def test_a_missing_size_of_heads_is_that_of_the_tensors(name: str, tmp_path: Path) -> None:
    """It need not be the hidden size over the number of heads."""
    layout = LAYOUTS[name]
    folder = write_head(tmp_path, layout, **{"head_dim": 24})
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    head = load_published(folder, TARGET).head
    assert head.config.head_dim == 24 and DRAFT_V


def test_prefixes_of_tensor_names(tmp_path: Path) -> None:
    """Of early heads of SpecForge, and of Muse Glimmer's assistant."""
    folder = write_head(tmp_path, LAYOUTS["DSpark, SpecForge"])
    weights = load_file(folder / "model.safetensors")
    expected = load_published(folder, TARGET).head.state_dict()

    def renamed(name: str) -> str:
        for own, other in (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc.")):
            if name.startswith(own):
                return other + name.removeprefix(own)
        return f"logit_head.{name}" if name.startswith(("markov_head", "confidence_head")) else name

    others: dict[str, Tensor] = {renamed(name): value for name, value in weights.items()}
    assert len(set(others) - set(weights)) == 6
    save_file(others, folder / "model.safetensors")
    found = load_published(folder, TARGET).head.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    save_file(others | {"fc.weight": weights["fc.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights hold fc\.weight twice"):
        load_published(folder, TARGET)
