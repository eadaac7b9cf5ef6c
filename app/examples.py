"""`mmspec examples`, which `make demo` runs: the bundled pictures and clips, by plain generate and by mmspec.

Needs no network: model and examples are part of the package. Imports nothing heavy at start.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import TYPE_CHECKING

from mmspec.app.cli.arguments import DEFAULT_MODEL
from mmspec.messages import description_of, printable

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import Caption

EPILOG = """\
Pictures of one's own: `mmspec caption PATH --model M --compare` (both texts), `mmspec compare --image PATH --model M`.

exit code
  0 all texts identical, 1 a difference
"""
EXAMPLE_TOKENS = 160
"""Longest text."""


DESCRIPTION = "Caption the bundled examples with plain generate and with mmspec, in turn; print both texts."


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command has none."""


def run(args: argparse.Namespace) -> int:
    """Caption and print one example after the other; returns 0 if all texts are identical, else 1."""
    from mmspec.app.caption.command import build_captioner
    from mmspec.app.caption.config import CaptionConfig, ProcessInfo, default_prompt
    from mmspec.app.cli.arguments import hide_progress_bars
    from mmspec.app.io.images import Video
    from mmspec.app.io.videos import load_media
    from mmspec.app.scenes.examples import list_example_files
    from mmspec.vision.video.decoder_pool import DecoderPool

    hide_progress_bars(None)
    print(f"Loading the model {DEFAULT_MODEL!r} ...", flush=True)
    config = CaptionConfig((), DEFAULT_MODEL, max_new_tokens=EXAMPLE_TOKENS, batch_size=1)
    captioner = build_captioner(config, ProcessInfo())
    num_parameters = sum(weight.numel() for weight in captioner.model.parameters()) / 1e6
    print(f"{num_parameters:.0f} M parameters: {description_of(captioner.model.config)}.", flush=True)
    print("Each example by plain generate and by mmspec:", flush=True)
    captions: list[Caption] = []
    totals = captioner.comparison
    with DecoderPool() as decoders:
        for file in list_example_files():
            media = load_media(file, isolated=decoders)
            prompt = default_prompt(isinstance(media, Video))
            if not captions:
                captioner.caption([media], [prompt], 0, [True])  # warm-up, of which no seconds are counted
            before = totals.plain_s, totals.patched_s
            captions += captioner.caption([media], [prompt], 0, [True])
            seconds = totals.plain_s - before[0], totals.patched_s - before[1]
            print(printable(f"\n{file.name}: {prompt}", lines=True))
            _print_result(captions[-1], *seconds)
    return _print_summary(captions, totals.plain_s, totals.patched_s)


def _print_result(caption: Caption, plain_s: float, patched_s: float) -> None:
    """Print both texts, tokens, tau and speed."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    for name, seconds, text in (("plain", plain_s, caption.plain), ("mmspec", patched_s, caption.caption)):
        head = f"  {name:<7}{seconds:5.2f} s  "
        shown = printable(text or "(nothing)", lines=True)
        print(textwrap.fill(shown, width, initial_indent=head, subsequent_indent=" " * len(head)))
    verdict = "identical" if caption.identical else "DIFFERENT"
    speed = f"{caption.n_new_tokens / patched_s:.0f} tokens/s, {plain_s / patched_s:.2f}x"
    print(f"{'':>18}{verdict}; {caption.n_new_tokens} tokens, tau {caption.tau:.2f}, {speed}", flush=True)


def _print_summary(captions: list[Caption], plain_s: float, patched_s: float) -> int:
    """Print the totals; returns the exit code."""
    num_identical = sum(caption.identical is True for caption in captions)
    num_tokens = sum(caption.n_new_tokens for caption in captions)
    tau = (num_tokens - len(captions)) / max(1, sum(caption.n_rounds for caption in captions))
    print(f"\n{num_identical} of {len(captions)} texts identical to plain generate.")
    print(f"{num_tokens / plain_s:.0f} tokens/s plain, {num_tokens / patched_s:.0f} with mmspec", end="")
    print(f": {plain_s / patched_s:.2f}x, tau {tau:.2f}")
    print("(image encoding and the prompt included; `mmspec compare` measures with repeats)")
    return int(num_identical < len(captions))
