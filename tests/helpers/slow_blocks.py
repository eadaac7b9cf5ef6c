"""Published heads that draft blocks (DFlash, DSpark and those upon them) as their trainers feed them, one at a time.

Written from the specification of each method, with the keys of its published configs; shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from slow_heads import Sequences, SlowHead
from slow_readers import Cache, attend, rotate
from torch import Tensor
from torch.nn import functional


class SlowBlock(SlowHead):
    """DFlash and DSpark: a block of mask tokens behind the last token, whose positions see the context and each other.

    Attributes:
        from_anchor: whether the last token's own position predicts a token too.
        is_neox: whether a vector is rotated in halves, not in pairs of neighbours.
        layer_offset: hidden state of transformers that layer 0 of the config's list is.
        embedding: [V, D] of the target, or of the file.
        windows: positions that a query sees, of each layer; 0 for all.
        causal: whether a query sees no later position of its block, of each layer.
    """

    windows: Sequence[int] = (0,) * 9
    causal: Sequence[bool] = (False,) * 9

    def __init__(self, folder: Path, text: Sequences, from_anchor: bool, is_neox: bool, layer_offset: int) -> None:
        super().__init__(folder, text)
        self.from_anchor = from_anchor
        self.is_neox = is_neox
        keys = {**self.layer_config, **self.config, **self.config.get("dflash_config", {})}
        layers = keys.get("target_layer_ids") or keys["aux_hidden_state_layer_ids"]
        self.layers = [layer + layer_offset for layer in layers]
        file = folder / "mask_embedding.pt"
        self.embedding = self.weights.get("embed_tokens.weight", text.embedding)
        self.mask = self.embedding[keys["mask_token_id"]]
        if file.is_file():
            self.mask = torch.load(file, weights_only=True)["embedding"]
        self.block_size: int = keys["block_size"]
        self.caches = [Cache() for _ in range(self.layer_config["num_hidden_layers"])]

    def read_row(self, row: int) -> None:
        state = torch.cat([self.text.states[layer][row] for layer in self.layers])
        feature = self.norm("hidden_norm", self.linear("fc", state))
        for index, cache in enumerate(self.caches):
            cache.append(self.keys_values(index, feature, row))

    def keys_values(self, layer: int, row: Tensor, position: int) -> tuple[Tensor, Tensor]:
        keys = self.turn(self.heads(f"layers.{layer}", "k", row), position)
        return keys, self.heads(f"layers.{layer}", "v", row)

    def turn(self, heads: Tensor, position: int) -> Tensor:
        return rotate(heads, position, self.theta, interleaved=not self.is_neox)

    def block(self, num_known: int) -> list[Tensor]:
        """Outputs [D] of the positions of a block behind so many tokens that predict one."""
        while self._num_rows < num_known - 1:
            self.read_row(self._num_rows)
            self._num_rows += 1
        anchor = int(self.text.ids[num_known - 1])
        rows = [self.embedding[anchor], *[self.mask] * (self.block_size - 1)]
        for index in range(len(self.caches)):
            name, positions = f"layers.{index}", range(num_known - 1, num_known - 1 + len(rows))
            normed = [self.norm(f"{name}.input_layernorm", row) for row in rows]
            outputs = self.around(f"{name}.attention_conv", normed, partial(self.attention, index, positions))
            rows = [row + output for row, output in zip(rows, outputs, strict=True)]
            normed = [self.norm(f"{name}.post_attention_layernorm", row) for row in rows]
            outputs = self.around(f"{name}.mlp_conv", normed, partial(self.mlp, name))
            rows = [row + output for row, output in zip(rows, outputs, strict=True)]
        return [self.norm("norm", row) for row in rows][int(not self.from_anchor) :]

    def chain(self, num_known: int, num_tokens: int, allowed: Tensor) -> tuple[list[int], Tensor]:
        """See `SlowHead`; the logits are those without the correction by the token before."""
        outputs, anchor = self.block(num_known), int(self.text.ids[num_known - 1])
        lm_head = self.weights.get("lm_head.weight", self.text.lm_head)
        found = [lm_head @ output for output in outputs]
        return self.walk(found, outputs, allowed, anchor)[:num_tokens], torch.stack(found)

    def walk(self, found: list[Tensor], outputs: list[Tensor], allowed: Tensor, anchor: int) -> list[int]:
        """The tokens of a block from the logits and outputs of its positions."""
        tokens, ids = list[int](), self.token_ids()
        for logits, output in zip(found, outputs, strict=True):
            scores = self.scores(
                logits.where(allowed, torch.tensor(-torch.inf)), output, tokens[-1] if tokens else anchor
            )
            tokens.append(ids[int(scores.argmax())])
        return tokens

    def attention(self, index: int, positions: Sequence[int], normed: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the attention of a layer at the positions of the block."""
        pairs = list(zip(normed, positions, strict=True))
        keys = self.caches[index] + [self.keys_values(index, *pair) for pair in pairs]
        window, is_causal, outputs = self.windows[index], self.causal[index], list[Tensor]()
        for row, position in pairs:
            seen = [
                part
                for other, part in enumerate(keys)
                if (not window or abs(position - other) < window) and (not is_causal or other <= position)
            ]
            outputs.append(attend(self.turn(self.heads(f"layers.{index}", "q", row), position), seen))
        return [self.linear(f"layers.{index}.self_attn.o_proj", output) for output in outputs]

    def mlp(self, name: str, normed: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the MLP of a layer."""
        gates = [functional.silu(self.linear(f"{name}.mlp.gate_proj", row)) for row in normed]
        return [
            self.linear(f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", row))
            for gate, row in zip(gates, normed, strict=True)
        ]

    def around(
        self, name: str, rows: list[Tensor], sublayer: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Outputs of a sublayer; DFlash 2 mixes neighbours before and after it."""
        return sublayer(rows)

    def scores(self, logits: Tensor, output: Tensor, previous: int) -> Tensor:
        """[V'] of a position with these logits and this output behind a token."""
        return logits + self.bias(previous)

    @property
    def has_bias(self) -> bool:
        """Whether a token depends on the one before, so that the tree of a drafter is a chain."""
        return "markov_head.markov_w1.weight" in self.weights

    def bias(self, token: int) -> Tensor:
        """[V'] of the token before."""
        if not self.has_bias:
            return torch.zeros(1)
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][token]

    def confidence(self, output: Tensor, token: int) -> Tensor:
        """Probability that the token drawn at a position behind a token is accepted."""
        rows = torch.cat((output, self.weights["markov_head.markov_w1.weight"][token]))
        return self.linear("confidence_head.proj", rows)[0].sigmoid()

    def token_ids(self) -> list[int]:
        if "d2t" not in self.weights:
            return super().token_ids()
        return [index + offset for index, offset in enumerate(self.weights["d2t"].long().tolist())]


class SlowDflash2(SlowBlock):
    """DFlash 2: a block whose positions are mixed with the one before, and scores of pairs among the likeliest."""

    @property
    def has_bias(self) -> bool:
        return True

    def around(
        self, name: str, rows: list[Tensor], sublayer: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        kernel, width = self.weights[f"{name}.base_kernel"], self.config["dflash_config"]["conv_group_size"]
        changes = [
            self.linear(f"{name}.kernel_projection", row).view(2, 2, -1).repeat_interleave(width, 2) for row in rows
        ]

        def mix(side: int, values: Sequence[Tensor]) -> list[Tensor]:
            taps = [kernel[side] + change[side] for change in changes]
            before = [torch.zeros_like(values[0]), *values[:-1]]
            return [tap[0] * value + tap[1] * other for tap, value, other in zip(taps, values, before, strict=True)]

        return mix(1, sublayer(mix(0, rows)))

    def scores(self, logits: Tensor, output: Tensor, previous: int) -> Tensor:
        best = logits.topk(self.config["dflash_config"]["selector_top_k"]).indices
        gate = self.linear("candidate_selector.hidden_projection", output)
        before = self.weights["candidate_selector.predecessor_codebook"][previous] * gate
        pairs = self.weights["candidate_selector.successor_codebook"][best] @ before
        return torch.full_like(logits, -torch.inf).index_copy_(0, best, logits[best] + pairs)


class SlowDomino(SlowBlock):
    """Domino: a block corrected by a GRU over the anchor and the tokens so far."""

    path: tuple[int, ...] = ()

    @property
    def has_bias(self) -> bool:
        return True

    def chain(self, num_known: int, num_tokens: int, allowed: Tensor) -> tuple[list[int], Tensor]:
        self.path = ()
        return super().chain(num_known, num_tokens, allowed)

    def scores(self, logits: Tensor, output: Tensor, previous: int) -> Tensor:
        self.path, settings = (*self.path, previous), self.config["dflash_config"]
        if len(self.path) <= settings["pure_draft_prefix_len"]:
            return logits
        gru = torch.nn.GRU(len(output), settings["gru_hidden_dim"], bias=False)
        gru.load_state_dict({name: self.weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
        with torch.no_grad():
            state = gru(self.text.embedding[list(self.path)])[0][-1]
        inner = functional.silu(self.linear("embed_proj.0", torch.cat((output, state))))
        return logits + self.linear("embed_proj.2", inner)


class SlowLilicorr(SlowDflash2):
    """LiLiCorr: candidates of a block that see each other, and products of two vectors of each with its neighbours'.

    Attributes:
        path_scores: of the candidates of each position of the last block, behind the token before.
    """

    def __init__(self, folder: Path, text: Sequences, **options: bool | int) -> None:
        super().__init__(folder, text, **options)  # type: ignore[arg-type]
        self.settings = self.config["dflash_config"]
        renamed = {"feature_norm": "feature_mlp.0", "feature_mlp.up_proj": "feature_mlp.1"}
        renamed |= {"feature_mlp.down_proj": "feature_mlp.3", "mlp.up_proj": "mlp.0", "mlp.down_proj": "mlp.2"}
        for name in [name for name in self.weights if name.startswith("lilicorr.")]:
            new = next((name.replace(old, new) for old, new in renamed.items() if f".{old}." in name), name)
            self.weights[new] = self.weights.pop(name)

    def read_row(self, row: int) -> None:
        super().read_row(row)
        state = torch.cat([self.text.states[layer][row] for layer in self.layers])
        self.context = self.norm("hidden_norm", self.linear("fc", state))

    def around(
        self, name: str, rows: list[Tensor], sublayer: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        return super().around(name, rows, sublayer) if "conv_kernel_size" in self.settings else sublayer(rows)

    def walk(self, found: list[Tensor], outputs: list[Tensor], allowed: Tensor, anchor: int) -> list[int]:
        """See `SlowBlock`."""
        name, num = "lilicorr", self.settings["lilicorr_candidate_topk"]
        best = [logits.where(allowed, torch.tensor(-torch.inf)).topk(num).indices for logits in found]
        rows = list[Tensor]()
        for slot, (logits, output, ids) in enumerate(zip(found, outputs, best, strict=True)):
            log_probs = logits.log_softmax(0)[ids]
            for rank, token in enumerate(ids.tolist()):
                log_prob = log_probs[rank]
                numbers = [log_prob, log_prob.exp(), log_prob - log_probs.max(), rank / (num - 1), float(rank == 0)]
                norm = [self.weights[f"{name}.feature_mlp.0.{part}"] for part in ("weight", "bias")]
                inner = functional.layer_norm(torch.tensor(numbers), (5,), *norm)
                inner = functional.silu(self.linear(f"{name}.feature_mlp.1", inner))
                row = self.linear(f"{name}.feature_mlp.3", inner) + self.linear(f"{name}.pass_hidden_proj", output)
                embedding = self.text.embedding[token]
                has_projection = f"{name}.token_proj.weight" in self.weights
                row = row + (self.linear(f"{name}.token_proj", embedding) if has_projection else embedding)
                row = row + self.weights[f"{name}.slot_embedding"][0, 0, slot, 0]
                rows.append(row + self.weights[f"{name}.rank_embedding"][0, 0, 0, rank])
        for index in range(self.settings["lilicorr_num_layers"]):
            rows = self.lattice_layer(f"{name}.layers.{index}", rows, num)
        rows = [self.norm(f"{name}.output_norm", row) for row in rows]
        beside = self.norm(f"{name}.anchor_norm", self.linear(f"{name}.context_proj", self.context))
        inner_rows = [
            functional.silu(self.linear(f"{name}.factor_input_proj", torch.cat((row, beside, row * beside))))
            for row in rows
        ]
        behind, tokens, self.path_scores = self.unit("anchor_out_head", beside), list[int](), list[Tensor]()
        for slot, ids in enumerate(best):
            own = inner_rows[slot * num : (slot + 1) * num]
            scores = torch.stack([behind @ self.unit("in_head", row) for row in own])
            self.path_scores.append(self.settings["lilicorr_logit_scale"] * scores)
            place = int(scores.argmax())
            tokens.append(int(ids[place]))
            behind = self.unit("out_head", own[place])
        return tokens

    def unit(self, name: str, row: Tensor) -> Tensor:
        """A vector of length 1."""
        return functional.normalize(self.linear(f"lilicorr.{name}", row), dim=0, eps=1e-4)

    def lattice_layer(self, name: str, rows: list[Tensor], num: int) -> list[Tensor]:
        """A layer in which each candidate attends to all."""
        normed = [self.norm(f"{name}.attn_norm", row) for row in rows]
        packed = [self.weights[f"{name}.attn.in_proj_{part}"] for part in ("weight", "bias")]
        heads, outputs = self.settings["lilicorr_num_heads"], list[Tensor]()
        parts = [(packed[0] @ row + packed[1]).view(3, heads, -1) for row in normed]
        distances = self.weights["lilicorr.relative_slot_bias"]
        for place, (query, _, _) in enumerate(parts):
            mixed = list[Tensor]()
            for head in range(heads):
                scores = list[Tensor]()
                for other, (_, key, _) in enumerate(parts):
                    distance = place // num - other // num
                    bias = distances[head, distance + distances.shape[1] // 2]
                    bias = bias + (self.weights["lilicorr.same_slot_bias"][head] if distance == 0 else 0.0)
                    scores.append(query[head] @ key[head] / len(key[head]) ** 0.5 + bias)
                shares = torch.stack(scores).softmax(0)
                mixed.append(sum(share * part[2][head] for share, part in zip(shares, parts, strict=True)))  # type: ignore[arg-type]
            outputs.append(self.linear(f"{name}.attn.out_proj", torch.cat(mixed)))
        rows = [row + output for row, output in zip(rows, outputs, strict=True)]
        inner = [functional.silu(self.linear(f"{name}.mlp.0", self.norm(f"{name}.mlp_norm", row))) for row in rows]
        return [row + self.linear(f"{name}.mlp.2", one) for row, one in zip(rows, inner, strict=True)]
