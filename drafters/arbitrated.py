"""`arbitrated`: n-grams of several kinds, or a copy in 4 or 8 bits, whichever pays most.

Every round one source drafts, as the chooser of the call says (`mmspec.economy.chooser`); all follow what the target
emits. The n-gram sources are subsets of those of one best-first drafter, so that their probabilities are calibrated
together: `outputs` has all of them with counts of the n-grams of all calls. The counts guess what the copy
decodes, too, which is made once it would have saved the time that making it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.drafters.model.chain import ChainState
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.drafters.ngram.base import BestFirstDrafter, BestFirstState
from mmspec.drafters.ngram.lookup import PromptLookup
from mmspec.drafters.ngram.output_ngrams import OutputNgrams
from mmspec.drafters.ngram.recycling import SuccessorTable
from mmspec.economy.known import Offer, Source
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, VerifyResult

ENABLED = {"outputs": [True, True, True], "lookup": [True, False, False], "recycling": [False, True, False]}
"""{source: which of lookup, recycling and counts take part}."""


@dataclass
class ArbitratedState:
    """State of one call.

    Attributes:
        ngram: state of the n-grams.
        chain: state of the copy that drafts, or None.
        prompt: of the call.
    """

    ngram: BestFirstState
    chain: ChainState | None
    prompt: Prompt


class ArbitratedDrafter(Drafter):
    """Drafts by the source (n-grams of some kinds, or a copy) that the chooser plans.

    Attributes:
        ngram: the best-first drafter; the n-gram sources are subsets of its sources.
        copied: drafts with a copy of the target in few bits; None where there is none.
        kinds: n-gram sources that may draft, the one to begin with first.
    """

    name = "arbitrated"

    def __init__(self, kinds: Sequence[str] = ("outputs", "lookup", "recycling"), may_copy: bool = False) -> None:
        """
        Args:
            kinds: n-gram sources that may draft, names of `ENABLED`.
            may_copy: whether a copy of the target may be made, on a CPU.
        """
        self.ngram = BestFirstDrafter(self.name, [PromptLookup(), SuccessorTable(), OutputNgrams()])
        self.copied = QuantizedDrafter(guide=self.ngram, is_optional=True) if may_copy else None
        self.kinds = tuple(kinds)
        self.vocab_size = self.ngram.vocab_size
        self.requirements = self.ngram.requirements if self.copied is None else self.copied.requirements

    # --- a call ------------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ArbitratedState:
        """Start all sources."""
        ngram, chooser, subsets = self.ngram.begin(prompt), prompt.chooser, prompt.layer_subsets
        state = ArbitratedState(ngram, None, prompt)
        if self.copied is not None and subsets is not None:
            state.chain = self.copied.begin(prompt)
            state.chain.guide = ngram
        if chooser is not None:
            chooser.sources = [Source(kind) for kind in self.kinds]
            if state.chain is not None and subsets is not None and not subsets.is_made:
                likely = self._copies(state)[0]
                chooser.offer = Offer(likely, lambda: self._make_copy(state), "a copy in few bits")
            else:
                chooser.sources += self._copies(state)
        return state

    def _copies(self, state: ArbitratedState) -> list[Source]:
        """The sources that draft with the copy."""
        return [] if self.copied is None or state.chain is None else self.copied.sources(state.chain)

    def _make_copy(self, state: ArbitratedState) -> list[Source]:
        """Make the copy of the target; what drafts with it."""
        subsets = state.prompt.layer_subsets
        if subsets is None or not subsets.make():
            state.chain = None
        return self._copies(state)

    def propose(self, state: ArbitratedState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The draft of the planned source."""
        self.ngram.catch_up(state.ngram)
        source = None if state.prompt.chooser is None else state.prompt.chooser.source
        if self.copied is not None and state.chain is not None and source is not None and source.variant is not None:
            return self.copied.propose(state.chain, max_nodes, active)
        state.ngram.enabled = ENABLED[self.kinds[0] if source is None else source.name]
        return self.ngram.propose(state.ngram, max_nodes, active)

    def observe(self, state: ArbitratedState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Let all sources follow."""
        self.ngram.observe(state.ngram, result, {})
        if self.copied is not None and state.chain is not None:
            self.copied.observe(state.chain, result, {})
