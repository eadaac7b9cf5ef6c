"""The table of model types in `docs/models.md`: self-test, random cases, media, drafters.

`python tests/helpers/model_table.py --cases 100 --jobs 2` (about half an hour) rewrites the table and its JSON;
`--rounds` (some minutes) finds what computes rounds in each type; `--others` why types without a row are not drafted.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz as fuzz
import tiny_heads as heads
import tiny_models as tiny
import torch
import transformers
import zoo
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import mmspec
from mmspec import fallback
from mmspec.cpu.linear import find_linear_layers
from mmspec.fallback import FallbackPolicy
from mmspec.targets.c_forwards import CForwards
from mmspec.targets.registry import find_adapter
from mmspec.targets.selftest import run_selftest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
RESULT = ROOT / "docs" / "models.json"
BEGIN, END = "<!-- table: python tests/helpers/model_table.py -->", "<!-- end of table -->"
BEGIN_ROUNDS, END_ROUNDS = "<!-- table: python tests/helpers/model_table.py --rounds -->", "<!-- end of rounds -->"
BEGIN_OTHERS, END_OTHERS = "<!-- table: python tests/helpers/model_table.py --others -->", "<!-- end of others -->"
ROUND_TYPES = ("float32", "bfloat16", "float16")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"MSD": "decoupled", "EAGLE": "coupled", "EAGLE-3": "eagle3", "FLASH": "flash"}


@dataclass
class Row:
    """One model type.

    Attributes:
        identical: of `cases` random calls; `speculated` of them were not left to transformers.
        transformers: the version that the cases ran on.
        rounds: {type of the weights: what computes rounds on a CPU}.
    """

    model_type: str
    traits: str
    media: list[str]
    selftest: str = ""
    cases: int = 0
    identical: int = 0
    speculated: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    grids: bool = False
    error: str = ""
    rounds: dict[str, str] = field(default_factory=dict)
    transformers: str = transformers.__version__


def media_of(family: str) -> list[str]:
    """What a prompt may contain."""
    row = zoo.FAMILIES[family]
    return [name for name, builder in (("images", row.images), ("videos", row.videos)) if builder is not None]


def working_heads(family: str) -> list[str]:
    """Draft heads (with random weights) that draft for a prompt with images and leave the output unchanged."""
    found = []
    spec = tiny.ModelSpec(family, seed=4)
    model = tiny.build_model(spec)
    with_images = "images" in media_of(family)
    inputs = tiny.build_inputs(model, 3, 1, images=[1] if with_images else None, padding="none")
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    for name, kind in HEADS.items():
        drafter = heads.build_drafter(kind, spec)
        with fuzz.patch_model(model, drafter, tree_size=8):
            text = model.generate(**inputs, **options)
            stats = mmspec.stats(model, last=True)
        if torch.equal(text, plain) and not stats.fallback_reason and stats.num_draft_tokens > 0:
            found.append(name)
    return found


def measure(family: str, cases: int, pool: Any) -> Row:
    """Everything about one model type."""
    row = Row(family, zoo.FAMILIES[family].traits, media_of(family))
    try:
        adapter = find_adapter(tiny.build_model(tiny.ModelSpec(family)))
        row.grids = adapter.layout.has_grids
        reason = fallback.reason_before_binding(adapter.model) or adapter.unsupported_reason()
        result = None if reason else run_selftest(adapter)
        row.selftest = f"not run: {reason}" if result is None else "passed" if result.passed else result.describe()
        row.heads = working_heads(family)
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}"
    for result in pool.imap(partial(fuzz.run_seed, family=family), range(cases), chunksize=4):
        row.cases += 1
        row.identical += not result.differences
        row.speculated += not result.fallback
        if result.fallback:
            row.reasons[result.fallback] = row.reasons.get(result.fallback, 0) + 1
    return row


def measure_rounds(family: str) -> dict[str, str]:
    """{type of the weights: what computes the rounds of a call}: "C", "linear kernels", "torch" or "transformers".

    "-" where the model itself has no forward in that type.
    """
    found = {}
    for dtype in ROUND_TYPES:
        model = tiny.build_model(tiny.ModelSpec(family, seed=4, dtype=dtype))
        images = [1] if "images" in media_of(family) else None
        inputs = tiny.build_inputs(model, 3, 1, images=images, padding="none")
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        try:
            model.generate(**inputs, **options)
        except RuntimeError:
            found[dtype] = "-"
            continue
        original, are_in_c = CForwards.score, list[bool]()

        def spy(self: CForwards, *args: Any, original: Any = original, are_in_c: list[bool] = are_in_c) -> Any:
            scored = original(self, *args)
            are_in_c.append(scored is not None)
            return scored

        with mock.patch.object(CForwards, "score", spy), fuzz.patch_model(model, "lookup", tree_size=4):
            model.generate(**inputs, **options)
            reason = mmspec.stats(model, last=True).fallback_reason
        if reason:
            found[dtype] = "transformers"
        elif are_in_c:
            found[dtype] = "C" if all(are_in_c) else "C in part"
        else:
            found[dtype] = "linear kernels" if find_linear_layers([find_adapter(model).text_model]) else "torch"
    return found


def rounds_table(rows: Sequence[Row]) -> str:
    """The table of what computes rounds."""
    lines = ["| computed by | model types |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.model_type):
        if row.rounds:
            kinds = [row.rounds[dtype] for dtype in ROUND_TYPES]
            differing = [f"{kind} ({dtype})" for kind, dtype in zip(kinds, ROUND_TYPES, strict=True)]
            text = kinds[0] if len({*kinds}) == 1 else ", ".join(differing)
            groups.setdefault(text, []).append(f"`{row.model_type}`")
    return "\n".join([*lines, *(f"| {text} | {', '.join(names)} |" for text, names in sorted(groups.items()))])


OTHERS: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"text_config": {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}},
    "evolla": {
        **SIZES,
        "num_key_value_heads": 2,
        "resampler_depth": 1,
        "aligner_num_add_layers": 1,
        "protein_encoder_config": {**SIZES, "vocab_size": 60},
    },
    "git": {**SIZES, "vision_config": {**SIZES, "image_size": 16, "patch_size": 8}},
    "kosmos-2.5": {
        "text_config": {"embed_dim": 16, "layers": 2, "ffn_dim": 32, "attention_heads": 2, "vocab_size": 60},
        "vision_config": {**SIZES, "patch_embed_hidden_size": 48, "head_dim": 8, "max_num_patches": 16},
        "latent_query_num": 2,
    },
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
    },
}
"""Values of configs whose defaults describe no model, and of models that the self-test must judge."""


def image_text_types() -> dict[str, str]:
    """{model type: name of the model class} of all that transformers calls image-text models."""
    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def reason_of(model_type: str) -> str:
    """Why a model type has no row: transformers decodes all of its calls, or it is of the class of another type.

    From the model that its config describes, without weights; with random ones if only the self-test can tell.
    """
    classes = image_text_types()
    if found := next((row for row in zoo.ALL if classes.get(row) == classes[model_type]), None):
        return f"the class of `{found}`"
    config, kind = CONFIG_MAPPING[model_type](**OTHERS.get(model_type, {})), getattr(transformers, classes[model_type])
    with torch.device("meta"):
        model = kind(config)
    try:
        adapter = find_adapter(model)
    except TypeError:
        return "no text is generated"
    if reason := FallbackPolicy(adapter, None).standing_reason():
        return reason.removesuffix(f" ({kind.__name__})")
    torch.manual_seed(0)
    return f"refused by the self-test: {run_selftest(find_adapter(kind(config).eval())).failure}"


def others_table(others: Mapping[str, str]) -> str:
    """The table of the model types without a row."""
    lines, groups = ["| why | model types |", "|---|---|"], dict[str, list[str]]()
    for name, reason in sorted(others.items()):
        groups.setdefault(reason, []).append(f"`{name}`")
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(groups.items())]
    return "\n".join(lines)


def write_results(rows: Sequence[Row], versions: dict[str, Any]) -> None:
    """The JSON and the table in the document."""
    RESULT.write_text(json.dumps({**versions, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    text = DOCUMENT.read_text()
    for begin, end, table in (
        (BEGIN, END, markdown_table(rows)),
        (BEGIN_ROUNDS, END_ROUNDS, rounds_table(rows)),
        (BEGIN_OTHERS, END_OTHERS, others_table(versions.get("others", {}))),
    ):
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    DOCUMENT.write_text(text)


def markdown_table(rows: Sequence[Row]) -> str:
    """The table of the document."""
    lines = [
        "| model type | reads | traits | speculated |",
        "|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.model_type):
        exceptions = [row.traits, *([] if row.identical == row.cases else [f"{row.identical} identical"])]
        if row.selftest != "passed":
            exceptions.append("not run" if row.selftest.startswith("not run") else row.selftest)
        elif len(row.heads) < len(HEADS):
            exceptions.append(f"draft heads: {', '.join(row.heads) or 'none'}")
        if row.grids:
            exceptions.append("grids")
        cells = [
            f"`{row.model_type}`",
            ", ".join(row.media) or "text",
            "; ".join(filter(None, exceptions)) or "-",
            str(row.speculated),
        ]
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    exact = sum(row.identical == row.cases for row in rows)
    newest = max(map(Version, (row.transformers for row in rows)))
    older = [f"`{row.model_type}`: {row.transformers}" for row in rows if Version(row.transformers) < newest]
    versions = f"transformers {newest}" + (f" ({', '.join(older)})" if older else "")
    cases = min(row.cases for row in rows)
    return "\n".join([f"{exact} of {len(rows)} model types identical in all of {cases} cases, {versions}.", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="random cases of each model type")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--family", action="append", help="only these model types; the rows of others stay")
    parser.add_argument("--rounds", action="store_true", help="only find what computes rounds, in all rows")
    parser.add_argument("--others", action="store_true", help="only find why other types have no row")
    args = parser.parse_args(argv)
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    fuzz.init_worker()
    values = json.loads(RESULT.read_text())
    old = [Row(**row) for row in values.pop("rows")]
    if args.others:
        have = {row.model_type for row in old}
        values["others"] = {name: reason_of(name) for name in image_text_types() if name not in have}
        write_results(old, values)
        return 0
    if args.rounds:
        for row in old:
            if row.model_type not in {*tiny.FAMILIES, *zoo.ROWS}:
                continue  # the installed transformers cannot run it
            row.rounds = measure_rounds(row.model_type)
            print(f"{row.model_type}: {row.rounds}", file=sys.stderr, flush=True)
        write_results(old, values)
        return 0
    rows = []
    with get_context("fork").Pool(args.jobs, initializer=fuzz.init_worker) as pool:
        for family in args.family or [*tiny.FAMILIES, *zoo.ROWS]:
            row = measure(family, args.cases, pool)
            row.rounds = measure_rounds(family)
            rows.append(row)
            print(f"{family}: {row.identical} of {row.cases}, {row.selftest} {row.error}", file=sys.stderr, flush=True)
    failed = any(row.identical < row.cases for row in rows)
    measured = {row.model_type for row in rows}
    rows += [row for row in old if row.model_type not in measured]
    print(markdown_table(rows))
    write_results(rows, {**values, "torch": torch.__version__, "cases": args.cases})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
