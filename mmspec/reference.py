"""The options `reference` and `reference_ids`: texts that the output may repeat, for drafters that copy from them."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from typing import Any


def resolve_reference_ids(rows: Any) -> list[list[int]] | None:
    """Reference ids as lists of int, or None.

    Raises:
        TypeError, ValueError: not a non-empty list of lists of token ids.
    """
    if rows is None:
        return None
    rule = "reference_ids must be a list with one list of token ids per prompt, or with one for all, as [[5, 6, 7]]"
    try:
        token_ids = [[_token_id(token) for token in row] for row in rows]
    except TypeError:
        raise TypeError(f"{rule}; got {reprlib.repr(rows)}.") from None
    if not token_ids:
        raise ValueError(f"{rule}; got {reprlib.repr(rows)}. Omit it if there is no reference.")
    return token_ids


def encode_reference(reference: Any, tokenizer: Any) -> list[list[int]] | None:
    """The option `reference` as token ids, one list per text; None for None.

    Args:
        reference: a text for all prompts, or one per prompt.
        tokenizer: of the model; None if there is none.

    Raises:
        TypeError, ValueError: not a string or a non-empty list of strings, or no tokenizer.
    """
    if reference is None:
        return None
    rule = "reference must be a string, or a list with one string per prompt"
    texts = [reference] if isinstance(reference, str) else reference
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{rule}; got {reprlib.repr(reference)}. Pass token ids as reference_ids.")
    if not texts:
        raise ValueError(f"{rule}; got {reprlib.repr(reference)}. Omit it if there is no reference.")
    if tokenizer is None:
        raise ValueError("reference= is text and needs the tokenizer: pass processor=, or pass reference_ids=.")
    # Both forms: tokenizers usually encode a text after a space differently than at the start of a line.
    return [
        [token for form in (text, " " + text) for token in tokenizer(form, add_special_tokens=False).input_ids]
        for text in texts
    ]


def _token_id(value: Any) -> int:
    """An integer of any integer type; strings, bools and floats are refused."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
