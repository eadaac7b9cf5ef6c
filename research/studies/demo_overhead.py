"""`python -m research.studies.demo_overhead`: overhead of the pages in the times that they report, and startup time.

Each held-out picture is answered through the served Compare tab (worker thread, all rounds recorded, HTML rendered
several times a second and streamed to a client process) and as in `research.bench`, alternating, with the same drafter
and seed. Reports ratios of paired runs, page over bench, as medians with 95% bootstrap intervals. CPU time of a browser
is not included.

`--start N` instead measures N starts of `mmspec demo`: seconds to the page, to the first token and to the full answer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gradio_client import Client, handle_file

from mmspec.app.caption.config import DEFAULT_MODEL
from mmspec.app.cli.arguments import positive_int
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.scenes.tasks import REQUEST_TASKS, SceneRequest, generate_requests
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.ui.credit import PLAIN_GENERATE
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.page_client import download_json, run_events
from mmspec.app.ui.server import DemoServer, serve
from research.bench.measure import HF, TimedRun, bootstrap_interval, build_contestants, gc_paused, run_once

Ratios = dict[str, list[float]]


class ServedPage:
    """The served Compare tab, driven by a client in another process. `gr.State` inputs are sent as None."""

    def __init__(self, server: DemoServer, executor: Executor, *settings: Any) -> None:
        self.server = server
        self.executor = executor
        self.settings = settings
        events = {getattr(fn.fn, "__name__", ""): number for number, fn in server.app.fns.items()}
        self.events = events["answer"], events["finish"]
        outputs = server.app.fns[events["finish"]].outputs
        self.download_index = next(n for n, part in enumerate(outputs) if part.elem_id == "mm-download")

    def run(self, request: SceneRequest) -> dict[str, Any]:
        """Run one request; returns the JSON report that the page offers for download."""
        file = self.server.context.temp_storage.new_folder() / "picture.png"
        request.images[0].save(file)
        data = [str(file), None, None, request.question, None, *self.settings]
        outputs = self.executor.submit(run_events, self.server.url, self.events, data, 0).result()
        run: dict[str, Any] = download_json(self.server.url, outputs[self.download_index]["value"]["path"])
        return run


@gc_paused()
def measure_ratios(args: argparse.Namespace, tick: Any) -> Ratios:
    """Ratios page / bench for each request after the first, which warms up."""
    model, processor = load_model(args.model)
    by_name = {one.name: one for one in build_contestants(model, [args.drafter], processor, stop_at_eos=True)}
    captioner = Captioner(model, processor)
    ratios: Ratios = {}
    store = ModelStore(args.model, args.drafter)
    spawn = multiprocessing.get_context("spawn")
    with serve(store, port=0) as server, ProcessPoolExecutor(1, spawn) as executor:
        page = ServedPage(
            server, executor, args.model, args.drafter, "none", 0, 0, args.new_tokens, "automatic", [], PLAIN_GENERATE
        )
        for number, request in enumerate(islice(generate_requests(args.task, args.first_seed), args.count + 1)):
            inputs = captioner.build_inputs([request.images], [request.question])
            runs: dict[str, TimedRun] = {}
            report = page.run(request) if number % 2 else None  # alternate which one runs first
            for side, name in (("plain", HF), ("mmspec", args.drafter)):
                runs[side] = run_once(by_name[name], inputs, args.new_tokens, 0.0, 0)
            report = report or page.run(request)
            for side, run in runs.items():
                page_side = report[side]
                if page_side["n_tokens"] != run.num_tokens:
                    raise RuntimeError(
                        f"{side}: {page_side['n_tokens']} tokens on the page, {run.num_tokens} in the bench"
                    )
                if number and run.decode_s:
                    ratios.setdefault(f"{side} decode", []).append(page_side["decode_s"] / run.decode_s)
                    total_s = report["vision_s"] + page_side["total_s"]
                    ratios.setdefault(f"{side} whole call", []).append(total_s / run.total_s)
            tick()
    return ratios


def summarize_ratios(values: Sequence[float]) -> dict[str, float]:
    """The median with its 95% bootstrap interval."""
    bounds = bootstrap_interval(lambda indices: median(values[i] for i in indices), len(values))
    return {name: round(value, 3) for name, value in zip(("median", "low", "high"), bounds, strict=True)}


def measure_startup(model: str, drafter: str) -> dict[str, float]:
    """Seconds from starting `mmspec demo` to the page, to the first token and to both answers of an immediate question.

    The time to the first token is an upper bound: work after the answers counts as before them.
    """
    command = [sys.executable, "-m", "mmspec", "demo", "--port", "0", "--model", model, "--drafter", drafter]
    start_time = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            url = running.stdout.readline().split()[2]
            page_s = time.perf_counter() - start_time
            client = Client(url, verbose=False)
            result = client.predict(handle_file(str(list_example_files()[0])), "What do you see?", api_name="/compare")
            answer_s = time.perf_counter() - start_time
            word_s = answer_s - result["plain"]["total_s"] - result["mmspec"]["total_s"] + result["plain"]["ttft_s"]
            return {"page_s": round(page_s, 2), "word_s": round(word_s, 2), "answer_s": round(answer_s, 2)}
        finally:
            running.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m research.studies.demo_overhead", description=__doc__)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL)
    add("--drafter", default="auto", metavar="D")
    add("--task", choices=[task for task in REQUEST_TASKS if task != "clip"], default="describe")
    add("--first-seed", type=int, default=FIRST_HELD_OUT_SEED, metavar="S")
    add("--count", type=positive_int, default=20, metavar="N", help="requests after the warm-up (default 20)")
    add("--new-tokens", type=positive_int, default=160, metavar="N")
    add("--start", type=positive_int, metavar="N", help="measure N starts of mmspec demo instead")
    add("--json", metavar="FILE")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    from tqdm import tqdm

    result: dict[str, Any] = {"model": args.model, "drafter": args.drafter, "threads": torch.get_num_threads()}
    if args.start is not None:
        result["starts"] = [
            measure_startup(args.model, args.drafter) for _ in tqdm(range(args.start), disable=not args.progress)
        ]
        for one in result["starts"]:
            print(
                "pages after {page_s:.2f} s, first word after {word_s:.2f} s, answers after {answer_s:.2f} s".format(
                    **one
                )
            )
    else:
        with tqdm(total=args.count + 1, unit="request", disable=not args.progress) as bar:
            rows = {name: summarize_ratios(values) for name, values in measure_ratios(args, bar.update).items()}
        for name, row in rows.items():
            print(f"{name:<20} {row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
        result |= {"count": args.count, "task": args.task} | rows
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
