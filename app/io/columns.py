"""The columns of the rows of a caption job: their names, their order and their types, one table for all formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from mmspec.app.errors import UsageError
from mmspec.hints import did_you_mean

ScalarKind = Literal["text", "texts", "integer", "real", "boolean"]
Column = ScalarKind | Mapping[str, ScalarKind]
"""The type of a column: a scalar, a list of texts, or a struct."""

GENERATION: dict[str, ScalarKind] = {
    "max_new_tokens": "integer",
    "temperature": "real",
    "top_p": "real",
    "top_k": "integer",
    "repetition_penalty": "real",
    "seed": "integer",
    "stop": "texts",
    "batch_size": "integer",
    "dtype": "text",
    "system_prompt": "text",
    "chat_template_kwargs": "text",
}
"""The settings that a caption was generated with; the variables of the template as JSON."""
ROW_COLUMNS: dict[str, Column] = {
    "id": "text",
    "file_name": "text",
    "caption": "text",
    "prompt": "text",
    "prompt_sha1": "text",
    "model": "text",
    "model_revision": "text",
    "drafter": "text",
    "gen": GENERATION,
    "n_prompt_tokens": "integer",
    "n_new_tokens": "integer",
    "n_rounds": "integer",
    "tau": "real",
    "ttft_s": "real",
    "seconds": "real",
    "finish_reason": "text",
    "identical": "boolean",
    "plain": "text",
    "error": {"type": "text", "message": "text"},
    "mmspec_version": "text",
    "index": "integer",
    "file_stamp": "text",
}
STATE_COLUMNS = ("id", "file_name", "caption", "prompt_sha1", "error", "index", "file_stamp")
"""What a resumed job needs of a row, so that no choice of columns leaves it out."""
COMPARED_COLUMNS = ("identical", "gen")
"""What it needs besides where rows are compared with plain `generate`."""


def choose_columns(names: Sequence[str], compared: bool) -> tuple[str, ...]:
    """The columns of a job whose user named some, in the order of the table; those of its state are always there.

    Raises:
        UsageError: there is no such column.
    """
    for name in names:
        if name not in ROW_COLUMNS:
            known = ", ".join(ROW_COLUMNS)
            raise UsageError(f"--fields: no column {name[:30]!r}; there are {known}{did_you_mean(name, ROW_COLUMNS)}")
    wanted = {*names, *STATE_COLUMNS, *(COMPARED_COLUMNS if compared else ())}
    return tuple(name for name in ROW_COLUMNS if name in wanted)
