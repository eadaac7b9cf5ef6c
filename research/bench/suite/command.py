"""`research.bench --suite` and `--peers`: options, the run, its files and exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmspec.app.cli.arguments import Options, goes_with, hide_progress_bars, positive_int, split_commas
from mmspec.app.errors import explain_write
from research.arguments import check_writable
from research.bench.results import ResultFiles
from research.bench.suite.config import SUITES, SuiteConfig

INTERRUPTED = 130
"""Exit code, as of a shell."""
PEERS = "hf-static, hf-compile, hf-lookup, hf-assisted, llama.cpp, openvino, vllm (the last three also with -lookup)"
EPILOG = """\
with --peers or --suite: every peer on the same prompts and weights, greedily, against generate (docs/benchmarking.md)
  a round is one prompt: hf, all others in rotating order, hf again; ratios are taken within a round
  --suite mmspec    the MMSpec benchmark (arXiv 2603.14989), or any folder of its form, named by --data
  --suite scenes    generated scenes (describe, short, answer, clip)
  --suite text      ten text tasks, for a language model
  python -m research.bench --peers hf-static,hf-lookup,llama.cpp,openvino --peer-python peers/bin/python
  python -m research.bench --suite scenes --batch-sizes 1,8 --report report/
  python -m research.bench --suite mmspec --data MMSpec/test --model llava-hf/llava-1.5-7b-hf --report report/
  python -m research.bench --suite text --model SmolLM2/ --drafters auto --peers llama.cpp-lookup --json text.json
with --shape: random weights of a shape, and drafters whose acceptance is given (oracle: drafts that cost nothing; msd,
  flash: heads of the shape); baselines hf and hf-static (compiled on CUDA; on a CPU with --peers hf-compile)
  python -m research.bench --shape llava-1.5-7b --device cuda --tau 1,2.6,3.6,5 --batch-sizes 1,8 --json shape.json

exit code
  0 success, 1 a call of mmspec failed or gave other text in float32, 2 wrong usage; the report names peers that fail or
  differ
"""
REPORT_FILES = ("report.md", "results.json")


def add_suite_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `research.bench`."""
    group: Options = parser.add_argument_group("other engines and suites")
    add = group.add_argument
    add("--peers", type=split_commas, default=[], metavar="A,B", help=f"also measure {PEERS}")
    python_help = "interpreters of environments with engines in them (default: MMSPEC_PEER_PYTHON, then this one)"
    python = add("--peer-python", type=split_commas, default=[], metavar="PATH,..", help=python_help)
    goes_with(python, "--peers, --suite or --shape", lambda args: is_suite(args) or args.shape)
    assistant = add("--assistant", default=None, metavar="M", help="assistant model of hf-assisted")
    add("--suite", choices=SUITES, default=None, help="questions by category (with --peers: scenes)")
    data = add("--data", type=Path, default=None, metavar="FOLDER", help="of --suite mmspec: mmspec.jsonl and images/")
    categories_help = "of the suite (default: all, no clips)"
    categories = add("--categories", type=split_commas, default=[], metavar="A,B", help=categories_help)
    limit_help = "items of each category (scenes: 42 in all)"
    limit = add("--limit", type=positive_int, default=None, metavar="N", help=limit_help)
    minutes_help = (
        "begin no round after that once there are 7; categories take turns (default 3; no limit with --repeats, "
        "--count and --suite mmspec)"
    )
    add("--minutes", type=positive_int, default=None, metavar="M", help=minutes_help)
    add(
        "--against", type=Path, default=None, metavar="JSON", help="print the differences to an earlier run of the same"
    )
    report_help = f"write {', '.join(REPORT_FILES)}"
    report = add("--report", type=Path, default=None, metavar="FOLDER", help=report_help)
    for action in (assistant, data, categories, limit, report):
        goes_with(action, "--suite or --peers", is_suite)


def is_suite(args: argparse.Namespace) -> bool:
    """Whether the command line asks for a suite."""
    return bool(args.suite or args.peers)


def run_suite(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from research.bench.against import read_ratios, suite_ratios
    from research.bench.peers.registry import check_peer_names
    from research.bench.suite.report import against_section, format_json, format_markdown, write_json
    from research.bench.suite.session import measure_suite

    check_peer_names(args.peers)
    config, files = SuiteConfig.from_args(args), ResultFiles.from_args(args)
    files.check()
    if args.report is not None:
        with explain_write(args.report):
            args.report.mkdir(parents=True, exist_ok=True)
        check_writable(args.report / REPORT_FILES[0])
    earlier = read_ratios(args.against)
    hide_progress_bars(args.progress)
    result = measure_suite(config, args.command, args.progress, lambda result: write_json(result, files))
    report, content = format_markdown(result), format_json(result)
    if earlier:
        report += f"\n{against_section(args.against.name, suite_ratios(content['calls']), earlier)}"
    print(report)
    write_json(result, files)
    if args.report is not None:
        texts = (report, json.dumps(content, indent=1) + "\n")
        for name, text in zip(REPORT_FILES, texts, strict=True):
            (args.report / name).write_text(text, encoding="utf-8")
    if result.is_stopped:
        return INTERRUPTED
    own = {"hf-again", "none", *config.drafters}
    is_exact = result.run["dtype"] in ("float32", "float64")
    failed = any(row.failed or (is_exact and row.same < row.calls) for row in result.rows if row.peer in own)
    return 1 if failed or not result.calls else 0
