"""Self-speculative drafting: the target itself drafts with some of its decoder layers, or a copy of it in few bits.

No second model and no training; without a copy no memory. The draft reads the keys and values that the target has
computed. Which layers draft is chosen among a few sets by their running acceptance and cost: early exits behind the
first layers (Kangaroo, arXiv 2404.18911; DEL, arXiv 2504.05598), and every second or third layer left out (Draft &
Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916). Differences from the papers: there is no adapter and no search
over sets, and the target verifies with all layers, also those that the draft has run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mmspec.drafters.model.chain import ChainDrafter, ChainInputs, ChainState
from mmspec.interfaces import Drafter, DrafterRequirements, DraftTarget, LayerSubsets, Prompt

MAX_QUANTIZED_LENGTH = 15
"""Tokens of a draft by a copy, which is right more often than some of the layers are."""
COPY_PRIOR, HALF_PRIOR = 0.9, 0.5
"""Acceptance of a token that a copy has drafted, with all layers and with half of them, before it is measured."""
LayerSet = tuple[int, ...]
"""Indices of the decoder layers that draft, rising."""


def candidate_layer_sets(num_layers: int, exit_limit: int | None = None) -> list[LayerSet]:
    """The layer sets to choose from, the likeliest to pay first.

    Args:
        num_layers: decoder layers of the target.
        exit_limit: where later layers read keys and values of earlier ones, the number of layers before them: only
            early exits up to there run without the others. None: any set does.
    """
    edge = 2 if num_layers >= 8 else 1
    middle = range(edge, num_layers - edge)
    sets = [
        tuple(layer for layer in range(num_layers) if layer not in middle[::every])
        for every in ((2, 3) if exit_limit is None else ())
    ]
    limit = num_layers - 1 if exit_limit is None else exit_limit
    sets += [tuple(range(min(limit, max(1, num_layers * quarters // 4)))) for quarters in (2, 3, 1)]
    return [layers for layers in dict.fromkeys(sets) if 0 < len(layers) < num_layers]


@dataclass
class SelfState(ChainState):
    """State of one call.

    Attributes:
        layer_sets: the sets to choose from.
        targets: {layer set: the target with these layers}.
        cached_lengths: of the target before the last draft.
    """

    layer_sets: list[LayerSet] = field(default_factory=list)
    targets: dict[Hashable, DraftTarget] = field(default_factory=dict)
    cached_lengths: list[int] = field(default_factory=list)


class SelfDrafter(ChainDrafter):
    """Drafts with the target's own layers."""

    name = "self"
    drafts_under_rules = True
    requirements = DrafterRequirements(layer_subsets=True)

    def __init__(self, layers: Sequence[int] | None = None, max_length: int = 6, guide: Drafter | None = None) -> None:
        """
        Args:
            layers: decoder layers that draft; None chooses them by running acceptance.
            max_length: largest number of tokens of a draft.
            guide: see `ChainDrafter`.

        Raises:
            ValueError: `layers` is empty, negative or not rising.
        """
        super().__init__(max_length, guide=guide)
        if layers is not None and (not layers or list(layers) != sorted({int(x) for x in layers if x >= 0})):
            raise ValueError(f"layers must be rising indices of decoder layers, or None; got {layers!r}.")
        self.layers = None if layers is None else tuple(layers)

    def begin(self, prompt: Prompt) -> SelfState:
        """See `ChainDrafter.begin`.

        Raises:
            ValueError: the target has fewer layers than `layers` names.
        """
        state = SelfState(**vars(super().begin(prompt)))
        subsets = prompt.layer_subsets
        if subsets is not None:
            state.layer_sets = self._layer_sets(subsets)
        if prompt.chooser is not None and self.owns_guide:
            prompt.chooser.sources = self.sources(state)
        return state

    def variants(self, state: ChainState) -> Sequence[Hashable]:
        """The layer sets."""
        assert isinstance(state, SelfState)
        return state.layer_sets

    def open_chain(self, state: ChainState, variant: Hashable, active: Sequence[bool]) -> ChainInputs:
        """The target with some layers. Its cache holds all emitted tokens but the last."""
        assert isinstance(state, SelfState) and isinstance(variant, tuple) and state.prompt.layer_subsets is not None
        if variant not in state.targets:
            state.targets[variant] = state.prompt.layer_subsets.open(variant)
        target = state.targets[variant]
        state.cached_lengths = list(target.cached_lengths)
        return ChainInputs(target, [row[-1:] for row in state.output_ids])

    def close_chain(self, state: ChainState, chain: ChainInputs) -> None:
        """Restore the lengths of the target's cache.

        Of rows of several lengths the target reads, masked, what it does not overwrite: there 0 * nan would be nan.
        """
        assert isinstance(state, SelfState)
        chain.target.crop(state.cached_lengths, zero_tail=len(state.cached_lengths) > 1)

    def _candidates(self, subsets: LayerSubsets) -> list[LayerSet]:
        """The layer sets to choose from."""
        return candidate_layer_sets(subsets.num_layers, subsets.exit_limit)

    def _layer_sets(self, subsets: LayerSubsets) -> list[LayerSet]:
        if self.layers is None:
            return self._candidates(subsets)
        if self.layers[-1] >= subsets.num_layers:
            raise ValueError(
                f"layers must be below the target's number of decoder layers, {subsets.num_layers}; got {self.layers}."
            )
        return [self.layers]


class QuantizedDrafter(SelfDrafter):
    """Drafts with a copy of the target's weights in 4 or 8 bits, over the target's KV cache.

    As ML-SpecQD (arXiv 2503.13565) and QuantSpec (arXiv 2502.10424), which have caches of their own: there, a
    position that the target has verified is still that of the copy.
    """

    name = "quantized"

    def __init__(
        self,
        bits: int | None = None,
        layers: Sequence[int] | None = None,
        max_length: int = MAX_QUANTIZED_LENGTH,
        guide: Drafter | None = None,
        is_optional: bool = False,
    ) -> None:
        """
        Args:
            bits: of the decoder's weights, 4 or 8; None chooses (`FEW_WEIGHTS`). The LM head has 8.
            layers: decoder layers that draft; None chooses between all and the first half by running acceptance.
            max_length: largest number of tokens of a draft.
            guide: drafts for the copy, which then scores several nodes in one forward; None for none.
            is_optional: a drafter around this one decides whether the copy is made, and owns the guide.

        Raises:
            ValueError: other `bits`; or `layers` is empty, negative or not rising.
        """
        super().__init__(layers, max_length, guide)
        if bits not in (None, 4, 8):
            raise ValueError(f"bits must be 4, 8 or None; got {bits!r}.")
        top_k = 0 if guide is None else guide.requirements.top_k
        self.requirements = DrafterRequirements(
            layer_subsets=True, copy_bits=bits or 0, top_k=top_k, optional_copy=is_optional
        )
        self.owns_guide = not is_optional

    def prior(self, state: ChainState, number: int) -> tuple[float, float]:
        """See `ChainDrafter`. A step takes what reading its weights takes."""
        subsets = state.prompt.layer_subsets
        share = 1.0 if subsets is None else subsets.byte_share
        return (COPY_PRIOR, share) if number == 0 else (HALF_PRIOR, 0.5 * share)

    def _candidates(self, subsets: LayerSubsets) -> list[LayerSet]:
        limit = subsets.num_layers if subsets.exit_limit is None else subsets.exit_limit
        half = tuple(range(min(limit, subsets.num_layers // 2)))
        return [tuple(range(subsets.num_layers)), *([half] if half else [])]
