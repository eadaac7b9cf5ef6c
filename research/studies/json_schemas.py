"""Answers that follow a JSON schema: how much faster are they with a drafter than without, and are they equal?

Ten schemas, one question each, greedy, by xgrammar (extra json); each answer is compared with that of plain `generate`.
A row is a schema: tokens, seconds of decoding, the quotient to those without drafts, tokens a round. Seconds are those
of the processor, so that what else runs on the machine counts less: `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmspec

TEXT = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
LIST = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": {"name": TEXT, "age": NUMBER, "city": TEXT},
    "a film": {"title": TEXT, "director": TEXT, "year": NUMBER, "genres": LIST},
    "a recipe": {"dish": TEXT, "minutes": NUMBER, "ingredients": LIST},
    "a book": {
        "title": TEXT,
        "author": {"type": "object", "properties": {"first": TEXT, "last": TEXT}},
        "pages": NUMBER,
    },
    "a weather report": {"city": TEXT, "temperature": NUMBER, "sky": {"enum": ["clear", "cloudy", "rain", "snow"]}},
    "an order of a shop": {"order_number": NUMBER, "items": LIST, "is_paid": {"type": "boolean"}},
    "a bug report": {"summary": TEXT, "severity": {"enum": ["low", "medium", "high"]}, "affected_versions": LIST},
    "a function in Python": {"function_name": TEXT, "parameters": LIST, "return_type": TEXT},
    "a football match": {"home_team": TEXT, "away_team": TEXT, "home_goals": NUMBER, "away_goals": NUMBER},
    "a picture of a street": {"main_subject": TEXT, "dominant_colors": LIST, "number_of_people": NUMBER},
}
"""{what is asked for: properties, all of them required}."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with all properties required, and no others."""
    if schema.get("type") != "object":
        return schema
    properties = {name: closed(one) for name, one in schema["properties"].items()}
    return {**schema, "properties": properties, "required": [*properties], "additionalProperties": False}


def main(name: str, *drafters: str) -> None:
    """Print a table for each drafter."""
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor

    time.perf_counter = time.process_time
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    mmspec.patch(model, "none", processor=tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler, ratios = xgrammar.GrammarCompiler(info), dict[str, list[float]]()
    for subject, properties in SCHEMAS.items():
        schema = closed({"type": "object", "properties": properties})
        grammar = compiler.compile_json_schema(json.dumps(schema))
        chat = [{"role": "user", "content": f"Describe {subject} of your choice as JSON."}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        results = {}
        for drafter in ("generate", "none", *drafters):
            own = {"enabled": False} if drafter == "generate" else {"drafter": drafter}
            options = {"max_new_tokens": 96, "do_sample": False, "logits_processor": [LogitsProcessor(grammar)]}
            output = model.generate(**inputs, **options, mmspec=own)
            results[drafter] = output, mmspec.stats(model, last=True)
        answer = tokenizer.decode(results["generate"][0][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{subject}: {answer}")
        for drafter in ("none", *drafters):
            output, stats = results[drafter]
            ratio = results["none"][1].decode_s / stats.decode_s
            ratios.setdefault(drafter, []).append(ratio)
            same = output.equal(results["generate"][0])
            rounds = f"{stats.tokens / stats.rounds:.2f} tokens a round"
            print(f"    {drafter}: equal {same}, {stats.tokens} tokens, {stats.decode_s:.2f} s, {ratio:.2f}, {rounds}")
        sys.stdout.flush()
    for drafter, found in ratios.items():
        print(f"{drafter}: {torch.tensor(found).log().mean().exp():.2f} (geometric mean), {min(found):.2f} at least")


if __name__ == "__main__":
    main(*sys.argv[1:])
