"""`mmspec caption`: its options, and the caption job that they configure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.batch_size import AUTO_BATCH_SIZE
from mmspec.app.caption.config import (
    DEFAULT_BATCH_SIZE,
    FORMATS,
    FRAMES,
    MAX_PIXELS,
    PROMPT,
    SAMPLERS,
    VIDEO_PROMPT,
    CaptionConfig,
    ProcessInfo,
)
from mmspec.app.cli.arguments import (
    MODEL_HELP,
    Commands,
    add_command,
    add_device_options,
    add_drafter_options,
    add_progress,
    add_sampling_options,
    config_from_args,
    hide_progress_bars,
    positive_int,
    validate_drafter,
)
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.text import find_fault

if TYPE_CHECKING:
    from mmspec.app.io.output import Output
    from mmspec.app.io.shards import ShardFormat
    from mmspec.app.modeling.captioner import Captioner

CHOOSE_MODEL = (
    "--model is missing: name a model, as in --model llava-hf/llava-1.5-7b-hf, or --model scenes for the bundled toy "
    "model, which knows drawn scenes and no photographs"
)
EPILOG = """\
PATH is any mix of
  photo.jpg          an image
  clip.mp4           a video: --frames of it are passed to the model, as a video if its processor takes videos, else
                     as images; --fps and --sampler select them; decoding takes at most 5 minutes per video
  photos/            a folder, with its sub-folders, in natural order (img2 before img10)
  'photos/*.png'     a glob, expanded here if the shell has not
  list.jsonl         a manifest: "file_name" and optionally "prompt" and "id" per row; .csv has the same columns;
                     .txt holds one path per line. Paths are relative to the manifest and may not leave its folder.
  'a-{000..099}.tar' WebDataset archives, read without extracting them; braces and globs are expanded here if the
                     shell has not. Members with one key are a row: KEY.jpg, and with --prompt-column txt its prompt
  'data/*.parquet'   tables with a column of pictures: bytes, {bytes, path}, paths below the table's folder, or
                     addresses (--urls). pip install 'mmspec[data]'
  saved/             a folder of `datasets`' save_to_disk; hf://datasets/OWNER/NAME is a dataset of the hub, streamed
  s3://bucket/a.tar  any of these by an address that fsspec opens: s3:// (mmspec[s3]), gs:// (mmspec[gs]), hf://, ...

examples
  mmspec caption photos/ --model llava-hf/llava-1.5-7b-hf --out captions.jsonl
  mmspec caption photos/ --model ./my-llava --out photos/metadata.jsonl     loads with load_dataset("imagefolder")
  mmspec caption drawn.png --model scenes --compare      no download: the bundled toy model, for drawn scenes
  mmspec caption clips/ --fps 1 --frames 32 --model ...                     one frame per second, at most 32
  mmspec caption list.jsonl --model ... --temperature 0.7 --seed 1 --stop $'\\n'
  mmspec caption 's3://bucket/pictures-{0000..0511}.tar' --model ... --out captions.jsonl
  mmspec caption data/*.parquet --model ... --out captions/ --format parquet --ray auto     pip install 'mmspec[ray]'
  accelerate launch --num_processes 4 -m mmspec caption photos/ --model ... --out captions.jsonl

resuming
  Run the same command again: finished rows are skipped, whatever stopped the job. NAME.meta.json beside NAME.jsonl
  holds the settings; a job with different settings is refused unless --overwrite. --drafter and --device may differ
  (neither changes a caption); so may --batch-size unless captions are sampled.

sampling
  With --temperature above 0 the generator is seeded per batch from --seed and the index of the batch's first image,
  and the list of files fixes the batches: a resumed job gives the same captions as one that was never stopped.
  They depend on --batch-size, --shard and the number of processes.

learning
  Where no trained head is at hand, the drafter learns from the job: later captions are faster, and the same. Weights,
  nothing else, are stored in the user's cache folder (mmspec cache list, clear), from which the next job goes on.
  --no-learn, or any other drafter than auto, arbitrated and instant, switches it off; on a GPU it is off by default.

columns
  n_rounds is the number of forward passes of the row after its prompt; tau = (n_new_tokens - 1) / n_rounds; ttft_s
  is the time to the first token from the call of generate for the row's batch; seconds is the batch's time divided by
  its rows, image processing included; an end token counts as a new token.
  Captions end before a --stop text. Transparent images are put on white; of an animation the first frame is used.

exit code
  0 success, 1 some rows failed (or --compare found a difference in float32), 2 wrong usage,
  74 output cannot be written (disk full, read-only, size limit): remove the cause and run the same command again,
  130 interrupted (the first Ctrl-C finishes the batch, the second stops at once), 143 the same by SIGTERM
"""


def add_parser(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = add_command(
        commands,
        common,
        "caption",
        run,
        help="caption images and videos; resumable",
        description="Caption images and videos with a vision-language model and mmspec. One row per image or video.",
        epilog=EPILOG,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, globs, manifests (see below)")
    _add_model(parser)
    _add_decoding(parser)
    _add_tables(parser)
    _add_job(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=None, metavar="M", help=f"required: {MODEL_HELP}")
    add_drafter_options(group)
    learn_help = (
        "let the drafter learn from this job where no trained head is at hand (default: on a CPU). Weights, nothing "
        "else, are stored in the user's cache folder: mmspec cache"
    )
    group.add_argument("--learn", action=argparse.BooleanOptionalAction, default=None, help=learn_help)
    add_device_options(group)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("captions")
    add = group.add_argument
    add("--prompt", default=None, metavar="TEXT", help=f"default {PROMPT!r}; for videos {VIDEO_PROMPT!r}")
    add(
        "--frames", type=positive_int, default=FRAMES, metavar="N", help=f"frames per video, at most (default {FRAMES})"
    )
    add(
        "--fps", type=parse_fps, default=None, metavar="R", help="sample R frames per second of a video, up to --frames"
    )
    sampler_help = "frames of a video: evenly spread (default) or those that differ most from each other"
    add("--sampler", choices=SAMPLERS, default=SAMPLERS[0], help=sampler_help)
    batch_help = f"images or videos per batch (default {DEFAULT_BATCH_SIZE}); auto: as many as speed and memory permit"
    add("--batch-size", type=parse_batch_size, default=DEFAULT_BATCH_SIZE, metavar="N", help=batch_help)
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="per caption (default 128)")
    add_sampling_options(group)
    add("--stop", action="append", default=[], metavar="TEXT", help="end a caption at this text; repeatable")


def _add_tables(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tables and archives").add_argument
    image_help = "column of the pictures, or extension of their members (default: found by name, as image, jpg or url)"
    add("--image-column", default=None, metavar="NAME", help=image_help)
    prompt_help = "column of the prompts; in archives a member (txt), or a key of the member json (default: none)"
    add("--prompt-column", default=None, metavar="NAME", help=prompt_help)
    add(
        "--id-column", default=None, metavar="NAME", help="column of the ids (default: file name and row number or key)"
    )
    add("--split", default="train", metavar="S", help="split of a dataset (default train)")
    urls_help = (
        "read http(s) addresses in rows: those of the public internet, or with `any` of private networks as well"
    )
    add("--urls", nargs="?", const="public", choices=("public", "any"), default=None, help=urls_help)


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    add = group.add_argument
    add("--out", default="-", metavar="FILE", help="file, or folder of shards; - (default) is standard output")
    format_help = (
        "jsonl (default): one file; parquet: a folder of shards with the same columns; webdataset: a folder of tar "
        "archives, each picture with its caption (.txt) and its row (.json)"
    )
    add("--format", choices=FORMATS, default=FORMATS[0], help=format_help)
    add("--rows-per-shard", type=positive_int, default=1000, metavar="N", help="of parquet and webdataset")
    add("--overwrite", action="store_true", help="discard the rows in FILE")
    add("--retry-errors", action="store_true", help="repeat the rows that hold an error")
    add(
        "--shard", type=parse_shard, default=(0, 1), metavar="I/N", help="every Nth file, starting at the Ith (0-based)"
    )
    ray_help = "caption on Ray: the cluster at ADDRESS (auto: the running one), else this machine's cores and GPUs"
    add("--ray", nargs="?", const="", default=None, metavar="ADDRESS", help=ray_help)
    add("--actors", type=positive_int, default=None, metavar="N", help="of Ray, at most (default: one per GPU or core)")
    compare_help = "also run plain generate, for all or the first N, and report whether the tokens are identical"
    add("--compare", type=parse_compare, nargs="?", const=-1, default=0, metavar="N", help=compare_help)
    add("--max-pixels", type=positive_int, default=MAX_PIXELS, metavar="N", help="refuse larger images")
    add("--threads", type=positive_int, default=4, metavar="N", help="decoding threads (default 4)")
    add_progress(group)


def parse_fps(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be frames per second, a number above 0, got {text!r}")
    return value


def parse_batch_size(text: str) -> int:
    """A number above 0; "auto" is `AUTO_BATCH_SIZE`."""
    return AUTO_BATCH_SIZE if text == "auto" else positive_int(text)


def parse_shard(text: str) -> tuple[int, int]:
    """ "1/4": the second of four."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N-1, as in 0/4, got {text!r}")
    return int(first), int(count)


def parse_compare(text: str) -> int:
    """A number of files; "all" is -1, every one."""
    if text == "all":
        return -1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number, got {text!r} (put paths before it, or write --compare all)")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from mmspec.app.caption.job import CaptionJob
    from mmspec.app.caption.progress import print_stderr

    if args.model is None:
        raise UsageError(CHOOSE_MODEL)
    config = config_from_args(CaptionConfig, args, stop=tuple(filter(None, args.stop)))
    process = ProcessInfo.from_env(os.environ)
    validate_drafter(config.drafter, config.compressor)
    config.frame_sampler()
    if config.batch_size == AUTO_BATCH_SIZE and config.temperature > 0:
        raise UsageError("sampled captions depend on the batches: give --batch-size a number with --temperature")
    check_texts(config)
    if config.ray is not None:
        from mmspec.app.caption.ray_job import RayCaptionJob

        check_ray(config, process)
        return RayCaptionJob(config, build_output(config, process)).run()
    hide_progress_bars(config.progress)

    loaded: list[Captioner] = []

    def load() -> Captioner:
        captioner = build_captioner(config, process)
        loaded.append(captioner)
        if process.rank == 0 and captioner.learned_folder is not None:
            print_stderr(
                "mmspec: the drafter learns from this job; weights, nothing else, are stored in "
                f"{captioner.learned_folder} (--no-learn switches it off)"
            )
        return captioner

    try:
        return CaptionJob(config, build_output(config, process), load, process).run()
    finally:
        for captioner in loaded:
            captioner.close()


def check_ray(config: CaptionConfig, process: ProcessInfo) -> None:
    """Refuse options that do not go with `--ray`.

    Raises:
        UsageError: there is one.
    """
    if process.world_size > 1:
        raise UsageError("--ray divides the work itself: start one process, without accelerate or torchrun")
    if config.shard != (0, 1):
        raise UsageError("--ray divides the work itself: leave --shard away")


def build_output(config: CaptionConfig, process: ProcessInfo) -> Output:
    """The output that `--out` names.

    Raises:
        UsageError: options that do not go with it.
    """
    from mmspec.app.io.output import FileOutput, StreamOutput
    from mmspec.app.io.shards import ShardedOutput

    settings, ranks = config.fingerprint(process.world_size), {"rank": process.rank, "world_size": process.world_size}
    if config.out != "-" and config.format == "jsonl":
        return FileOutput(Path(config.out), settings, **ranks, overwrite=config.overwrite)
    if config.out != "-":
        shards, rows = build_format(config.format), config.rows_per_shard
        return ShardedOutput(
            Path(config.out), settings, shards, **ranks, overwrite=config.overwrite, rows_per_shard=rows
        )
    if config.format != "jsonl":
        raise UsageError(f"--format {config.format} writes a folder of shards: give --out FOLDER")
    if process.world_size > 1:
        raise UsageError("several processes cannot share standard output: give --out FILE")
    if config.overwrite or config.retry_errors:
        raise UsageError("--overwrite and --retry-errors need --out FILE")
    return StreamOutput()


def build_format(name: str) -> ShardFormat:
    """The shard format of that name.

    Raises:
        UsageError: a package that it needs is not installed.
    """
    from mmspec.app.io.parquet_shards import ParquetShards
    from mmspec.app.io.tar_shards import TarShards

    formats: dict[str, Callable[[], ShardFormat]] = {"parquet": ParquetShards, "webdataset": TarShards}
    return formats[name]()


def build_captioner(config: CaptionConfig, process: ProcessInfo) -> Captioner:
    """Load the model, patch it with the drafter, and wrap both.

    Raises:
        UsageError: a model, drafter or compressor that cannot be loaded.
    """
    import mmspec
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.chat import reject_media_tokens
    from mmspec.app.modeling.load import load_model

    model, processor = load_model(config.model, config.dtype, config.device, process.local_rank)
    reject_media_tokens(processor, config.prompt, "--prompt")
    learn = resolve_learning(config, model.device.type)
    try:
        mmspec.patch(model, config.drafter, config.compressor, processor=processor, learn=learn)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--model {config.model} --drafter {config.drafter}: {one_line(error, 600)}") from error
    return Captioner(model, processor, config.max_new_tokens, config.temperature, config.stop)


def check_texts(config: CaptionConfig) -> None:
    """Refuse a prompt or stop text that is no text.

    Raises:
        UsageError: it is empty, too long or no valid Unicode.
    """
    if config.prompt is not None and not config.prompt.strip():
        raise UsageError("--prompt must not be empty")
    for flag, text in (("--prompt", config.prompt), *(("--stop", stop) for stop in config.stop)):
        if fault := find_fault(text or ""):
            raise UsageError(f"{flag} {fault}")


def resolve_learning(config: CaptionConfig, device_type: str) -> bool | str:
    """`learn` of `patch`: "auto" by default on a CPU, where batches were measured, and True if a drafter that is named
    is asked to learn."""
    from mmspec.config import LEARNS_FROM_NOTHING

    if config.learn is None:
        return "auto" if device_type == "cpu" else False
    return config.learn and ("auto" if config.drafter in LEARNS_FROM_NOTHING else True)


__all__ = ["add_parser", "run"]
