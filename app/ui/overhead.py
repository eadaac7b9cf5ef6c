"""`python -m mmspec.app.ui.overhead`: what the pages add to the times that they show.

Each held-out picture is asked about as the Compare tab does it (in the worker's thread, streamed, drawn several times a
second, with every round recorded) and as `mmspec bench` does it, in turn, with the same drafter and seed. Told are
ratios of paired runs, page over bench. A browser, which on a machine of few cores takes its part, is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from mmspec.app.caption import positive
from mmspec.app.captioner import Captioner
from mmspec.app.load import load
from mmspec.app.measure import PLAIN, Run, once, systems
from mmspec.app.scenes.tasks import TASKS, Request, requests
from mmspec.app.scenes.world import HELD_OUT
from mmspec.app.settings import DEFAULT
from mmspec.app.ui.context import Context
from mmspec.app.ui.page_compare import Parts, Talk, steps
from mmspec.app.ui.report import Report, Space
from mmspec.app.ui.shelf import Shelf

Ratios = dict[str, list[float]]


class Page:
    """The Compare tab without a browser."""

    def __init__(self, model: str, drafter: str, tokens: int) -> None:
        self.space = Space()
        self.context = Context(Shelf(model, drafter), self.space)
        self.parts = Parts(*Parts.__dataclass_fields__)
        self.chosen = (model, drafter, "none", 0.0, 0, tokens, "automatic")

    def ask(self, request: Request) -> Report:
        """What it tells in the end."""
        file = self.space.new() / "picture.png"
        request.pictures[0].save(file)
        told = {}
        for told in steps(  # noqa: B007 - the last one counts
            self.context, self.parts, "run", str(file), request.question, Talk(), self.chosen, "overhead"
        ):
            pass
        self.context.sessions.end("overhead")
        report: Report = told["run"]
        return report

    def close(self) -> None:
        """Remove what was written."""
        self.context.worker.close()
        self.space.close()


def ratios(args: argparse.Namespace, tick: Any) -> Ratios:
    """Page over bench, for each request after the first, which warms up."""
    model, processor = load(args.model)
    by_name = {one.name: one for one in systems(model, [args.drafter], processor, ends=True)}
    maker = Captioner(model, processor)
    page = Page(args.model, args.drafter, args.new_tokens)
    found: Ratios = {}
    try:
        for number, request in enumerate(islice(requests(args.task, args.first_seed), args.count + 1)):
            inputs = maker.inputs([request.pictures], [request.question])
            runs: dict[str, Run] = {}
            report = page.ask(request) if number % 2 else None  # whoever is first may find a colder machine
            for side, name in (("plain", PLAIN), ("mmspec", args.drafter)):
                runs[side] = once(by_name[name], inputs, args.new_tokens, 0.0, 0)
            report = report or page.ask(request)
            for side, run in runs.items():
                seen = report.figures["sides"][side]
                if seen["n_tokens"] != run.tokens:
                    raise RuntimeError(f"{side}: {seen['n_tokens']} tokens on the page, {run.tokens} in the bench")
                if number and run.decode_s:
                    found.setdefault(f"{side} decode", []).append(seen["decode_s"] / run.decode_s)
                    whole = report.figures["vision_s"] + seen["total_s"]
                    found.setdefault(f"{side} whole call", []).append(whole / run.total_s)
            tick()
    finally:
        page.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmspec.app.ui.overhead", description=__doc__)
    add = parser.add_argument
    add("--model", default=DEFAULT)
    add("--drafter", default="auto", metavar="D")
    add("--task", choices=[task for task in TASKS if task != "clip"], default="describe")
    add("--first-seed", type=int, default=HELD_OUT, metavar="S")
    add("--count", type=positive, default=20, metavar="N", help="requests after the warm-up (default 20)")
    add("--new-tokens", type=positive, default=160, metavar="N")
    add("--json", metavar="FILE")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    from tqdm import tqdm

    with tqdm(total=args.count + 1, unit="request", disable=not args.progress) as bar:
        found = ratios(args, bar.update)
    rows = {
        name: {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
        for name, values in found.items()
    }
    for name, row in rows.items():
        print(f"{name:<20} {row['median']:.3f} [{row['min']:.3f}, {row['max']:.3f}]")
    if args.json:
        Path(args.json).write_text(json.dumps({"count": args.count} | rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
