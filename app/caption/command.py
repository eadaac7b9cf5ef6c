"""`mmspec caption`: the caption job that its options configure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.config import MAX_PIXELS, CaptionConfig, ProcessInfo
from mmspec.app.caption.options import SUFFIX_FORMATS, caption_help, choose_format
from mmspec.app.caption.options import add_options as add_options
from mmspec.app.caption.progress import print_stderr
from mmspec.app.caption.schema import build_grammar, check_schema, schema_columns
from mmspec.app.caption.variants import check_variants
from mmspec.app.cli.arguments import hide_progress_bars, validate_drafter
from mmspec.app.cli.options import given, read_options, read_settings
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.text import find_fault

if TYPE_CHECKING:
    from mmspec.app.io.item import Item
    from mmspec.app.io.output import Output
    from mmspec.app.modeling.captioner import Captioner

CHOOSE_MODEL = (
    "--model is missing: name a model, as in --model llava-hf/llava-1.5-7b-hf, or --model scenes for the bundled toy "
    "model, which knows drawn scenes and no photographs"
)


DESCRIPTION = "Caption images and videos with a vision-language model and mmspec. One row per image or video."
EPILOG = caption_help


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    config = build_config(args)
    process = ProcessInfo.from_env(os.environ)
    check_options(config)
    if config.progress is not False and process.rank == 0:
        print_stderr(f"mmspec: loading {config.model} ...")  # before torch, which takes seconds
    from mmspec.app.caption.executor import LocalExecutor
    from mmspec.app.caption.job import CaptionJob
    from mmspec.app.caption.report import JobReport

    if process.world_size > 1 and process.rank == 0:
        print_stderr(
            f"mmspec: process 1 of {process.world_size}, as RANK and WORLD_SIZE say: others caption the other rows"
        )
    config = with_task_prompt(config)
    if config.ray is not None:
        check_ray(config, process)
    output = build_output(config, process)
    report = JobReport(Path(config.report), args.command) if config.report and process.rank == 0 else None
    if config.ray is not None:
        from mmspec.app.caption.ray_job import run_on_ray

        return run_on_ray(config, output, report)
    hide_progress_bars(config.progress)

    loaded: list[Captioner] = []

    def load() -> Captioner:
        captioner = build_captioner(config, process)
        loaded.append(captioner)
        if process.rank == 0:
            for line in captioner.describe():
                print_stderr(f"mmspec: {line}")
        return captioner

    try:
        return CaptionJob(config, output, LocalExecutor(config, load, process), report).run()
    finally:
        for captioner in loaded:
            captioner.close()


def build_config(args: argparse.Namespace) -> CaptionConfig:
    """The options of the command line; where it has none those of `--config`, and else their defaults.

    Raises:
        UsageError: no input or model, a bad file of options, a name that nothing has.
    """
    found = {} if args.config is None else read_options(args.config, CaptionConfig, "paths")
    line = given(CaptionConfig, args) | ({"paths": tuple(args.paths)} if hasattr(args, "paths") else {})
    if Path(line.get("out", "")).suffix.lower() in SUFFIX_FORMATS:  # which then says the format, not the file
        found.pop("format", None)
    found |= line
    found |= read_settings(CaptionConfig, args.set or ())
    if not found.get("model"):
        raise UsageError(CHOOSE_MODEL)
    if not found.get("paths"):
        raise UsageError("nothing to caption: name files, folders, globs or lists (or paths in --config)")
    found["format"] = choose_format(found.get("format"), found.get("out", "-"))
    found |= {
        "stop": tuple(filter(None, found.get("stop", ()))),
        "ban_words": tuple(map(str.strip, found.get("ban_words", ()))),
        "pixel_limit": max(MAX_PIXELS, found.get("max_pixels") or 0),
    }
    config = CaptionConfig(**found)
    validate_drafter(config.drafter, config.compressor)
    return config


def check_options(config: CaptionConfig) -> None:
    """Refuse options that contradict each other, before anything is read.

    Raises:
        UsageError: there are some.
    """
    config.frame_sampler()
    config.columns()
    check_texts(config)
    if config.json_schema is not None:
        for name in ("stop", "start", "prefix", "suffix", "cut_loops"):
            if getattr(config, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} does not go with --json-schema: captions are JSON as they are"
                )
        check_schema(config.json_schema)
    check_variants(config)
    if config.out == "-" and config.format != "jsonl" and not config.writes_texts:
        what = "a folder of shards: give --out FOLDER" if config.has_shards else "a file: give --out FILE"
        raise UsageError(f"--format {config.format} writes {what}")
    for name, holds, others in (
        ("rows_per_shard", config.has_shards, "--format parquet or webdataset"),
        ("actors", config.ray is not None, "--ray"),
        ("hide_start", config.start is not None, "--start"),
    ):
        if getattr(config, name) != getattr(CaptionConfig, name) and not holds:
            raise UsageError(f"--{name.replace('_', '-')} goes with {others}")
    if config.out == "-" and config.format == "jsonl" and (config.overwrite or config.retry_errors):
        raise UsageError("--overwrite and --retry-errors need --out FILE")
    if config.temperature <= 0:
        for name in ("top_p", "top_k"):
            if getattr(config, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for sampling: give --temperature above 0 as well")


def with_task_prompt(config: CaptionConfig) -> CaptionConfig:
    """The same with the prompt of the model's family, where that takes the names of tasks and none is given."""
    from mmspec.app.modeling.load import read_model_config
    from mmspec.app.modeling.prompt_format import task_prompt

    found = read_model_config(config.model)
    prompt = task_prompt(found.get("model_type"))
    if config.prompt is not None or prompt is None:
        return config
    print_stderr(f"mmspec: models of this family take tasks as prompts; --prompt {prompt!r} is used")
    return replace(config, prompt=prompt)


def check_ray(config: CaptionConfig, process: ProcessInfo) -> None:
    """Refuse options that do not go with `--ray`.

    Raises:
        UsageError: there is one.
    """
    if process.world_size > 1:
        raise UsageError("--ray divides the work itself: start one process (unset RANK and WORLD_SIZE)")
    if config.shard != (0, 1):
        raise UsageError("--ray divides the work itself: leave --shard away")


def build_output(config: CaptionConfig, process: ProcessInfo) -> Output:
    """The output that `--out` names.

    Raises:
        UsageError: options that do not go with it, or a package that it needs is missing.
    """
    from mmspec.app.io.csv_output import CsvOutput
    from mmspec.app.io.output import OutputJob, StreamOutput
    from mmspec.app.io.output_file import FileOutput
    from mmspec.app.io.parquet_shards import ParquetShards
    from mmspec.app.io.tar_shards import TarShards

    if config.writes_texts:
        return build_sidecars(config, process)
    if config.out == "-":
        if process.world_size > 1:
            raise UsageError(
                "several processes cannot share standard output: give --out FILE; for one, unset RANK and WORLD_SIZE"
            )
        return StreamOutput()
    out, settings = Path(config.out), job_settings(config, process)
    job = OutputJob(settings, process.rank, process.world_size, config.overwrite, config.to_run_again())
    if config.format == "jsonl":
        return FileOutput(out, job)
    if config.format == "csv":
        return CsvOutput(out, job, config.columns())
    if config.format == "webdataset":
        return TarShards(out, job, config.rows_per_shard)
    return ParquetShards(out, job, config.rows_per_shard, config.columns(), schema_columns(config.json_schema))


def job_settings(config: CaptionConfig, process: ProcessInfo) -> dict[str, Any]:
    """What determines the captions of a job: its settings, and the weights of its model if they can be told apart."""
    from mmspec.app.io.job_metadata import WEIGHTS
    from mmspec.app.modeling.weights_id import weights_id

    found = weights_id(config.model)
    return config.fingerprint(process.world_size) | ({WEIGHTS: found} if found is not None else {})


def build_sidecars(config: CaptionConfig, process: ProcessInfo) -> Output:
    """Text files beside the pictures, or in the folder `--out`.

    Raises:
        UsageError: several processes, or columns, of which there are none.
    """
    from mmspec.app.io.inputs import Inputs
    from mmspec.app.io.output import OutputJob
    from mmspec.app.io.sidecars import SidecarOutput

    if process.world_size > 1:
        raise UsageError(
            f"--format {config.format} is for one process, and WORLD_SIZE is {process.world_size}: start several with "
            "--shard I/N instead; for one, unset RANK and WORLD_SIZE"
        )
    if config.fields:
        raise UsageError(f"--fields names columns, and --format {config.format} has none: leave one of them away")
    folder = None if config.out == "-" else Path(config.out)

    def items() -> Iterable[Item]:
        inputs = Inputs(config.paths, config.source_options(output.base), output.own_files())
        return inputs.rows(lambda ident: True)

    job = OutputJob(job_settings(config, process) if config.overwrite else {}, overwrite=config.overwrite)
    output = SidecarOutput(folder, config.paths, items, job, suffix=f".{config.format}", shard=config.shard)
    return output


def build_captioner(config: CaptionConfig, process: ProcessInfo) -> Captioner:
    """Load the model, patch it with the drafter, and wrap both.

    Raises:
        UsageError: a model, drafter or compressor that cannot be loaded.
    """
    import torch

    import mmspec
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.chat import check_chat
    from mmspec.app.modeling.load import load_model
    from mmspec.app.modeling.sampling import banned_tokens

    chat, sampling = config.chat_format(), config.sampling()
    banned: list[list[int]] = []

    def check(processor: Any) -> None:
        name = f"--model {Path(config.model).name}"
        check_chat(processor, name, config.prompt, chat)
        if config.json_schema is not None:
            tokenizer = processor.tokenizer
            build_grammar(config.json_schema, tokenizer, len(tokenizer), [tokenizer.eos_token_id or 0])
        banned.extend(banned_tokens(processor.tokenizer, config.ban_words, name))

    model, processor = load_model(
        config.model,
        config.dtype,
        config.device,
        process.local_rank,
        check=check,
    )
    try:
        is_exact = model.dtype in (torch.float32, torch.float64)
        reuse = config.num_variants > 1 and is_exact if config.reuse_prefix is None else config.reuse_prefix
        mmspec.patch(model, config.drafter, config.compressor, processor, reuse_prefix=reuse)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--model {config.model} --drafter {config.drafter}: {one_line(error, 600)}") from error
    captioner = Captioner(
        model,
        processor,
        config.max_new_tokens,
        replace(sampling, bad_words_ids=banned),
        config.stop,
        chat,
        hide_start=config.hide_start,
    )
    if config.json_schema is not None:
        width = model.get_output_embeddings().weight.shape[0]
        captioner.grammar = build_grammar(config.json_schema, processor.tokenizer, width, captioner.eos_ids)
    return captioner


def check_texts(config: CaptionConfig) -> None:
    """Refuse a prompt, system prompt or stop text that is no text.

    Raises:
        UsageError: it is empty, too long or no valid Unicode.
    """
    texts = [("--prompt", config.prompt), ("--system-prompt", config.system_prompt), ("--start", config.start)]
    several = {"--stop": config.stop, "--prompts": config.prompts, "--ban-words": config.ban_words}
    for flag, text in [*texts, *((flag, one) for flag, many in several.items() for one in many)]:
        if text is not None and not text.strip() and flag != "--stop":
            raise UsageError(f"{flag} must not be empty")
        if fault := find_fault(text or ""):
            raise UsageError(f"{flag} {fault}")
