"""What can be chosen at `patch` and again per call, and the checks on it. Changes nothing."""

from __future__ import annotations

import operator
import os
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmspec.control.tree_size import DEFAULT_TREE_SIZE
from mmspec.engine.tree import BUCKETS
from mmspec.interfaces import Compressor, Drafter, TargetInfo


@dataclass(frozen=True)
class SpecConfig:
    """What can be chosen at `patch` and again per call.

    Attributes:
        drafter: where guesses come from. compressor: shows the drafter fewer visual tokens.
        reference: texts that answers may resemble, one for all rows or one per row. reference_ids: the same as ids.
        nodes: score trees of just this many nodes, the root counted, whatever that costs; None lets the controller
            choose every round, so that it is never slower.
        deterministic: fix all shapes, so that a run in half precision repeats itself bit for bit on one machine.
        packed: on a CPU, True also tries float32 linear layers in the kernel's own order, which costs their memory once
            more; False leaves all linear layers as they are.
    """

    drafter: Drafter
    compressor: Compressor | None = None
    reference: str | Sequence[str] | None = None
    reference_ids: Sequence[Sequence[int]] | None = None
    nodes: int | None = None
    deterministic: bool = False
    packed: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise TypeError(
                f"deterministic must be True (fixed shapes) or False; got {self.deterministic!r}. Pass a bool."
            )
        if self.packed is not None and not isinstance(self.packed, bool):
            raise TypeError(f"packed must be True, False, or None (measure what is fastest); got {self.packed!r}.")
        _check_reference(self.reference)
        if self.nodes is not None and (isinstance(self.nodes, bool) or not isinstance(self.nodes, int)):
            raise TypeError(f"nodes must be a whole number of 1 to {BUCKETS[-1]}, or None; got {self.nodes!r}.")
        if self.nodes is not None and not 1 <= self.nodes <= BUCKETS[-1]:
            raise ValueError(f"nodes must be 1 to {BUCKETS[-1]} (the root counted), or None; got {self.nodes}.")
        if self.compressor is not None:
            _check_compressor(self.compressor, self.drafter)

    @property
    def fixed_tree_size(self) -> int | None:
        """Size of every tree, if timing must not choose it."""
        return self.nodes or (DEFAULT_TREE_SIZE if self.deterministic else None)

    @property
    def active_compressor(self) -> Compressor | None:
        """What shows the drafter fewer visual tokens: chosen, or its own; None if nothing does."""
        own = getattr(self.drafter, "compressor", None)
        return own if self.compressor is None and isinstance(own, Compressor) else self.compressor


def checked_tokenizer(processor: Any) -> Any:
    """The tokenizer of a processor, or the tokenizer itself; None of None."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        return None
    if isinstance(tokenizer, type) or not callable(tokenizer) or not hasattr(tokenizer, "__len__"):
        raise TypeError(
            "processor must be the model's processor or its tokenizer, an object that turns text into ids; got "
            f"{processor!r}. Pass AutoProcessor.from_pretrained(...), or leave it out."
        )
    return tokenizer


def checked_reference_ids(rows: Any) -> list[list[int]] | None:
    """Reference ids as lists of int."""
    if rows is None:
        return None
    rule = "reference_ids must be a list with one list of token ids per prompt, or with one for all, as [[5, 6, 7]]"
    try:
        made = [[_token(token) for token in row] for row in rows]
    except TypeError:
        raise TypeError(f"{rule}; got {reprlib.repr(rows)}.") from None
    if not made:
        raise ValueError(f"{rule}; got {reprlib.repr(rows)}. Leave it out if there is no reference.")
    return made


def _check_reference(reference: Any) -> None:
    if reference is None or isinstance(reference, str):
        return
    rule = "reference must be a text, or a list with one text per prompt"
    if not isinstance(reference, Sequence) or not all(isinstance(text, str) for text in reference):
        raise TypeError(f"{rule}; got {reprlib.repr(reference)}. Pass token ids as reference_ids.")
    if not reference:
        raise ValueError(f"{rule}; got {reprlib.repr(reference)}. Leave it out if there is no reference.")


def _token(value: Any) -> int:
    """A token id of any integer type; text, truth values and fractions are none."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def target_info(family: Any, tokenizer: Any) -> TargetInfo:
    """What a drafter may check of a target."""
    return TargetInfo(
        model_type=family.model_type,
        hidden_size=family.text_config.hidden_size,
        vocab_size=family.vocab_size,
        num_layers=family.num_layers,
        tokenizer=tokenizer,
        name=str(getattr(family.model.config, "_name_or_path", "") or ""),
        media_token_ids=family.media_token_ids,
        device=family.model.device.type,
    )


def resolve_drafter(drafter: str | Drafter, family: Any, tokenizer: Any = None) -> Drafter:
    """The drafter of that name or folder, or the object itself, if it fits the target."""
    from mmspec.drafters.registry import build_drafter

    made = build_drafter(drafter, target_info(family, tokenizer))
    if made.vocab_size is not None and made.vocab_size != family.vocab_size:
        raise ValueError(
            f"drafter {made.name!r} was made for a vocabulary of {made.vocab_size} ids, the model has "
            f"{family.vocab_size}; use a drafter of this model, or drafter='auto'."
        )
    wrong = [tap for tap in made.requirements.hidden_state_indices if not 0 <= tap <= family.num_layers]
    if wrong:
        raise ValueError(f"drafter {made.name!r} taps states {wrong}; this model has states 0 to {family.num_layers}.")
    comes_with = getattr(made, "comes_with", None)
    if comes_with is not None:
        from mmspec.vision.registry import restored

        facts, weights = comes_with
        made.compressor = restored(facts, weights, family.text_config.hidden_size)  # type: ignore[attr-defined]
    return made


def resolve_compressor(compressor: str | Compressor | None) -> Compressor | None:
    """The compressor of that name, or the object itself if it is one."""
    if compressor is None:
        return None
    from mmspec.vision.registry import make

    return make(compressor)


def _check_compressor(compressor: Compressor, drafter: Drafter) -> None:
    """Refuse any beside a drafter that shrinks pictures, and weights of another width than the states it reads."""
    head = getattr(drafter, "head", None)
    if getattr(head, "compresses_visual_tokens", False):
        raise ValueError(f"drafter {drafter.name!r} shrinks pictures itself; leave compressor=None.")
    made, config = getattr(compressor, "hidden_size", None), getattr(head, "config", None)
    if made is None:
        return
    if getattr(config, "eagle3_input", False):  # states are wider than embeddings: no one width fits both
        raise ValueError(
            f"compressor {compressor.name!r} was made for states of width {made}, drafter {drafter.name!r} reads "
            "several states side by side; choose one without weights."
        )
    wanted = getattr(config, "hidden_size", made)
    if made != wanted:
        raise ValueError(
            f"compressor {compressor.name!r} was made for states of width {made}, drafter {drafter.name!r} reads "
            f"states of width {wanted}; make it with hidden_size={wanted}, or choose one without weights."
        )


def reference_rows(
    options: SpecConfig, tokenizer: Any, batch: int | None, num_return_sequences: int
) -> list[list[int]]:
    """One list of reference ids per row of the expanded batch. `batch` None only checks."""
    texts, ids = options.reference, options.reference_ids
    if texts is None and ids is None:
        return [[] for _ in range(batch or 0)]
    if texts is not None:
        if tokenizer is None:
            raise ValueError("reference= is text and needs the tokenizer: pass processor=, or give reference_ids=.")
        many = [texts] if isinstance(texts, str) else list(texts)
        # Twice, since a text after a space is other tokens than at the start of a line.
        ids = [
            [token for form in (text, " " + text) for token in tokenizer(form, add_special_tokens=False).input_ids]
            for text in many
        ]
    assert ids is not None
    if batch is None:
        return []
    if len(ids) == 1:
        ids = list(ids) * (batch // num_return_sequences)
    if len(ids) * num_return_sequences != batch:
        raise ValueError(
            f"reference gives {len(ids)} texts for {batch // num_return_sequences} prompts; give one, or one per prompt."
        )
    return [list(row) for row in ids for _ in range(num_return_sequences)]


PER_CALL_OPTIONS = (
    "enabled",
    "drafter",
    "compressor",
    "nodes",
    "deterministic",
    "packed",
    "reference",
    "reference_ids",
)


MAX_CACHED_DRAFTERS = 4
"""Drafters that calls named and that are kept for later calls; each may hold the weights of a layer."""


class DrafterCache:
    """Drafters by name, so that a call that names one does not read its weights anew, and what it learned stays."""

    def __init__(self) -> None:
        self._made: dict[Any, Drafter] = {}
        self._lock = threading.Lock()

    def get(self, drafter: str | Drafter, family: Any, tokenizer: Any) -> Drafter:
        """As `checked_drafter`; a folder that has changed since is read again."""
        if not isinstance(drafter, str):
            return resolve_drafter(drafter, family, tokenizer)
        key = drafter, _stamp(drafter), id(tokenizer), family.vocab_size
        with self._lock:
            made = self._made.pop(key, None) or resolve_drafter(drafter, family, tokenizer)
            self._made[key] = made  # the newest last
            for old in list(self._made)[:-MAX_CACHED_DRAFTERS]:
                del self._made[old]
        return made


def _stamp(folder: str) -> tuple[Any, ...]:
    """Size and time of what is in a folder; nothing of what is none."""
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as found:
        return tuple(sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in found))


def resolve_call_config(
    options: SpecConfig, chosen: Mapping[str, Any] | None, family: Any, tokenizer: Any, kept: DrafterCache
) -> tuple[SpecConfig, bool]:
    """Options of one call, and whether mmspec is on, from `generate(..., mmspec=dict(...))`."""
    if chosen is None:
        return _own(options), True
    if not isinstance(chosen, Mapping):
        raise TypeError(f"generate(mmspec=...) takes a dict with any of {', '.join(PER_CALL_OPTIONS)}; got {chosen!r}.")
    chosen = dict(chosen)
    unknown = sorted(set(chosen) - set(PER_CALL_OPTIONS))
    if unknown:
        raise ValueError(f"generate(mmspec=...) takes {', '.join(PER_CALL_OPTIONS)}; got {', '.join(unknown)}.")
    enabled = chosen.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled must be True or False; got {enabled!r}. generate(mmspec=dict(enabled=False)) decodes this call "
            "by transformers alone."
        )
    if "reference_ids" in chosen:
        chosen["reference_ids"] = checked_reference_ids(chosen["reference_ids"])
    if "drafter" in chosen:
        chosen["drafter"] = kept.get(chosen["drafter"], family, tokenizer)
    if "compressor" in chosen:
        chosen["compressor"] = resolve_compressor(chosen["compressor"])
    return _own(replace(options, **chosen)), enabled


def _own(options: SpecConfig) -> SpecConfig:
    """With the drafter's own compressor where the one chosen by name only stands in for it."""
    if options.compressor is None:
        return options
    from mmspec.vision.compressors.cost_based import Measured

    own = getattr(options.drafter, "compressor", None)
    stands_in = isinstance(options.compressor, Measured) and options.compressor.name == getattr(own, "name", None)
    return replace(options, compressor=own) if stands_in else options
