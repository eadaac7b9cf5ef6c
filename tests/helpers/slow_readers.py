"""Draft heads read from files as serving engines read them, one position and one head at a time.

Written from the formulas of the published layouts (EAGLE-3 of vLLM, SGLang and `speculators`; DSpark of `speculators`),
to be compared with ours logit for logit. Shares no code with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]
"""(keys, values) [H', d] of each position."""


def rms_norm(vector: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[d]"""
    return vector / (vector.pow(2).mean() + eps).sqrt() * weight


def rotate(heads: Tensor, position: int | Sequence[int], theta: float, interleaved: bool = False) -> Tensor:
    """[H, d] the first half of each vector is the real part, the second the imaginary one.

    Args:
        heads: [H, d].
        position: one for all frequencies, or the position of each of them.
        theta: base.
        interleaved: neighbouring dimensions are the two parts instead.
    """
    half = heads.shape[-1] // 2
    angles = torch.tensor(position) / theta ** (torch.arange(half, dtype=torch.float64) / half)
    real, imaginary = (heads[:, 0::2], heads[:, 1::2]) if interleaved else heads.chunk(2, dim=1)
    turned = torch.complex(real.double(), imaginary.double()) * torch.polar(torch.ones_like(angles), angles)
    parts = torch.view_as_real(turned)
    return (parts if interleaved else parts.mT).flatten(-2).float()


def attend(queries: Tensor, cache: Cache) -> Tensor:
    """[H * d] attention of [H, d] queries to all of a cache."""
    keys, values = (torch.stack(parts) for parts in zip(*cache, strict=True))
    groups, outputs = len(queries) // keys.shape[1], []
    for head, query in enumerate(queries):
        scores = keys[:, head // groups] @ query / math.sqrt(len(query))
        outputs.append(scores.softmax(0) @ values[:, head // groups])
    return torch.cat(outputs)


class SlowReader:
    """A folder with config.json and model.safetensors.

    Attributes:
        config: of the file.
        layer_config: sizes of the decoder layer.
        weights: by name, `midlayer` as `layers.0`.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.layer_config: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        weights = load_file(folder / "model.safetensors")
        others = {"midlayer.": "layers.0.", "img_adaptor.query": "imadpt.q", "img_adaptor.": "imadpt."}
        for other, name in others.items():
            weights = {key.replace(other, name): value.float() for key, value in weights.items()}
        self.weights = weights
        self.eps = self.layer_config["rms_norm_eps"]
        sizes = self.layer_config["hidden_size"], self.layer_config["num_attention_heads"]
        self.head_dim = self.layer_config.get("head_dim") or sizes[0] // sizes[1]
        parameters = self.layer_config.get("rope_parameters") or {}
        self.theta = float(self.layer_config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)

    def linear(self, name: str, vector: Tensor) -> Tensor:
        """A projection, with its bias if it has one."""
        outputs = self.weights[f"{name}.weight"] @ vector
        bias = self.weights.get(f"{name}.bias")
        return outputs if bias is None else outputs + bias

    def norm(self, name: str, vector: Tensor) -> Tensor:
        return rms_norm(vector, self.weights[f"{name}.weight"], self.eps)

    def heads(self, name: str, vector: Tensor) -> Tensor:
        """[H, d] of a projection."""
        return self.linear(name, vector).view(-1, self.head_dim)

    def feed_forward(self, layer: str, state: Tensor) -> Tensor:
        normed = self.norm(f"{layer}.post_attention_layernorm", state)
        gate = functional.silu(self.linear(f"{layer}.mlp.gate_proj", normed))
        return state + self.linear(f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", normed))

    def to_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[V] logits of the target's ids, -inf where the head has none."""
        if "d2t" not in self.weights:
            return logits
        ids = torch.arange(len(logits)) + self.weights["d2t"].long()
        assert self.weights["t2d"].bool().nonzero().flatten().tolist() == ids.tolist()
        return torch.full((vocab_size,), -math.inf).index_copy_(0, ids, logits)


class SlowEagle3(SlowReader):
    """An EAGLE-3 head, as the keys of its config say."""

    def step(self, embed: Tensor, state: Tensor, position: int, cache: Cache) -> tuple[Tensor, Tensor]:
        """One position, appended to the cache: (logits of the draft vocabulary, state for the next step).

        Args:
            embed: [D] of the next token, or of the media placeholder.
            state: [S * D] the target's hidden states, concatenated, or [D] the state of the step before.
            position: of the hidden states.
            cache: positions so far.
        """
        nested = self.config | self.config.get("eagle_config", {})
        if len(state) != self.layer_config["hidden_size"]:
            if nested.get("fc_norm"):
                parts = state.view(3, -1)
                state = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)])
            if nested.get("norm_before_fc"):
                state = self.norm("input_norm", state)
            state = self.linear("fc", state)
        normed = self.norm("layers.0.hidden_norm", state)
        inputs = torch.cat((self.norm("layers.0.input_layernorm", embed), normed))
        residual = normed if self.config.get("norm_before_residual") else state
        queries, keys, values = (self.heads(f"layers.0.self_attn.{name}_proj", inputs) for name in "qkv")
        if "layers.0.self_attn.q_norm.weight" in self.weights:
            queries, keys = (
                torch.stack([self.norm(f"layers.0.self_attn.{name}_norm", head) for head in heads])
                for name, heads in (("q", queries), ("k", keys))
            )
        cache.append((rotate(keys, position, self.theta), values))
        outputs = attend(rotate(queries, position, self.theta), cache)
        state = self.feed_forward("layers.0", residual + self.linear("layers.0.self_attn.o_proj", outputs))
        normed = self.norm("norm", state)
        return self.linear("lm_head", normed), normed if nested.get("norm_output") else state

    def draft(self, embedding: Tensor, embeds: Tensor, states: Tensor, num_tokens: int) -> tuple[list[int], Tensor]:
        """A greedy chain after a prompt: its tokens, and the logits [num_tokens, V] that they come from.

        Args:
            embedding: [V, D] of the target.
            embeds: [n, D] embedding of the token after each position.
            states: [n, S * D] hidden states of each position.
            num_tokens: length of the chain.
        """
        cache, tokens, found = Cache(), list[int](), []
        for position, (embed, state) in enumerate(zip(embeds, states, strict=True)):
            logits, last = self.step(embed, state, position, cache)
        for index in range(num_tokens):
            found.append(self.to_target(logits, len(embedding)))
            tokens.append(int(found[-1].argmax()))
            if index + 1 < num_tokens:
                logits, last = self.step(embedding[tokens[-1]], last, len(states) + index, cache)
        return tokens, torch.stack(found)


class SlowDspark(SlowReader):
    """A DSpark head that predicts from its anchor: k positions predict k tokens.

    Attributes:
        interleaved: whether neighbouring dimensions are rotated together.
        windows: positions that a query sees, of each layer; 0 for all.
        causal: whether a query sees no later position of its block, of each layer.
    """

    interleaved, windows, causal = False, (0, 0), (False, False)

    def block(self, embedding: Tensor, lm_head: Tensor, states: Tensor, anchor: int, k: int) -> tuple[Tensor, Tensor]:
        """Features [k, D] of a block and its logits [k, V'] without the Markov bias.

        Args:
            embedding: [V, D] of the target; an embedding in the file takes its place.
            lm_head: [V, D] of the target; that of the file takes its place.
            states: [n, S * D] hidden states of all positions before the anchor.
            anchor: the last token.
            k: block size.
        """
        embedding = self.weights.get("embed_tokens.weight", embedding)
        features = [self.norm("hidden_norm", self.linear("fc", state)) for state in states]
        rows = [embedding[token] for token in (anchor, *[self.config["mask_token_id"]] * (k - 1))]
        for layer in range(self.layer_config["num_hidden_layers"]):
            name, window = f"layers.{layer}", self.windows[layer]
            normed = [self.norm(f"{name}.input_layernorm", row) for row in rows]
            cache = [
                (self._turned(name, "k", row, position), self.heads(f"{name}.self_attn.v_proj", row))
                for position, row in enumerate([*features, *normed])
            ]
            for slot, row in enumerate(normed):
                query = len(features) + slot
                seen = [
                    part
                    for position, part in enumerate(cache)
                    if (not window or abs(query - position) < window) and (not self.causal[layer] or position <= query)
                ]
                outputs = attend(self._turned(name, "q", row, query), seen)
                rows[slot] = rows[slot] + self.linear(f"{name}.self_attn.o_proj", outputs)
            rows = [self.feed_forward(name, row) for row in rows]
        outputs = torch.stack([self.norm("norm", row) for row in rows])
        return outputs, outputs @ self.weights.get("lm_head.weight", lm_head).T

    def _turned(self, layer: str, kind: str, row: Tensor, position: int) -> Tensor:
        heads = self.heads(f"{layer}.self_attn.{kind}_proj", row)
        heads = torch.stack([self.norm(f"{layer}.self_attn.{kind}_norm", head) for head in heads])
        return rotate(heads, position, self.theta, self.interleaved)

    def bias(self, token: int) -> Tensor:
        """[V'] added to the logits of the position after a token."""
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][token]

    def confidence(self, feature: Tensor, token: int) -> Tensor:
        """Probability that the token drawn at a position is accepted."""
        rows = torch.cat((feature, self.weights["markov_head.markov_w1.weight"][token]))
        return self.linear("confidence_head.proj", rows)[0].sigmoid()
