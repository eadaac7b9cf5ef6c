"""What `make demo` runs: the example pictures and clips, described plainly and sped up, both texts side by side.

Needs no network: the model and the examples ship with the package.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.command import (
    COMPRESSOR_HELP,
    MODEL_HELP,
    build_captioner,
    hide_progress_bars,
    positive_int,
    validate_drafter,
)
from mmspec.app.caption.config import DEFAULT_MODEL, SCENES_MODEL, CaptionConfig, ProcessInfo
from mmspec.app.cli.main import CommandParser
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import ImageError, Media
from mmspec.app.io.sources import Item, collect_items
from mmspec.app.io.videos import load_media
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.scenes.domain_check import warn_if_out_of_domain
from mmspec.vision.video.decoder_pool import Isolated

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import Caption, Captioner

EPILOG = """\
examples
  python -m mmspec.app.examples                                   the examples that ship with mmspec
  python -m mmspec.app.examples photo.jpg --model llava-hf/llava-1.5-7b-hf
"""


@dataclass(frozen=True)
class ExampleResult:
    """One example, done both ways."""

    caption: Caption
    plain_s: float
    patched_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Exit code 0 if all texts are identical, 1 if not, 2 for wrong usage."""
    parser = CommandParser(
        prog="python -m mmspec.app.examples",
        description="Describe pictures and clips with plain generate and with mmspec, in turn; print both texts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="pictures, videos, folders (default: the examples of the package)")
    add("--model", default=DEFAULT_MODEL, metavar="M", help=MODEL_HELP)
    add("--drafter", default="auto", metavar="D", help="source of guesses (default auto)")
    add("--compressor", default=None, metavar="C", help=COMPRESSOR_HELP)
    add("--max-new-tokens", type=positive_int, default=160, metavar="N", help="per text (default 160)")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except UsageError as error:
        print(f"mmspec: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Load, warm up, show one example after the other."""
    from mmspec.app.scenes.examples import list_example_files

    validate_drafter(args.drafter, args.compressor)
    items = collect_items(args.paths or [str(file) for file in list_example_files()], Path())
    with Isolated() as decoders:
        shown = [load_item(item, decoders) for item in items]
    if args.model == SCENES_MODEL and args.paths:
        warn_if_out_of_domain(shown[0], items[0].file_name)
    hide_progress_bars(None)
    settings = CaptionConfig(
        tuple(args.paths),
        args.model,
        drafter=args.drafter,
        compressor=args.compressor,
        max_new_tokens=args.max_new_tokens,
        batch_size=1,
    )
    print(f"Loading the model {args.model!r} ...", flush=True)
    maker = build_captioner(settings, ProcessInfo())
    size = sum(weight.numel() for weight in maker.model.parameters()) / 1e6
    print(f"{size:.0f} M parameters. {len(items)} examples, each with plain generate and with mmspec:", flush=True)
    if args.model in SIZES:
        print("Its weights are random: its words are noise, and noise cannot be guessed.", flush=True)
    caption_both_ways(maker, shown[0], items[0].resolve_prompt())  # warms up
    shots = []
    for item, one in zip(items, shown, strict=True):
        shots.append(caption_both_ways(maker, one, item.resolve_prompt()))
        print_result(item, shots[-1])
    return print_summary(shots)


def load_item(item: Item, decoders: Isolated) -> Media:
    """The picture, or the frames of the clip."""
    try:
        return load_media(item.path, isolated=decoders)
    except ImageError as error:
        raise UsageError(f"{item.path}: {one_line(error)}") from error


def caption_both_ways(maker: Captioner, shown: Media, prompt: str) -> ExampleResult:
    """Both ways, and the seconds each took."""
    plain, patched = maker.comparison.plain_s, maker.comparison.patched_s
    made = maker.caption([shown], [prompt], 0, [True])[0]
    return ExampleResult(made, maker.comparison.plain_s - plain, maker.comparison.patched_s - patched)


def print_result(item: Item, shot: ExampleResult) -> None:
    """Both texts and what it took."""
    made = shot.caption
    width = max(60, min(120, shutil.get_terminal_size().columns))
    print(f"\n{item.path.name}: {item.resolve_prompt()}")
    for name, seconds, text in (("plain", shot.plain_s, made.plain), ("mmspec", shot.patched_s, made.caption)):
        head = f"  {name:<7}{seconds:5.2f} s  "
        print(textwrap.fill(text or "(nothing)", width, initial_indent=head, subsequent_indent=" " * len(head)))
    verdict = "identical" if made.identical else "DIFFERENT"
    speed = f"{made.n_new_tokens / shot.patched_s:.0f} tokens/s, {shot.plain_s / shot.patched_s:.2f}x"
    print(f"{'':>18}{verdict}; {made.n_new_tokens} tokens, tau {made.tau:.2f}, {speed}", flush=True)


def print_summary(shots: Sequence[ExampleResult]) -> int:
    """The sum of it."""
    same = sum(shot.caption.identical is True for shot in shots)
    tokens, rounds = (sum(getattr(shot.caption, name) for shot in shots) for name in ("n_new_tokens", "n_rounds"))
    plain, patched = sum(shot.plain_s for shot in shots), sum(shot.patched_s for shot in shots)
    tau = (tokens - len(shots)) / max(1, rounds)
    print(f"\n{same} of {len(shots)} texts identical to plain generate.")
    speed = f"{tokens / plain:.0f} tokens/s plain, {tokens / patched:.0f} with mmspec"
    print(f"{speed}: {plain / patched:.2f}x, tau {tau:.2f}")
    print("(image encoding and the prompt included; `mmspec bench` measures with repeats)")
    return 0 if same == len(shots) else 1


if __name__ == "__main__":
    raise SystemExit(main())
