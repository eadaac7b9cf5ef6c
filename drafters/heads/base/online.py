"""`LearnableHead`: online learning of trained heads (`mmspec.learning.protocols.GradientDrafter`).

A call is recorded as whole sequences with the target's states, as offline training has them, so every architecture
learns all of its weights with its own training loss, from the target's distributions (SpecVLM, arXiv 2509.11815,
trains online from the target's logits as well). When a step is taken and where weights are stored is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.collector import SequenceCollector
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.registry import method_of
from mmspec.drafters.training.batch import TrainBatch
from mmspec.engine.undo import InferenceMode
from mmspec.interfaces import SharedEmbeddings, VerifyResult


class LearnableHead(HeadDrafter):
    """A `HeadDrafter` that implements `mmspec.learning.protocols.GradientDrafter`."""

    @property
    def cannot_learn(self) -> str | None:
        method = method_of(self)
        if method is None or method.classes().loss is None:
            return "its architecture has no training loss"
        if self.head.config.hidden_state_layers or len(self.hidden_state_indices) > 1:
            return "it reads hidden states of inner layers"
        if self.own_embeddings is not None:
            return "it has embeddings of its own"
        if self.bundled_compressor is not None:
            return "it was trained with a compressor"
        return None

    # --- recording ----------------------------------------------------------------------------------------------------

    def start_collecting(self, state: DraftState, with_examples: bool) -> None:
        """See `LearnableDrafter`. A prompt that continues a cache, or is compressed, is not recorded."""
        prompt = state.prompt
        assert prompt is not None
        hidden_states = self.select_hidden_states(prompt.hidden_states)
        is_whole = hidden_states.shape[1] == prompt.input_ids.shape[1]
        if with_examples and is_whole and prompt.compressor is None:
            state.collector = SequenceCollector(prompt, hidden_states, state.shared_embeddings)

    @InferenceMode()
    def observe(self, state: DraftState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """See `HeadDrafter`; records the emitted tokens and the states before them."""
        is_first, num_pending = state.first_ids is None, len(state.pending)
        super().observe(state, result, hidden_states)
        if state.collector is None:
            return
        if is_first:
            state.collector.add(result.emitted_ids, None)
        elif len(state.pending) > num_pending:
            state.collector.add(result.emitted_ids, state.pending[-1].hidden_states)

    def collected_examples(self, state: DraftState) -> list[TrainBatch]:
        """See `LearnableDrafter`: one sequence per row."""
        return [] if state.collector is None else state.collector.sequences()

    # --- training -----------------------------------------------------------------------------------------------------

    @property
    def learning_key(self) -> str:
        digest = hashlib.sha256()
        for name, weight in self.head.named_parameters():
            flat = weight.detach().flatten()
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
        return f"{type(self.head).__name__.lower()}-{digest.hexdigest()[:12]}"

    def learnable_copy(self) -> nn.Module:
        with torch.device("meta"):  # an initialisation would advance the user's random generator
            copy = type(self.head)(self.head.config)
        copy.load_state_dict(
            {name: value.detach().float().clone() for name, value in self.head.state_dict().items()}, assign=True
        )
        return copy.requires_grad_(True)

    def learning_loss(
        self,
        module: nn.Module,
        examples: Sequence[TrainBatch],
        shared_embeddings: SharedEmbeddings,
        rng: torch.Generator,
    ) -> Tensor:
        """See `GradientDrafter`: the loss of the architecture, as in training."""
        from mmspec.drafters.training.online import sequence_loss

        return sequence_loss(self, module, examples, shared_embeddings, rng)

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """See `LearnableDrafter`.

        Parameters are replaced one by one and never written to, so that a round in another thread reads whole weights;
        for one draft it may combine old and new ones, which affects acceptance only.
        """
        parameters = dict(self.head.named_parameters())
        _check_weights(weights, parameters)
        for name, weight in parameters.items():
            owner_name, _, attribute = name.rpartition(".")
            value = weights[name].detach().to(weight.device, weight.dtype, copy=True)
            setattr(self.head.get_submodule(owner_name), attribute, nn.Parameter(value, requires_grad=False))


def _check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
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
