"""`CaptionActor`: captions in Ray Data pipelines of one's own. Public as `mmspec.ray.CaptionActor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.rows import RowCaptioner
from mmspec.app.io.cells import Reach, cell_content, is_missing
from mmspec.app.io.content import Unreadable
from mmspec.app.io.images import ImageError, Media, load_image
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.vision.video.decoder_pool import DecoderPool

NEW_COLUMNS = ("caption", "error", "n_new_tokens", "tau", "finish_reason")
NUMBERS: dict[str, float] = {"n_new_tokens": 0, "tau": math.nan}
"""Columns of numbers, with the value of a row without a caption; columns of text have an empty one."""


class CaptionActor:
    """A callable class for `ray.data.Dataset.map_batches` that adds captions to batches of pictures.

        import ray
        from mmspec.ray import CaptionActor

        dataset = ray.data.read_images("photos/", mode="RGB", include_paths=True)
        dataset = dataset.map_batches(
            CaptionActor,
            fn_constructor_kwargs={"model": "llava-hf/llava-1.5-7b-hf", "max_new_tokens": 64},
            batch_size=16,
            num_gpus=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=4),
        )
        dataset.drop_columns(["image"]).write_parquet("captions/")

    The model is loaded once per actor and patched with the drafter. A picture that cannot be read or captioned has
    an empty caption and a text in the column `error`, which is empty for the others.

    Args:
        model: hub id, local folder, or "scenes" for the bundled toy model.
        image_column: arrays `[H, W]` or `[H, W, 3 or 4]`, Pillow images, the bytes of files, or `{bytes, path}`.
        prompt_column: a prompt per row; None, or an empty cell: `prompt`.
        prompt: of all rows; None: "Describe the image.".
        drafter: as in `mmspec.patch`.
        compressor: as in `mmspec.patch`.
        max_new_tokens: per caption.
        temperature: 0 is greedy.
        seed: of sampling; a batch is seeded by it and by the number of the batch in this actor, so sampled captions
            are not repeatable where actors share the work.
        dtype: of the model; "auto": the checkpoint's, float32 on a CPU.
        device: of the model; "auto": the GPU that Ray gives this actor, if there is one.
        max_pixels: larger pictures are shrunk to as many pixels; None: as the processor does without it.

    Adds the columns `caption`, `error`, `n_new_tokens`, `tau` (tokens per forward) and `finish_reason`.

    Raises:
        UsageError: the model or drafter cannot be loaded, or the prompt is no text.
    """

    def __init__(
        self,
        model: str,
        *,
        image_column: str = "image",
        prompt_column: str | None = None,
        prompt: str | None = None,
        drafter: str = "auto",
        compressor: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        dtype: str = "auto",
        device: str = "auto",
        max_pixels: int | None = None,
    ) -> None:
        from mmspec.app.caption.command import build_captioner, check_texts

        self._config = CaptionConfig(
            (), model=model, prompt=prompt, drafter=drafter, compressor=compressor, max_new_tokens=max_new_tokens,
            temperature=temperature, seed=seed, dtype=dtype, device=device, max_pixels=max_pixels,
        )  # fmt: skip
        check_texts(self._config)
        self._image_column, self._prompt_column = image_column, prompt_column
        self._captioner: RowCaptioner | None = None
        self._model = build_captioner(self._config, ProcessInfo())
        self._decoders = DecoderPool()
        self._num_rows = 0

    def __call__(self, batch: Any) -> Any:
        """The batch with the new columns: a mapping (`batch_format` "numpy" or "pandas") or a table of pyarrow."""
        from dataclasses import replace

        cells = _cells(batch, self._image_column)
        prompts = _cells(batch, self._prompt_column) if self._prompt_column else [None] * len(cells)
        if self._captioner is None:
            self._captioner = RowCaptioner(replace(self._config, batch_size=max(1, len(cells))), self._model)
        decoded = []
        for cell, prompt in zip(cells, prompts, strict=True):
            text = None if is_missing(prompt) or not str(prompt) else str(prompt)
            item = Item(Path(), str(self._num_rows), prompt=text, index=self._num_rows)
            fault = item.content  # of the prompt: an item with a bad one cannot be read
            bad = ImageError(fault.kind, fault.message) if isinstance(fault, Unreadable) else None
            decoded.append((item, bad or self._decode(cell)))
            self._num_rows += 1
        rows = self._captioner.caption_rows(decoded)
        new = {name: column(rows, name) for name in NEW_COLUMNS}
        return (
            dict(batch) | new
            if isinstance(batch, Mapping) or not hasattr(batch, "column_names")
            else _added(batch, new)
        )

    def _decode(self, cell: Any) -> Media | ImageError:
        try:
            if isinstance(cell, np.ndarray | Image.Image):
                return load_image(cell, self._config.pixel_limit)
            if isinstance(cell, str) or (isinstance(cell, Mapping) and not cell.get("bytes")):
                raise ImageError("NotAnImage", "a picture is an array or bytes: read paths and addresses before")
            content, _ = cell_content(cell, Reach(""))
            return load_image(content.read(), self._config.pixel_limit, self._decoders)
        except ImageError as error:
            return error


def _cells(batch: Any, name: str) -> Sequence[Any]:
    """The values of a column."""
    cells = batch[name]
    found: Sequence[Any] = cells.to_pylist() if hasattr(cells, "to_pylist") else cells
    return found


def _added(table: Any, columns: Mapping[str, np.ndarray]) -> Any:
    """A table of pyarrow with these columns; those of the same names are replaced."""
    import pyarrow

    table = table.drop_columns([name for name in columns if name in table.column_names])
    for name, values in columns.items():
        table = table.append_column(name, pyarrow.array(values))
    return table


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """A new column, of one type whatever the rows hold: Ray gives each block the types that its values have, and files
    of a type "null" do not merge with others."""
    if name in NUMBERS:
        missing = NUMBERS[name]
        return np.array([missing if row[name] is None else row[name] for row in rows], type(missing))
    values = [row[name] for row in rows]
    if name == "error":
        values = [error and f"{error['type']}: {error['message']}" for error in values]
    return np.array([value or "" for value in values], object)
