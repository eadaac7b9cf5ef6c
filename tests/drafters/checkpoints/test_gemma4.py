"""DSpark and DFlash with layers of Gemma 4, beside their formulas written out; settings of others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import check_changed
from safetensors.torch import load_file, save_file
from test_export import TARGET, H, V, draft_chain, embeddings
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.checkpoints.published import load_published
from mmspec.drafters.heads.gemma4.head import Gemma4DsparkDrafter
from mmspec.interfaces import SharedEmbeddings

__all__ = ["embeddings"]  # a fixture
D, HEADS, BLOCK, MASK = 12, 2, 4, 5
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "hidden_size": H, "intermediate_size": 40,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 256,
    "global_head_dim": D, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "vocab_size": V,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_k_eq_v": True,
    "final_logit_softcapping": 4.0, "hidden_size_per_layer_input": 0, "enable_moe_block": False, "block_size": BLOCK,
    "target_layer_ids": [0, 2, 6], "mask_token_id": MASK, "num_anchors": 512, "enable_confidence_head": False,
    "markov_rank": 6, "markov_head_type": "vanilla", "tie_word_embeddings": False, "sliding_window": 512,
    "use_double_wide_mlp": False, "num_kv_shared_layers": 0, "target_text_model_type": "gemma4_text",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def write(folder: Path, shared: SharedEmbeddings, **changes: Any) -> Path:
    config, rng = CONFIG | changes, torch.Generator().manual_seed(1)
    markov = config["markov_rank"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    shapes["lm_head.weight"] = (V, H)
    for index in range(2):
        name = f"layers.{index}."
        values = {} if config["attention_k_eq_v"] else {"v": 1}
        for part, heads in ({"q": HEADS, "k": 1} | values).items():
            shapes[f"{name}self_attn.{part}_proj.weight"] = (heads * D, H)
        shapes |= {f"{name}self_attn.{part}_norm.weight": (D,) for part in "qk"}
        shapes |= {f"{name}self_attn.o_proj.weight": (H, HEADS * D), f"{name}mlp.down_proj.weight": (H, 40)}
        shapes |= {f"{name}mlp.{part}_proj.weight": (40, H) for part in ("gate", "up")}
        norms = "input", "post_attention", "pre_feedforward", "post_feedforward"
        shapes |= {f"{name}{norm}_layernorm.weight": (H,) for norm in norms} | {f"{name}layer_scalar": (1,)}
    if markov:
        shapes |= {f"markov_head.markov_w{part}.weight": (V, markov) for part in (1, 2)}
    weights = {
        name: torch.randn(shape, generator=rng) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    weights["embed_tokens.weight"] = shared.embed_tokens.weight.detach().clone()  # type: ignore[union-attr,operator]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def norm(rows: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(heads: Tensor, positions: Tensor) -> Tensor:
    """[n, H, 12] of which the first 3 of 6 pairs (i, i + 6) are rotated, at the pace of the whole head."""
    angles = positions[:, None, None] / 1e6 ** (torch.arange(6) / 6) * (torch.arange(6) < 3)
    first, second = heads.chunk(2, dim=-1)
    parts = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(parts, dim=-1)


def block_logits(weights: dict[str, Tensor], states: Tensor, anchor: int, cap: float | None) -> Tensor:
    """[k, V] logits of a block behind [n, 3 H] states."""
    context = norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    rows = weights["embed_tokens.weight"][[anchor, *[MASK] * (BLOCK - 1)]] * H**0.5
    positions = torch.arange(len(context) + BLOCK)
    for index in range(2):
        layer = {key.removeprefix(f"layers.{index}."): value for key, value in weights.items()}
        normed = norm(rows, layer["input_layernorm.weight"])
        both = torch.cat((context, normed))
        raw = both @ layer["self_attn.k_proj.weight"].T
        values = norm(both @ layer["self_attn.v_proj.weight"].T if "self_attn.v_proj.weight" in layer else raw)
        keys = turn(norm(raw, layer["self_attn.k_norm.weight"])[:, None], positions)[:, 0]
        queries = (normed @ layer["self_attn.q_proj.weight"].T).view(BLOCK, HEADS, D)
        queries = turn(norm(queries, layer["self_attn.q_norm.weight"]), positions[-BLOCK:])
        outputs = ((queries @ keys.T).softmax(-1) @ values).flatten(1) @ layer["self_attn.o_proj.weight"].T
        rows = rows + norm(outputs, layer["post_attention_layernorm.weight"])
        normed = norm(rows, layer["pre_feedforward_layernorm.weight"])
        gate = functional.gelu(normed @ layer["mlp.gate_proj.weight"].T, approximate="tanh")
        outputs = (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
        rows = (rows + norm(outputs, layer["post_feedforward_layernorm.weight"])) * layer["layer_scalar"]
    logits = norm(rows, weights["norm.weight"]) @ weights["lm_head.weight"].T
    return cap * (logits / cap).tanh() if cap else logits


@pytest.mark.parametrize(
    "changes",
    [{}, {"markov_rank": 0}, {"attention_k_eq_v": False, "final_logit_softcapping": None}],
)
@torch.no_grad()
def test_blocks_are_those_of_the_formulas(
    changes: dict[str, Any], embeddings: SharedEmbeddings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = load_published(write(tmp_path, embeddings, **changes), TARGET)
    assert type(drafter) is Gemma4DsparkDrafter and drafter.mask_token_id == MASK and not caplog.records
    drafter.top_k, rng = 1, torch.Generator().manual_seed(2)
    ids, states = torch.randint(6, V, (12,), generator=rng), torch.randn(3, 11, H, generator=rng)
    tokens, logits = draft_chain(drafter, embeddings, embeddings.embed(ids), states, ids)
    weights = load_file(tmp_path / "model.safetensors")
    config = CONFIG | changes
    expected = block_logits(weights, torch.cat(list(states), dim=-1), int(ids[-1]), config["final_logit_softcapping"])
    assert torch.allclose(logits, expected, atol=1e-4)
    if not config["markov_rank"]:
        assert tokens[0] == int(expected[0].argmax())
        return
    chain = [int(ids[-1])]
    first, second = (weights[f"markov_head.markov_w{part}.weight"] for part in (1, 2))
    for row in expected:
        chain.append(int((row + second @ first[chain[-1]]).argmax()))
    assert tokens[:BLOCK] == chain[1:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported in a dspark-gemma4 head"),
        ({"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8 is not supported"),
        (
            {"final_logit_softcapping": -1},
            "final_logit_softcapping of a Gemma 4 DSpark head must be a finite number above 0; got -1",
        ),
        ({"num_attention_heads": 5}, "needs num_attention_heads and projections"),
        ({"attention_k_eq_v": False}, r"lacks layers\.0\.self_attn\.v_proj\.weight"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, embeddings: SharedEmbeddings, tmp_path: Path) -> None:
    check_changed(write(tmp_path, embeddings), TARGET, message, changes)
