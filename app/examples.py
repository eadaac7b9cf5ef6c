"""What `mmspec examples` and `make demo` run: example images and videos, captioned by plain generate and by mmspec.

Needs no network: model and examples are part of the package. `python -m mmspec.app.examples` is the same command.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmspec.app.caption.command import build_captioner
from mmspec.app.caption.config import SCENES_MODEL, CaptionConfig, ProcessInfo
from mmspec.app.cli.arguments import DEFAULT_MODEL, hide_progress_bars, validate_drafter
from mmspec.app.io.decode import ReadableRows
from mmspec.app.io.images import Media, Video
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.modeling.random_models import SIZES
from mmspec.app.scenes.domain_check import warn_if_out_of_domain
from mmspec.messages import description_of, printable
from mmspec.vision.video.decoder_pool import DecoderPool

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import Caption, Captioner


@dataclass(frozen=True)
class ExampleConfig:
    """Options of `mmspec examples`, named like its flags. No `paths`: the bundled examples.

    `source` is how the paths are read.
    """

    paths: tuple[str, ...] = ()
    source: SourceOptions = field(default_factory=SourceOptions)
    prompt: str | None = None
    model: str = DEFAULT_MODEL
    drafter: str = "auto"
    compressor: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 160


@dataclass(frozen=True)
class ExampleResult:
    """One example, captioned both ways.

    Attributes:
        caption: of mmspec, with the text of plain generate beside it.
        plain_s: seconds of plain generate.
        patched_s: seconds with mmspec.
    """

    caption: Caption
    plain_s: float
    patched_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `mmspec examples ARGV`; returns its exit code."""
    import sys

    from mmspec.app.cli.main import main as run_command

    return run_command(["examples", *(sys.argv[1:] if argv is None else argv)])


def run_examples(config: ExampleConfig) -> int:
    """Caption and print one example after the other.

    Returns:
        The exit code: 0 if all texts are identical, else 1.

    Raises:
        UsageError: an unknown drafter, or a file that cannot be read.
    """
    from mmspec.app.scenes.examples import list_example_files

    validate_drafter(config.drafter, config.compressor)
    paths = config.paths or [str(file) for file in list_example_files()]
    results: list[ExampleResult] = []

    def prompt_of(item: Item, media: Media) -> str:
        return item.resolve_prompt(config.prompt, isinstance(media, Video))

    with DecoderPool() as decoders:
        rows = ReadableRows(paths, config.source, decoders, "mmspec examples")
        item, media = rows.peek()  # before the model is loaded
        if config.model == SCENES_MODEL and config.paths:
            warn_if_out_of_domain(media, item.file_name)
        hide_progress_bars(None)
        captioner = _load_captioner(config)
        num_parameters = sum(weight.numel() for weight in captioner.model.parameters()) / 1e6
        says = description_of(captioner.model.config)
        print(f"{num_parameters:.0f} M parameters{f': {says}' if says else ''}.", flush=True)
        print("Each example by plain generate and by mmspec:", flush=True)
        if config.model in SIZES:
            print("Its weights are random: its text is noise, and noise cannot be drafted.", flush=True)
        rows.check = lambda item, media: captioner.checked_inputs([media], [prompt_of(item, media)])
        for item, media in rows:
            prompt = prompt_of(item, media)
            if not results:
                caption_both_ways(captioner, media, prompt)  # warm-up
            results.append(caption_both_ways(captioner, media, prompt))
            print_result(item, prompt, results[-1])
        rows.report()
    return print_summary(results)


def _load_captioner(config: ExampleConfig) -> Captioner:
    caption_config = CaptionConfig(
        config.paths,
        config.model,
        drafter=config.drafter,
        compressor=config.compressor,
        dtype=config.dtype,
        device=config.device,
        max_new_tokens=config.max_new_tokens,
        batch_size=1,
    )
    print(f"Loading the model {config.model!r} ...", flush=True)
    return build_captioner(caption_config, ProcessInfo())


def caption_both_ways(captioner: Captioner, media: Media, prompt: str) -> ExampleResult:
    """Caption with mmspec and with plain generate, and time both."""
    totals = captioner.comparison
    plain_before, patched_before = totals.plain_s, totals.patched_s
    caption = captioner.caption([media], [prompt], 0, [True])[0]
    return ExampleResult(caption, totals.plain_s - plain_before, totals.patched_s - patched_before)


def print_result(item: Item, prompt: str, result: ExampleResult) -> None:
    """Print both texts, tokens, tau and speed."""
    caption = result.caption
    width = max(60, min(120, shutil.get_terminal_size().columns))
    print(printable(f"\n{item.path.name if item.content is None else item.id}: {prompt}", lines=True))
    for name, seconds, text in (
        ("plain", result.plain_s, caption.plain),
        ("mmspec", result.patched_s, caption.caption),
    ):
        head = f"  {name:<7}{seconds:5.2f} s  "
        shown = printable(text or "(nothing)", lines=True)
        print(textwrap.fill(shown, width, initial_indent=head, subsequent_indent=" " * len(head)))
    verdict = "identical" if caption.identical else "DIFFERENT"
    speed = f"{caption.n_new_tokens / result.patched_s:.0f} tokens/s, {result.plain_s / result.patched_s:.2f}x"
    print(f"{'':>18}{verdict}; {caption.n_new_tokens} tokens, tau {caption.tau:.2f}, {speed}", flush=True)


def print_summary(results: Sequence[ExampleResult]) -> int:
    """Print the totals; returns the exit code."""
    num_identical = sum(result.caption.identical is True for result in results)
    num_tokens = sum(result.caption.n_new_tokens for result in results)
    num_rounds = sum(result.caption.n_rounds for result in results)
    plain_s = sum(result.plain_s for result in results)
    patched_s = sum(result.patched_s for result in results)
    tau = (num_tokens - len(results)) / max(1, num_rounds)
    print(f"\n{num_identical} of {len(results)} texts identical to plain generate.")
    speed = f"{num_tokens / plain_s:.0f} tokens/s plain, {num_tokens / patched_s:.0f} with mmspec"
    print(f"{speed}: {plain_s / patched_s:.2f}x, tau {tau:.2f}")
    print("(image encoding and the prompt included; `mmspec compare` measures with repeats)")
    return 0 if num_identical == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
