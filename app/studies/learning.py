"""Online learning over a job: tokens per second and per forward against requests done, beside other drafters.

`scenes`: pictures that no trained head may be used for, from nothing. `adaptation`: the bundled FLASH head on a target
that was fine-tuned a little (LoRA, merged), with and without learning, beside learning from nothing. `text`: prompts of
one kind for a text model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

import mmspec
from mmspec.app.bench.measure import clone, share_kernel_timings
from mmspec.app.bench.results import ResultFiles, add_result_options
from mmspec.app.bench.rows import ResultRow
from mmspec.app.bench.session import provenance
from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.cli.arguments import config_from_args, module_parser, non_negative_int, positive_int, split_commas
from mmspec.app.errors import UsageError
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model, load_text_model
from mmspec.app.scenes.tasks import generate_requests
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.studies.learning_targets import fine_tune_scenes, text_requests

EPILOG = """
method
  Every request is decoded by every drafter in turn, each on a model of its own that shares the weights; greedy, one
  row. "+learn" patches with learn=True; learned weights go to a temporary folder. Rows are means
  over --block requests. Outputs are compared with the first drafter's. --clock cpu measures the processor time of this
  process in place of the wall clock, for machines with other work; use one thread then (OMP_NUM_THREADS=1).

examples
  OMP_NUM_THREADS=1 python -m mmspec.app.studies.learning scenes --count 400 --clock cpu --json learning.json
  OMP_NUM_THREADS=1 python -m mmspec.app.studies.learning adaptation --count 200 --clock cpu --json learning.json
  OMP_NUM_THREADS=1 python -m mmspec.app.studies.learning text --model M --count 80 --new-tokens 96 --clock cpu
"""
LEARNING_SUITES = ("scenes", "adaptation", "text")
DRAFTERS_BY_SUITE = {
    "scenes": ["hybrid", "flash", "arbitrated+learn"],
    "adaptation": ["flash", "flash+learn", "arbitrated+learn"],
    "text": ["hybrid", "arbitrated+learn"],
}
LEARN_SUFFIX = "+learn"
TUNED_STEPS = 30
"""After which FLASH has lost a third of its tau."""


@dataclass(frozen=True)
class LearningStudyConfig:
    """Options of the study, named like its flags.

    Attributes:
        suite: of `LEARNING_SUITES`.
        model: folder or file of the text model.
        drafters: names, with `+learn` where they learn.
        count: requests.
        block: requests per row.
        new_tokens: largest number of tokens of an answer.
        clock: "wall" or "cpu".
        first_seed: requests to skip.
    """

    suite: str
    model: str
    drafters: tuple[str, ...]
    count: int
    block: int
    new_tokens: int
    clock: str
    first_seed: int


@dataclass
class JobTotals:
    """Sums over consecutive requests of one drafter; times are seconds of the clock."""

    tokens: int = 0
    forwards: int = 0
    decode_s: float = 0.0
    total_s: float = 0.0
    learn_s: float = 0.0
    identical: bool = True
    first: int = 0
    last: int = 0

    def row(self) -> dict[str, Any]:
        """The sums and what follows from them."""
        return {
            "first": self.first,
            "last": self.last,
            "tokens": self.tokens,
            "tau": round(self.tokens / max(1, self.forwards), 3),
            "tokens_per_s": round(self.tokens / self.decode_s, 2) if self.decode_s else None,
            "decode_s": round(self.decode_s, 3),
            "total_s": round(self.total_s, 3),
            "learn_s": round(self.learn_s, 4),
            "identical": self.identical,
        }


@dataclass
class JobContestant:
    """A drafter, its model, and its totals block by block."""

    name: str
    model: Any
    blocks: list[JobTotals] = field(default_factory=list)


@contextmanager
def study_clock(name: str) -> Iterator[None]:
    """Context in which all time of mmspec is measured by this clock."""
    if name == "wall":
        yield
        return
    with mock.patch.object(time, "perf_counter", time.process_time):
        yield


@contextmanager
def temporary_cache() -> Iterator[None]:
    """Context in which learned weights and costs are stored in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"MMSPEC_CACHE": folder}):
        yield


def scene_requests(captioner: Captioner, count: int, first: int) -> Iterator[dict[str, Any]]:
    """Pictures with the question for a long description, which the scenes model was not trained on."""
    found = generate_requests("describe", FIRST_HELD_OUT_SEED)
    for request in islice(found, first, first + count):
        yield captioner.build_inputs([request.images], [request.question])


def run_job(
    config: LearningStudyConfig,
    model: Any,
    processor: Any,
    requests: Iterator[Mapping[str, Any]],
    on_block: Callable[[Sequence[JobContestant]], None],
) -> None:
    """Decode all requests by all drafters in turn; `on_block` is called after every block."""
    contestants = []
    for name in config.drafters:
        copy = clone(model)
        drafter = name.removesuffix(LEARN_SUFFIX)
        mmspec.patch(copy, drafter=drafter, processor=processor, learn=name.endswith(LEARN_SUFFIX))
        contestants.append(JobContestant(name, copy))
    share_kernel_timings([contestant.model for contestant in contestants])
    for number, inputs in enumerate(tqdm(requests, total=config.count, disable=not sys.stderr.isatty())):
        expected = None
        for contestant in contestants:
            ids = contestant.model.generate(
                **inputs, max_new_tokens=config.new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            expected = ids if expected is None else expected
            _count(contestant, number, config.block, torch.equal(ids, expected))
        if (number + 1) % config.block == 0:
            print("  ".join(format_block(contestant) for contestant in contestants), flush=True)
            on_block(contestants)


def _count(contestant: JobContestant, number: int, block: int, is_identical: bool) -> None:
    """Add the last call of a contestant to its totals."""
    stats = mmspec.stats(contestant.model, last=True)
    if number % block == 0:
        contestant.blocks.append(JobTotals(first=number + 1))
    totals = contestant.blocks[-1]
    learned_before = sum(one.learn_s for one in contestant.blocks)
    totals.last = number + 1
    totals.tokens += stats.tokens - stats.first_tokens
    totals.forwards += stats.row_rounds
    totals.decode_s += stats.decode_s
    totals.total_s += stats.total_s
    totals.learn_s += stats.learning.learn_s - learned_before
    totals.identical &= is_identical


def format_block(contestant: JobContestant) -> str:
    """The last block as it is printed."""
    row = contestant.blocks[-1].row()
    return "{last:>4} {name}: {tokens_per_s:.0f}/s tau {tau:.2f} learn {learn_s:.2f} s".format(
        name=contestant.name, **row
    )


def build_learning_rows(config: LearningStudyConfig, contestants: Sequence[JobContestant]) -> list[ResultRow]:
    """One row for each contestant, with its blocks."""
    rows: list[ResultRow] = []
    for contestant in contestants:
        stats = mmspec.stats(contestant.model)
        learned = stats.learning.as_dict()
        for key in ("curve", "folder"):
            learned.pop(key)
        rows.append(
            {
                "suite": config.suite,
                "drafter": contestant.name,
                "clock": config.clock,
                "threads": torch.get_num_threads(),
                "blocks": [totals.row() for totals in contestant.blocks],
                "learning": learned,
            }
        )
    return rows


def rows_of_other_suites(file: Path | None, suite: str) -> list[ResultRow]:
    """The rows of a result file that a run of a suite leaves as they are; none if there is no such file."""
    if file is None or not file.is_file():
        return []
    try:
        rows: list[ResultRow] = json.loads(file.read_text(encoding="utf-8") or "[]")
    except ValueError as error:
        raise UsageError(f"--json must name a result file of this study or a new one: {file}: {error}") from error
    return [row for row in rows if row["suite"] != suite]


def _prepare(config: LearningStudyConfig) -> tuple[Any, Any, Iterator[Mapping[str, Any]]]:
    """(model, processor, requests) of a suite."""
    if config.suite == "text":
        model, tokenizer = load_text_model(config.model)
        return model, tokenizer, text_requests(tokenizer, config.count, config.first_seed)
    model, processor = load_model(SCENES_MODEL, "auto", "cpu", 0)
    if config.suite == "adaptation":
        model = fine_tune_scenes(model, processor, TUNED_STEPS)
    return model, processor, scene_requests(Captioner(model, processor), config.count, config.first_seed)


def _build_parser() -> argparse.ArgumentParser:
    parser = module_parser("mmspec.app.studies.learning", __doc__, EPILOG)
    add = parser.add_argument
    add("suite", choices=LEARNING_SUITES, help="requests and target")
    add("--model", default="", metavar="PATH", help="of the suite `text`: a folder, or a GGUF file")
    add("--drafters", type=split_commas, default=None, metavar="D,D", help="with +learn where they learn")
    add("--count", type=positive_int, default=400, metavar="N", help="requests (default 400)")
    add("--block", type=positive_int, default=25, metavar="N", help="requests per point of the curve (default 25)")
    add("--new-tokens", type=positive_int, default=160, metavar="N", help="largest answer (default 160)")
    add("--clock", choices=("wall", "cpu"), default="wall", help="default wall")
    add("--first-seed", type=non_negative_int, default=0, metavar="N", help="requests to skip (default 0)")
    add_result_options(parser, json_help="write the rows; those of other suites in the file stay")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args = parser.parse_args(arguments)
    args.drafters = args.drafters or DRAFTERS_BY_SUITE[args.suite]
    files = ResultFiles.from_args(args)
    try:
        files.check()
        config = config_from_args(LearningStudyConfig, args)
        others = rows_of_other_suites(files.json, config.suite)
    except UsageError as error:
        parser.error(str(error))
    run = provenance(f"{parser.prog} {shlex.join(arguments)}", torch.device("cpu"))
    with temporary_cache():
        model, processor, requests = _prepare(config)

        def write(contestants: Sequence[JobContestant]) -> None:
            files.write([*others, *(row | {"run": run} for row in build_learning_rows(config, contestants))])

        with study_clock(config.clock):
            run_job(config, model, processor, requests, write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
