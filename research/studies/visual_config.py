"""Options of `python -m research.studies.visual`: its parser, and the validated configuration."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mmspec.app.cli.arguments import add_model_option, positive_int, split_commas
from mmspec.app.errors import UsageError
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.arguments import add_progress, config_from_args, module_parser
from research.bench.drafter_specs import check_spec, parse_spec
from research.bench.results import add_result_options
from research.scenes.tasks import add_scene_seed
from research.studies.scenarios import SCENARIOS, parse_shapes, parse_shares

EPILOG = """\
shapes
  short    one image and a short question     one      one image to describe
  four     four images to describe            clip8, clip32, clipN   a clip of that many frames, or of as many as the
                                              model has positions for

compressors
  as for mmspec.patch; own is the one that a drafter was trained with, with a smaller budget: --compressors own

rows
  *_over are ratios to the first drafter (tau_over: of tau), speedup_* ratios of its speed, speedup_hf* ratios to the
  speed of plain generate, *_ci their 95% intervals; names is the share of their tokens that was accepted, names_tau
  their tokens for each forward that one of them cost. Without --nodes tau depends on a controller that uses measured
  times. Adaptive compressors (elastic) are compared with the best fixed one, by the sum of all seconds and
  by the mean over shapes, and with the best one for each request: by forwards, and by seconds (an optimistic bound,
  selected after the fact from noisy times).

examples
  python -m research.studies.visual out/msd --compressors pool,stride,relevant --json study.json --markdown study.md
  python -m research.studies.visual out/msd out/msd-elastic out/msd-latent --shapes short,one,clip8
  python -m research.studies.visual out/msd-latent --compressors own --nodes 16
"""


@dataclass(frozen=True)
class CompressorStudyConfig:
    """Options of the study, named like its flags.

    Attributes:
        drafters: specs as `research.bench.drafter_specs.parse_spec` reads them; the first is the base.
        compressors: for the first drafter, at every share.
        shares: budgets: 1/share of the visual tokens; 0 is one token.
        shapes: scenarios as `research.studies.scenarios.count_images` reads them.
        scene_seed: of the first scene. count: measured requests of each shape.
        nodes: size of every tree; None lets the controller choose.
        also: JSON files of earlier runs, whose rows come first.
        progress: show a progress bar; None for only if standard error is a terminal.
    """

    drafters: tuple[str, ...]
    compressors: tuple[str, ...]
    shares: tuple[int, ...]
    shapes: tuple[str, ...]
    model: str
    scene_seed: int
    count: int
    nodes: int | None
    max_new_tokens: int
    also: tuple[str, ...]
    progress: bool | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CompressorStudyConfig:
        """Validate the parsed options.

        Raises:
            UsageError: an unknown drafter or compressor; `--compressors` with a first drafter that has one.
        """
        config = config_from_args(cls, args)
        first = parse_spec(config.base)
        if config.compressors and (first.compressor or first.own_tokens):
            raise UsageError(f"--compressors apply to the first drafter, which has one: {config.base!r}; put it later")
        for name in (*config.drafters, *(f"{config.base}+{compressor}:1" for compressor in config.compressors)):
            check_spec(name)
        return config

    @property
    def base(self) -> str:
        """The drafter that the others are compared with."""
        return self.drafters[0]


def build_study_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of the study."""
    parser = module_parser("research.studies.visual", description, EPILOG)
    add = parser.add_argument
    add("drafters", nargs="+", metavar="D", help="trained drafters; the others are compared with the first one")
    add("--compressors", type=split_commas, default=[], metavar="C,C", help="for the first drafter, at every share")
    add("--shares", type=parse_shares, default=[2, 4, 8, 16, 0], metavar="N,N", help="1/N of the tokens; 0: one token")
    add("--shapes", type=parse_shapes, default=["one", "clip8"], metavar="S,S", help=f"of {', '.join(SCENARIOS)}")
    add_model_option(parser)
    add_scene_seed(parser, FIRST_HELD_OUT_SEED, str(FIRST_HELD_OUT_SEED))
    add("--count", type=positive_int, default=12, metavar="N", help="requests of each shape (default 12)")
    add("--nodes", type=positive_int, default=None, metavar="N", help="fixed tree size (default: what pays)")
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="of an answer (default 128)")
    add_result_options(
        parser,
        json_help="write the rows",
        markdown_help="write the tables",
        plot_help="write tau against the number of visual tokens (needs matplotlib)",
    )
    add("--also", nargs="+", default=[], metavar="FILE", help="JSON of earlier runs, whose rows come first")
    add_progress(parser)
    return parser


__all__ = ["CompressorStudyConfig", "build_study_parser"]
