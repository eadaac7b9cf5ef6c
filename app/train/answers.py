"""Answers that the data bring: the checks that prompts have, so that one odd answer costs one record."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mmspec.app.io.images import ImageError
from mmspec.app.modeling.chat import max_positions

MAX_ANSWER_TOKENS = 2048
"""Tokens of an answer of the data; as many as an answer may have that the target writes, if that is more."""


def answer_ids(tokenizer: Any, answer: str, eos_ids: list[int]) -> list[int]:
    """Token ids of an answer and its end."""
    return [*tokenizer(" " + answer.strip(), add_special_tokens=False).input_ids, *eos_ids[:1]]


def check_answer(
    model: Any, tokenizer: Any, ids: list[int], prompt_tokens: int, placeholders: Collection[int], limit: int
) -> None:
    """Refuse an answer that the target cannot read behind its prompt.

    Args:
        ids: of the answer.
        prompt_tokens: of picture and prompt before it.
        placeholders: ids of visual tokens, for which an answer has no picture.
        limit: of the number of its tokens.

    Raises:
        ImageError: it is one.
    """
    if (found := next((token for token in ids if token in placeholders), None)) is not None:
        name = tokenizer.convert_ids_to_tokens(found)
        raise ImageError("BadText", f"the answer must not contain {name}: there is no picture for it")
    if len(ids) > limit:
        raise ImageError(
            "TooLong", f"the answer has {len(ids)} tokens; the limit is {limit}: --max-new-tokens raises it"
        )
    positions = max_positions(model)
    total = prompt_tokens + len(ids)
    if positions is not None and total > positions:
        raise ImageError("TooLong", f"image, prompt and answer have {total} tokens, the model {positions} positions")
