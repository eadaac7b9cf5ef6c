"""DSpark and DFlash heads with the keys that their trainers publish: each of them against a slow reader."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import check_changed
from safetensors.torch import load_file, save_file
from test_export import TARGET, H, V, build, draft_chain, embeddings, read_block
from torch import Tensor, nn

from mmspec.drafters.checkpoints.export import export_head
from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.interfaces import SharedEmbeddings

__all__ = ["embeddings"]  # a fixture
MASK = 5
FLAT = {
    "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 7,
    "hidden_act": "silu", "max_position_embeddings": 40960, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
Z_LAB = {"architectures": ["DFlashDraftModel"], "block_size": 4, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
LIQUID = {
    "architectures": ["Lfm2DSparkDraftModel"], "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 2, 6],
    "rope_is_neox_style": False, "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
}  # fmt: skip
DEEPSEEK = LIQUID | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "confidence_head_with_markov": True}
del DEEPSEEK["rope_is_neox_style"]


def write(
    folder: Path, shared: SharedEmbeddings, values: dict[str, Any], markov: bool = True, **layer: Any
) -> dict[str, Any]:
    """A head of random weights with a flat config; returns the config."""
    export_head(folder, build("dspark", (1, 3, 7)), TARGET, "speculators", shared)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    unused = ("embed_tokens", "lm_head") if markov else ("embed_tokens", "lm_head", "markov_head", "confidence_head")
    save_file(
        {name: value for name, value in weights.items() if not name.startswith(unused)}, folder / "model.safetensors"
    )
    config = config["transformer_layer_config"] | FLAT | layer | values
    (folder / "config.json").write_text(json.dumps(config))
    return config


def check(
    folder: Path, shared: SharedEmbeddings, from_anchor: bool, scale: float = 1.0, is_neox: bool = True, **traits: Any
) -> None:
    """Compare the logits of a block and a greedy chain with the slow reader's."""
    drafter = load_published(folder, TARGET)
    assert isinstance(drafter, DsparkDrafter)
    drafter.top_k, rng = 1, torch.Generator().manual_seed(2)
    ids, states = torch.randint(6, V, (12,), generator=rng), torch.randn(3, 11, H, generator=rng)
    tokens, logits = draft_chain(drafter, shared, shared.embed(ids), states, ids)
    reader = read_block(folder, drafter, shared, states, ids, from_anchor=from_anchor, is_neox=is_neox)
    reader.embedding = reader.embedding * scale
    reader.mask = reader.embedding[MASK]
    for name, value in traits.items():
        setattr(reader, name, value)
    read, expected = reader.chain(len(ids), 4, torch.ones(V, dtype=torch.bool))
    assert logits.shape == expected.shape and torch.allclose(logits, expected, atol=5e-4)
    count = len(read) if reader.has_bias else 1  # else the likeliest paths of a product, no chain
    assert tokens[:count] == read[:count]


@pytest.mark.parametrize(
    ("values", "from_anchor"),
    [
        (LIQUID, True),
        (DEEPSEEK, True),
        (DEEPSEEK | {"markov_rank": 0}, True),  # dflash_*_block7
        (DEEPSEEK | {"sample_from_anchor": False}, False),
        (Z_LAB | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 6]}}, False),
        (
            Z_LAB
            | {
                "architectures": ["DSparkDraftModel"],
                "dflash_config": {
                    "mask_token_id": MASK,
                    "target_layer_ids": [0, 2, 6],
                    "markov_rank": 6,
                    "markov_head_type": "vanilla",
                    "enable_confidence_head": True,
                    "projector_type": "dspark",
                },
            },
            True,  # SpecForge, whose labels begin behind the anchor
        ),
        (
            Z_LAB
            | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 6], "sample_from_anchor": True}},
            True,
        ),
    ],
)
@torch.no_grad()
def test_anchors_pairs_and_markov_keys(
    values: dict[str, Any],
    from_anchor: bool,
    embeddings: SharedEmbeddings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nested = values.get("dflash_config", {})
    write(tmp_path, embeddings, values, markov=bool(values.get("markov_rank", nested.get("markov_rank"))))
    check(tmp_path, embeddings, from_anchor, is_neox=values.get("rope_is_neox_style") is not False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("kind", "num_tokens", "from_anchor", "warns"),
    [
        ("dspark", 4, True, False), ("dspark", 3, False, False), ("dflash", 3, False, False),
        ("dflash", 4, False, False), ("dspark", None, True, True), ("dflash", None, False, False),
        ("dspark", 9, True, True),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_anchor_of_speculators_heads(
    kind: str, num_tokens: int | None, from_anchor: bool, warns: bool, embeddings: SharedEmbeddings, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """DSpark's from the tokens that a block drafts, or assumed in one line; the first of DFlash named one more."""
    export_head(tmp_path, build("dspark", (1, 3, 7)), TARGET, "speculators", embeddings)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sample_from_anchor"]
    config |= {"speculators_model_type": kind}
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = num_tokens
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = load_published(tmp_path, TARGET)
    assert drafter.head.config.sample_from_anchor is from_anchor and drafter.max_depth == (4 if from_anchor else 3)
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == warns and all("sample_from_anchor is missing" in text for text in messages)


@torch.no_grad()
def test_a_missing_base_is_one_line(
    embeddings: SharedEmbeddings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, embeddings, LIQUID, rope_theta=None)
    assert load_published(tmp_path, TARGET).head.config.rope_theta == 10000
    assert "rope_theta is missing, and readers disagree on its default" in caplog.text
    caplog.clear()
    write(tmp_path, embeddings, LIQUID, rope_theta=None, rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    assert load_published(tmp_path, TARGET).head.config.rope_theta == 5e6 and not caplog.records


def dflash(**nested: Any) -> dict[str, Any]:
    return Z_LAB | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 6]} | nested}


SLIDES, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("layer", "nested", "windows", "causal"),
    [
        ({"layer_types": [SLIDES, FULL], "sliding_window": 6}, {}, (6, 0), (True, False)),  # z-lab, Gemma 4 and Qwen3.6
        ({"layer_types": [SLIDES, SLIDES], "sliding_window": 3, "is_causal": False}, {}, (3, 3), (False, False)),
        ({"layer_types": [FULL, FULL], "sliding_window": 3, "use_sliding_window": True}, {}, (0, 0), (False, False)),
        ({}, {"use_swa": True, "swa_window_size": 5}, (5, 5), (False, False)),  # MiMo
        ({"layer_types": [FULL, SLIDES], "sliding_window": 4}, {"causal": False}, (0, 4), (False, False)),
        ({}, {"causal": True}, (0, 0), (True, True)),
        (
            {"layer_types": [SLIDES, FULL], "sliding_window": 6, "sliding_window_non_causal": True},
            {},
            (6, 0),
            (False,) * 2,
        ),
    ],
)
@torch.no_grad()
def test_windows_and_causal_blocks(
    layer: dict[str, Any],
    nested: dict[str, Any],
    windows: Any,
    causal: Any,
    embeddings: SharedEmbeddings,
    tmp_path: Path,
) -> None:
    write(tmp_path, embeddings, dflash(**nested), markov=False, **layer)
    check(tmp_path, embeddings, from_anchor=False, windows=windows, causal=causal)


@torch.no_grad()
def test_windows_of_rows_of_other_lengths(embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    """Two rows at once draft what each drafts alone: the window is counted from the end of its own row."""
    from mmspec.drafters.heads.dspark.drafter import block_masks

    write(tmp_path, embeddings, dflash(), markov=False, layer_types=[SLIDES, FULL], sliding_window=4)
    config = load_published(tmp_path, TARGET).head.config
    both = block_masks(config, torch.tensor([9, 6]), 9, 4, has_gaps=True)
    for row, length in enumerate((9, 6)):
        alone = block_masks(config, torch.tensor([length]), length, 4, has_gaps=True)
        for mask, single in zip(both, alone, strict=True):
            assert mask is not None and single is not None
            found = mask.expand(2, 1, 4, 13)[row, 0]
            expected = single.expand(1, 1, 4, length + 4)[0, 0]
            assert torch.equal(torch.cat((found[:, :length], found[:, 9:]), dim=1), expected)
            assert not found[:, length:9].any()


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: the module multiplies, the stored rows are smaller."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 7.0


@pytest.mark.parametrize("scale", [None, 1.0, 2.5])
@torch.no_grad()
def test_embeddings_of_a_block_are_those_that_are_stored(
    scale: float | None, embeddings: SharedEmbeddings, tmp_path: Path
) -> None:
    weight: Tensor = embeddings.embed_tokens.weight  # type: ignore[assignment]
    scaled = SharedEmbeddings(ScaledEmbedding(V, H, _weight=weight), embeddings.lm_head)
    nested = {} if scale is None else {"input_embedding_scale": scale}
    write(tmp_path, embeddings, dflash(**nested), markov=False)
    check(tmp_path, scaled, from_anchor=False, scale=scale or 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LIQUID | {"architectures": ["Gemma4DSparkModel"]}, "hidden_activation None is not supported in a dspark-g"),
        (LIQUID | {"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported"),
        (LIQUID | {"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        (LIQUID | {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias True is not supported"),
        (LIQUID | {"layer_types": [SLIDES, FULL], "sliding_window": None}, "sliding_window must be a number of"),
        (LIQUID | {"layer_types": ["linear_attention", FULL]}, "layer_types must be one of full_a.*linear"),
        (LIQUID | {"layer_types": [FULL]}, "layer_types must be one of full_attention, .* each of 2 layers"),
        (LIQUID | {"markov_rank": 9}, r"markov_rank is 9; markov_head.markov_w1.weight is \[48, 6\]"),
        (LIQUID | {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported"),
        (LIQUID | {"rope_parameters": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
        (LIQUID, r"markov_rank is 6, but markov_head\.markov_w1\.weight is missing"),
    ],
)  # fmt: skip
def test_what_stays_refused(values: dict[str, Any], message: str, embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    """By the key and its value."""
    write(tmp_path, embeddings, values, markov="is missing" not in message)
    check_changed(tmp_path, TARGET, message)


def test_a_confidence_head_of_features_alone_is_left_out(embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    """It would scale scores, never change a token."""
    write(tmp_path, embeddings, DEEPSEEK | {"confidence_head_with_markov": False})
    weights = load_file(tmp_path / "model.safetensors")
    weights["confidence_head.proj.weight"] = torch.zeros(1, H)
    save_file(weights, tmp_path / "model.safetensors")
    assert load_published(tmp_path, TARGET).head.config.confidence_head is False
    check(tmp_path, embeddings, from_anchor=True)
