"""The options of `mmspec caption`: what argparse, `--config`, the help and the identity of a job derive from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.app.caption import values as parse
from mmspec.app.caption.schema import read_schema
from mmspec.app.cli import arguments as common
from mmspec.app.cli.options import option
from mmspec.app.io.table_options import TableOptions

PROMPT = "Describe the image."
VIDEO_PROMPT = "Describe the video."
FRAMES = 8
DEFAULT_BATCH_SIZE = 16
"""Rows per batch: on two cores 1.15 times the rows per second of 8; 32 would add a fifteenth."""
SAMPLERS = ("uniform", "differing")
"""How the frames of a video are selected."""
FORMATS = ("jsonl", "csv", "parquet", "webdataset", "txt", "caption")


_MODEL, _PROMPTS, _CAPTIONS, _OUTPUT, _JOB = "model", "prompts and pictures", "captions", "output", "job"


@dataclass(frozen=True)
class CaptionOptions(TableOptions):
    """The options of `mmspec caption`, each described in its field. Paths, model and output come first, for scripts."""

    paths: tuple[str, ...]
    model: str = option("", f"required: {common.MODEL_HELP}", _MODEL, metavar="M", decides="always")
    out: str = option(
        "-",
        "file, or folder of shards or text files; - (default) is standard output",
        _OUTPUT,
        parse=common.output_name,
        metavar="FILE",
    )
    drafter: str = option("auto", common.DRAFTER_HELP, _MODEL, metavar="D")
    compressor: str | None = option(None, common.COMPRESSOR_HELP, _MODEL, metavar="C")
    dtype: str = option("auto", common.DTYPE_HELP, _MODEL, choices=common.DTYPES, decides="always")
    device: str = option("auto", common.DEVICE_HELP, _MODEL, metavar="DEV")

    prompt: str | None = option(
        None,
        f"default {PROMPT!r}; for videos {VIDEO_PROMPT!r}; for PaliGemma 'caption en'. {{FIELD}} is that of the row: a "
        "column of its list or table, name and folder of the picture, caption for a text file beside it",
        _PROMPTS,
        metavar="TEXT",
        decides="always",
    )
    prompts: tuple[str, ...] = option(
        (),
        "a prompt a line: every picture is asked each of them, and has a row for each; {answer1} is the answer to the "
        "first",
        _PROMPTS,
        parse=parse.read_prompts,
        metavar="FILE",
        decides="if set",
    )
    num_captions: int = option(
        1,
        "captions for each prompt, which sampling makes different (default 1)",
        _PROMPTS,
        parse=common.positive_int,
        metavar="N",
        decides="if set",
    )
    reuse_prefix: bool | None = option(
        None,
        "compute what the rows of a picture share once (default: in float32; in half precision near-ties may then fall "
        "the other way)",
        _PROMPTS,
    )
    system_prompt: str | None = option(
        None, "of every row (default: that of the chat template)", _PROMPTS, metavar="TEXT", decides="if set"
    )
    chat_template_kwargs: Mapping[str, Any] = option(
        {},
        "variables of the chat template, such as '{\"enable_thinking\": true}' (default: thinking off, where the "
        "template can switch it)",
        _PROMPTS,
        parse=parse.parse_template_kwargs,
        metavar="JSON",
        decides="if set",
    )
    max_pixels: int | None = option(
        None,
        "shrink larger pictures to N pixels (default: as the model's processor does)",
        _PROMPTS,
        parse=common.positive_int,
        metavar="N",
        decides="if set",
    )
    frames: int = option(
        FRAMES,
        f"frames per video, at most (default {FRAMES})",
        _PROMPTS,
        parse=common.positive_int,
        metavar="N",
        decides="always",
    )
    fps: float | None = option(
        None,
        "sample R frames per second of a video, up to --frames",
        _PROMPTS,
        parse=parse.parse_fps,
        metavar="R",
        decides="if set",
    )
    sampler: str = option(
        SAMPLERS[0],
        "frames of a video: evenly spread (default) or those that differ most from each other",
        _PROMPTS,
        choices=SAMPLERS,
        decides="if set",
    )

    batch_size: int = option(
        DEFAULT_BATCH_SIZE,
        f"images or videos per batch (default {DEFAULT_BATCH_SIZE}); auto: as many as speed and memory permit",
        _CAPTIONS,
        parse=parse.parse_batch_size,
        metavar="N",
        decides="if sampled",
    )
    max_new_tokens: int = option(
        128, "per caption (default 128)", _CAPTIONS, parse=common.positive_int, metavar="N", decides="always"
    )
    temperature: float = option(
        0.0, common.TEMPERATURE_HELP, _CAPTIONS, parse=common.parse_temperature, metavar="T", decides="always"
    )
    seed: int = option(
        0, "of sampling (default 0)", _CAPTIONS, parse=common.parse_seed, metavar="N", decides="if sampled"
    )
    top_p: float | None = option(
        None,
        "sample from this share of the probability",
        _CAPTIONS,
        parse=parse.parse_top_p,
        metavar="P",
        decides="if set",
    )
    top_k: int | None = option(
        None,
        "sample from the K most likely tokens; 0: all",
        _CAPTIONS,
        parse=common.non_negative_int,
        metavar="K",
        decides="if set",
    )
    repetition_penalty: float | None = option(
        None,
        "above 1: tokens that are there already are less likely; in greedy decoding too",
        _CAPTIONS,
        parse=parse.parse_penalty,
        metavar="R",
        decides="if set",
    )
    stop: tuple[str, ...] = option(
        (), "end a caption at this text; repeatable", _CAPTIONS, metavar="TEXT", many=True, decides="always"
    )
    start: str | None = option(
        None, "how every answer begins; the model goes on from there", _CAPTIONS, metavar="TEXT", decides="if set"
    )
    hide_start: bool = option(False, "leave the --start out of the caption", _CAPTIONS, decides="if set")
    ban_words: tuple[str, ...] = option(
        (), "a word a line that no caption has", _CAPTIONS, parse=parse.read_words, metavar="FILE", decides="if set"
    )
    json_schema: str | None = option(
        None,
        "captions are JSON that this schema describes, its properties columns json.NAME (extra json)",
        _CAPTIONS,
        parse=read_schema,
        metavar="FILE",
        decides="if set",
    )
    cut_loops: bool = option(
        False,
        "cut what is repeated at the end of a caption to one time; finish_reason is then loop",
        _CAPTIONS,
        decides="if set",
    )

    format: str = option(
        FORMATS[0],
        "default: by the suffix of --out. jsonl: one file; csv: the same as a table, beside a file of the rows; "
        "parquet: a folder of shards with the same columns; webdataset: a folder of tar archives, each picture "
        "with its caption (.txt) and row (.json); txt, caption: a text file of one line and that suffix for each "
        "picture, beside it or in the folder --out; one that exists is left alone",
        _OUTPUT,
        choices=FORMATS,
    )
    fields: tuple[str, ...] | None = option(
        None,
        "columns of rows, by commas, besides id, caption, prompt_sha1, error, index and file_stamp (default: all)",
        _OUTPUT,
        parse=parse.parse_fields,
        metavar="A,B",
        decides="if set",
    )
    rows_per_shard: int = option(
        1000, "of parquet and webdataset (default 1000)", _OUTPUT, parse=common.positive_int, metavar="N"
    )
    prefix: str = option("", "put before each caption, as in 'sks dog, '", _OUTPUT, metavar="TEXT", decides="if set")
    suffix: str = option("", "put after each caption", _OUTPUT, metavar="TEXT", decides="if set")
    overwrite: bool = option(False, "discard the rows in FILE; of txt replace files that exist", _OUTPUT, in_file=False)
    retry_errors: bool = option(False, "repeat the rows that hold an error", _OUTPUT, in_file=False)

    limit: int | None = option(
        None, "the first N pictures only", _JOB, parse=common.positive_int, metavar="N", decides="if sampled"
    )
    shard: tuple[int, int] = option(
        (0, 1),
        "every Nth file, starting at the Ith (0-based)",
        _JOB,
        parse=parse.parse_shard,
        metavar="I/N",
        decides="if sampled",
    )
    ray: str | None = option(
        None,
        "caption on Ray: the cluster at ADDRESS (auto: the running one), else this machine's cores and GPUs",
        _JOB,
        metavar="ADDRESS",
        optional="",
    )
    actors: int | None = option(
        None, "of --ray, at most (default: one per GPU or core)", _JOB, parse=common.positive_int, metavar="N"
    )
    compare: int = option(
        0,
        "also run plain generate, for all or the first N, and report whether the tokens are identical",
        _JOB,
        parse=parse.parse_compare,
        metavar="N",
        optional=-1,
    )
    threads: int = option(4, "decoding threads (default 4)", _JOB, parse=common.positive_int, metavar="N")
    report: str | None = option(
        None,
        "write report.html: captions, errors, speed, drafts of this run",
        _JOB,
        parse=common.output_name,
        metavar="FOLDER",
    )
    progress: bool | None = option(None, common.PROGRESS_HELP, _JOB, in_file=False)
