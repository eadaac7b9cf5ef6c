"""The command line of `mmspec caption`: its options, and the help that follows them. Imports nothing heavy at start."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.caption.option_fields import FORMATS
from mmspec.app.cli.options import add_described, add_settings, list_settings
from mmspec.app.errors import UsageError

EPILOG = """\
PATH is any mix of
  photo.jpg          an image
  clip.mp4           a video: --frames of it are passed to the model, as a video if its processor takes videos, else
                     as images; --fps selects them; decoding takes at most 5 minutes per video
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


def caption_help() -> str:
    """The help behind the options, with the settings."""
    return f"settings, as in --set top_k=20 threads=8\n{list_settings(CaptionConfig)}\n\n{EPILOG}"


SUFFIX_FORMATS = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".tar": "webdataset"}
COMPRESSED_SUFFIXES = (".7z", ".bz2", ".gz", ".lz4", ".rar", ".tbz", ".tgz", ".txz", ".xz", ".zip", ".zst")
_OTHERS = """
.arrow .avro .db .feather .h5 .hdf5 .htm .html .ipc .lance .md .npy .npz .orc .pickle .pkl .pq .sqlite .sqlite3
.toml .tsv .txt .xls .xlsx .xml .yaml .yml
"""
OTHER_SUFFIXES = frozenset(_OTHERS.split())
"""Suffixes of tables and texts that are no rows of JSON."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the paths and all options; what is not given is not in the namespace."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="files, folders, globs, manifests (see below)",
    )
    config_help = (
        "a TOML file of options, as a job writes it beside its output; those of the command line have precedence"
    )
    parser.add_argument("--config", default=None, metavar="FILE", help=config_help)
    add_described(parser, CaptionConfig, with_defaults=False, with_settings=True)
    add_settings(parser, CaptionConfig, {"--sampler": "--fps"})


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
