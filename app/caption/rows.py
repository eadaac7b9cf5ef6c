"""Decoded pictures and prompts to rows of the output, one batch at a time: errors, memory, the columns of a row.

The model (`CaptionModel`) is an argument. Knows nothing of inputs, files or resuming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mmspec.app.caption.config import SCENES_MODEL, CaptionConfig, derive_seed, prompt_sha1
from mmspec.app.caption.loops import LOOP, without_loop
from mmspec.app.caption.progress import print_stderr
from mmspec.app.caption.schema import column_values, fault_of, schema_columns
from mmspec.app.caption.variants import picture_number
from mmspec.app.errors import one_line
from mmspec.app.io.columns import GENERATION, ROW_COLUMNS
from mmspec.app.io.fields import MissingFieldError, answer_number, fill
from mmspec.app.io.file_stamp import file_stamp
from mmspec.app.io.images import ImageError, Media, Video
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.text import escaped_values, find_fault
from mmspec.app.scenes.domain_check import warn_if_out_of_domain
from mmspec.app.versions import mmspec_version

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import Caption, ComparisonTotals, Provenance

Work = Sequence[tuple[Item, Media]]


class CaptionModel(Protocol):
    """What generates captions: `Captioner`, or a stand-in in tests."""

    @property
    def comparison(self) -> ComparisonTotals | None: ...

    @property
    def dtype(self) -> str: ...

    @property
    def acceptance(self) -> float | None: ...

    @property
    def provenance(self) -> Provenance: ...

    def count_tokens(self, width: int, height: int) -> int | None: ...

    def caption(
        self, media: Sequence[Media], prompts: Sequence[str], seed: int, compare: Sequence[bool] = ()
    ) -> Sequence[Caption]: ...


Result: TypeAlias = "Caption | ImageError"
"""A caption, or why there is none."""


class RowCaptioner:
    """Captions batches with one model and remembers what fits in its memory."""

    def __init__(self, config: CaptionConfig, model: CaptionModel) -> None:
        self.config, self.model = config, model
        self._max_rows = config.batch_size  # less, where memory has not sufficed
        self._check_images = config.model == SCENES_MODEL  # until the first warning
        self._answers: dict[tuple[int, int], dict[str, str]] = {}  # of the pictures of the last batch: `_place`

    def caption_rows(self, decoded: Sequence[tuple[Item, Media | ImageError]]) -> list[Row]:
        """Rows of one batch: a caption or an error each."""
        decoded = [self._asked(item, media) for item, media in decoded]
        good = [(item, media) for item, media in decoded if not isinstance(media, ImageError)]
        self._check_domain(good)
        results: dict[str, Result] = {item.id: error for item, error in decoded if isinstance(error, ImageError)}
        start = 0
        while start < len(good):
            work = good[start : start + self._max_rows]
            results |= zip((item.id for item, _ in work), self._attempt(work), strict=True)
            start += len(work)
        self._remember([item for item, _ in decoded], results)
        return [self._row(item, media, results[item.id]) for item, media in decoded]

    def _place(self, item: Item) -> tuple[tuple[int, int], int]:
        """Which answers a row shares, those about its picture in the same sample, and the number of its prompt."""
        number, sample = divmod(item.index % self.config.num_variants, self.config.num_captions)
        return (picture_number(item, self.config), sample), number + 1

    def _asked(self, item: Item, media: Media | ImageError) -> tuple[Item, Media | ImageError]:
        """The row with its whole prompt, or why it has none."""
        if not item.template or isinstance(media, ImageError):
            return item, media
        answers = self._answers.get(self._place(item)[0], {})
        try:
            prompt = fill(item.template, {**item.fields, **answers})
        except MissingFieldError as error:
            name = str(error)
            what = f"prompt {name[6:]} has no answer" if answer_number(name) else f"the row has no field {name!r:.60}"
            return item, ImageError("NoField", f"{what}, which the prompt names")
        if fault := find_fault(prompt):
            return item, ImageError("BadText", f"the prompt {fault}")
        return replace(item, prompt=prompt), media

    def _remember(self, items: Sequence[Item], results: Mapping[str, Result]) -> None:
        """Keep the answers for further prompts about the same pictures."""
        if not self.config.uses_answers:
            return
        pictures = {self._place(item)[0][0] for item in items}
        kept = {place: answers for place, answers in self._answers.items() if place[0] in pictures}
        for item in items:
            place, number = self._place(item)
            if not isinstance(result := results[item.id], ImageError):
                kept.setdefault(place, {})[f"answer{number}"] = result.caption
        self._answers = kept

    def _check_domain(self, work: Work) -> None:
        """Warn once if the bundled toy model gets an image that is no drawn scene."""
        for item, media in work:
            if self._check_images and item.index % self.config.num_variants == 0:  # each picture once
                self._check_images = not warn_if_out_of_domain(media, item.file_name)

    def _attempt(self, work: Work, may_halve: bool = True) -> list[Result]:
        """Captions or errors of `work`. Out of memory: retried in halves. Any other error: each row alone."""
        from mmspec.app.modeling.captioner import PromptTooLongError, out_of_memory

        too_long: dict[int, str] = {}
        try:
            return self._caption(work)
        except PromptTooLongError as error:
            too_long = error.rows
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":  # the device is unusable from here on
                raise
            full = out_of_memory(error)
            if len(work) == 1 or (full and not may_halve):
                kind = "OutOfMemory" if full else type(error).__name__
                return [ImageError(kind, one_line(error))] * len(work)
        # outside of `except`, so that the error's traceback no longer holds the tensors of the failed attempt
        if too_long:
            return self._attempt_without(work, too_long)
        step = (len(work) + 1) // 2 if full else 1
        if full:
            _free()
            self._max_rows = min(self._max_rows, step)
            print_stderr(f"mmspec: out of memory with {len(work)} images per batch, continuing with {step}")
        parts = [work[start : start + step] for start in range(0, len(work), step)]
        return [result for part in parts for result in self._attempt(part, may_halve=False)]

    def _attempt_without(self, work: Work, too_long: dict[int, str]) -> list[Result]:
        """Captions of the other rows, which then are not padded to the length of these."""
        rest = [one for number, one in enumerate(work) if number not in too_long]
        captions = iter(self._attempt(rest) if rest else [])
        rows = range(len(work))
        return [ImageError("TooLong", too_long[row]) if row in too_long else next(captions) for row in rows]

    def _caption(self, work: Work) -> list[Result]:
        config = self.config
        num_compared = len(work) if config.compare < 0 else config.compare
        compare = [config.compare < 0 or item.index < num_compared for item, _ in work] if config.compare else []
        prompts = [item.resolve_prompt(config.prompt, isinstance(media, Video)) for item, media in work]
        seed = derive_seed(config.seed, work[0][0].index)
        captions = self.model.caption([media for _, media in work], prompts, seed, compare)
        return [self._finished(one) for one in captions]

    def _finished(self, caption: Caption) -> Result:
        """The caption, without a loop at its end; an error if the output ended before there was one."""
        from mmspec.app.modeling.captioner import CUT_WHILE_THINKING

        schema = self.config.json_schema
        if schema is not None and (fault := fault_of(schema, caption.caption)) is not None:
            cut = f" (cut after {caption.n_new_tokens} tokens)" if caption.finish_reason == "length" else ""
            return ImageError("BadJson", f"{fault}{cut}")
        if caption.finish_reason != CUT_WHILE_THINKING:
            text = without_loop(caption.caption) if self.config.cut_loops else None
            return caption if text is None else replace(caption, caption=text, finish_reason=LOOP)
        message = (
            f"the model was still thinking after {caption.n_new_tokens} tokens: raise --max-new-tokens, or switch "
            "thinking off by --chat-template-kwargs if its template can"
        )
        return ImageError("Thinking", message)

    def _row(self, item: Item, media: Media | ImageError, result: Result) -> Row:
        config, provenance = self.config, self.model.provenance
        is_video = None if isinstance(media, ImageError) else isinstance(media, Video)
        prompt = item.resolve_prompt(config.prompt, is_video)
        schema = config.json_schema
        row: Row = dict.fromkeys((*ROW_COLUMNS, *schema_columns(schema)))
        row |= {"id": item.id, "file_name": item.file_name, "index": item.index, "mmspec_version": mmspec_version()}
        row["file_stamp"] = file_stamp(item) if isinstance(media, ImageError) else item.stamp
        row |= {"prompt": prompt, "prompt_sha1": prompt_sha1(prompt), "finish_reason": "error"}
        row |= {"model": config.model, "model_revision": provenance.model_revision, "drafter": provenance.drafter}
        variables = json.dumps(dict(config.chat_template_kwargs)) if config.chat_template_kwargs else None
        chosen = {name: getattr(config, name) for name in GENERATION if hasattr(config, name)}
        chosen |= {"stop": list(config.stop), "dtype": self.model.dtype, "chat_template_kwargs": variables}
        row["gen"] = chosen | dict(provenance.sampling)
        if isinstance(result, ImageError):
            row["error"] = {"type": result.kind, "message": str(result)}
        else:
            row |= asdict(result)
            row |= {} if schema is None else column_values(schema, result.caption)
            row["caption"] = f"{config.prefix}{result.caption}{config.suffix}"
        found: Row = escaped_values(row)
        return found


def _free() -> None:
    """Release cached device memory before the retry."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
