"""`mmspec caption`: its flags, and how they become a job."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import (
    DEFAULT,
    DTYPES,
    FRAMES,
    MAX_PIXELS,
    PROMPT,
    SAMPLERS,
    VIDEO_PROMPT,
    JobSettings,
    Place,
)
from mmspec.app.errors import UsageError, one_line

if TYPE_CHECKING:
    from mmspec.app.io.output import Output
    from mmspec.app.modeling.captioner import Captioner

MODELS = f"hub id, folder, or built in: scenes (knows its own small world), tiny, mid (random); default {DEFAULT}"
EPILOG = """\
PATH is any mix of
  photo.jpg          one file; clip.mp4 likewise (--frames of it are shown to the model, as a video if it takes videos,
                     else as so many pictures; --fps and --sampler say which; videos are decoded in a process of their
                     own, 5 minutes each at most)
  photos/            a folder, with its sub-folders, in natural order (img2 before img10)
  'photos/*.png'     a glob, expanded here if your shell has not
  list.jsonl         a manifest: "file_name" and, if wanted, "prompt" and "id" per row; .csv likewise;
                     .txt holds one path per line. Paths are relative to the manifest and may not leave its folder.

examples
  mmspec caption photos/ --model llava-hf/llava-1.5-7b-hf --out captions.jsonl
  mmspec caption photos/ --model ./my-llava --out photos/metadata.jsonl     loads with load_dataset("imagefolder")
  mmspec caption cat.png --compare              no download: the small model that ships, for drawn scenes
  mmspec caption clips/ --fps 1 --frames 32 --model ...                     a frame a second, 32 at most
  mmspec caption list.jsonl --model ... --temperature 0.7 --seed 1 --stop $'\\n'
  accelerate launch --num_processes 4 -m mmspec caption photos/ --model ... --out captions.jsonl

resuming
  Run the same command again: finished rows are skipped, whatever stopped the job. NAME.meta.json beside NAME.jsonl
  keeps the settings; a job with others is refused unless --overwrite. Another --drafter or --device may go on with
  it (neither changes a caption); so may another --batch-size unless captions are sampled.

sampling
  With --temperature above 0 the generator is seeded per batch from --seed and the place of the batch's first picture,
  and batches are fixed by the list of files: a resumed job gives the same captions as one that was never stopped.
  They do depend on --batch-size, --shard and the number of processes.

columns
  n_rounds is the forwards of the row after its prompt; tau = (n_new_tokens - 1) / n_rounds; ttft_s counts from the
  call of generate for the row's batch; seconds is the batch's time divided by its rows, image processing included;
  an end token counts as a new token.
  Captions are cut before a --stop text. Transparent pictures go on white; of animations the first frame is used.

exit code
  0 all fine, 1 some rows failed (or --compare found a difference in float32), 2 wrong usage,
  130 interrupted (the first Ctrl-C finishes the batch, the second stops at once), 143 the same by SIGTERM
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "caption",
        parents=[common],
        help="caption pictures and videos into JSON lines; resumes by itself",
        description="Caption pictures and videos with a vision-language model, sped up by mmspec. One JSON row each.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, globs, manifests (see below)")
    _add_model(parser)
    _add_decoding(parser)
    _add_job(parser)


COMPRESSORS = "show the drafter fewer visual tokens: measured; drop; stride, pool, relevant, salient, diverse with :N"


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", default=DEFAULT, metavar="M", help=MODELS)
    add("--drafter", default="auto", metavar="D", help="source of guesses (default auto; none: no drafts)")
    add("--compressor", default=None, metavar="C", help=COMPRESSORS)
    add("--dtype", default="auto", choices=DTYPES, help="default auto: the checkpoint's, float32 on a CPU")
    add("--device", default="auto", metavar="DEV", help="default auto: the GPU if there is one")


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("captions").add_argument
    add("--prompt", default=None, metavar="TEXT", help=f"default {PROMPT!r}; of videos {VIDEO_PROMPT!r}")
    add("--frames", type=positive, default=FRAMES, metavar="N", help=f"of a video, at most (default {FRAMES})")
    add("--fps", type=rate, default=None, metavar="R", help="R frames of each second of a video, up to --frames")
    told = "of a video, evenly spread frames (default) or those that differ most from each other"
    add("--sampler", choices=SAMPLERS, default=SAMPLERS[0], help=told)
    add("--batch-size", type=positive, default=8, metavar="N", help="pictures or videos at a time (default 8)")
    add("--max-new-tokens", type=positive, default=128, metavar="N", help="per caption (default 128)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--seed", type=int, default=0, metavar="N", help="for sampling (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a caption here; repeatable")


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("job").add_argument
    add("--out", default="-", metavar="FILE", help="JSON lines file; - (default) is standard output")
    add("--overwrite", action="store_true", help="forget what FILE holds")
    add("--retry-errors", action="store_true", help="do rows again that hold an error")
    add("--shard", type=shard, default=(0, 1), metavar="I/N", help="every Nth picture from the Ith on (0-based)")
    told = "also decode plainly, all or the first N, and say whether the tokens are identical"
    add("--compare", type=compare, nargs="?", const=-1, default=0, metavar="N", help=told)
    add("--max-pixels", type=positive, default=MAX_PIXELS, metavar="N", help="refuse larger pictures")
    add("--threads", type=positive, default=4, metavar="N", help="threads that decode ahead (default 4)")
    add("--progress", action=argparse.BooleanOptionalAction, help="default: if on a terminal")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def temperature(text: str) -> float:
    """A finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or more, got {text!r}")
    return value


def rate(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be frames a second, a number above 0, got {text!r}")
    return value


def shard(text: str) -> tuple[int, int]:
    """ "1/4": the second of four."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N-1, as in 0/4, got {text!r}")
    return int(first), int(count)


def compare(text: str) -> int:
    """How many pictures; "all" is every one."""
    if text == "all":
        return -1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number, got {text!r} (put paths before it, or say --compare all)")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.app.caption.job import Job

    given = {field.name: getattr(args, field.name) for field in fields(JobSettings)}
    settings = JobSettings(**given | {"paths": tuple(args.paths), "stop": tuple(filter(None, args.stop))})
    place = Place.of(os.environ)
    check_drafter(settings.drafter, settings.compressor)
    settings.frame_sampler()
    if settings.prompt is not None and not settings.prompt.strip():
        raise UsageError("--prompt must not be empty")
    quiet(settings.progress)
    return Job(settings, output_of(settings, place), lambda: captioner(settings, place), place).run()


def output_of(settings: JobSettings, place: Place) -> Output:
    """Where the rows go."""
    from mmspec.app.io.output import FileOutput, StreamOutput

    if settings.out != "-":
        world, print_of = place.world, settings.fingerprint(place.world)
        return FileOutput(Path(settings.out), print_of, rank=place.rank, world=world, overwrite=settings.overwrite)
    if place.world > 1:
        raise UsageError("several processes cannot share standard output: give --out FILE")
    if settings.overwrite or settings.retry_errors:
        raise UsageError("--overwrite and --retry-errors need --out FILE")
    return StreamOutput()


def check_drafter(name: str, compressor: str | None = None) -> None:
    """Refuse an unknown drafter or compressor before anything is loaded."""
    from mmspec.drafters.registry import drafter_names, is_known_drafter

    if not is_known_drafter(name):
        raise UsageError(f"unknown drafter {name!r}; known are {', '.join(drafter_names())}, a folder, or a hub id")
    if compressor is not None:
        from mmspec.vision.registry import make

        try:
            make(compressor)
        except ValueError as error:
            raise UsageError(str(error)) from error


def captioner(settings: JobSettings, place: Place) -> Captioner:
    """Load and patch the model."""
    import mmspec
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.chat import check_words
    from mmspec.app.modeling.load import load

    model, processor = load(settings.model, settings.dtype, settings.device, place.local)
    check_words(processor, settings.prompt, "--prompt")
    try:
        mmspec.patch(model, settings.drafter, settings.compressor, processor=processor)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--model {settings.model}: {one_line(error, 600)}") from error
    return Captioner(model, processor, settings.max_new_tokens, settings.temperature, settings.stop)


def quiet(progress: bool | None) -> None:
    """Keep transformers' own bars off a standard error that nobody watches."""
    import sys

    from transformers.utils import logging

    if not (sys.stderr.isatty() if progress is None else progress):
        logging.disable_progress_bar()


__all__ = ["add_parser", "run"]
