"""Published EAGLE-1/2, MSD, ViSpec and EAGLE-3 heads as their papers and trainers feed them, one position at a time.

Row p pairs the target's hidden state at position p with the embedding of token p + 1. Written from the specification of
each method, with the keys of its published configs; shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from slow_readers import Cache, SlowReader, attend, rotate
from torch import Tensor

Position = tuple[int, int, int]
"""Time, height and width, as the target counts them."""


@dataclass(frozen=True)
class Sequences:
    """One text of a target with everything that a head may read of it.

    Attributes:
        ids: [T].
        embeds: [T, D] as the target's first layer received them: at visual positions projected features.
        states: of each index of transformers' `hidden_states`, [T, D].
        is_visual: [T] bool.
        positions: of each position, as the target counts them.
        embedding: [V, D] of the target.
        lm_head: [V, D] of the target.
    """

    ids: Tensor
    embeds: Tensor
    states: Sequence[Tensor] | Mapping[int, Tensor]
    is_visual: Tensor
    positions: list[Position]
    embedding: Tensor
    lm_head: Tensor


class SlowHead(SlowReader):
    """A head that has read the rows of a text up to some position.

    Attributes:
        cache: keys and values of the rows so far.
        last: [D] output at the last of them.
    """

    def __init__(self, folder: Path, text: Sequences) -> None:
        super().__init__(folder)
        self.text = text
        self.cache = Cache()
        self.last = torch.zeros(0)
        self._num_rows = 0

    # --- of each method -----------------------------------------------------------------------------------------------

    def read_row(self, row: int) -> None:
        """Append a row of the text to the cache."""
        raise NotImplementedError

    def draft_row(self, token: int, state: Tensor, row: int) -> Tensor:
        """[D] output of a drafted token below a node with the output `state`, appended to the cache."""
        raise NotImplementedError

    def logits(self, state: Tensor) -> Tensor:
        """[V'] of the token after a row with the output `state`."""
        return self.text.lm_head @ state

    def token_ids(self) -> list[int]:
        """The target's id of each logit."""
        return list(range(len(self.text.embedding)))

    # --- of all -------------------------------------------------------------------------------------------------------

    def chain(self, num_known: int, num_tokens: int, allowed: Tensor) -> tuple[list[int], Tensor]:
        """A greedy chain after the first `num_known` tokens, and the logits [num_tokens, V'] that it comes from.

        Args:
            num_known: tokens of the text so far, at least as many as in the call before.
            num_tokens: length of the chain.
            allowed: [V'] bool, what may be drafted.
        """
        while self._num_rows < num_known - 1:
            self.read_row(self._num_rows)
            self._num_rows += 1
        length, state, ids = len(self.cache), self.last, self.token_ids()
        tokens, found = list[int](), list[Tensor]()
        for index in range(num_tokens):
            if index:
                state = self.draft_row(tokens[-1], state, num_known - 2 + index)
            found.append(self.logits(state))
            tokens.append(ids[int(found[-1].where(allowed, torch.tensor(-torch.inf)).argmax())])
        del self.cache[length:]
        return tokens, torch.stack(found)

    def layer(self, inputs: Tensor, residual: Tensor, position: int | Sequence[int]) -> Tensor:
        """[D] output of the decoder layer, appended to the cache."""
        queries, keys, values = (self.heads("layers.0", part, inputs) for part in "qkv")
        self.cache.append((rotate(keys, position, self.theta), values))
        outputs = attend(rotate(queries, position, self.theta), self.cache)
        return self.feed_forward("layers.0", residual + self.linear("layers.0.self_attn.o_proj", outputs))


class SlowEagle(SlowHead):
    """EAGLE-1/2 and MSD: one layer over `fc` of [embedding ; state], the target's LM head, positions on one axis.

    `model_type` says which of them: MSD's code names its targets, "llava" and "qwen2_vl".
    """

    def read_row(self, row: int) -> None:
        embed, state = self.text.embeds[row + 1], self.text.states[-1][row]
        is_msd = self.config["model_type"] in ("llava", "qwen2_vl") or self.config.get("architectures") == [
            "MultimodalEagleDraftModel"
        ]
        is_bypassed = is_msd and bool(self.text.is_visual[row + 1])
        self.last = self.step(embed if is_bypassed else self.linear("fc", torch.cat((embed, state))), row)

    def draft_row(self, token: int, state: Tensor, row: int) -> Tensor:
        return self.step(self.linear("fc", torch.cat((self.text.embedding[token], state))), row)

    def step(self, inputs: Tensor, position: int) -> Tensor:
        has_norm = "layers.0.input_layernorm.weight" in self.weights
        output = self.layer(self.norm("layers.0.input_layernorm", inputs) if has_norm else inputs, inputs, position)
        return self.norm("norm", output) if "norm.weight" in self.weights else output  # NeMo Automodel's


class SlowVispec(SlowEagle):
    """ViSpec: an image becomes the last few of its positions and a vector in the state of all text after it."""

    def __init__(self, folder: Path, text: Sequences) -> None:
        super().__init__(folder, text)
        self.image = torch.zeros(text.embeds.shape[1])
        self._span: list[int] = []  # rows of the image that is being read

    def read_row(self, row: int) -> None:
        if self.text.is_visual[row + 1]:
            self._span.append(row)
            return
        if self._span:
            compressed = self.adapt(self.text.embeds[[one + 1 for one in self._span]])
            for vector, position in zip(compressed[:-1], self._span[1 - len(compressed) :], strict=True):
                self.step(vector, position)
            self.image, self._span = compressed[-1], []
        self.last = self.text_row(self.text.embeds[row + 1], self.text.states[-1][row], row)

    def draft_row(self, token: int, state: Tensor, row: int) -> Tensor:
        return self.text_row(self.text.embedding[token], state, row)

    def text_row(self, embed: Tensor, state: Tensor, position: int) -> Tensor:
        mixed = self.linear("img_fc", torch.cat((state, self.image)))
        return self.step(self.linear("fc", torch.cat((embed, mixed))), position)

    def adapt(self, embeds: Tensor) -> Tensor:
        """[Q, D] of an image's embeddings [N, D]."""
        queries = self.weights["imadpt.q"]
        keys, values = (
            torch.stack([self.linear(f"imadpt.{name}_proj", embed) for embed in embeds]).view(
                len(embeds), *queries[0].shape
            )
            for name in "kv"
        )
        outputs = []
        for query in queries:
            heads = []
            for head, vector in enumerate(query):
                scores = keys[:, head] @ vector / len(vector) ** 0.5
                heads.append(scores.softmax(0) @ values[:, head])
            outputs.append(self.linear("imadpt.o_proj", torch.cat(heads)))
        return torch.stack(outputs)


class SlowEagle3Head(SlowHead):
    """EAGLE-3 of the EAGLE code, speculators, SpecForge and AngelSlim.

    The embedding of a visual position is that of its placeholder token, as all of them train and vLLM serves it, unless
    the config has the `visual_mode` "coupled". With a `mrope_section` the rotary positions are the target's: SpecForge
    gives each axis one range of frequencies, AngelSlim takes turns whatever its config says, speculators ignores it.

    Attributes:
        settings: of the config and of its section.
        layers: of the hidden states that are read.
    """

    def __init__(self, folder: Path, text: Sequences) -> None:
        super().__init__(folder, text)
        self.settings, num_layers = self.config | self.config.get("eagle_config", {}), len(text.states) - 1
        default = 2, num_layers // 2, num_layers - 3
        self.layers: Sequence[int] = self.config.get("eagle_aux_hidden_state_layer_ids") or default

    def read_row(self, row: int) -> None:
        mode = self.config.get("visual_mode", "placeholder")
        if mode == "text_only" and self.text.is_visual[row + 1]:
            return
        parts = [self.text.states[layer][row] for layer in self.layers]
        if self.settings.get("fc_norm"):
            parts = [self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
        joined = torch.cat(parts)
        state = self.linear("fc", self.norm("input_norm", joined) if self.settings.get("norm_before_fc") else joined)
        is_placeholder = mode == "placeholder"  # "coupled": as SGLang feeds it
        embed = self.text.embedding[self.text.ids[row + 1]] if is_placeholder else self.text.embeds[row + 1]
        self.last = self.step(embed, state, row)

    def draft_row(self, token: int, state: Tensor, row: int) -> Tensor:
        state = self.norm("norm", state) if self.settings.get("norm_output") else state
        return self.step(self.text.embedding[token], state, row)

    def step(self, embed: Tensor, state: Tensor, row: int) -> Tensor:
        normed = self.norm("layers.0.hidden_norm", state)
        inputs = torch.cat((self.norm("layers.0.input_layernorm", embed), normed))
        return self.layer(inputs, normed if self.config.get("norm_before_residual") else state, self.position(row))

    def position(self, row: int) -> int | list[int]:
        """The number of a row, or what each rotary frequency counts."""
        rope = {**(self.layer_config.get("rope_scaling") or {}), **(self.layer_config.get("rope_parameters") or {})}
        section = rope.get("mrope_section")
        if section is None or "speculators_model_type" in self.config:
            return row
        known = self.text.positions
        beyond = max(0, row - len(known) + 1)  # drafts past the end of the text, which are text
        position = [axis + beyond for axis in known[min(row, len(known) - 1)]]
        is_interleaved = rope.get("mrope_interleaved") or "Eagle3LlamaForCausalLM" in self.config["architectures"]
        counts = []
        for index in range(self.head_dim // 2):
            if is_interleaved:
                axis = 1 if index % 3 == 1 and index < 3 * section[1] else 0
                axis = 2 if index % 3 == 2 and index < 3 * section[2] else axis
            else:
                axis = 0 if index < section[0] else 1 if index < section[0] + section[1] else 2
            counts.append(position[axis])
        return counts

    def layer(self, inputs: Tensor, residual: Tensor, position: int | Sequence[int]) -> Tensor:
        """See `SlowHead`; further layers read the output of the one below, and a layer may have a window."""
        types = self.layer_config.get("layer_types") or ["full_attention"] * self.layer_config["num_hidden_layers"]
        own: list[tuple[Tensor, Tensor]] = []
        self.cache.append(own)  # type: ignore[arg-type]
        for index, kind in enumerate(types):
            name = f"layers.{index}"
            if index:
                inputs = self.norm(f"{name}.input_layernorm", residual)
            queries, keys, values = (self.heads(name, part, inputs) for part in "qkv")
            own.append((rotate(keys, position, self.theta), values))
            first = -self.layer_config["sliding_window"] if kind == "sliding_attention" else 0
            outputs = attend(rotate(queries, position, self.theta), [row[index] for row in self.cache[first:]])
            residual = self.feed_forward(name, residual + self.linear(f"{name}.self_attn.o_proj", outputs))
        return residual

    def logits(self, state: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", state))

    def token_ids(self) -> list[int]:
        offsets = self.weights["d2t"].long().tolist()
        return [index + offset for index, offset in enumerate(offsets)]
