"""Records of data sets as columns: conversations with their pictures, and records within records."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from mmspec.app.io.cells import is_missing
from mmspec.app.io.fields import normalized
from mmspec.app.io.text import GENERIC_TOKENS

TURN_KEYS = ("conversations", "messages", "conversation", "input")
"""Where a record holds a conversation."""
_SPEAKERS = {"human": "user", "gpt": "assistant"}


def record_columns(row: dict[str, Any], file_columns: tuple[str, ...]) -> dict[str, Any]:
    """The cells of a record that are not empty, by normalized name.

    Of a request of OpenAI's batches they are those of its `body`, of a task of Label Studio or a row of a viewer
    those of its `data` or `row`; the id is that of the record.
    """
    columns = _cells(row)
    body = columns.get("body")
    if isinstance(body, dict) and any(isinstance(body.get(key), list) for key in TURN_KEYS):
        return _within(columns, body)
    if not any(key in columns for key in file_columns):
        for key in ("data", "row"):
            if isinstance(inner := columns.get(key), dict):
                return _within(columns, inner)
    return columns


def _within(columns: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    ident = next((columns[key] for key in ("custom_id", "id", "row_idx") if key in columns), None)
    return ({} if ident is None else {"id": ident}) | _annotated(columns.get("annotations")) | _cells(inner)


def _annotated(annotations: Any) -> dict[str, Any]:
    """What people wrote and chose in Label Studio, by the names of its controls: of the first annotation with any."""
    for one in annotations if isinstance(annotations, list) else ():
        results = one.get("result") if isinstance(one, dict) and not one.get("was_cancelled") else None
        found: dict[str, Any] = {}
        for result in results if isinstance(results, list) else ():
            value = result.get("value") if isinstance(result, dict) else None
            text = value.get("text", value.get(result.get("type"))) if isinstance(value, dict) else None
            if text is not None and isinstance(name := result.get("from_name"), str):  # of each region
                found.setdefault(normalized(name), []).extend(text if isinstance(text, list) else [text])
        if found:
            return found
    return {}


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    return {normalized(str(name)): _chosen(value) for name, value in reversed(row.items()) if not is_missing(value)}


def _chosen(cell: Any) -> Any:
    """What a cell holds; of one of Label Studio's tables with several choices or texts, `{"choices": [...]}`, these."""
    if isinstance(cell, str) and cell.startswith(('{"choices":', '{"text":')):
        with suppress(ValueError, RecursionError):
            cell = json.loads(cell)
    return next(iter(cell.values())) if isinstance(cell, dict) and list(cell) in (["choices"], ["text"]) else cell


def is_empty(cell: Any) -> bool:
    """Whether a cell names no picture: nothing, an empty text, or a list or struct of such."""
    if isinstance(cell, dict):
        return all(map(is_empty, cell.values()))
    if isinstance(cell, list | tuple):
        return all(map(is_empty, cell))
    return is_missing(cell) or (isinstance(cell, str | bytes) and not cell.strip())


def conversation(columns: dict[str, Any]) -> tuple[str | None, str | None, list[Any]]:
    """The first question of a conversation, its answer, and its pictures.

    Question and answer are None without one; pictures are those among the parts of the message. Placeholders of
    pictures before or after the question are left out; where some stand within it all remain.
    """
    turns = next((columns[key] for key in TURN_KEYS if isinstance(columns.get(key), list)), None)
    if turns is None:
        return None, None, []
    found: dict[str, str] = {}
    shown: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict):
            speaker = str(turn.get("from", turn.get("role")))
            speaker = _SPEAKERS.get(speaker, speaker)
            text = turn.get("value", turn.get("content"))
            if isinstance(text, list):
                text, pictures = _joined(text)
                if speaker == "user" and speaker not in found:
                    shown = pictures
            found.setdefault(speaker, str(text or ""))
    return _placed(found.get("user", "")), found.get("assistant"), shown


def _joined(parts: list[Any]) -> tuple[str, list[Any]]:
    """The text of the parts of a message, with placeholders, and its pictures."""
    words, pictures = [], []
    for part in parts:
        if not isinstance(part, dict):
            continue
        picture = _picture_of(part)
        if picture is not None:
            pictures.append(picture)
        if picture is not None or part.get("type") in ("image", "video"):  # or its place, with the picture elsewhere
            words.append(GENERIC_TOKENS[0])
        elif part.get("text"):
            words.append(str(part["text"]))
    return " ".join(words), pictures


def _placed(question: str) -> str:
    bare = question.strip()
    while True:
        before = bare
        for token in GENERIC_TOKENS:
            bare = bare.removeprefix(token).removesuffix(token).strip()
        if bare == before:
            break
    return question.strip() if any(token in bare for token in GENERIC_TOKENS) else bare


def _picture_of(part: dict[str, Any]) -> Any:
    """What a part of a message shows, as in `{"image": ...}` or `{"image_url": {"url": ...}}`; None for text."""
    value = next((part[key] for key in ("image", "image_url", "video", "video_url") if part.get(key)), None)
    return value.get("url", value) if isinstance(value, dict) else value
