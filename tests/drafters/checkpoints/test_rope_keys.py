"""The rotary embedding of published heads, under the keys of either release of transformers, compared with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.rope import order_rotated_rows
from mmspec.drafters.heads.base.head import rotate_half
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.interfaces import TargetInfo

TARGET = TargetInfo("llava", 64, 96, 8)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MROPE = {"architectures": ["Eagle3LlamaForCausalLM"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
"""Of AngelSlim, whose heads of several axes alone may be rotated in part."""
SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    {"rope_type": "default"},
]


def read(**values: Any) -> EagleConfig:
    return EagleConfig.of(parse_published_config(SHAPE | values, TARGET, values.get("architectures")))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scalings_are_those_of_transformers(scaling: dict[str, Any], key: str, theta: float) -> None:
    """Under the old key `type` too, with the base beside it or within it."""
    old = key == "rope_scaling"
    values = {key: {"type" if name == "rope_type" and old else name: value for name, value in scaling.items()}}
    values = values | {"rope_theta": theta} if old else {key: values[key] | {"rope_theta": theta}}
    head = EagleHead(read(**values, max_position_embeddings=4096))
    expected = LlamaRotaryEmbedding(
        LlamaConfig(**SHAPE, max_position_embeddings=4096, rope_parameters={**scaling, "rope_theta": theta})
    )
    positions = torch.arange(0, 900, 7)[None]
    found = head.rotary_embedding(positions, torch.float32)
    for own, other in zip(found, expected(torch.zeros(1), positions), strict=True):
        assert torch.allclose(own, other, atol=2e-5)


def attention_scores(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, n] of [n, d] queries and keys."""
    queries, keys = queries * cos + rotate_half(queries) * sin, keys * cos + rotate_half(keys) * sin
    return queries @ keys.T


@pytest.mark.parametrize("key", ["rope_is_neox_style", "is_neox_style"])
@pytest.mark.parametrize(("is_neox", "share"), [(False, None), (True, 0.5), (False, 0.5), (True, 1.0)])
def test_pairs_and_parts_of_a_head(key: str, is_neox: bool, share: float | None) -> None:
    """Rows are moved so that scores are those of neighbouring pairs (or halves) of the first dimensions."""
    values = {key: is_neox} | ({} if share is None else {"partial_rotary_factor": share})
    config = read(**values | (MROPE if share else {}))
    size = int(16 * (share or 1))
    assert config.rotary_dim == (size if share else 0)
    assert read(**values).rotary_dim == 0, "other trainers rotate the whole head"
    assert read(rope_parameters={"rope_theta": 1e4} | values).rotary_dim == 0
    rng = torch.Generator().manual_seed(0)
    weights = {f"layers.0.self_attn.{name}_proj.weight": torch.randn(64, 8, generator=rng) for name in "qkv"}
    norms = {f"layers.0.self_attn.{name}_norm.weight": torch.randn(16, generator=rng) for name in "qk"}
    moved = order_rotated_rows(weights | norms, {key: is_neox}, 16, config.rotary_dim)
    assert torch.equal(moved["layers.0.self_attn.v_proj.weight"], weights["layers.0.self_attn.v_proj.weight"])
    cos, sin = EagleHead(config).rotary_embedding(torch.arange(9), torch.float32)
    inputs = torch.randn(9, 8, generator=rng)

    def turn(heads: Tensor) -> Tensor:
        """[n, 16] rotated position by position, as complex numbers."""
        angles = torch.arange(9)[:, None] / 1e4 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        first = heads[:, :size].double()
        pairs = first.unflatten(-1, (2, -1)).transpose(1, 2) if is_neox else first.unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((torch.view_as_real(turned).flatten(1), heads[:, size:].double()), dim=1)

    for head in range(4):
        plain, own = [], []
        for name in "qk":
            norm, weight = f"layers.0.self_attn.{name}_norm.weight", f"layers.0.self_attn.{name}_proj.weight"
            plain.append(inputs @ weights[weight].view(4, 16, 8)[head].T * norms[norm])
            own.append(inputs @ moved[weight].view(4, 16, 8)[head].T * moved[norm])
        expected = turn(plain[0]) @ turn(plain[1]).T
        assert torch.allclose(attention_scores(*own, cos, sin).double(), expected, atol=2e-3)


def test_angelslim_heads_rotate_with_the_default_base(caplog: pytest.LogCaptureFixture) -> None:
    """Its code reads `rope_theta` with M-RoPE alone; so does other code always."""
    angelslim: dict[str, Any] = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "rope_scaling": None,
        "rope_theta": 1000000,
    }
    assert read(**angelslim).rope_theta == 10000 and "rope_theta 1e+06 is taken as 10000" in caplog.text
    sections = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [3, 3, 2]}
    others: list[dict[str, Any]] = [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"rope_scaling": sections},
    ]
    ones: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ]
    assert [read(**angelslim | values).rope_theta for values in ones] == [1e4] * 2
    caplog.clear()
    assert [read(**angelslim | values).rope_theta for values in others] == [1e6] * 2
    del angelslim["rope_scaling"]
    assert read(**angelslim).rope_theta == 1e6 and not caplog.records


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
        (
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_scaling.partial_rotary_factor of type 'proportional'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings of"),
        (
            {"rope_scaling": YARN | {"factor": "4"}},
            "rope_scaling.factor of type 'yarn' must be a positive number; got '4'",
        ),
        ({"rope_scaling": YARN | {"factor": -1}}, "must be a positive number; got -1"),
        ({"rope_scaling": YARN | {"beta_fast": float("nan")}}, "beta_fast of type 'yarn' must be a positive number"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor must be below high_freq_factor"),
        (
            MROPE | {"partial_rotary_factor": 0.2},
            r"partial_rotary_factor 0\.2 of head_dim 16 must be an even size; got 3",
        ),
        (MROPE | {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor must be a number above 0"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_parameters\.rope_theta is 10000\.0, rope_theta 5",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
            r"rope_scaling\.factor is 4\.0, rope_parameters\.factor 2\.0: they must agree",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling.rope_type is 'yarn', rope_para",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
            | {"layer_types": ["full_attention", "sliding_attention"]},
            "rope_parameters must be the same for all layers of a draft head",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported in a draft head; silu and swish are"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation 'gelu_pytorch_tanh' is not supported"),
    ],
)
def test_what_stays_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**values)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_parameters_of_each_type_of_layer(kind: str) -> None:
    """As Gemma has them; those of the head's own layers count, and keys that agree may be there twice."""
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    found = read(rope_parameters=nested, layer_types=[kind] * 2)
    assert found.rope_theta == nested[kind]["rope_theta"]
    both = read(rope_scaling=YARN, rope_parameters=YARN | {"rope_theta": 1e6}, rope_theta=1000000)
    assert both.rope_theta == 1e6 and both.rope_scaling == YARN
