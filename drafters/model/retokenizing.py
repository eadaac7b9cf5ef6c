"""`RetokenizingDrafter`: a draft model with another tokenizer than the target's drafts text.

The text so far is written in the draft model's tokens, what it drafts is written in the target's tokens behind the last
emitted ones (universal assisted decoding of transformers; OmniDraft, arXiv 2507.02659, without its cache of merged
tokens). A draft is text, so it needs no map between the vocabularies; where the two tokenizers cut the text
differently, the target's last emitted tokens decide: a draft that would change them is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.model.chain import ChainState
from mmspec.drafters.model.model_drafter import ModelDrafter, ModelState, text_rows
from mmspec.engine.tree import DraftTree, Node, build_tree
from mmspec.interfaces import DraftModelSource, Prompt

SAMPLE_TEXT = "A small test: 13 red foxes, two of them asleep.\nYes, 2.5 km away (or more)."
"""Text that both tokenizers must reproduce."""
CONTEXT_TOKENS = 8
"""Emitted tokens before a draft that are tokenized together with it."""


@dataclass
class TextState(ModelState):
    """State of one call.

    Attributes:
        prompt_rows: target ids of the text of each prompt, without visual tokens.
    """

    prompt_rows: list[list[int]] = field(default_factory=list)


class RetokenizingDrafter(ModelDrafter):
    """Drafts with a model that has another tokenizer.

    Attributes:
        tokenizer: of the target.
        draft_tokenizer: of the draft model.
    """

    def __init__(self, source: DraftModelSource, tokenizer: Any, max_length: int = 6) -> None:
        """
        Args:
            source: opens the model; with its tokenizer.
            tokenizer: of the target.
            max_length: largest number of tokens of a draft, in the draft model's tokens.

        Raises:
            ValueError: one of the tokenizers does not reproduce text.
        """
        super().__init__(source, max_length=max_length)
        self.top_k = 1  # the draft is one text
        self.tokenizer = tokenizer
        self.draft_tokenizer = source.tokenizer
        for owner, one in (("processor=", tokenizer), (f"drafter={source.name}", source.tokenizer)):
            if decode_text(one, encode_text(one, SAMPLE_TEXT)).strip() != SAMPLE_TEXT:
                raise ValueError(
                    f"the tokenizer of {owner} does not reproduce text, so that drafts cannot be written in the "
                    "target's tokens. Use a draft model with the target's tokenizer."
                )

    def begin(self, prompt: Prompt) -> TextState:
        """See `ModelDrafter.begin`. All ids are those of the draft model, and are ranked without noise."""
        state = TextState(**vars(super().begin(prompt)))
        state.prompt_rows = text_rows(prompt)
        state.logit_bias = torch.zeros(self.source.vocab_size, device=state.logit_bias.device)
        return state

    def propose(self, state: ChainState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """See `ModelDrafter.propose`; a chain in the target's tokens."""
        assert isinstance(state, TextState)
        tree = super().propose(state, max_nodes, active)
        if tree.num_nodes == 1:
            return tree
        scores = [] if tree.scores is None else tree.scores.tolist()
        rows = [
            self._to_target(state, row, ids[1:], scores[row][1:])[: max_nodes - 1] if is_active else []
            for row, (ids, is_active) in enumerate(zip(tree.tokens.tolist(), active, strict=True))
        ]
        return build_tree(rows, tree.tokens.device)

    def prompt_ids(self, prompt: Prompt) -> list[list[int]]:
        return [encode_text(self.draft_tokenizer, decode_text(self.tokenizer, row)) for row in text_rows(prompt)]

    def output_ids(self, state: ModelState, row: int) -> list[int]:
        """See `ModelDrafter.output_ids`. Tokenized together with the last tokens of the prompt."""
        assert isinstance(state, TextState)
        context = state.prompt_rows[row][-CONTEXT_TOKENS:]
        before = encode_text(self.draft_tokenizer, decode_text(self.tokenizer, context))
        ids = encode_text(self.draft_tokenizer, decode_text(self.tokenizer, context + state.output_ids[row]))
        return ids[len(before) :] or ids[-1:] or [0]

    def _log_noise(self, state: ChainState, length: int) -> Tensor | None:
        """None: the target's noise belongs to other ids."""
        return None

    def _to_target(self, state: TextState, row: int, ids: list[int], scores: list[float]) -> list[Node]:
        """The chain of target tokens for a chain of the draft model's tokens; empty if it does not continue the output.

        Args:
            state: of the call.
            row: of the batch.
            ids: draft model's tokens.
            scores: probability of each, cumulative.
        """
        draft_context = self.output_ids(state, row)[-CONTEXT_TOKENS:]
        before = decode_text(self.draft_tokenizer, draft_context)
        after = decode_text(self.draft_tokenizer, draft_context + ids)
        text = after[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
        if not text or not after.startswith(before):
            return []
        context = (state.prompt_rows[row] + state.output_ids[row])[-CONTEXT_TOKENS:]
        tokens = encode_text(self.tokenizer, decode_text(self.tokenizer, context) + text)
        if tokens[: len(context)] != context:
            return []
        drafted = tokens[len(context) :]
        shares = [min(len(ids) - 1, (index + 1) * len(ids) // len(drafted)) for index in range(len(drafted))]
        return [(token, index, scores[shares[index]]) for index, token in enumerate(drafted)]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def same_tokenizer(first: Any, second: Any) -> bool:
    """Whether the vocabulary of one tokenizer is part of the other's, with the same ids and the same cuts."""
    one, other = first.get_vocab().items(), second.get_vocab().items()
    return (one <= other or other <= one) and encode_text(first, SAMPLE_TEXT) == encode_text(second, SAMPLE_TEXT)
