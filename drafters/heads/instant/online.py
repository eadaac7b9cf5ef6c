"""`OnlineHeads`: instant heads that learn from nothing while the target is used, in closed form.

They predict the next k positions of each row from the target's last two hidden states (`autoregression.py`), and are a
part of the drafters of `mmspec.drafters.arbitrated`, which combine them with n-grams. The weights that draft are one
object that is replaced whole, so a round reads old or new ones, never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.cpu.linear import active_kernel
from mmspec.cpu.ngram_types import HeadDistributions, HeadTokens
from mmspec.drafters.heads.instant.autoregression import (
    MAX_INPUT_SIZE,
    NUM_LAGS,
    NUM_SLOTS,
    RANK,
    AutoregressionFit,
    LinearHeads,
    input_projection,
)
from mmspec.drafters.heads.instant.collector import CallCollector
from mmspec.drafters.ngram.output_ngrams import HEAD_POWER, NGRAM_POWER, PRIOR_POWER
from mmspec.engine.host_copy import from_host
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import Prompt, SharedEmbeddings, VerifyResult
from mmspec.learning.protocols import Examples

MAX_UNREAD = 32
"""Rounds whose accepted states are kept until the heads draft again."""


@dataclass
class HeadsState:
    """State of one call.

    Attributes:
        shared_embeddings: of the target.
        last: [B, D] hidden state before each row's root.
        previous: [B, D] hidden state one position earlier.
        unread: accepted states [B, A, D] of the last rounds, and the number of each row's, that `last` and `previous`
            do not contain yet.
        collector: of a call that is learned from, else None.
        has_begun: whether the first token was observed.
    """

    shared_embeddings: SharedEmbeddings
    last: Tensor
    previous: Tensor
    unread: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    collector: CallCollector | None = None
    has_begun: bool = False


@dataclass(frozen=True)
class _Published:
    """Heads, and what follows from them and the target's LM head.

    Attributes:
        heads: the heads.
        base_logits: [k, V'] of the mean states.
        lm_head: [V', R] its rows in the basis of the heads.
        tokens: the V' tokens that are drafted.
    """

    heads: LinearHeads
    base_logits: Tensor
    lm_head: Tensor
    tokens: HeadTokens


class OnlineHeads:
    """Instant heads of one target.

    Attributes:
        hidden_size: D.
        vocab_size: V.
        hidden_state_index: of the output of the target's final norm.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.hidden_state_index = num_layers
        self._projection = input_projection(hidden_size)
        self._heads: LinearHeads | None = None
        self._published: _Published | None = None

    @property
    def is_ready(self) -> bool:
        """Whether anything was learned."""
        return self._heads is not None

    # --- drafting -----------------------------------------------------------------------------------------------------

    @InferenceMode()
    def begin(self, prompt: Prompt) -> HeadsState:
        """Take the last two hidden states of each prompt.

        Raises:
            ValueError: the prompt comes without the target's embeddings.
        """
        if prompt.shared_embeddings is None:
            raise ValueError("instant heads need the target's embeddings; got Prompt.shared_embeddings=None.")
        hidden_states = prompt.hidden_states[self.hidden_state_index]
        mask = prompt.attention_mask[:, -hidden_states.shape[1] :].to(hidden_states.device)
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        rows = torch.arange(len(last), device=last.device)
        return HeadsState(
            prompt.shared_embeddings, hidden_states[rows, last], hidden_states[rows, (last - 1).clamp(min=0)]
        )

    @InferenceMode()
    def observe(self, state: HeadsState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Follow the emitted tokens: the state before each is that of the accepted node before it."""
        collector = state.collector
        counts = [len(row) for row in result.emitted_ids]
        if not state.has_begun:
            state.has_begun = True
            if collector is not None:
                collector.add(state.last[:, None], [1] * len(counts))
        elif longest := max(counts):
            scored = hidden_states[self.hidden_state_index]
            path = result.path[:, :longest].to(scored.device)
            accepted = scored.gather(1, path[..., None].expand(-1, -1, scored.shape[-1]))  # a copy that may be kept
            if collector is not None:
                collector.add(accepted, counts)
            state.unread.append((accepted, counts))
            if len(state.unread) == MAX_UNREAD:
                _catch_up(state)
        if collector is not None:
            for tokens, emitted in zip(collector.tokens, result.emitted_ids, strict=True):
                tokens.extend(emitted)

    @InferenceMode()
    def distributions(self, state: HeadsState) -> HeadDistributions | None:
        """Of each row, those of the next k positions; None before anything was learned."""
        published = self._published_on(state)
        if published is None:
            return None
        _catch_up(state)
        heads = published.heads
        inputs = torch.cat((self._read(state.previous), self._read(state.last)), dim=1)
        offsets = _few_rows_linear(inputs, heads.weight, heads.bias).unflatten(1, (NUM_SLOTS, -1))
        logits = _few_rows_linear(offsets, published.lm_head, None).add_(published.base_logits)
        return published.tokens.weigh(state.shared_embeddings.scale_logits(logits), HEAD_POWER)

    def _read(self, states: Tensor) -> Tensor:
        """[B, D] -> [B, r] float32."""
        states = states.float()
        return states if self._projection is None else states @ self._projection

    def _published_on(self, state: HeadsState) -> _Published | None:
        """The current heads on the device of a call, with their rows of the LM head."""
        heads, published, device = self._heads, self._published, state.last.device
        if heads is None:
            return None
        if published is not None and published.heads is heads and heads.weight.device == device:
            return published
        heads = heads.to(device)
        if self._projection is not None:
            self._projection = self._projection.to(device)
        rows = state.shared_embeddings.lm_head_rows(heads.candidate_ids).float()
        ids = heads.candidate_ids.cpu()
        index = torch.full((self.vocab_size,), -1, dtype=torch.int32, device="cpu")
        index[ids] = torch.arange(len(ids), dtype=torch.int32, device="cpu")
        frequencies = heads.frequencies.cpu()
        tokens = HeadTokens(ids, index, frequencies**-PRIOR_POWER, frequencies**NGRAM_POWER)
        published = _Published(heads, heads.means @ rows.t(), rows @ heads.basis, tokens)
        self._heads, self._published = heads, published
        return published

    # --- learning -----------------------------------------------------------------------------------------------------

    @property
    def learning_key(self) -> str:
        return f"autoregression-k{NUM_SLOTS}-d{self.hidden_size}"

    def start_collecting(self, state: HeadsState, with_examples: bool) -> None:
        state.collector = CallCollector(len(state.last)) if with_examples else None

    def collected_examples(self, state: HeadsState) -> list[Examples]:
        examples = None if state.collector is None else state.collector.examples(1)
        return [] if examples is None else [examples]

    def closed_form(self, device: torch.device) -> AutoregressionFit:
        return AutoregressionFit(self.hidden_size, self.vocab_size, device)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights from now on.

        Args:
            weights: `LinearHeads.state_dict`.

        Raises:
            ValueError: names, shapes or ids are not those of this target, or a value is not finite.
        """
        heads = _check_heads(weights, self.hidden_size, self.vocab_size)
        if heads.num_examples:
            self._heads = heads


def _few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear`, in C where that is possible."""
    kernel = active_kernel()
    product = None if kernel is None else kernel.linear(weight, bias, rows)
    return functional.linear(rows, weight, bias) if product is None else product


def _catch_up(state: HeadsState) -> None:
    """Set the last two states after the rounds that are not read yet."""
    unread, state.unread = state.unread, []
    if not unread:
        return
    if len(unread) == 1 and len(unread[0][1]) == 1:
        accepted, (count,) = unread[0]
        state.previous = accepted[:, count - 2] if count > 1 else state.last
        state.last = accepted[:, count - 1]
        return
    states = torch.cat((state.previous[:, None], state.last[:, None], *(accepted for accepted, _ in unread)), dim=1)
    previous, last = [0] * len(states), [1] * len(states)
    place = 2
    for accepted, counts in unread:
        for row, count in enumerate(counts):
            if count:
                previous[row] = place + count - 2 if count > 1 else last[row]
                last[row] = place + count - 1
        place += accepted.shape[1]
    rows = torch.arange(len(states), device=states.device)
    state.previous = states[rows, from_host(previous, states.device)]
    state.last = states[rows, from_host(last, states.device)]


def _check_heads(weights: Mapping[str, Tensor], hidden_size: int, vocab_size: int) -> LinearHeads:
    """The heads of a state dict, checked."""
    expected = {item.name for item in fields(LinearHeads)}
    if set(weights) != expected:
        names = ", ".join(sorted(set(weights) ^ expected)[:4])
        raise ValueError(f"learned weights must be those of the drafter's heads; these differ: {names}.")
    tensors = {name: value.detach() for name, value in weights.items()}
    ids, rank = tensors["candidate_ids"], min(RANK, hidden_size)
    shapes = {
        "weight": [NUM_SLOTS * rank, NUM_LAGS * min(hidden_size, MAX_INPUT_SIZE)],
        "bias": [NUM_SLOTS * rank],
        "basis": [hidden_size, rank],
        "means": [NUM_SLOTS, hidden_size],
        "frequencies": list(ids.shape),
    }
    for name, shape in shapes.items():
        if list(tensors[name].shape) != shape:
            raise ValueError(f"{name} must be {shape}; got {list(tensors[name].shape)}.")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ValueError(f"{name} holds values that are not finite.")
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"candidate_ids must be ids from 0 to {vocab_size - 1}; got {list(ids.shape)} {ids.dtype}.")
    floats = {name: tensors[name].float() for name in shapes}
    return LinearHeads(**floats, candidate_ids=ids.long(), num_examples=int(tensors["num_examples"]))
