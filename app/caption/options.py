"""The options of `mmspec caption`, in their groups, and the types of their values. Imports nothing heavy at start."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mmspec.app.caption.batch_size import AUTO_BATCH_SIZE
from mmspec.app.caption.config import (
    DEFAULT_BATCH_SIZE,
    FORMATS,
    FRAMES,
    PROMPT,
    SAMPLERS,
    VIDEO_PROMPT,
)
from mmspec.app.caption.variants import read_prompts
from mmspec.app.cli.arguments import (
    MODEL_HELP,
    add_device_options,
    add_drafter_options,
    add_progress,
    add_sampling_options,
    add_table_options,
    goes_with,
    non_negative_int,
    output_name,
    parse_temperature,
    positive_int,
    split_commas,
)
from mmspec.app.errors import UsageError
from mmspec.app.modeling.prompt_format import RESERVED

EPILOG = """\
PATH is any mix of
  photo.jpg          an image
  clip.mp4           a video: --frames of it are passed to the model, as a video if its processor takes videos, else
                     as images; --fps and --sampler select them; decoding takes at most 5 minutes per video
  photos/            a folder, with its sub-folders, in natural order (img2 before img10)
  'photos/*.png'     a glob, expanded here if the shell has not
  list.jsonl         a list: "file_name" and optionally "prompt" and "id" per row; .json, .csv and .tsv have the same
                     columns, .txt a path or address per line. Paths stay below the folder of the list, or --root DIR
  'a-{000..099}.tar' WebDataset archives, read without extracting them; braces and globs are expanded here if the
                     shell has not. Members with one key are a row: KEY.jpg, and with --prompt-column txt its prompt
  'data/*.parquet'   tables with a column of pictures: bytes, {bytes, path}, paths below the table's folder, or
                     addresses (--urls). Needs, in the clone: pip install -e '.[data]'
  saved/             a folder of `datasets`' save_to_disk; hf://datasets/OWNER/NAME[/CONFIG] is streamed from the hub
  s3://bucket/a.tar  any of these but lists by an address that fsspec opens: s3:// (extra s3), gs:// (gs), hf://, ...

examples
  mmspec caption photos/ --model llava-hf/llava-1.5-7b-hf --out captions.jsonl
  mmspec caption photos/ --model ... --format txt --prefix 'sks dog, '           photos/1.txt beside photos/1.jpg
  mmspec caption photos/ --model ./my-llava --out photos/metadata.jsonl     loads with load_dataset("imagefolder")
  mmspec caption drawn.png --model scenes --compare      no download: the bundled toy model, for drawn scenes
  mmspec caption clips/ --fps 1 --frames 32 --model ...                     one frame per second, at most 32
  mmspec caption list.jsonl --model ... --temperature 0.7 --seed 1 --stop $'\\n'
  mmspec caption 's3://bucket/pictures-{0000..0511}.tar' --model ... --out captions.jsonl
  mmspec caption data/*.parquet --model ... --out captions/ --format parquet --ray auto     pip install -e '.[ray]'
  accelerate launch --num_processes 4 -m mmspec caption photos/ --model ... --out captions.jsonl

resuming
  Run the same command again: finished rows are skipped, whatever stopped the job. NAME.meta.json beside NAME.jsonl
  holds the settings; a job with different settings is refused unless --overwrite. --drafter and --device may differ
  (neither changes a caption); so may --batch-size unless captions are sampled.

sampling
  --temperature is the command's own, 0 by default. All else in the model's generation_config.json is used and printed,
  except values that would leave one token whatever the temperature (top_k 1 of Qwen2.5-VL).
  With --temperature above 0 the generator is seeded per batch from --seed and the index of the batch's first image,
  and the list of files fixes the batches: a resumed job gives the same captions as one that was never stopped.
  They depend on --batch-size, --shard and the number of processes.

columns
  n_rounds is the number of forward passes of the row after its prompt; tau = (n_new_tokens - 1) / n_rounds; ttft_s
  is the time to the first token from the call of generate for the row's batch; seconds is the batch's time divided by
  its rows, image processing included; an end token counts as a new token.
  Captions end before a --stop text. What a model thinks (<think> ...) is no part of a caption: an output that ends
  within it is an error row. One <image> at the beginning of a prompt is left out: the picture is there already.
  Transparent images are put on white; of an animation the first frame is used.

exit code
  0 success, 1 some rows failed (or --compare found a difference in float32), 2 wrong usage,
  74 output cannot be written (disk full, read-only, size limit), or no process started that decodes: remove the cause
     and run the same command again,
  130 interrupted (the first Ctrl-C finishes the batch, the second stops at once), 143 the same by SIGTERM
"""


SUFFIX_FORMATS = {".parquet": "parquet", ".tar": "webdataset"}
COMPRESSED_SUFFIXES = (".7z", ".bz2", ".gz", ".lz4", ".rar", ".tbz", ".tgz", ".txz", ".xz", ".zip", ".zst")
_OTHERS = """
.arrow .avro .csv .db .feather .h5 .hdf5 .htm .html .ipc .lance .md .npy .npz .orc .pickle .pkl .pq .sqlite .sqlite3
.toml .tsv .txt .xls .xlsx .xml .yaml .yml
"""
OTHER_SUFFIXES = frozenset(_OTHERS.split())
"""Suffixes of tables and texts that are no rows of JSON."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the paths and all options."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, globs, manifests (see below)")
    _add_model(parser)
    _add_prompt(parser)
    _add_decoding(parser)
    add_table_options(parser)
    _add_output(parser)
    _add_job(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=None, metavar="M", help=f"required: {MODEL_HELP}")
    add_drafter_options(group)
    # Of jobs from before learning went; the answers were the same with either.
    group.add_argument("--learn", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    add_device_options(group)


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts and pictures").add_argument
    prompt_help = f"default {PROMPT!r}; for videos {VIDEO_PROMPT!r}; for PaliGemma 'caption en'"
    add("--prompt", default=None, metavar="TEXT", help=prompt_help)
    prompts_help = "a prompt a line: every picture is asked each of them, and has a row for each"
    add("--prompts", type=read_prompts, default=(), metavar="FILE", help=prompts_help)
    captions_help = "captions for each prompt, which sampling makes different (default 1)"
    add("--num-captions", type=positive_int, default=1, metavar="N", help=captions_help)
    reuse_help = (
        "compute what the rows of a picture share once (default: in float32; in half precision near-ties may then fall "
        "the other way)"
    )
    add("--reuse-prefix", action=argparse.BooleanOptionalAction, default=None, help=reuse_help)
    add("--system-prompt", default=None, metavar="TEXT", help="of every row (default: that of the chat template)")
    variables_help = (
        "variables of the chat template, such as '{\"enable_thinking\": true}' (default: thinking off, where the "
        "template can switch it)"
    )
    add("--chat-template-kwargs", type=parse_template_kwargs, default={}, metavar="JSON", help=variables_help)
    pixels_help = "shrink larger pictures to N pixels (default: as the model's processor does)"
    add("--max-pixels", type=positive_int, default=None, metavar="N", help=pixels_help)
    frames_help = f"frames per video, at most (default {FRAMES})"
    add("--frames", type=positive_int, default=FRAMES, metavar="N", help=frames_help)
    fps_help = "sample R frames per second of a video, up to --frames"
    add("--fps", type=parse_fps, default=None, metavar="R", help=fps_help)
    sampler_help = "frames of a video: evenly spread (default) or those that differ most from each other"
    add("--sampler", choices=SAMPLERS, default=SAMPLERS[0], help=sampler_help)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("captions")
    add = group.add_argument
    batch_help = f"images or videos per batch (default {DEFAULT_BATCH_SIZE}); auto: as many as speed and memory permit"
    add("--batch-size", type=parse_batch_size, default=DEFAULT_BATCH_SIZE, metavar="N", help=batch_help)
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="per caption (default 128)")
    add_sampling_options(group)
    add("--top-p", type=parse_top_p, default=None, metavar="P", help="sample from this share of the probability")
    add(
        "--top-k", type=non_negative_int, default=None, metavar="K", help="sample from the K most likely tokens; 0: all"
    )
    penalty_help = "above 1: tokens that are there already are less likely; in greedy decoding too"
    add("--repetition-penalty", type=parse_penalty, default=None, metavar="R", help=penalty_help)
    add("--stop", action="append", default=[], metavar="TEXT", help="end a caption at this text; repeatable")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    out_help = "file, or folder of shards or text files; - (default) is standard output"
    add("--out", type=output_name, default="-", metavar="FILE", help=out_help)
    format_help = (
        "default: by the suffix of --out. jsonl: one file; parquet: a folder of shards with the same columns; "
        "webdataset: a folder of tar archives, each picture with its caption (.txt) and its row (.json); txt: a text "
        "file of one line for each picture, beside it or in the folder --out; one that exists is left alone"
    )
    add("--format", choices=FORMATS, default=None, help=format_help)
    fields_help = (
        "columns of the rows, comma-separated, besides id, caption, prompt_sha1, error and index (default: all)"
    )
    add("--fields", type=parse_fields, default=None, metavar="A,B", help=fields_help)
    shard_rows = add(
        "--rows-per-shard",
        type=positive_int,
        default=1000,
        metavar="N",
        help="of parquet and webdataset (default 1000)",
    )
    goes_with(shard_rows, "--format parquet or webdataset", has_shards)
    add("--prefix", default="", metavar="TEXT", help="put before each caption, as in 'sks dog, '")
    add("--suffix", default="", metavar="TEXT", help="put after each caption")
    add("--overwrite", action="store_true", help="discard the rows in FILE; of txt replace files that exist")
    add("--retry-errors", action="store_true", help="repeat the rows that hold an error")


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    add = group.add_argument
    add(
        "--shard", type=parse_shard, default=(0, 1), metavar="I/N", help="every Nth file, starting at the Ith (0-based)"
    )
    ray_help = "caption on Ray: the cluster at ADDRESS (auto: the running one), else this machine's cores and GPUs"
    add("--ray", nargs="?", const="", default=None, metavar="ADDRESS", help=ray_help)
    actors_help = "of --ray, at most (default: one per GPU or core)"
    actors = add("--actors", type=positive_int, default=None, metavar="N", help=actors_help)
    goes_with(actors, "--ray", lambda args: args.ray is not None)
    compare_help = "also run plain generate, for all or the first N, and report whether the tokens are identical"
    add("--compare", type=parse_compare, nargs="?", const=-1, default=0, metavar="N", help=compare_help)
    add("--threads", type=positive_int, default=4, metavar="N", help="decoding threads (default 4)")
    add(
        "--report",
        type=output_name,
        default=None,
        metavar="FOLDER",
        help="write report.html: captions, errors, speed, drafts of this run",
    )
    add_progress(group)


def has_shards(args: argparse.Namespace) -> bool:
    """Whether the output is a folder of shards."""
    return (args.format or SUFFIX_FORMATS.get(Path(args.out).suffix.lower())) in ("parquet", "webdataset")


def choose_format(name: str | None, out: str) -> str:
    """The format that `--format` names, else the suffix of `--out`.

    Raises:
        UsageError: a suffix of what is not written.
    """
    suffix = Path(out).suffix.lower()
    if name is None and suffix in SUFFIX_FORMATS:
        return SUFFIX_FORMATS[suffix]
    if suffix in COMPRESSED_SUFFIXES and name in (None, "jsonl"):
        raise UsageError(
            f"--out {out}: rows are not compressed, so that a job can be resumed: use a name as captions.jsonl"
        )
    if name is None and suffix in OTHER_SUFFIXES:
        raise UsageError(
            f"--out {out}: {suffix} is not written: name a .jsonl file or a .parquet folder, or say --format jsonl, "
            "parquet, webdataset or txt"
        )
    return name or FORMATS[0]


def parse_fields(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(split_commas(text))


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """A JSON object of variables of a chat template."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object, as in '{{\"enable_thinking\": false}}', got {text!r:.80}"
        )
    if taken := sorted(RESERVED & found.keys()):
        raise argparse.ArgumentTypeError(
            f"cannot set {', '.join(taken)}: mmspec sets it; name variables of the template"
        )
    return found


def parse_top_p(text: str) -> float:
    """A probability above 0."""
    value = parse_temperature(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a probability above 0 and at most 1, got {text!r}")
    return value


def parse_penalty(text: str) -> float:
    """A finite factor above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a factor above 0, as in 1.1, got {text!r}")
    return value


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
