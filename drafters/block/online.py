"""Online learning of block drafters: what they record of a call, what they train, and how new weights are swapped in.

A drafter that mixes `LearnableBlock` in names the parameters that are trained (`learned_parts`) and computes the
features of the block from what it recorded (`learned_features`). The loss is cross-entropy with the tokens that the
target emitted. The module knows neither when a step is taken nor where weights are stored.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.block.base import BlockDrafter
from mmspec.drafters.block.markov import MarkovHead
from mmspec.drafters.eagle.recorder import CallRecorder
from mmspec.drafters.eagle.state import DraftState
from mmspec.interfaces import ClosedFormFit, Examples, LearningSpec, Prompt, SharedEmbeddings, VerifyResult

SLOT_DECAY = 0.8
"""Weight of the loss of each further position of the block."""


class LearnableBlock(BlockDrafter):
    """A `BlockDrafter` that implements `mmspec.interfaces.LearnableDrafter`.

    Hooks:
        learned_parts: prefixes of the names of the head's parameters that are trained. Abstract.
        learned_features: features of the block from recorded inputs. Abstract.
        records_every_position: whether `observe` records all accepted positions, not only the roots of drafts.
    """

    learned_parts: tuple[str, ...] = ()
    records_every_position = False
    starts_untrained = False

    @abstractmethod
    def learned_features(self, head: Any, inputs: Tensor, root_embeds: Tensor) -> Tensor:
        """[n, k, D] features of the block.

        Args:
            head: the drafter's head, or a copy in training.
            inputs: [n, S] as recorded.
            root_embeds: [n, D] embeddings of the roots.
        """

    # --- recording ----------------------------------------------------------------------------------------------------

    def start_recording(self, state: DraftState, with_examples: bool) -> None:
        """See `LearnableDrafter`."""
        state.recorder = CallRecorder(len(state.last_hidden)) if with_examples else None

    def recorded_examples(self, state: DraftState) -> Examples | None:
        """See `LearnableDrafter`."""
        return None if state.recorder is None else state.recorder.examples(self.block_size)

    @torch.inference_mode()
    def sync(self, state: DraftState) -> None:
        """See `HeadDrafter`; records what the head reads at the root."""
        super().sync(state)
        recorder = state.recorder
        if recorder is not None and not self.records_every_position:
            recorder.add(state.last_hidden[:, None], [1] * len(recorder.tokens), offset=-1)

    @torch.inference_mode()
    def observe(self, state: DraftState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """See `HeadDrafter`; records the accepted tokens and, if asked for, the states before them."""
        is_first, num_pending = state.first_ids is None, len(state.pending)
        super().observe(state, result, hidden_states)
        recorder = state.recorder
        if recorder is None:
            return
        if self.records_every_position and is_first and state.prompt is not None:
            recorder.add(self.last_prompt_hidden(state.prompt)[:, None], [1] * len(recorder.tokens))
        elif self.records_every_position and len(state.pending) > num_pending:
            recorder.add(state.pending[-1].hidden_states, state.pending[-1].counts)
        for row, emitted in zip(recorder.tokens, result.emitted_ids, strict=True):
            row.extend(emitted)

    def last_prompt_hidden(self, prompt: Prompt) -> Tensor:
        """[B, S] hidden state of the last position of each row of a prompt."""
        hidden_states = self.select_hidden_states(prompt.hidden_states)
        mask = prompt.attention_mask[:, -hidden_states.shape[1] :]
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        return hidden_states.gather(1, last[:, None, None].expand(-1, 1, hidden_states.shape[-1]))[:, 0]

    # --- training -----------------------------------------------------------------------------------------------------

    @property
    def learning_spec(self) -> LearningSpec:
        """See `LearnableDrafter`."""
        config = self.head.config
        start = "" if self.starts_untrained else f"-{self._weights_digest()}"
        sizes = f"k{config.block_size}-f{config.block_ffn_size}-m{config.markov_rank}"
        return LearningSpec(
            key=f"{type(self.head).__name__.lower()}-{sizes}{start}",
            input_size=config.hidden_size,
            num_next=self.block_size,
            records_every_position=self.records_every_position,
            starts_untrained=self.starts_untrained,
        )

    def _weights_digest(self) -> str:
        """A short hash over the weights that learning starts from."""
        digest = hashlib.sha256()
        for name, weight in self._learned(self.head).items():
            flat = weight.detach().flatten()
            digest.update(name.encode())
            digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def _learned(self, head: nn.Module) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in head.named_parameters() if name.startswith(self.learned_parts)}

    def learnable_copy(self) -> nn.Module:
        """See `LearnableDrafter`. Weights that are not trained are shared with the head."""
        with torch.device("meta"):  # an initialisation would advance the user's random generator
            copy = type(self.head)(self.head.config)
        learned = self._learned(self.head)
        weights = {
            name: value.detach().float().clone() if name in learned else value.detach()
            for name, value in self.head.state_dict().items()
        }
        copy.load_state_dict(weights, assign=True)
        copy.requires_grad_(False)
        for weight in self._learned(copy).values():
            weight.requires_grad_(True)
        return copy

    def closed_form(self, device: torch.device) -> ClosedFormFit | None:
        """See `LearnableDrafter`; None: the head was trained."""
        return None

    def learning_loss(
        self, module: nn.Module, examples: Examples, shared_embeddings: SharedEmbeddings, candidate_ids: Tensor
    ) -> Tensor:
        """See `LearnableDrafter`: `block_cross_entropy`."""
        with torch.no_grad():
            root_embeds = shared_embeddings.embed(examples.root_ids).to(examples.inputs.dtype)
        features = self.learned_features(module, examples.inputs, root_embeds)
        markov_head = getattr(module, "markov_head", None)
        return block_cross_entropy(features, examples, shared_embeddings, markov_head, candidate_ids)[0]

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor], candidate_ids: Tensor | None) -> None:
        """See `LearnableDrafter`.

        Parameters are replaced one by one and never written to, so that a round in another thread reads whole weights;
        for one draft it may combine old and new ones, which affects acceptance only.
        """
        learned = self._learned(self.head)
        check_learned(weights, learned)
        for name, weight in learned.items():
            owner_name, _, attribute = name.rpartition(".")
            owner = self.head.get_submodule(owner_name)
            value = weights[name].detach().to(weight.device, weight.dtype, copy=True)
            setattr(owner, attribute, nn.Parameter(value, requires_grad=False))


def check_learned(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare learned weights with those of a head.

    Raises:
        ValueError: names or shapes differ, or a value is not finite.
    """
    if set(weights) != set(expected):
        names = ", ".join(sorted(set(weights) ^ set(expected))[:4])
        raise ValueError(f"learned weights must be those of the drafter's head; these differ: {names}.")
    for name, weight in expected.items():
        if weights[name].shape != weight.shape:
            raise ValueError(f"{name} must be {list(weight.shape)}; got {list(weights[name].shape)}.")
        if not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(f"{name} holds values that are not finite.")


def block_cross_entropy(
    features: Tensor,
    examples: Examples,
    shared_embeddings: SharedEmbeddings,
    markov_head: MarkovHead | None,
    candidate_ids: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of every position of a block, each given the emitted token before it.

    Args:
        features: [n, k, D] of the block.
        examples: n examples.
        shared_embeddings: of the target.
        markov_head: corrects all positions but the first, or None.
        candidate_ids: [V'] int64, increasing, the ids of the softmax.

    Returns:
        The loss, a scalar, and the metrics `agree0`, `agree1`, ...: of each position the share whose argmax is right.
    """
    with torch.no_grad():
        lm_head_rows = shared_embeddings.lm_head_rows(candidate_ids).to(features.dtype)
        previous = shared_embeddings.embed(examples.next_ids[:, :-1].clamp(min=0)).to(features.dtype)
    logits = shared_embeddings.logits(features, lm_head_rows)
    if markov_head is not None and features.shape[1] > 1:
        mixed = markov_head.mix(markov_head.project_features(features[:, 1:]), previous)
        correction = functional.linear(mixed, markov_head.vocab_proj.weight[candidate_ids])
        logits = logits + functional.pad(correction, (0, 0, 1, 0))
    labels = torch.searchsorted(candidate_ids, examples.next_ids.clamp(min=0))
    total, metrics = logits.new_zeros(()), dict[str, float]()
    for slot in range(features.shape[1]):
        rows = (examples.next_ids[:, slot] >= 0).nonzero()[:, 0]
        if len(rows):
            slot_logits, slot_labels = logits[rows, slot].float(), labels[rows, slot]
            total = total + SLOT_DECAY**slot * functional.cross_entropy(slot_logits, slot_labels)
            metrics[f"agree{slot}"] = float((slot_logits.argmax(-1) == slot_labels).float().mean())
    return total, metrics


__all__ = ["LearnableBlock", "block_cross_entropy", "check_learned"]
