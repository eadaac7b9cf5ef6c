"""What `mmspec train` leaves at the end: the exported head, its evaluation, curves, and a summary for the terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mmspec
from mmspec.app.bench.forced_tree import add_forced_tree, format_not_used, is_probe_needed, probe_forced_tree
from mmspec.app.bench.measure import NO_DRAFT, build_contestants, build_result_rows, run_rounds
from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.errors import one_line
from mmspec.app.train.config import TrainOptions
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import RequestDataset
from mmspec.app.train.heads import compressor_state
from mmspec.app.versions import commit, mmspec_version, version
from mmspec.drafters.checkpoints.format import HeadMetadata, save_head
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.training.batch import DraftModel
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
    draft_ids = draft_model.draft_ids
    if options.draft_vocab and not draft_model.head.config.draft_vocab_size:
        draft_ids = teacher.most_common_ids(options.draft_vocab)
    metadata = HeadMetadata(
        draft_model.head.config,
        draft_model.drafting_mode,
        adapter.num_layers,
        adapter.model_type,
        teacher.fingerprint,
        draft_ids,
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
    options: TrainOptions, folder: Path, teacher: Teacher, held_out: RequestDataset, visual_modes: Sequence[str] = ()
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


def _decode(options: TrainOptions, drafter: str | HeadDrafter, teacher: Teacher, held_out: RequestDataset) -> Stats:
    """Counters of the held-out requests with trees of `EVALUATION_TREE_SIZE` nodes, greedy."""
    mmspec.patch(teacher.model, drafter, processor=teacher.captioner.processor, tree_size=EVALUATION_TREE_SIZE)
    try:
        for index in range(len(held_out)):
            inputs = _inputs(teacher, held_out, index)
            teacher.model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        return mmspec.stats(teacher.model)
    finally:
        mmspec.unpatch(teacher.model)


def _inputs(teacher: Teacher, held_out: RequestDataset, index: int) -> dict[str, Any]:
    return teacher.build_inputs(held_out, [index])[1]


def measure_speed(
    options: TrainOptions, folder: Path, teacher: Teacher, held_out: RequestDataset
) -> dict[str, Any] | None:
    """Speed over plain generate on this machine, with the controller on, as `mmspec bench` measures it.

    Plain generate, the loop without drafts and the drafter decode a few held-out requests in turn.

    Returns:
        Keys of a bench row (`speedup_hf`, `speedup_hf_ci`, `tau`, `drafted_share`, `forced_tree`, `not_used`, ...), or
        None if mmspec cannot decode with this target.
    """
    model, processor = teacher.model, teacher.captioner.processor
    indices = [index % len(held_out) for index in range(1 + min(NUM_SPEED_REQUESTS, len(held_out)))]
    requests = [_inputs(teacher, held_out, index) for index in indices]
    limits: dict[str, Any] = {"new_tokens": options.max_new_tokens, "temperature": 0.0, "seed": options.seed}
    try:
        contestants = build_contestants(model, [str(folder)], processor, stop_at_eos=True)
        run_rounds(contestants, requests, **limits, tick=lambda: None)
        row = list(build_result_rows(contestants))[-1]
        own = next(one for one in contestants if one.name == NO_DRAFT)
        forced = None
        if is_probe_needed(row):
            forced = probe_forced_tree(own, str(folder), processor, requests, **limits, model=model, stop_at_eos=True)
        add_forced_tree(row, forced)
    except RuntimeError as error:
        print(f"mmspec: speed is not measured: {one_line(error)}", file=sys.stderr)
        return None
    keys = (
        "speedup_hf",
        "speedup_hf_ci",
        "speedup_own",
        "tau",
        "drafted_share",
        "identical",
        "forced_tree",
        "not_used",
    )
    return {"requests": len(requests) - 1} | {key: row[key] for key in keys}


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
    if speed is not None and speed["speedup_hf"] is not None:
        low, high = speed["speedup_hf_ci"]
        lines.append(
            f"  speed on this machine: x{speed['speedup_hf']:.2f} over plain generate [{low:.2f}, {high:.2f}], "
            f"{speed['requests']} requests, tau {speed['tau']:.2f}, {speed['drafted_share'] or 0:.0%} of rounds drafted"
        )
        lines += [f"  {reason}" for reason in filter(None, [format_not_used(speed)])]
    return [*lines, f"  next: {next_command(options, folder)}"]


def next_command(options: TrainOptions, folder: Path) -> str:
    """The command that measures the drafter more thoroughly."""
    command = ["mmspec", "bench", "--drafters", str(folder)]
    if options.target != SCENES_MODEL:
        command += ["--model", options.target, "--images", *options.data, *options.source.flags()]
    if options.dtype != "auto":
        command += ["--dtype", options.dtype]
    return shlex.join(command)


def write_curves(out: Path, title: str) -> None:
    """OUT/curves.png from OUT/log.jsonl, if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    from mmspec.app.bench.plot import plot_training_log

    try:
        plot_training_log(out / "log.jsonl", out / "curves.png", title)
    except Exception as error:  # a plot is no reason to lose a training run
        print(f"mmspec: no curves.png: {one_line(error)}", file=sys.stderr)
