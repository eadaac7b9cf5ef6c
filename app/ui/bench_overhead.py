"""`python -m mmspec.app.ui.bench_overhead`: what the pages add to the times that they show, and how soon they can be used.

Each held-out picture is asked about through the served Compare tab (in the worker's thread, every round recorded, drawn
several times a second and streamed to a process that reads it, as a browser would) and as `mmspec bench` does it, in
turn, with the same drafter and seed. Told are ratios of paired runs, page over bench, medians with 95% intervals. What
a browser takes of a machine of few cores for itself is not in it.

`--start N` measures something else, N times: seconds from starting `mmspec demo` to its pages, to the first word of an
answer and to its end.
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

import gradio as gr
import torch
from gradio_client import Client, handle_file

from mmspec.app.bench.measure import HF, TimedRun, bootstrap_interval, build_contestants, gc_paused, run_once
from mmspec.app.caption.command import positive_int
from mmspec.app.caption.config import DEFAULT_MODEL
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.load import load_model
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.scenes.tasks import REQUEST_TASKS, SceneRequest, generate_requests
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.page_client import download_json, run_events
from mmspec.app.ui.server import DemoServer, serve

Ratios = dict[str, list[float]]


class ServedPage:
    """The served Compare tab, asked by another process. Gradio's states stand in its inputs as None."""

    def __init__(self, site: DemoServer, readers: Executor, *chosen: Any) -> None:
        self.server, self.executor, self.settings = site, readers, chosen
        found = {getattr(fn.fn, "__name__", ""): number for number, fn in site.app.fns.items()}
        self.events = found["answer"], found["finish"]
        outputs = site.app.fns[found["finish"]].outputs
        self.download_index = next(n for n, part in enumerate(outputs) if isinstance(part, gr.DownloadButton))

    def run(self, request: SceneRequest) -> dict[str, Any]:
        """The run as it can be downloaded."""
        file = self.server.context.temp_storage.new_folder() / "picture.png"
        request.images[0].save(file)
        data = [str(file), None, None, request.question, None, *self.settings]
        told = self.executor.submit(run_events, self.server.url, self.events, data, 0).result()
        run: dict[str, Any] = download_json(self.server.url, told[self.download_index]["value"]["path"])
        return run


@gc_paused()
def measure_ratios(args: argparse.Namespace, tick: Any) -> Ratios:
    """Page over bench, for each request after the first, which warms up."""
    model, processor = load_model(args.model)
    by_name = {one.name: one for one in build_contestants(model, [args.drafter], processor, stop_at_eos=True)}
    maker = Captioner(model, processor)
    found: Ratios = {}
    shelf, fresh = ModelStore(args.model, args.drafter), multiprocessing.get_context("spawn")
    with serve(shelf, port=0) as site, ProcessPoolExecutor(1, fresh) as readers:
        page = ServedPage(site, readers, args.model, args.drafter, "none", 0, 0, args.new_tokens, "automatic")
        for number, request in enumerate(islice(generate_requests(args.task, args.first_seed), args.count + 1)):
            inputs = maker.build_inputs([request.images], [request.question])
            runs: dict[str, TimedRun] = {}
            report = page.run(request) if number % 2 else None  # whoever is first may find a colder machine
            for side, name in (("plain", HF), ("mmspec", args.drafter)):
                runs[side] = run_once(by_name[name], inputs, args.new_tokens, 0.0, 0)
            report = report or page.run(request)
            for side, run in runs.items():
                seen = report[side]
                if seen["n_tokens"] != run.num_tokens:
                    raise RuntimeError(f"{side}: {seen['n_tokens']} tokens on the page, {run.num_tokens} in the bench")
                if number and run.decode_s:
                    found.setdefault(f"{side} decode", []).append(seen["decode_s"] / run.decode_s)
                    whole = report["vision_s"] + seen["total_s"]
                    found.setdefault(f"{side} whole call", []).append(whole / run.total_s)
            tick()
    return found


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and between which it lies with 95% (bootstrap)."""
    ends = bootstrap_interval(lambda places: median(values[i] for i in places), len(values))
    return {name: round(value, 3) for name, value in zip(("median", "low", "high"), ends, strict=True)}


def measure_startup(model: str, drafter: str) -> dict[str, float]:
    """Seconds from starting `mmspec demo` until its pages are served, until the first word of an answer to a question
    that is asked at once (at most: what comes after the answer counts as before it), and until both answers are there.
    """
    command = [sys.executable, "-m", "mmspec", "demo", "--port", "0", "--model", model, "--drafter", drafter]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            url = running.stdout.readline().split()[2]
            page_s = time.perf_counter() - began
            client = Client(url, verbose=False)
            told = client.predict(handle_file(str(list_example_files()[0])), "What do you see?", api_name="/compare")
            answer_s = time.perf_counter() - began
            word_s = answer_s - told["plain"]["total_s"] - told["mmspec"]["total_s"] + told["plain"]["ttft_s"]
            return {"page_s": round(page_s, 2), "word_s": round(word_s, 2), "answer_s": round(answer_s, 2)}
        finally:
            running.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmspec.app.ui.bench_overhead", description=__doc__)
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

    told: dict[str, Any] = {"model": args.model, "drafter": args.drafter, "threads": torch.get_num_threads()}
    if args.start is not None:
        told["starts"] = [
            measure_startup(args.model, args.drafter) for _ in tqdm(range(args.start), disable=not args.progress)
        ]
        for one in told["starts"]:
            print(
                "pages after {page_s:.2f} s, first word after {word_s:.2f} s, answers after {answer_s:.2f} s".format(
                    **one
                )
            )
    else:
        with tqdm(total=args.count + 1, unit="request", disable=not args.progress) as bar:
            rows = {name: median_interval(values) for name, values in measure_ratios(args, bar.update).items()}
        for name, row in rows.items():
            print(f"{name:<20} {row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
        told |= {"count": args.count, "task": args.task} | rows
    if args.json:
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
