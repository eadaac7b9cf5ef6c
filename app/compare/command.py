"""`mmspec compare`: one line per drafter for the user's own model and image, within a minute."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.option_fields import PROMPT
from mmspec.app.cli.arguments import (
    add_device_options,
    add_model_option,
    add_table_options,
    hide_progress_bars,
    positive_int,
    source_options,
    split_commas,
    validate_drafter,
)
from mmspec.app.errors import UsageError, one_line
from mmspec.messages import printable

if TYPE_CHECKING:
    from mmspec.comparison import Comparison

DEFAULT_DRAFTERS = ["none", "lookup", "recycling", "hybrid", "auto"]
TEXT_PROMPT = "Explain how a bicycle stays upright."
"""Of a language model."""
COMPARED_PAIRS = 2
"""Measured pairs after a warm-up pair: enough for a look, not for a quote."""
HEADING = f"{'drafter':14} {'identical':10} {'tau':>5} {'x decode':>9} {'x whole':>8}"
EPILOG = """\
Plain generate and each drafter in turn on one image and one question, the same tokens compared. Decoding is from the
first token to the last; prefill and image encoding are not accelerated. Two pairs of runs per drafter: for figures to
quote call `mmspec.compare(model, inputs, repeats=9)`. Drafters that have not begun after --seconds are left out.

examples
  mmspec compare --image photo.jpg --model llava-hf/llava-1.5-7b-hf --dtype bfloat16
  mmspec compare --model Qwen/Qwen2.5-0.5B-Instruct --prompt "Tell a story."         a language model, without an image
  mmspec compare                                              an image of the toy world and the bundled model

exit code
  0 success, 1 a drafter failed or gave other tokens in float32, 2 wrong usage
"""


DESCRIPTION = "Compare drafters on your model and image."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_model_option(parser)
    add_device_options(parser)
    add("--image", default=None, metavar="PATH", help="the first of what PATH names (default: a bundled drawing)")
    add("--prompt", default=None, metavar="TEXT", help=f"default {PROMPT!r}; of a language model {TEXT_PROMPT!r}")
    drafters_help = f"default {','.join(DEFAULT_DRAFTERS)}"
    add("--drafters", type=split_commas, default=DEFAULT_DRAFTERS, metavar="A,B", help=drafters_help)
    add("--new-tokens", type=positive_int, default=64, metavar="N", help="of the answer, at most (default 64)")
    add("--seconds", type=positive_int, default=60, metavar="S", help="after which no drafter begins (default 60)")
    add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    for name in args.drafters:
        validate_drafter(*split_spec(name))
    hide_progress_bars(None)
    model, processor, inputs = _load(args)
    print(HEADING, flush=True)
    start, is_exact = time.perf_counter(), True
    for name in dict.fromkeys(args.drafters):
        if time.perf_counter() - start > args.seconds:
            print(f"{name:14} left out: {args.seconds} seconds are over", flush=True)
            continue
        try:
            result = _compare(model, processor, name, inputs, args.new_tokens)
        except Exception as error:  # the others are still worth a line
            print(printable(f"{name:14} failed: {one_line(error)}"), flush=True)
            is_exact = False
            continue
        print(printable(format_compared(name, result), lines=True), flush=True)
        is_exact = is_exact and (result.identical or str(model.dtype) not in ("torch.float32", "torch.float64"))
    return 0 if is_exact else 1


def split_spec(name: str) -> tuple[str, str | None]:
    """The drafter and the compressor of `DRAFTER` or `DRAFTER+COMPRESSOR`; a folder may have a + in its path."""
    drafter, plus, compressor = name.rpartition("+")
    return (drafter, compressor) if plus and drafter and "/" not in compressor else (name, None)


def format_compared(name: str, result: Comparison) -> str:
    """One line of the table."""
    same = "yes" if result.identical else "NO"
    divergence = result.first_divergence
    if result.stats.fallback_reason:
        return f"{name:14} {same:10} {'-':>5} {'-':>9} {'-':>8}  plain generate: {result.stats.fallback_reason}"
    text = f"{name:14} {same:10} {result.tau:5.2f} {result.speedup_decode:8.2f}x {result.speedup_e2e:7.2f}x"
    if divergence is not None:
        return f"{text}  first difference at token {divergence.column}, logit margin {divergence.margin:.1e}"
    return text


def _load(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    from mmspec.app.io.decode import ReadableRows
    from mmspec.app.io.images import media_images
    from mmspec.app.modeling.chat import build_inputs, check_length
    from mmspec.app.modeling.load import load_model, load_text_model
    from mmspec.app.modeling.text import is_text_model
    from mmspec.app.scenes.examples import list_example_files
    from mmspec.vision.video.decoder_pool import DecoderPool

    if is_text_model(args.model):
        if args.image is not None:
            raise UsageError(f"--image: {args.model} reads no pictures; leave it out")
        model, processor = load_text_model(args.model, args.dtype, args.device)
        inputs = build_inputs(model, processor, [()], [args.prompt or TEXT_PROMPT])
        check_length(model, inputs, args.new_tokens)
        return model, processor, inputs
    question = [args.prompt or PROMPT]
    path = args.image or str(list_example_files()[0])
    with DecoderPool() as decoders:
        rows = ReadableRows([path], source_options(args), decoders, f"--image {path}")
        rows.peek()  # before the model is loaded
        model, processor = load_model(args.model, args.dtype, args.device)
        rows.check = lambda item, media: build_inputs(model, processor, [media_images(media)[0]], question)
        image = media_images(next(iter(rows))[1])[0]
        rows.report()
    inputs = build_inputs(model, processor, [image], question)
    check_length(model, inputs, args.new_tokens)
    return model, processor, inputs


def _compare(model: Any, processor: Any, name: str, inputs: dict[str, Any], new_tokens: int) -> Comparison:
    """Patch, compare, undo."""
    import mmspec

    mmspec.patch(model, *split_spec(name), processor)
    options = dict.fromkeys(("temperature", "top_p", "top_k"))
    try:
        return mmspec.compare(
            model, inputs, repeats=COMPARED_PAIRS, max_new_tokens=new_tokens, do_sample=False, **options
        )
    finally:
        mmspec.unpatch(model)
