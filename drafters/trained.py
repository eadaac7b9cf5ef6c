"""A trained draft head from a folder to a drafter, checked against the target."""

from __future__ import annotations

import os

from mmspec.drafters.checkpoint import fingerprint, load
from mmspec.drafters.eagle import EagleDrafter
from mmspec.interfaces import Facts


def trained(folder: str | os.PathLike[str], target: Facts | None = None) -> EagleDrafter:
    """The drafter in a folder of `mmspec train`.

    Raises:
        FileNotFoundError, ValueError: no draft head, a damaged one, or one for another target.
    """
    head, made = load(folder)
    if target is not None:
        made.check(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            layers=target.layers,
            tokenizer=None if target.tokenizer is None else fingerprint(target.tokenizer),
        )
    name = os.path.basename(os.path.normpath(folder))
    return EagleDrafter(head, made.rule, layers=made.layers, name=name, draft_ids=made.draft_ids)


__all__ = ["trained"]
