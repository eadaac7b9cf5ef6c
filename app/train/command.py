"""`mmspec train`: a draft head for a target, from requests alone. Resumes where it was interrupted."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.cli.arguments import (
    Commands,
    add_command,
    add_device_options,
    add_model_option,
    add_progress,
    add_table_options,
    goes_with,
    hide_progress_bars,
    non_negative_int,
    output_path,
    parse_seed,
    positive_int,
    split_commas,
)
from mmspec.app.errors import UsageError
from mmspec.app.train.config import TrainOptions
from mmspec.app.train.progress import ProgressReporter
from mmspec.drafters.heads.registry import Recipe, recipes
from mmspec.messages import printable

if TYPE_CHECKING:
    from mmspec.drafters.training.trainer import Trainer

VISUAL_MODES = ("decoupled", "coupled", "placeholder", "text_only")
"""Keys of mmspec.drafters.heads.base.visual_inputs.VISUAL_MODES, which is too slow to import here."""
LOSSES = ("ce", "kl", "tv", "lk", "lk-mix", "path")
"""Keys of mmspec.drafters.training.distribution_losses.DISTRIBUTION_LOSSES, as `VISUAL_MODES`."""
DRAFT_LM = "draft-lm"
"""The drafter that is a language model instead of a head."""
FIRST_CHECKPOINT_S = 30.0
"""Seconds of training after which the first checkpoint is written; later ones follow the trainer's interval."""

EPILOG = """\
drafters
{drafters}
  draft-lm           a small language model instead of a head: some layers of the target, trained on its answers
                     (FastDraft); reads no images; alone, not beside heads
  Several, separated by commas, train side by side on the same batches: the target runs once for all of them.

data
  --data names all that `mmspec caption` reads; a list may bring "prompt" and "answer" per row. Where there is no answer
  the target generates one, so that the drafter learns the target's own text. Answers are stored in OUT/answers.jsonl.
  --target may be a language model: then --data names text files with a request per line, or .jsonl files with a
  "prompt" per row; without it the target writes its requests (--count).
  A picture that cannot be used is counted, and the next one takes its place. Bytes of tables wait in a temporary file
  (TMPDIR).
  The last requests (--evaluate of them, at most a tenth) are held out: tau is measured on them.

OUT holds answers.jsonl, run.json (the settings of the answers), state.pt (the checkpoint; the first within a minute),
log.jsonl, curves.png if matplotlib is installed, and at the end a folder per drafter with config.json,
model.safetensors, evaluation.json and provenance.json: `mmspec.patch(model, drafter="OUT/msd")`.
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
    """The help behind the options, with the drafters of the registry."""
    lines = []
    for name, (_, recipe) in recipes().items():
        first, *rest = textwrap.wrap(recipe.help, width=99)
        lines += [f"  {name:18} {first}", *(" " * 21 + line for line in rest)]
    return EPILOG.format(drafters="\n".join(lines))


def add_parser(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        common,
        "train",
        run,
        help="train a drafter for a model",
        description="Train draft heads on a target's own answers and hidden states.",
        epilog=train_help,
    )
    group = parser.add_argument_group("what")
    add = group.add_argument
    add_model_option(group, "--target")
    add_device_options(group)
    add(
        "--drafter",
        type=parse_drafters,
        default=["msd"],
        metavar="D,D",
        help="names of the list below (default msd)",
    )
    data_help = "as `mmspec caption` reads them"
    add("--data", nargs="+", default=[], metavar="PATH", help=data_help)
    add("--out", type=output_path, required=True, metavar="FOLDER", help="folder of the run")
    prompt_help = "of rows of --data without their own (default: as mmspec caption)"
    add("--prompt", default=None, metavar="TEXT", help=prompt_help)
    add_table_options(parser)
    _add_training(parser.add_argument_group("how"))


def _add_training(how: argparse._ArgumentGroup) -> None:
    """Data, schedule, losses."""
    add = how.add_argument
    count = add("--count", type=positive_int, default=2000, metavar="N", help="requests to write (default 2000)")
    goes_with(count, "a language model without --data", lambda args: not args.data)
    add(
        "--max-new-tokens",
        type=positive_int,
        default=160,
        metavar="N",
        help="maximum length of an answer in tokens (default 160)",
    )
    add("--steps", type=positive_int, default=None, metavar="N", help="default 1000")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="sequences per step (default 16)")
    add(
        "--answer-batch",
        type=positive_int,
        default=None,
        metavar="N",
        help="batch size of answers (default: --batch-size)",
    )
    cache_help = "host memory for the target's hidden states (default 4)"
    add("--cache-gib", type=float, default=4.0, metavar="GIB", help=cache_help)
    add("--lr", type=float, default=None, metavar="R", help="highest learning rate (default 1e-3; mtp 1e-4)")
    hidden_help = "weight of smooth L1 on the hidden states (default 1)"
    add("--hidden-loss", type=float, default=1.0, metavar="W", help=hidden_help)
    logits_help = "weight of soft cross-entropy on the logits (default 0.1)"
    add("--logits-loss", type=float, default=0.1, metavar="W", help=logits_help)
    loss_help = """loss on the logits (default ce): ce and kl fit the target's distribution; tv, lk, lk-mix and path
        follow the probability that draft tokens are accepted"""
    add("--loss", choices=LOSSES, default="ce", help=loss_help)
    ttt_help = "training-time-test steps: forwards per batch, all but the first on the head's own outputs (default 3)"
    add("--ttt-steps", type=positive_int, default=3, metavar="N", help=ttt_help)
    _add_head(how)


def _add_head(how: argparse._ArgumentGroup) -> None:
    """Batches without images, shape and start of the head, evaluation."""
    add = how.add_argument
    text = how.add_mutually_exclusive_group().add_argument
    text("--text-first", action="store_true", help="MSD's schedule: text alone for half the steps, then more images")
    text("--text-only", action="store_true", help="questions without their images in all steps")
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="W",
        help="uniform noise on hidden states (EAGLE: 0.2; default 0)",
    )
    add("--ffn", type=positive_int, default=None, metavar="N", help="intermediate size (default: the target's)")
    block = add(
        "--block", type=positive_int, default=None, metavar="K", help="tokens per forward (flash: 5, falcon: 2)"
    )
    goes_with(block, "drafters of several tokens per forward", _have_blocks)
    mode_help = "how visual tokens enter the head (default: that of the drafter)"
    modes = (*VISUAL_MODES, "mixed")
    add("--visual-mode", default=None, choices=modes, help=mode_help)
    layers_help = (
        "hidden states that the head reads, of 0 to the number of layers (default: 2, N/2, N-3; dspark also N-1)"
    )
    add("--head-layers", type=positive_int, default=1, metavar="N", help="decoder layers of a dspark head (default 1)")
    add("--layers", type=parse_layers, default=None, metavar="I,I,I", help=layers_help)
    add(
        "--compressor",
        type=compressor_spec,
        default=None,
        metavar="NAME:N",
        help="compress visual tokens to N (latent:64)",
    )
    add("--start-from", metavar="FOLDER", help="trained weights: a folder of a run or drafter, or a name")
    add(
        "--draft-vocab",
        type=positive_int,
        default=None,
        metavar="N",
        help="size of the draft vocabulary: the N most frequent ids",
    )
    add(
        "--evaluate",
        type=non_negative_int,
        default=24,
        metavar="N",
        help="requests to measure tau on (default 24; 0 none)",
    )
    layers_help = "decoder layers of draft-lm (default: an eighth of the target's)"
    draft_layers = add("--draft-layers", type=positive_int, default=None, metavar="N", help=layers_help)
    goes_with(draft_layers, f"--drafter {DRAFT_LM}", lambda args: DRAFT_LM in args.drafter)
    add(
        "--seed",
        type=parse_seed,
        default=0,
        metavar="N",
        help="of initial weights and of the order of samples (default 0)",
    )
    add("--minutes", type=float, default=math.inf, metavar="T", help="stop after this long; run again to go on")
    add_progress(how, "bar (default: on a terminal, else lines)")


def _have_blocks(args: argparse.Namespace) -> bool:
    """Whether a drafter has blocks, or refuses `--block` itself."""
    known = recipes()
    return any(name not in known or known[name][1].block_size > 1 for name in args.drafter)


def parse_drafters(text: str) -> list[str]:
    """Comma-separated drafters."""
    names = split_commas(text)
    if DRAFT_LM in names and len(names) > 1:
        raise argparse.ArgumentTypeError(f"{DRAFT_LM} is trained alone, not beside heads")
    known = (*recipes(), DRAFT_LM)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown drafter {name!r}; known are {', '.join(known)}")
    return list(dict.fromkeys(names))


def parse_layers(text: str) -> tuple[int, ...]:
    """Comma-separated indices of hidden states."""
    return tuple(non_negative_int(part) for part in split_commas(text))


def compressor_spec(text: str) -> str:
    """NAME:N, a compressor and the number of tokens that it keeps."""
    from mmspec.vision.registry import parse_compressor

    try:
        parse_compressor(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.app.train.report import write_curves
    from mmspec.app.train.setup import (
        build_teacher,
        build_trainer,
        check_run_settings,
        data_settings,
        distributed_context,
        init_from_target,
        train_settings,
    )

    set_default_sizes(args)
    options = TrainOptions.from_args(args)
    hide_progress_bars(options.progress)
    if options.drafter == [DRAFT_LM]:
        from mmspec.app.train.draft_lm_run import run_draft_lm

        return run_draft_lm(options)
    process = ProcessInfo.from_env(os.environ)
    if options.batch_size % process.world_size:
        raise UsageError(f"--batch-size {options.batch_size} cannot be shared by {process.world_size} processes")
    wait_for_everyone, distributed = distributed_context(options, process)
    teacher, held_out = build_teacher(options, process)
    count = len(teacher.data) // (2 if options.text_first or options.text_only else 1)
    answer_settings = data_settings(options, count, held_out)
    settings = answer_settings | train_settings(options)
    # Before the answers, which take long: it may refuse.
    trainer = build_trainer(options, teacher, count, settings, distributed)
    check_run_settings(options.out, answer_settings | {"items": teacher.data.digest}, distributed)
    start_index = count if options.text_only else 0
    is_silent = distributed.rank > 0
    total, shard = len(teacher.data) - start_index, (distributed.rank, distributed.world_size)
    batch_size, new_tokens = options.answer_batch or options.batch_size, options.max_new_tokens
    with ProgressReporter("answers", total, "text", show_bar=options.progress, is_silent=is_silent) as progress:
        teacher.generate_answers(options.out, batch_size, new_tokens, progress.update, shard, start_index)
    wait_for_everyone()
    teacher.read_answers(options.out)
    init_from_target(trainer, teacher)
    with ProgressReporter("train", options.steps, "step", show_bar=options.progress, is_silent=is_silent) as progress:
        progress.resume(trainer.step)
        is_done = trainer.run(60 * options.minutes, on_step=on_step(trainer, progress))
    if is_silent:
        return 0
    write_curves(options.out, title=f"{', '.join(options.drafter)} for {options.target}")
    if not is_done:
        print(f"stopped after {trainer.step} of {options.steps} steps; run again to go on")
        return 0
    finish(options, trainer, teacher, held_out, settings)
    return 0


def set_default_sizes(args: argparse.Namespace) -> None:
    """Requests and steps that were not given: the largest defaults of the drafters; learning rate: the lowest."""
    known = recipes()
    chosen = [known[name][1] for name in args.drafter if name in known] or [Recipe(DRAFT_LM, "", "")]
    args.steps = args.steps or max(recipe.steps for recipe in chosen)
    args.lr = args.lr or min(recipe.learning_rate for recipe in chosen)


def on_step(trainer: Trainer, progress: ProgressReporter) -> Callable[[dict[str, float]], None]:
    """What happens after each training step: progress, and the first checkpoint as soon as it is due."""
    start_time, is_saved = time.monotonic(), False

    def report(metrics: dict[str, float]) -> None:
        nonlocal is_saved
        progress.update(1, {name: value for name, value in metrics.items() if name != "teacher_s"})
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
