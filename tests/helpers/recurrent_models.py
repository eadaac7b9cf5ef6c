"""Models with recurrent layers, batches for them, and a drafter of which each row accepts another number of tokens."""

from __future__ import annotations

from typing import Any

import adversarial
import tiny_models as tiny
import torch
import zoo
from parity import build_cached_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mmspec.engine.tree import DraftTree

FAMILIES = [name for name, row in zoo.ROWS.items() if "recurrent" in row.traits]


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec(family, **{"seed": 3, "layers": 3, **changes}))


def one_row(model: PreTrainedModel, seed: int = 5) -> tiny.Inputs:
    return tiny.build_inputs(model, seed, 1, images=[2], padding="none")


class HalfRight(adversarial.AdversarialDrafter):
    """Drafts chains whose first `row + 1` tokens are right, so that each row keeps another part of its states."""

    def __init__(self, sequences: Tensor) -> None:
        super().__init__()
        self.texts = sequences.tolist()
        self.positions = [0] * len(self.texts)

    def begin(self, prompt: Any) -> Any:
        self.positions = [prompt.input_ids.shape[1]] * len(self.texts)
        return None

    def observe(self, state: Any, result: Any, hidden_states: Any) -> None:
        for row, tokens in enumerate(result.emitted_ids):
            self.positions[row] += len(tokens)

    def propose(self, state: Any, max_nodes: int, active: Any) -> DraftTree:
        rows = []
        for row, (text, position) in enumerate(zip(self.texts, self.positions, strict=True)):
            right = text[position : position + 1 + row][: max_nodes - 1]
            rows.append([0, *right, *[8] * (max_nodes - 1 - len(right))])
        tokens = torch.tensor(rows)
        parents = torch.arange(-1, tokens.shape[1] - 1).expand(tokens.shape)
        return DraftTree(tokens, parents, torch.ones_like(parents, dtype=torch.bool))


def ragged(model: PreTrainedModel, seed: int = 5, batch: int = 4) -> tiny.Inputs:
    """Rows of different length with and without images, padded on the left."""
    given = tiny.build_inputs(model, seed, batch, images=([2, 0, 1, 0] * batch)[:batch], padding="left")
    assert not given["attention_mask"].all()
    return given


def text_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A text model of two layers of another class, the first of which is recurrent."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[model_type](vocab_size=60, num_hidden_layers=2, **sizes, **special, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


MIXED = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {f"linear_{name}": size for name, size in zip(("num_key_heads", "num_value_heads"), (2, 4), strict=True)}
OTHERS: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {**MIXED, **DELTA, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MIXED, **MAMBA, "num_local_experts": 0},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
}


def text_batch() -> tiny.Inputs:
    """Three rows of different length for a `text_model`."""
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
