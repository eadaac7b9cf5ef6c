"""Is the first answer of a process decoded as well as its tenth, with and without stored costs?

Every row is a process of its own, on the bundled scenes model: "empty" with an empty folder of stored costs, "filled"
with the folder that the first one has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryDirectory

import torch

import mmspec
from mmspec.app.cli.arguments import positive_int, split_commas
from mmspec.app.errors import UsageError
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.files import CACHE_VARIABLE
from research.arguments import module_parser
from research.bench.results import ResultFiles, add_result_options
from research.bench.rows import ResultRow
from research.bench.session import provenance
from research.scenes.tasks import generate_requests

EPILOG = """
method
  A process answers the same --prompts held-out requests --answers times. tau is the number of tokens per round and row
  over all prompts of one repetition; drafters that learn (hybrid) rise, trained heads should not.

examples
  python -m research.studies.first_answers msd,flash
"""
FIRST_SEED = 60_000_000
"""Seed of the first request; none of them was trained on."""


@dataclass(frozen=True)
class Repetition:
    """All prompts once.

    Attributes:
        tau: tokens per round.
        ms_per_token: milliseconds of decoding per token.
    """

    tau: float
    ms_per_token: float


def answer_repeatedly(drafter: str, num_prompts: int, num_answers: int) -> list[Repetition]:
    """Answer in this process."""
    model, processor = load_model("scenes")
    captioner = Captioner(model, processor)
    requests = islice(generate_requests("describe", FIRST_SEED), num_prompts)
    prompts = [captioner.build_inputs([request.images], [request.question]) for request in requests]
    mmspec.patch(model, drafter, processor=processor)
    repetitions = []
    for _ in range(num_answers):
        num_tokens, num_rounds, decode_s = 0, 0, 0.0
        for inputs in prompts:
            model.generate(**inputs, max_new_tokens=128, do_sample=False)
            stats = mmspec.stats(model, last=True)
            num_tokens += stats.tokens - stats.first_tokens
            num_rounds += stats.row_rounds
            decode_s += stats.decode_s
        repetitions.append(Repetition(num_tokens / num_rounds, 1e3 * decode_s / num_tokens))
    return repetitions


def run_process(drafter: str, folder: str, num_prompts: int, num_answers: int) -> tuple[list[float], list[float]]:
    """`answer_repeatedly` in a new process that stores costs in `folder`: (tau, milliseconds per token).

    Raises:
        UsageError: the process failed.
    """
    command = [sys.executable, "-m", "research.studies.first_answers", drafter, "--in-process"]
    command += ["--prompts", str(num_prompts), "--answers", str(num_answers)]
    environment = os.environ | {CACHE_VARIABLE: folder, "MMSPEC_COST_CACHE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{drafter}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    taus, times = json.loads(done.stdout.splitlines()[-1])
    return taus, times


def measure_rows(drafters: Sequence[str], num_prompts: int, num_answers: int) -> Iterator[ResultRow]:
    """Two rows for each drafter."""
    for drafter in drafters:
        with TemporaryDirectory() as folder:
            for costs in ("empty", "filled"):
                taus, times = run_process(drafter, folder, num_prompts, num_answers)
                yield {"drafter": drafter, "costs": costs, "tau": taus, "ms_per_token": times}


def format_row(row: ResultRow) -> str:
    """A row as it is printed: the first and the last answer."""
    tau, times = row["tau"], row["ms_per_token"]
    return (
        f"{row['drafter']:<8} {row['costs']:<7} tau of answer 1 {tau[0]:.2f}, of answer {len(tau)} {tau[-1]:.2f} "
        f"({tau[0] / tau[-1]:.2f});  ms per token {times[0]:.2f}, {times[-1]:.2f} ({times[0] / times[-1]:.2f})"
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = module_parser("research.studies.first_answers", __doc__, EPILOG)
    parser.add_argument("drafters", type=split_commas, metavar="D,D", help="drafters, as in mmspec.patch")
    parser.add_argument("--prompts", type=positive_int, default=4, metavar="N", help="requests (default 4)")
    parser.add_argument("--answers", type=positive_int, default=10, metavar="N", help="answers to each (default 10)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    add_result_options(parser, json_help="write the rows")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args = parser.parse_args(arguments)
    if args.in_process:
        repetitions = answer_repeatedly(args.drafters[0], args.prompts, args.answers)
        print(json.dumps([[one.tau for one in repetitions], [one.ms_per_token for one in repetitions]]))
        return 0
    files = ResultFiles.from_args(args)
    rows: list[ResultRow] = []
    try:
        files.check()
        run = provenance(f"{parser.prog} {shlex.join(arguments)}", torch.device("cpu"))
        for row in measure_rows(args.drafters, args.prompts, args.answers):
            rows.append(row | {"run": run})
            print(format_row(row), flush=True)
    except UsageError as error:
        parser.error(str(error))
    files.write(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
