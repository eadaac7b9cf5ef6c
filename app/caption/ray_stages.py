"""What runs in Ray's tasks and actors: planning batches, decoding them, captioning them.

Batches travel whole, so their rows stay together as in a job of one process, and captions are the same ones; and those
about the same pictures as one value, so that one actor has them and each picture is decoded, and encoded, once.
Imports nothing of Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mmspec.app.caption.config import SCENES_MODEL, CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import decode_batches
from mmspec.app.caption.pending import is_pending
from mmspec.app.caption.plan import RowPlan, skip_finished
from mmspec.app.caption.rows import RowCaptioner
from mmspec.app.caption.variants import picture_number
from mmspec.app.errors import UsageError
from mmspec.app.io.images import ImageError, Media
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished
from mmspec.app.modeling.random_models import SIZES
from mmspec.vision.video.decoder_pool import DecoderPool

COLUMN = "batch"
"""The only column of our datasets: batches about the same pictures, or a captioned one, per row."""


@dataclass(frozen=True)
class PlannedBatches:
    """Rows to caption together, batch by batch: one, or several about the same pictures."""

    batches: list[list[Item]]


@dataclass(frozen=True)
class DecodedBatches:
    """The same rows, each with its media, or why there are none."""

    batches: list[list[tuple[Item, Media | ImageError]]]


@dataclass(frozen=True)
class CaptionedBatch:
    """The rows of the output, and what they are about."""

    items: list[Item]
    rows: list[Row]


@dataclass(frozen=True)
class EndOfPlan:
    """Comes after the last batch.

    Attributes:
        num_batches: batches before it; with fewer results some were lost.
        num_finished: rows that were captioned before this run.
        left_out: what the inputs hold besides the rows, as lines for the user.
    """

    num_batches: int
    num_finished: int
    left_out: Sequence[str] = ()


def plan_job(
    config: CaptionConfig, base: Path, own_files: list[Path], finished: Mapping[str, Finished]
) -> Iterator[PlannedBatches | EndOfPlan]:
    """The batches with a pending row, then `EndOfPlan`; the same ones whenever it runs."""
    enter_folder(config)
    inputs = Inputs(config.paths, config.source_options(base), own_files)
    plan = RowPlan(config, ProcessInfo(), lambda item: is_pending(item, finished, config), token_counter(config))
    number = 0
    for batches in about_same_pictures(plan.batches(inputs.rows(skip_finished(finished, config))), config):
        number += len(batches)
        yield PlannedBatches(batches)
    yield EndOfPlan(number, plan.num_finished, tuple(inputs.left_out(listed=False)))


def about_same_pictures(batches: Iterable[list[Item]], config: CaptionConfig) -> Iterator[list[list[Item]]]:
    """Consecutive batches, together where later ones are about pictures of the first."""
    together: list[list[Item]] = []
    pictures: set[int] = set()
    for batch in batches:
        about = {picture_number(item, config) for item in batch}
        if together and not about <= pictures:
            yield together
            together = []
        pictures = pictures if together else about
        together.append(batch)
    if together:
        yield together


def token_counter(config: CaptionConfig) -> Callable[[int, int], int | None]:
    """Visual tokens of a picture by its size, by the model's processor alone, loaded at the first call."""

    @lru_cache(maxsize=1)
    def processor() -> Any:
        if config.model in (SCENES_MODEL, *SIZES):  # torch would take seconds, and all pictures have as many tokens
            return None
        from mmspec.app.modeling.load import load_processor

        try:
            return load_processor(config.model)
        except UsageError:  # the actors, which load the model, report it
            return None

    def count(width: int, height: int) -> int | None:
        if processor() is None:
            return None
        from mmspec.app.modeling.picture_size import count_visual_tokens

        return count_visual_tokens(processor(), width, height, config.max_pixels)

    return count


def decode_stage(frames: Any, config: CaptionConfig) -> Any:
    """Decode the media of planned batches, in the decoder processes of this worker."""
    return frame([_decode(value, config) if isinstance(value, PlannedBatches) else value for value in frames[COLUMN]])


def _decode(planned: PlannedBatches, config: CaptionConfig) -> DecodedBatches:
    enter_folder(config)

    def sent(item: Item, media: Media | ImageError) -> tuple[Item, Media | ImageError]:
        """What an actor needs of it."""
        is_stored = config.stores_pictures and not isinstance(media, ImageError)
        return item if is_stored else replace(item, content=None), media

    decoded = decode_batches(iter(planned.batches), config, _decoders())
    return DecodedBatches([[sent(*row) for row in batch] for batch in decoded])


@lru_cache(maxsize=1)
def _decoders() -> DecoderPool:
    """One pool per worker process; it ends with the process."""
    return DecoderPool()


class CaptionStage:
    """An actor with the model: decoded batches to rows, each batch as soon as it is captioned."""

    def __init__(self, config: CaptionConfig) -> None:
        from mmspec.app.caption.command import build_captioner
        from mmspec.app.cli.arguments import hide_progress_bars

        hide_progress_bars(False)
        self._captioner = RowCaptioner(config, build_captioner(absolute_paths(config), ProcessInfo()))

    def __call__(self, frames: Any) -> Iterator[Any]:
        for value in frames[COLUMN]:
            for batch in value.batches if isinstance(value, DecodedBatches) else [value]:
                if isinstance(batch, list):
                    batch = CaptionedBatch([item for item, _ in batch], self._captioner.caption_rows(batch))
                yield frame([batch])


def frame(values: list[Any]) -> Any:
    """A pandas frame of our column with these values: Ray moves their objects as they are."""
    import pandas as pd

    cells = np.empty(len(values), object)
    for number, value in enumerate(values):
        cells[number] = value
    return pd.DataFrame({COLUMN: cells})


def absolute_paths(config: CaptionConfig) -> CaptionConfig:
    """The same for a worker, which has another working directory: it enters that of this process for the inputs, whose
    ids are relative where they were given so; model and drafter are absolute."""

    def absolute(name: str) -> str:
        return os.path.abspath(name) if os.path.isdir(name) else name

    folder = config.working_folder or os.getcwd()
    return replace(config, working_folder=folder, model=absolute(config.model), drafter=absolute(config.drafter))


def enter_folder(config: CaptionConfig) -> None:
    """Make the working folder of a job that of this process, where it exists."""
    if config.working_folder is not None and os.path.isdir(config.working_folder):
        os.chdir(config.working_folder)
