"""Reduced LM heads: a draft token is chosen among the most frequent ids, so that a step reads few rows of the LM head.

A vocabulary of 248,320 ids makes the LM head the larger part of a draft step, while most text consists of a few
thousand ids (FR-Spec, arXiv 2502.14856; VocabTrim, arXiv 2506.22694). Ids that are left out are never drafted; the
output does not depend on it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.forks import new_lock

GROWTH, MIN_NEW_IDS = 1.5, 512
"""Ids are chosen again when so many times the ids of the last choice are counted, and at least so many more."""
MAX_ID_FILE_BYTES = 1 << 23


class FrequentIds:
    """The ids that a reduced LM head has rows for: the most frequent of prompts and outputs, then the lowest ones.

    Tokenizers that merge pairs give low ids to frequent tokens, which the first calls rely on. Threads may share it.

    Attributes:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        """
        Raises:
            ValueError: `size` below 1.
        """
        if size < 1:
            raise ValueError(f"a reduced LM head has at least 1 id; got {size}.")
        self.size = size
        self._counts: Counter[int] = Counter()
        self._chosen: tuple[int, Tensor] | None = None  # ids counted at the last choice, and what it was
        self._lock = new_lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # replicas of a drafter count the same text

    def count(self, ids: Iterable[int]) -> None:
        """Count ids of a prompt or an output."""
        with self._lock:
            self._counts.update(ids)

    def choose(self, vocab_size: int) -> Tensor | None:
        """[size] int64, increasing; None where that are all. The same object until the counts have grown."""
        if self.size >= vocab_size:
            return None
        with self._lock:
            total = self._counts.total()
            if self._chosen is None or total >= max(GROWTH * self._chosen[0], self._chosen[0] + MIN_NEW_IDS):
                known = (token for token, _ in self._counts.most_common() if 0 <= token < vocab_size)
                frequent = set(islice(known, self.size))
                others = (token for token in range(vocab_size) if token not in frequent)
                ids = torch.tensor(sorted([*frequent, *islice(others, self.size - len(frequent))]))
                self._chosen = total, ids
            return self._chosen[1]


class RowCache:
    """The rows of an LM head for some ids, a copy that is kept from call to call while head and ids are the same."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._ids: Tensor | None = None
        self._rows: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def rows(self, weight: Tensor | None, ids: Tensor, read: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """[n, D] `read(ids)`, which is called if the weight or the ids have changed.

        Args:
            weight: [V, D] of the LM head; None if it is unknown, then nothing is kept.
            ids: [n] int64.
            read: copies rows.
        """
        if weight is None:
            return read(ids)
        version = 0 if weight.is_inference() else weight._version
        key = (weight.data_ptr(), version, weight.shape, weight.dtype, weight.device)
        is_same = self._ids is not None and (self._ids is ids or torch.equal(self._ids, ids))
        if self._rows is None or key != self._key or not is_same:
            self._key, self._ids, self._rows = key, ids, read(ids)
        return self._rows


def read_ids(file: Path) -> Tensor:
    """[n] int64, increasing: the ids in a text file, as a JSON list or separated by spaces, commas or lines.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or holds something else.
    """
    if (size := file.stat().st_size) > MAX_ID_FILE_BYTES:
        raise ValueError(f"{file} must have at most {MAX_ID_FILE_BYTES} bytes; got {size}.")
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text) if text.startswith("[") else [int(part) for part in re.split(r"[\s,]+", text)]
    entries = found if isinstance(found, list) else [None]
    wrong = [number for number, one in enumerate(entries) if type(one) is not int or not 0 <= one < 1 << 31]
    if wrong or not entries:
        # Without its content: who names a file need not be allowed to read it.
        raise ValueError(
            f"{file} must hold ids of a vocabulary, whole numbers from 0, as a JSON list or one a line; got "
            f"{f'another entry {wrong[0]}' if isinstance(found, list) and wrong else 'another text'}."
        )
    return torch.tensor(sorted(set(entries)))
