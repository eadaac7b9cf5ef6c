"""Gemma 4's assistants with random weights for tiny targets, and their drafts by transformers' own model."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
import zoo
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = tuple(
    family
    for family, kind in (("gemma4", "Gemma4"), ("gemma4_unified", "Gemma4Unified"))
    if family in zoo.ROWS and hasattr(transformers, f"{kind}AssistantConfig")
)
"""Those that this transformers has with assistants."""
needs_assistants = pytest.mark.skipif("gemma4" not in FAMILIES, reason="an older transformers")


def build_assistant(target: PreTrainedModel, seed: int = 0, centroids: bool = True, hidden: int = 16) -> Any:
    """An assistant of four layers, of the target's kind; older transformers have none."""
    kind = target.config.model_type
    prefix = "Gemma4Unified" if kind == "gemma4_unified" else "Gemma4"

    spec, text = target.tiny_spec, target.config.get_text_config()
    stored = len(text.layer_types) - text.num_kv_shared_layers
    types = list(dict.fromkeys(text.layer_types[:stored]))
    own = {
        "model_type": f"{kind}_text",
        "vocab_size": spec.vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4,
        "layer_types": [types[0]] * 3 + [types[-1]],
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden // spec.heads,
        "global_head_dim": 2 * spec.hidden // spec.heads,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": text.sliding_window,
        "max_position_embeddings": 1024,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 4,
    }
    if kind == "gemma4":
        own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=own,
        backbone_hidden_size=spec.hidden,
        use_ordered_embeddings=centroids,
        num_centroids=10,
        centroid_intermediate_top_k=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}AssistantForCausalLM")(config).eval()
        for weight in model.parameters():
            weight.data.normal_(0, 0.2) if weight.dim() > 1 else weight.data.normal_(1, 0.1)
        if centroids:
            model.masked_embedding.token_ordering.copy_(torch.randperm(spec.vocab))
    return model.requires_grad_(False)


class SlowAssistant:
    """Drafts of one row by transformers' forwards: the target over the whole text, the assistant node by node."""

    def __init__(self, target: PreTrainedModel, assistant: Any, given: tiny.Inputs) -> None:
        self.target, self.assistant, self.given = target, assistant, dict(given)
        self._last: Any = None

    def _read(self, emitted: list[int]) -> tuple[Tensor, dict[str, Any], int]:
        """The last hidden state of the text, the keys and values that are shared, and its length; once per text."""
        if self._last is None or self._last[0] != emitted:
            given = {name: value for name, value in self.given.items() if name not in ("input_ids", "attention_mask")}
            ids = torch.cat((self.given["input_ids"], torch.tensor([emitted[:-1]], dtype=torch.long)), dim=1)
            if "mm_token_type_ids" in given:
                given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(emitted) - 1))
            options: dict[str, Any] = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": True}
            outputs = self.target(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **options)
            window = self.target.config.get_text_config().sliding_window
            shared = dict(outputs.shared_kv_states)
            shared["sliding_attention"] = tuple(part[:, :, -window:] for part in shared["sliding_attention"])
            self._last = list(emitted), (outputs.hidden_states[-1][:, -1:], shared, ids.shape[1])
        return self._last[1]

    def logits(self, emitted: list[int], path: list[int]) -> Tensor:
        """[V] logits behind the emitted tokens and a path of draft tokens; low for ids that have none."""
        hidden, shared, length = self._read(emitted)
        position, embed = torch.tensor([[length - 1]]), self.target.get_input_embeddings()
        for token in (emitted[-1], *path):
            inputs = torch.cat((embed(torch.tensor([[token]])), hidden), dim=-1)
            drafted = self.assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
            hidden = drafted.last_hidden_state
        return drafted.logits[0, -1]
