"""Online learning over a job: tokens per second and per forward against requests done, beside other drafters.

`scenes`: pictures that no trained head may be used for, from nothing. `adaptation`: the bundled heads on a target that
was fine-tuned a little (LoRA, merged), with and without learning, beside learning from nothing. `text`: prompts of one
kind for a text model.
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
from statistics import median
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

import mmspec
from mmspec.app.caption.config import SCENES_MODEL
from mmspec.app.cli.arguments import config_from_args, module_parser, non_negative_int, positive_int, split_commas
from mmspec.app.errors import UsageError
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import clone, load_model, load_text_model
from mmspec.app.scenes.tasks import generate_requests
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.studies.learning_targets import fine_tune_scenes, text_requests

EPILOG = """
method
  Every batch of requests (--batch rows) is decoded greedily by every drafter, in rotating order, each on a model of its
  own that shares the weights. "+learn" patches with learn=True, "+learn=0.1" with that share of the time; learned
  weights go to a temporary folder. Rows are means over --block requests. Outputs are compared with each other. --clock
  cpu measures the processor time of this process in place of the wall clock, for machines with other work; use one
  thread then (OMP_NUM_THREADS=1). At the end: whole calls, learning included, against the first drafter's, the median
  of the blocks' ratios and their range.

examples
  OMP_NUM_THREADS=1 python -m research.studies.learning scenes --count 400 --clock cpu --json learning.json
  OMP_NUM_THREADS=1 python -m research.studies.learning scenes --count 384 --batch 16 --block 64 --clock cpu \\
      --drafters none,hybrid,arbitrated,arbitrated+learn --json learning.json
  OMP_NUM_THREADS=1 python -m research.studies.learning adaptation --count 200 --clock cpu --json learning.json
  OMP_NUM_THREADS=1 python -m research.studies.learning text --model M --count 80 --new-tokens 96 --clock cpu
"""
LEARNING_SUITES = ("scenes", "adaptation", "text")
DRAFTERS_BY_SUITE = {
    "scenes": ["hybrid", "flash", "arbitrated+learn"],
    "adaptation": ["flash", "flash+learn", "flash+learn=0.1", "msd", "msd+learn", "msd+learn=0.1", "arbitrated+learn"],
    "text": ["hybrid", "arbitrated+learn"],
}
LEARN_SUFFIX = "+learn"
TUNED_STEPS = 60
"""After which FLASH and MSD have lost a fifth of their tau."""


@dataclass(frozen=True)
class LearningStudyConfig:
    """Options of the study, named like its flags.

    Attributes:
        suite: of `LEARNING_SUITES`.
        model: folder or file of the text model.
        drafters: names, with `+learn` where they learn.
        count: requests.
        batch: requests per call.
        block: requests per row.
        new_tokens: largest number of tokens of an answer.
        clock: "wall" or "cpu".
        first_seed: requests to skip.
    """

    suite: str
    model: str
    drafters: tuple[str, ...]
    count: int
    batch: int
    block: int
    new_tokens: int
    clock: str
    first_seed: int


@dataclass
class JobTotals:
    """Sums over consecutive requests of one drafter; times are seconds of the clock.

    Attributes:
        total_s: of the calls, as `mmspec.stats` counts them.
        call_s: of the calls as a whole, with what is learned between them.
    """

    tokens: int = 0
    forwards: int = 0
    decode_s: float = 0.0
    total_s: float = 0.0
    call_s: float = 0.0
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
            "call_s": round(self.call_s, 3),
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


def scene_requests(captioner: Captioner, count: int, first: int, batch: int) -> Iterator[dict[str, Any]]:
    """Pictures with the question for a long description, which the scenes model was not trained on, in batches."""
    found = islice(generate_requests("describe", FIRST_HELD_OUT_SEED), first, first + count)
    while requests := list(islice(found, batch)):
        yield captioner.build_inputs([one.images for one in requests], [one.question for one in requests])


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
        drafter, separator, share = name.partition(LEARN_SUFFIX)
        learn = float(share[1:]) if share else bool(separator)
        mmspec.patch(copy, drafter=drafter, processor=processor, learn=learn)
        contestants.append(JobContestant(name, copy))
    done = 0
    num_calls = -(-config.count // config.batch)
    for number, inputs in enumerate(tqdm(requests, total=num_calls, disable=not sys.stderr.isatty())):
        is_new_block = done % config.block == 0
        done += len(inputs["input_ids"])
        expected = None
        turn = number % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            start = time.perf_counter()
            ids = contestant.model.generate(
                **inputs, max_new_tokens=config.new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            call_s = time.perf_counter() - start
            expected = ids if expected is None else expected
            if is_new_block:
                contestant.blocks.append(JobTotals(first=done + 1 - len(ids)))
            _count(contestant, done, call_s, torch.equal(ids, expected))
        if done % config.block == 0 or done == config.count:
            print("  ".join(format_block(contestant) for contestant in contestants), flush=True)
            on_block(contestants)
    for contestant in contestants[1:]:
        print(format_ratios(contestant, contestants[0]))


def _count(contestant: JobContestant, done: int, call_s: float, is_identical: bool) -> None:
    """Add the last call of a contestant, after which `done` requests are done, to its totals."""
    stats = mmspec.stats(contestant.model, last=True)
    totals = contestant.blocks[-1]
    learned_before = sum(one.learn_s for one in contestant.blocks)
    totals.last = done
    totals.call_s += call_s
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


def format_ratios(contestant: JobContestant, base: JobContestant) -> str:
    """Whole calls and decoding against another contestant, as it is printed at the end."""
    parts = []
    for what, key in (("calls", "call_s"), ("decoding", "decode_s")):
        pairs = [
            (getattr(one, key), getattr(own, key)) for one, own in zip(base.blocks, contestant.blocks, strict=True)
        ]
        ratios = [other / own for other, own in pairs if own]
        if ratios:
            parts.append(f"{what} {median(ratios):.3f}x [{min(ratios):.3f}, {max(ratios):.3f}]")
    learned = sum(one.learn_s for one in contestant.blocks) / sum(one.call_s for one in contestant.blocks)
    identical = "" if all(one.identical for one in contestant.blocks) else ", OUTPUTS DIFFER"
    return f"{contestant.name} against {base.name}: {', '.join(parts)}, learning {learned:.2%}{identical}"


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
                "batch": config.batch,
                "drafter": contestant.name,
                "clock": config.clock,
                "threads": torch.get_num_threads(),
                "blocks": [totals.row() for totals in contestant.blocks],
                "learning": learned,
            }
        )
    return rows


def rows_of_other_suites(file: Path | None, suite: str, batch: int = 1) -> list[ResultRow]:
    """The rows of a result file that a run of a suite leaves as they are, those of other batch sizes among them; none
    if there is no such file."""
    if file is None or not file.is_file():
        return []
    try:
        rows: list[ResultRow] = json.loads(file.read_text(encoding="utf-8") or "[]")
    except ValueError as error:
        raise UsageError(f"--json must name a result file of this study or a new one: {file}: {error}") from error
    return [row for row in rows if (row["suite"], row.get("batch", 1)) != (suite, batch)]


def check_batch(config: LearningStudyConfig) -> None:
    """Refuse batches that do not fit.

    Raises:
        UsageError: they do not.
    """
    if config.batch > 1 and config.suite == "text":
        raise UsageError(f"--batch is for pictures, the suite text decodes one prompt at a time; got {config.batch}")
    if config.block % config.batch:
        raise UsageError(f"--block must be a multiple of --batch; got {config.block} and {config.batch}")


def _prepare(config: LearningStudyConfig) -> tuple[Any, Any, Iterator[Mapping[str, Any]]]:
    """(model, processor, requests) of a suite."""
    if config.suite == "text":
        model, tokenizer = load_text_model(config.model)
        return model, tokenizer, text_requests(tokenizer, config.count, config.first_seed)
    model, processor = load_model(SCENES_MODEL, "auto", "cpu", 0)
    if config.suite == "adaptation":
        model = fine_tune_scenes(model, processor, TUNED_STEPS)
    captioner = Captioner(model, processor)
    return model, processor, scene_requests(captioner, config.count, config.first_seed, config.batch)


def _build_parser() -> argparse.ArgumentParser:
    parser = module_parser("research.studies.learning", __doc__, EPILOG)
    add = parser.add_argument
    add("suite", choices=LEARNING_SUITES, help="requests and target")
    add("--model", default="", metavar="PATH", help="of the suite `text`: a folder, or a GGUF file")
    add("--drafters", type=split_commas, default=None, metavar="D,D", help="with +learn where they learn")
    add("--count", type=positive_int, default=400, metavar="N", help="requests (default 400)")
    add("--batch", type=positive_int, default=1, metavar="N", help="requests per call (default 1)")
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
        check_batch(config)
        others = rows_of_other_suites(files.json, config.suite, config.batch)
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
