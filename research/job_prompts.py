"""Processor time of a job of several prompts, over that of one prompt and the decoding of the others' captions.

    OMP_NUM_THREADS=1 python -m research.job_prompts --pictures 32 --rounds 2

1.0 would be: what comes before the first token is computed once for each picture. Decoding is what the same calls take
with all tokens less what they take with one. User and system time of this process and its decoders, loading left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.caption import command
from mmspec.app.cli.main import main as run_command
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene

PROMPTS = (
    "Describe the image.",
    "Describe the image in one sentence.",
    "What objects are in the image?",
    "List all objects with their colours.",
    "What is in the middle?",
)


def processor_time() -> float:
    """Seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class Timed:
    """A function, and the processor time of its calls."""

    function: Callable[..., Any]
    seconds: float = 0.0

    def __call__(self, *args: Any) -> Any:
        start = processor_time()
        try:
            return self.function(*args)
        finally:
            self.seconds += processor_time() - start


def run_job(folder: Path, *options: object) -> tuple[float, float, dict[tuple[str, str], str]]:
    """Seconds of a job without loading, those of them in `generate`, and the captions by picture and prompt."""
    load, generate = Timed(command.build_captioner), Timed(Captioner._generate)
    out = folder / "out.jsonl"
    words = ["caption", folder / "pictures", "--model", "scenes", "--no-progress", "--overwrite", "--out", out]
    original = command.build_captioner, Captioner._generate
    try:
        command.build_captioner = load  # type: ignore[assignment]
        Captioner._generate = lambda *args: generate(*args)  # type: ignore[method-assign]  # a method, not a callable
        start = processor_time()
        assert run_command([str(word) for word in (*words, *options)]) == 0
        seconds = processor_time() - start - load.seconds
    finally:
        command.build_captioner, Captioner._generate = original  # type: ignore[method-assign]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return seconds, generate.seconds, {(row["file_name"], row["prompt"]): row["caption"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
        for number in range(args.pictures):
            render_scene(generate_scene(900_000 + number)).save(folder / "pictures" / f"{number:05d}.png")
        for number in range(args.rounds):
            forms = (("--prompt", PROMPTS[0]), ("--prompts", folder / "prompts.txt"))
            (one, one_calls, _), (all_, all_calls, captions) = (run_job(folder, *form) for form in forms)
            first_tokens = [run_job(folder, *form, "--max-new-tokens", 1)[1] for form in forms]
            decoding = (all_calls - first_tokens[1]) - (one_calls - first_tokens[0])
            plain = run_job(folder, *forms[1], "--no-reuse-prefix")
            words = f"one prompt {one:.1f} s, all {all_:.1f} s, decoding of the others {decoding:.1f} s"
            same = "the same" if plain[2] == captions else "OTHER"
            print(f"round {number}: {words}: {all_ / (one + decoding):.2f}", flush=True)
            print(f"  without sharing {plain[0]:.1f} s, {same} captions", flush=True)


if __name__ == "__main__":
    main()
