"""What `mmspec train` leaves at the end: the exported head, its evaluation, and a summary for the terminal."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mmspec
from mmspec.app.modeling.text import is_text_model
from mmspec.app.train.config import TrainOptions
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import Requests
from mmspec.app.train.heads import compressor_state
from mmspec.app.versions import commit, mmspec_version, version
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.training.batch import DraftModel
from mmspec.messages import printable
from mmspec.metrics.stats import Stats
from mmspec.resolve import resolve_drafter

EVALUATION_TREE_SIZE = 16
"""Nodes of every tree while tau is measured."""
NUM_SPEED_REQUESTS = 4
"""Held-out requests of the speed measurement, the warm-up not included."""


def export(
    options: TrainOptions, folder: Path, draft_model: DraftModel, teacher: Teacher, settings: Mapping[str, Any]
) -> None:
    """Write the head (config.json, model.safetensors) and provenance.json into `folder`."""
    adapter = teacher.adapter
    metadata = HeadMetadata(
        draft_model.head.config,
        draft_model.drafting_mode,
        adapter.num_layers,
        adapter.model_type,
        teacher.fingerprint,
        draft_model.draft_ids,
        facts={"target": target_name(options.target), "visual_mode": draft_model.visual_mode},
        architecture=draft_model.architecture,
        compressor=compressor_state(draft_model.compressor),
    )
    save_head(folder, draft_model.head, metadata)
    write_provenance(folder, options, teacher, settings)


def write_provenance(folder: Path, options: TrainOptions, teacher: Teacher, settings: Mapping[str, Any]) -> None:
    """Write provenance.json: what a drafter was trained with."""
    provenance = {
        "command": options.command,
        "seed": options.seed,
        "mmspec": mmspec_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": commit(),
        "device": teacher.model.device.type,
    }
    (folder / "provenance.json").write_text(json.dumps({**provenance, **settings}, indent=1) + "\n", encoding="utf-8")


def target_name(target: str) -> str:
    """Hub id of a target; of a folder only the last part, so that no path of this machine is published."""
    return os.path.basename(os.path.abspath(target)) if os.path.isdir(target) else target


def evaluate(
    options: TrainOptions, folder: Path, teacher: Teacher, held_out: Requests, visual_modes: Sequence[str] = ()
) -> dict[str, Any]:
    """Decode held-out requests with the drafter; writes and returns evaluation.json.

    Returns:
        `tau` and `acceptance_by_depth` with trees of `nodes` nodes in every round; `speed` as in `measure_speed`; with
        several `visual_modes`, `tau_by_visual_mode`.
    """
    stats = _decode(options, str(folder), teacher, held_out)
    evaluation: dict[str, Any] = {
        "requests": len(held_out),
        "held_out": True,
        "nodes": EVALUATION_TREE_SIZE,
        "tau": round(stats.tau, 3),
        "acceptance_by_depth": [round(share, 3) for share in stats.acceptance_by_depth],
        "speed": measure_speed(options, folder, teacher, held_out),
    }
    if visual_modes:
        by_mode = evaluation["tau_by_visual_mode"] = {}
        for mode in visual_modes:
            drafter = resolve_drafter(str(folder), teacher.adapter, teacher.tokenizer)
            assert isinstance(drafter, HeadDrafter)
            drafter.fix_visual_mode(mode)
            by_mode[mode] = round(_decode(options, drafter, teacher, held_out).tau, 3)
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n", encoding="utf-8")
    return evaluation


def _decode(options: TrainOptions, drafter: str | HeadDrafter, teacher: Teacher, held_out: Requests) -> Stats:
    """Counters of the held-out requests with trees of `EVALUATION_TREE_SIZE` nodes, greedy."""
    mmspec.patch(teacher.model, drafter, processor=teacher.captioner.processor, tree_size=EVALUATION_TREE_SIZE)
    try:
        for index in range(len(held_out)):
            _, inputs = teacher.build_inputs(held_out, [index])
            teacher.model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        return mmspec.stats(teacher.model)
    finally:
        mmspec.unpatch(teacher.model)


def measure_speed(options: TrainOptions, folder: Path, teacher: Teacher, held_out: Requests) -> dict[str, Any] | None:
    """Speed over plain generate on this machine, with the controller on: `mmspec.compare` on a few held-out requests.

    Returns:
        `requests`, `speedup_decode` and `speedup_e2e` (medians over requests, None if no answer has two tokens), `tau`,
        `drafted_share` (of the rounds, those that scored a draft) and `identical`; None if mmspec cannot decode with
        this target.
    """
    model, found, total = teacher.model, [], Stats()
    mmspec.patch(model, str(folder), processor=teacher.captioner.processor)
    try:
        for index in range(1 + min(NUM_SPEED_REQUESTS, len(held_out))):
            _, inputs = teacher.build_inputs(held_out, [index % len(held_out)])
            result = mmspec.compare(model, inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
            if result.stats.fallback_calls:
                print(printable(f"mmspec: speed is not measured: {result.stats.fallback_reason}"), file=sys.stderr)
                return None
            if index:  # the first warms up
                found.append(result)
                total.add(result.stats)
    finally:
        mmspec.unpatch(model)

    def typical(values: list[float]) -> float | None:
        good = [value for value in values if value and math.isfinite(value)]
        return round(median(good), 4) if good else None

    return {
        "requests": len(found),
        "speedup_decode": typical([one.speedup_decode for one in found]),
        "speedup_e2e": typical([one.speedup_e2e for one in found]),
        "tau": round(total.tau, 4),
        "drafted_share": round(total.drafted_rounds / total.rounds, 4) if total.rounds else None,
        "identical": all(one.identical for one in found),
    }


def summary_lines(options: TrainOptions, folder: Path, evaluation: Mapping[str, Any]) -> list[str]:
    """What to know about a trained drafter: tau, acceptance per depth, speed here, the next command."""
    if not evaluation:
        return [f"{folder}: trained, tau not measured", f"  next: {next_command(options, folder)}"]
    depths = " ".join(f"{share:.0%}" for share in evaluation["acceptance_by_depth"]) or "none"
    lines = [
        f"{folder}: tau {evaluation['tau']:.2f} on {evaluation['requests']} held-out requests, trees of "
        f"{evaluation['nodes']} nodes",
        f"  acceptance at depth 1, 2, ...: {depths}",
    ]
    if modes := evaluation.get("tau_by_visual_mode"):
        lines.append("  tau by visual mode: " + ", ".join(f"{mode} {tau:.2f}" for mode, tau in modes.items()))
    speed = evaluation["speed"]
    if speed is not None and speed["speedup_decode"] is not None:
        lines.append(
            f"  speed on this machine: x{speed['speedup_decode']:.2f} over plain generate, "
            f"{speed['requests']} requests, tau {speed['tau']:.2f}, {speed['drafted_share'] or 0:.0%} of rounds drafted"
        )
    return [*lines, f"  next: {next_command(options, folder)}"]


def next_command(options: TrainOptions, folder: Path) -> str:
    """The command that compares the drafter with others."""
    command = ["mmspec", "compare", "--drafters", f"auto,{folder}"]
    command += ["--model", options.target]
    if not is_text_model(options.target):
        command += ["--image", *options.data[:1], *options.source.flags()]
    if options.dtype != "auto":
        command += ["--dtype", options.dtype]
    return shlex.join(command)
