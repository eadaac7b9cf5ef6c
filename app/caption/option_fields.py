"""The options of `mmspec caption`: argparse, `--set`, `--config`, the help and the identity of a job derive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmspec.app.caption import values as parse
from mmspec.app.caption.schema import read_schema
from mmspec.app.cli import arguments as common
from mmspec.app.cli.options import Decides, option
from mmspec.app.io.table_options import TableOptions

PROMPT = "Describe the image."
VIDEO_PROMPT = "Describe the video."
FRAMES = 8
DEFAULT_BATCH_SIZE = 16
"""Rows per batch: on two cores 1.15 times the rows per second of 8; 32 would add a fifteenth."""
FORMATS = ("jsonl", "csv", "parquet", "webdataset", "txt", "caption")

_MODEL, _PROMPTS, _CAPTIONS, _OUTPUT, _JOB = "model", "prompts and pictures", "captions", "output", "job"
_SET = ""
"""The group of what is a setting: `--set NAME=VALUE`."""


def _text(
    default: Any, help: str, group: str = _SET, metavar: str = "TEXT", *, decides: Decides = "if set", **more: Any
) -> Any:
    """An option that is a text, or read from one."""
    return option(default, help, group, metavar=metavar, decides=decides, **more)


def _number(
    default: Any,
    help: str,
    group: str = _SET,
    parse: Callable[[str], Any] = common.positive_int,
    *,
    decides: Decides = "if set",
    **more: Any,
) -> Any:
    """An option that is a number; a whole one above 0 if nothing else is said."""
    return option(default, help, group, parse=parse, metavar="N", decides=decides, **more)


@dataclass(frozen=True)
class CaptionOptions(TableOptions):
    """The options of `mmspec caption`, each described in its field. Paths, model and output come first, for scripts."""

    paths: tuple[str, ...]
    model: str = _text("", f"required: {common.MODEL_HELP}", _MODEL, "M", decides="always")
    out: str = option(
        "-", "file, or folder of shards or text files; - (default) is standard output", _OUTPUT,
        parse=common.output_name, metavar="FILE",
    )  # fmt: skip
    drafter: str = option("auto", common.DRAFTER_HELP, _MODEL, metavar="D")
    compressor: str | None = option(None, common.COMPRESSOR_HELP, _SET, metavar="C")
    dtype: str = option("auto", common.DTYPE_HELP, _MODEL, choices=common.DTYPES, decides="always")
    device: str = option("auto", common.DEVICE_HELP, _MODEL, metavar="DEV")

    prompt: str | None = _text(
        None,
        f"default {PROMPT!r}; for videos {VIDEO_PROMPT!r}; for PaliGemma 'caption en'. {{FIELD}} is that of the row: a "
        "column of its list or table, name and folder of the picture, caption for a text file beside it",
        _PROMPTS,
        decides="always",
    )
    prompts: tuple[str, ...] = _text(
        (),
        "a prompt a line: every picture is asked each of them, and has a row for each; {answer1} is the answer to the "
        "first",
        _PROMPTS,
        "FILE",
        parse=parse.read_prompts,
    )
    num_captions: int = _number(1, "captions for each prompt, which sampling makes different (1)")
    reuse_prefix: bool | None = option(
        None, "compute what the rows of a picture share once (in float32; in others near-ties may fall otherwise)", _SET
    )
    system_prompt: str | None = _text(None, "of every row (that of the chat template)")
    chat_template_kwargs: Mapping[str, Any] = _text(
        {},
        "variables of the chat template, '{\"enable_thinking\": true}' (thinking is off where it can be)",
        parse=parse.parse_template_kwargs,
    )
    max_pixels: int | None = _number(None, "shrink larger pictures to N pixels (as the model's processor does)")
    frames: int = _number(FRAMES, f"frames per video, at most (default {FRAMES})", _PROMPTS, decides="always")
    fps: float | None = _number(
        None, "sample so many frames per second of a video, up to --frames", _PROMPTS, parse.parse_fps
    )

    batch_size: int = _number(
        DEFAULT_BATCH_SIZE,
        f"images or videos per batch, halved when memory does not suffice (default {DEFAULT_BATCH_SIZE})",
        _CAPTIONS,
        decides="if sampled",
    )
    max_new_tokens: int = _number(128, "per caption (default 128)", _CAPTIONS, decides="always")
    temperature: float = _number(0.0, common.TEMPERATURE_HELP, _CAPTIONS, common.parse_temperature, decides="always")
    seed: int = _number(0, "of sampling (default 0)", _CAPTIONS, common.parse_seed, decides="if sampled")
    top_p: float | None = _number(None, "sample from this share of the probability", _SET, parse.parse_top_p)
    top_k: int | None = _number(None, "sample from so many likely tokens; 0: all", _SET, common.non_negative_int)
    repetition_penalty: float | None = _number(
        None,
        "above 1: tokens that are there already are less likely, also in greedy decoding",
        _SET,
        parse.parse_penalty,
    )
    stop: tuple[str, ...] = _text((), "end a caption at this text; repeatable", _CAPTIONS, many=True, decides="always")
    start: str | None = _text(None, "how every answer begins; the model goes on from there", _CAPTIONS)
    hide_start: bool = option(False, "leave the --start out of the caption", _SET, decides="if set")
    ban_words: tuple[str, ...] = _text(
        (), "a file of words, one a line, not to be written, nor capitalised", _SET, "FILE", parse=parse.read_words
    )
    json_schema: str | None = _text(
        None,
        "captions are JSON that this schema describes, its properties columns json.NAME (extra json)",
        _CAPTIONS,
        "FILE",
        parse=read_schema,
    )
    cut_loops: bool = option(
        False,
        "cut what is repeated at the end of a caption to one time; finish_reason is then loop",
        _SET,
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
    fields: tuple[str, ...] = _text(
        (),
        "columns of rows, by commas, besides id, caption, prompt_sha1, error, index and file_stamp (default: all)",
        _OUTPUT,
        "A,B",
        parse=lambda text: tuple(common.split_commas(text)),
    )
    rows_per_shard: int = _number(1000, "rows of a shard of parquet and webdataset (1000)", decides="nothing")
    prefix: str = _text("", "put before each caption, as in 'sks dog, '", _OUTPUT)
    suffix: str = _text("", "put after each caption")
    overwrite: bool = option(False, "discard the rows in FILE; of txt replace files that exist", _OUTPUT, in_file=False)
    retry_errors: bool = option(False, "repeat the rows that hold an error", _OUTPUT, in_file=False)

    limit: int | None = _number(None, "the first N pictures only", _JOB, decides="if sampled")
    shard: tuple[int, int] = _text(
        (0, 1),
        "every Nth file, starting at the Ith (0-based)",
        _JOB,
        "I/N",
        parse=parse.parse_shard,
        decides="if sampled",
    )
    ray: str | None = option(
        None,
        "caption on Ray: the cluster at ADDRESS (auto: the running one), else this machine's cores and GPUs",
        _JOB,
        metavar="ADDRESS",
        optional="",
    )
    actors: int | None = _number(None, "of --ray, at most (one per GPU or core)", decides="nothing")
    compare: int = option(
        0,
        "also run plain generate, for all or the first N, and report whether the tokens are identical",
        _JOB,
        parse=parse.parse_compare,
        metavar="N",
        optional=-1,
    )
    threads: int = _number(4, "threads that decode pictures ahead (4)", decides="nothing")
    report: str | None = option(
        None,
        "write report.html: captions and errors of this run",
        _SET,
        parse=common.output_name,
        metavar="FOLDER",
    )
    progress: bool | None = option(None, common.PROGRESS_HELP, _SET, in_file=False)
