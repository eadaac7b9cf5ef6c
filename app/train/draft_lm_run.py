"""The run of `mmspec train --drafter draft-lm`: answers of the target, training, the folder of the draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.errors import UsageError
from mmspec.app.train.config import TrainOptions
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import RequestDataset
from mmspec.app.train.draft_lm import DraftLMTrainer, TextSample, default_num_layers, init_draft_model
from mmspec.app.train.progress import ProgressReporter
from mmspec.app.train.report import evaluate, summary_lines, target_name, write_curves, write_provenance
from mmspec.app.train.setup import build_teacher, check_run_settings, data_settings
from mmspec.drafters.training.trainer import DistributedContext
from mmspec.messages import printable

UNUSED_OPTIONS = dict.fromkeys(("compressor", "start_from", "draft_vocab", "visual_mode", "block"))
UNUSED_OPTIONS |= dict.fromkeys(("text_first", "text_only"), False)
"""Options of draft heads that a draft model does not have, with their defaults."""


def run_draft_lm(options: TrainOptions) -> int:
    """Train a draft model; resumes where it was interrupted.

    Raises:
        UsageError: options that it does not have, or a target that it cannot be made for.
    """
    if used := [name for name, default in UNUSED_OPTIONS.items() if getattr(options, name) != default]:
        raise UsageError(f"--drafter draft-lm has no {used[0]}")
    teacher, held_out = build_teacher(options, ProcessInfo())
    draft = init_draft_model(teacher.model, options.draft_layers or default_num_layers(teacher.adapter.num_layers))
    options.out.mkdir(parents=True, exist_ok=True)
    check_run_settings(options.out, data_settings(options, len(teacher.data), held_out), DistributedContext())
    with ProgressReporter("answers", len(teacher.data), "text", show_bar=options.progress, is_silent=False) as progress:
        batch_size = options.batch_size
        teacher.generate_answers(options.out, batch_size, options.max_new_tokens, progress.update)
    trainer = DraftLMTrainer(
        options.out,
        draft,
        read_samples(teacher, options.batch_size),
        max_steps=options.steps,
        batch_size=options.batch_size,
        lr=options.lr,
        seed=options.seed,
    )
    with ProgressReporter("train", options.steps, "step", show_bar=options.progress, is_silent=False) as progress:
        progress.resume(trainer.step)
        is_done = trainer.run(60 * options.minutes, lambda metrics: progress.update(1, metrics))
    write_curves(options.out, title=f"draft-lm for {options.target}")
    if not is_done:
        print(f"stopped after {trainer.step} of {options.steps} steps; run again to go on")
        return 0
    finish_draft_lm(options, trainer.draft, teacher, held_out)
    return 0


def read_samples(teacher: Teacher, batch_size: int) -> list[TextSample]:
    """The text of every request and the target's answer to it; requests without an answer are left out."""
    samples = []
    for start in range(0, len(teacher.data), batch_size):
        indices = [
            index for index in range(start, min(start + batch_size, len(teacher.data))) if teacher.answers[index]
        ]
        prompts = teacher.prompt_text_ids(indices)
        samples += [TextSample(ids, teacher.answers[index]) for index, ids in zip(indices, prompts, strict=True)]
    return samples


def finish_draft_lm(options: TrainOptions, draft: Any, teacher: Teacher, held_out: RequestDataset) -> None:
    """Save the draft model with its tokenizer as a folder of transformers, evaluate it and print its summary."""
    folder = Path(options.out) / "draft-lm"
    draft.config._name_or_path = ""
    draft.save_pretrained(folder)
    teacher.tokenizer.save_pretrained(folder)
    write_provenance(folder, options, teacher, {"draft_lm_for": target_name(options.target)})
    evaluation = evaluate(options, folder, teacher, held_out) if len(held_out) else {}
    print(printable("\n".join(summary_lines(options, folder, evaluation)), lines=True), flush=True)
