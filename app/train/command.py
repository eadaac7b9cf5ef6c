"""`mmspec train`: a draft head for a target, from requests alone. Resumes where it was interrupted."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.caption.progress import Progress
from mmspec.app.cli.arguments import hide_progress_bars
from mmspec.app.cli.options import add_described, add_settings, list_described, list_settings
from mmspec.app.errors import UsageError
from mmspec.app.train.config import TrainOptions
from mmspec.drafters.heads.registry import recipes
from mmspec.messages import printable

if TYPE_CHECKING:
    from mmspec.drafters.training.trainer import Trainer

NUM_METRICS = 3
"""Metrics beside the progress."""
FIRST_CHECKPOINT_S = 30.0
"""Seconds of training after which the first checkpoint is written; later ones follow the trainer's interval."""

_EPILOG = """\
drafters
{drafters}
  Several, separated by commas, train side by side on the same batches: the target runs once for all of them.

settings, as in --set block=4 layers=0,1,2 text_first (in brackets: the default)
{settings}

data
  --data names all that `mmspec caption` reads; a list may bring "prompt" and "answer" per row. Where there is no answer
  the target generates one, so that the drafter learns the target's own text. Answers are stored in OUT/answers.jsonl.
  --target may be a language model: then --data names text files with a request per line, or .jsonl files with a
  "prompt" per row.
  A picture that cannot be used is counted, and the next one takes its place. Bytes of tables wait in a temporary file
  (TMPDIR).
  The last requests (--evaluate of them, at most a tenth) are held out: tau is measured on them.

OUT holds answers.jsonl, run.json (the settings of the answers), state.pt (the checkpoint; the first within a minute),
log.jsonl, and at the end a folder per drafter with config.json, model.safetensors, evaluation.json and provenance.json:
`mmspec.patch(model, drafter="OUT/msd")`.
Repeat the command to resume an interrupted run.

At the end every drafter gets a summary: tau and acceptance per depth on the held-out requests with trees of 16 nodes,
the speed over plain generate on this machine (`mmspec.compare` on four of them), and the next command.

examples
  mmspec train --data drawings/ --out run                      msd for the bundled toy model
  mmspec train --data drawings/ --drafter msd,eagle,eagle-text-only --steps 600 --out study
  mmspec train --target llava-hf/llava-1.5-7b-hf --data photos/ --dtype bfloat16 --out run
  mmspec train --data drawings/ --drafter flash --compressor latent:64 --out run
  mmspec train --data drawings/ --start-from msd --steps 500 --out run          from the weights that are bundled
  accelerate launch --num_processes 4 -m mmspec train --target ... --data ... --out run     data parallel
"""


def train_help() -> str:
    """The help behind the options, with the drafters of the registry and the settings."""
    drafters = ((name, recipe.help) for name, (_, recipe) in recipes().items())
    return _EPILOG.format(drafters=list_described(drafters), settings=list_settings(TrainOptions))


DESCRIPTION = "Train draft heads on a target's own answers and hidden states."
EPILOG = train_help


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_described(parser, TrainOptions)
    add_settings(parser, TrainOptions, {"--answer-batch": "--batch-size"})


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.app.train.setup import (
        build_teacher,
        build_trainer,
        check_run_settings,
        data_settings,
        distributed_context,
        init_from_target,
    )
    from mmspec.drafters.training.trainer import SettingsError

    options = TrainOptions.from_args(args)
    hide_progress_bars(options.progress)
    process = ProcessInfo.from_env(os.environ)
    if options.batch_size % process.world_size:
        raise UsageError(f"--batch-size {options.batch_size} cannot be shared by {process.world_size} processes")
    wait_for_everyone, distributed = distributed_context(options, process)
    teacher, held_out = build_teacher(options, process)
    count = len(teacher.data) // (2 if options.text_first else 1)
    answer_settings = data_settings(options, count, held_out)
    # Further settings that must be equal on resume; options newer than a run are left out where they are unused.
    settings = answer_settings | {"text_first": options.text_first}
    chosen = {"start_from": options.start_from, "draft_vocab": options.draft_vocab}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    try:  # before the answers, which take long
        trainer = build_trainer(options, teacher, count, settings, distributed)
        check_run_settings(options.out, answer_settings | {"items": teacher.data.digest}, distributed)
    except SettingsError as error:
        raise UsageError(str(error)) from error
    show = False if distributed.rank > 0 else options.progress
    total, shard = len(teacher.data), (distributed.rank, distributed.world_size)
    batch_size, new_tokens = options.batch_size, options.max_new_tokens
    with Progress("answers", total, "text", show=show) as progress:
        teacher.generate_answers(options.out, batch_size, new_tokens, progress.update, shard)
    wait_for_everyone()
    teacher.read_answers(options.out)
    init_from_target(trainer, teacher, options.draft_vocab)
    with Progress("train", options.steps, "step", show=show) as progress:
        progress.resume(trainer.step)
        is_done = trainer.run(60 * options.minutes, on_step=on_step(trainer, progress))
    if distributed.rank > 0:
        return 0
    if not is_done:
        print(f"stopped after {trainer.step} of {options.steps} steps; run again to go on")
        return 0
    finish(options, trainer, teacher, held_out, settings)
    return 0


def on_step(trainer: Trainer, progress: Progress) -> Callable[[dict[str, float]], None]:
    """What happens after each training step: progress, and the first checkpoint as soon as it is due."""
    start_time, is_saved = time.monotonic(), False

    def report(metrics: dict[str, float]) -> None:
        nonlocal is_saved
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if name != "teacher_s"]
        progress.update(1, ", ".join(shown[:NUM_METRICS]))
        if not is_saved and time.monotonic() - start_time >= FIRST_CHECKPOINT_S:
            trainer.save()
            is_saved = True

    return report


def finish(options: TrainOptions, trainer: Trainer, teacher: Any, held_out: Any, settings: dict[str, Any]) -> None:
    """Write every trained head, evaluate it and print its summary."""
    from mmspec.app.train.report import evaluate, export, summary_lines

    if options.evaluate and not len(held_out):
        print("mmspec: tau is not measured: there are too few requests to hold one out", file=sys.stderr)
    for name, draft_model in trainer.draft_models.items():
        folder = options.out / name
        export(options, folder, draft_model, teacher, settings)
        modes = ("coupled", "placeholder") if draft_model.visual_mode == "mixed" else ()
        evaluation = evaluate(options, folder, teacher, held_out, modes) if len(held_out) else {}
        print(printable("\n".join(summary_lines(options, folder, evaluation)), lines=True), flush=True)
