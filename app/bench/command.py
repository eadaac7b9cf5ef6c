"""`mmspec bench`: how fast, against plain `generate`, in a table, as JSON and as a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.command import MODELS, positive, quiet, temperature
from mmspec.app.caption.config import DEFAULT, DTYPES, MODEL, PROMPT
from mmspec.app.errors import UsageError, one_line
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from mmspec.app.versions import commit, mmspec_version, version

if TYPE_CHECKING:
    import torch

TASKS = ("describe", "short", "answer", "clip")  # of mmspec.app.scenes.tasks, which is too heavy to import here
MOST_NODES = 64  # of mmspec.engine.tree
SHOWN = 5
"""Positions of a draft that the table has room for."""
COLUMNS = {
    "drafter": "drafter",
    "batch": "batch",
    "prompt_tokens": "prompt",
    "tau": "tau",
    "accepted_at_position": "kept %",
    "R": "R",
    "tokens_per_s": "tok/s",
    "speedup_hf": "x hf",
    "speedup_hf_lo": "min",
    "speedup_hf_hi": "max",
    "speedup_own": "x own",
    "speedup_e2e": "x e2e",
    "identical": "same",
    "score_ms": "score",
    "draft_ms": "draft",
    "rest_ms": "rest",
    "ttft_ms": "ttft ms",
}
"""Columns of the table: key of the row and heading."""

EPILOG = """\
rows
  hf            plain generate of transformers, on a model that was never patched
  hf-again      the same once more: its min and max of "x hf" are the noise band of this machine
  none          our own loop without drafts
  others        our loop with that drafter; NAME+COMPRESSOR shows it fewer visual tokens (msd+pool:49); NAME@DEPTH
                drafts so many levels in every round (msd@3, msd@3+pool:49), for drafters that draft level by level

columns
  x hf, x own   decode speed-up (first token to last) over hf and over our own plain loop; x e2e: the whole call, image
                encoding and prefill included. Medians of paired runs: in each round everybody runs once, in turn.
  tau           tokens per forward of a row;  R: time of one round in plain steps of our loop;  x own is about tau / R
  kept %        of 100 rounds, those that kept 1, 2, 3, ... drafted tokens
  same          all tokens equal to hf, in every run (in half precision near-ties may differ)
  score, draft, rest: ms per round
  In the JSON besides: accepted_at_position (kept % in full), speedup_*_ci (95% limits of the medians, bootstrap over
  runs), speedup_e2e_pooled (all seconds of hf over all seconds), draft_mib and of_target (weights of drafter and
  compressor, and their share of the target's), block (tokens of one pass of the drafter), tokens_min (of the shortest
  answer), run (versions, commit, command).

With --task (the default for the scenes model) pictures and questions come from the scenes world, from seed
--first-seed on, and rows end where the model ends them: describe (a long description), short (a caption), answer
(where, how many, is there, ...), clip (what happens in a clip). Seeds from 50,000,000 on were never trained on. tau is
over all tokens.

Else every call has pictures and prompts of its own, so that a drafter that learns from call to call cannot know the
answers; give as many --images as the largest batch size times (repeats + 1). Such rows never end early: all produce
--new-tokens tokens. A real model's text past its natural end tends to repeat itself, which flatters drafters: choose
--new-tokens below the usual length of its answers.

examples
  mmspec bench
  mmspec bench --task answer --drafters auto,hybrid --count 100 --json answers.json
  mmspec bench --drafters msd@3,msd@5,flash --nodes 16       trees of one size, whatever that costs
  mmspec bench --model mid --drafters none,lookup,auto --batch-sizes 1,8 --prompt-tokens 100,700 --json mid.json
  mmspec bench --model llava-hf/llava-1.5-7b-hf --images photos/ --dtype bfloat16 --plot speed.png
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bench",
        parents=[common],
        help="measure speed against plain generate",
        description="Measure decoding speed: plain generate, our loop without drafts, and each drafter, interleaved.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", default=DEFAULT, metavar="M", help=MODELS)
    add("--drafters", type=names, default=["none", "auto"], metavar="A,B", help="default none,auto")
    add("--nodes", type=positive, default=None, metavar="N", help="score trees of N nodes (default: what pays)")
    add("--batch-sizes", type=numbers, default=[1], metavar="N,N", help="default 1")
    add("--prompt-tokens", type=numbers, default=None, metavar="N,N", help="lengthen prompts with words to this")
    add("--task", choices=TASKS, default=None, help="what to ask about scenes from the world (default describe)")
    add("--first-seed", type=int, default=None, metavar="S", help=f"of the scenes (default {FIRST_HELD_OUT_SEED})")
    add("--count", type=positive, default=None, metavar="N", help="scenes (default: --repeats batches)")
    add("--new-tokens", type=positive, default=None, metavar="N", help="per row (default 64; with --task at most, 160)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--seed", type=int, default=0, metavar="N", help="for prompts, pictures and sampling (default 0)")
    add("--repeats", type=positive, default=5, metavar="N", help="rounds after the warm-up (default 5)")
    add("--images", nargs="+", default=[], metavar="PATH", help="pictures to use (default: made up)")
    add("--prompt", default=None, metavar="TEXT", help=f"default {PROMPT!r}")
    add("--dtype", default="auto", choices=DTYPES, help="default as for caption")
    add("--device", default="auto", metavar="DEV", help="default auto: the GPU if there is one")
    add("--json", default=None, metavar="FILE", help="write the rows as a JSON list, with more columns")
    add("--plot", default=None, metavar="FILE.png", help="write a bar chart (needs matplotlib)")
    add("--progress", action=argparse.BooleanOptionalAction, default=None, help="default: if on a terminal")


def names(text: str) -> list[str]:
    """Comma-separated drafters."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers above 0."""
    return [positive(part.strip()) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from mmspec.app.bench.specs import check

    for name in args.drafters:
        check(name)
    settle(args)
    for file in filter(None, (args.json, args.plot)):
        writable(file)
    if args.plot:
        from mmspec.app.bench.plot import require

        require()
    quiet(args.progress)
    rows = measure(args)
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from mmspec.app.bench.plot import plot

        plot(rows, Path(args.plot))
    return 0


def settle(args: argparse.Namespace) -> None:
    """Fill in what depends on other options, and refuse what does not go together."""
    made_up = {"--images": args.images, "--prompt": args.prompt, "--prompt-tokens": args.prompt_tokens}
    given = [name for name, value in made_up.items() if value]
    if args.task is None and args.model == MODEL and not given:
        args.task = "describe"
    if args.task is not None:
        if given:
            raise UsageError(f"--task brings pictures and questions of its own: leave {given[0]} away")
        if args.count is not None and args.count < max(args.batch_sizes):
            raise UsageError(f"--count {args.count} does not fill a batch of {max(args.batch_sizes)}")
        args.first_seed = FIRST_HELD_OUT_SEED if args.first_seed is None else args.first_seed
    elif args.first_seed is not None or args.count is not None:
        raise UsageError("--first-seed and --count go with --task")
    if args.nodes is not None and args.nodes > MOST_NODES:
        raise UsageError(f"--nodes is 1 to {MOST_NODES}, the root counted; got {args.nodes}")
    args.prompt = args.prompt or PROMPT
    args.new_tokens = args.new_tokens or (160 if args.task else 64)
    if args.new_tokens < 2:
        raise UsageError(f"--new-tokens must be 2 or more, or there is nothing to decode; got {args.new_tokens}")


def writable(file: str) -> None:
    """Refuse a result file that cannot be written, before an hour of measuring."""
    try:
        made = not Path(file).exists()
        with Path(file).open("ab"):
            pass
        if made:
            Path(file).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, batch by batch and prompt by prompt."""
    from tqdm import tqdm

    from mmspec.app.bench.measure import results, rounds, systems
    from mmspec.app.bench.requests import pictures, requests_of, world_requests
    from mmspec.app.modeling.captioner import Captioner
    from mmspec.app.modeling.load import load
    from mmspec.app.scenes.domain_check import warn_if_out_of_domain

    images = [] if args.task else pictures(args.images, max(args.batch_sizes) * (args.repeats + 1), args.seed)
    if args.model == MODEL and images:
        warn_if_out_of_domain(images[0], "what --images names" if args.images else "what is shown")
    model, processor = load(args.model, args.dtype, args.device)
    try:
        field = systems(model, args.drafters, processor, ends=args.task is not None, nodes=args.nodes)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--model {args.model}: {one_line(error, 600)}") from error
    maker = Captioner(model, processor)
    told = ("model", "task", "first_seed", "new_tokens", "temperature", "nodes")
    shared = {name: getattr(args, name) for name in told}
    shared |= {"dtype": maker.dtype, "run": provenance(args.command, model.device)}
    lengths = args.prompt_tokens or [0]
    repeats = {batch: args.count // batch if args.count else args.repeats for batch in args.batch_sizes}
    calls = len(lengths) * len(field) * sum(number + 1 for number in repeats.values())
    hide = not (sys.stderr.isatty() if args.progress is None else args.progress)
    rows = []
    with tqdm(total=calls, desc="bench", unit="call", disable=hide, file=sys.stderr) as bar:
        for batch in args.batch_sizes:
            for length in lengths:
                count = repeats[batch]
                if args.task:
                    requests = world_requests(maker, args.task, args.first_seed, batch, count)
                else:
                    requests = requests_of(maker, images, args.prompt, batch, length, count + 1, args.seed)
                rounds(field, requests, args.new_tokens, args.temperature, args.seed, bar.update)
                tokens = requests[0]["input_ids"].shape[1]
                rows += [row | {"prompt_tokens": tokens, "repeats": count} | shared for row in results(field)]
    return rows


def provenance(command: str, device: torch.device) -> dict[str, Any]:
    """What a figure must carry to be worth anything. device: where it was measured."""
    import torch

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": command,
        "mmspec": mmspec_version(),
        "commit": commit(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": card or device.type,
        "threads": torch.get_num_threads(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [list(COLUMNS.values()), *([_cell(row[column]) for column in COLUMNS] for row in rows)]
    first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return " ".join(f"{100 * share:.0f}" for share in value[:SHOWN]) or "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


__all__ = ["add_parser", "run", "table"]
