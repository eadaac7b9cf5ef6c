"""`--json-schema`: captions that a JSON schema describes, their columns, and the grammar that tokens are held to.

xgrammar makes the grammar and jsonschema judges each caption, which also knows the keywords that a grammar does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.columns import ScalarKind
from mmspec.app.io.text import read_text

MAX_SCHEMA_BYTES = 1 << 20
PREFIX = "json."
"""Of the names of columns."""
MAX_INTEGER = 1 << 63
"""Integers of a column are below it, and not below its negative."""
_KINDS: dict[str, ScalarKind] = {"string": "text", "integer": "integer", "number": "real", "boolean": "boolean"}
_TYPES = {"integer": int, "real": float, "boolean": bool}


def read_schema(text: str) -> str:
    """The schema of a file, or one in JSON itself, as `--config` holds it.

    Raises:
        argparse.ArgumentTypeError: it cannot be read, is too large, or no JSON object.
    """
    where = "the schema" if text.lstrip().startswith("{") else text
    try:
        schema = json.loads(read_text(text, MAX_SCHEMA_BYTES) if where == text else text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{where} is no JSON schema: {one_line(error, 100)}") from error
    if not isinstance(schema, dict):
        raise argparse.ArgumentTypeError(f"{where} must hold a JSON object, got {schema!r:.60}")
    return json.dumps(schema)


def check_schema(text: str) -> None:
    """Refuse a schema that is none, or that no caption can fulfil, before a model is loaded.

    Raises:
        UsageError: it is, or a package is missing.
    """
    try:
        import jsonschema
        import xgrammar
    except ImportError as error:
        raise UsageError(
            f"--json-schema needs {error.name}: pip install -e '.[json]' in the clone of mmspec"
        ) from error
    try:
        _validator(text).check_schema(json.loads(text))
        xgrammar.Grammar.from_json_schema(text)
    except jsonschema.SchemaError as error:
        raise UsageError(f"--json-schema is no JSON schema: {error.json_path}: {error.message[:200]}") from error
    except Exception as error:  # of xgrammar, which raises RuntimeError
        reason = one_line(error, 300).split(": ", 1)[-1]
        raise UsageError(f"--json-schema cannot be made a grammar: {reason}") from error


def build_grammar(text: str, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The grammar of a schema over the ids of a model, of xgrammar.

    Raises:
        UsageError: the tokenizer cannot write it.
    """
    import xgrammar

    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[*eos_ids])
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema(text, any_whitespace=False)
        bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(bitmask)
    except Exception as error:
        raise UsageError(f"--json-schema does not go with the model's tokenizer: {one_line(error, 200)}") from error
    if not bitmask.any():
        raise UsageError(
            "--json-schema allows nothing that the model's tokenizer can write: it has no token to begin with"
        )
    return grammar


@lru_cache(maxsize=4)
def _validator(text: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(text)
    return validator_for(schema)(schema, registry=Registry())  # an own registry fetches nothing


def schema_columns(text: str | None) -> dict[str, ScalarKind]:
    """The columns of a schema's own properties; what is no text, number or truth value is JSON."""
    properties = json.loads(text).get("properties") if text else None
    if not isinstance(properties, dict):
        return {}
    kinds = {name: str(one.get("type")) if isinstance(one, dict) else "" for name, one in properties.items()}
    return {f"{PREFIX}{name}": _KINDS.get(kind, "text") for name, kind in kinds.items()}


def fault_of(text: str, caption: str) -> str | None:
    """Why a caption is not what the schema describes; None if it is."""
    try:
        value = json.loads(caption)
        error = next(_validator(text).iter_errors(value), None)
    except (ValueError, RecursionError) as problem:
        return f"the caption is no JSON: {one_line(problem, 100)}"
    except Exception as problem:  # a reference that leads nowhere
        return f"the schema cannot judge the caption: {one_line(problem, 200)}"
    if error is not None:
        return f"{error.json_path}: {error.message[:200]}"
    large = [name for name, one in column_values(text, caption).items() if _is_large(one)]
    return f"{large[0]} is no integer of 64 bits" if large else None


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER


def column_values(text: str, caption: str) -> Mapping[str, Any]:
    """What a caption that is right puts into the columns."""
    found, values = json.loads(caption), dict[str, Any]()
    for name, kind in schema_columns(text).items():
        value = found.get(name.removeprefix(PREFIX)) if isinstance(found, dict) else None
        if value is None:
            values[name] = None
        elif kind == "text":
            values[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        else:
            values[name] = _TYPES[kind](value)
    return values
