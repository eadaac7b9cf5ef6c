"""Writes requests about generated scenes as pictures, clips and a list: what the bundled drafters were trained on.

`python -m research.scenes.write_requests FOLDER --count 2000`, then `mmspec train --data FOLDER/requests.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from mmspec.app.cli.arguments import positive_int
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED
from research.scenes.clips import Clip
from research.scenes.tasks import add_scene_seed, generate_requests
from research.scenes.write_examples import encode_video

LIST_FILE = "requests.jsonl"
MIX = {"describe": 0.6, "short": 0.15, "answer": 0.2, "clip": 0.05}
"""Share of each task."""


def write_requests(folder: Path, count: int, first_seed: int = 10_000_000) -> Path:
    """Write `count` requests into `folder`, created if needed: PNG and MP4 files (clips need PyAV) and a list of them.

    Returns:
        The list: a JSON line a request, with `file_name` and `prompt`.

    Raises:
        ValueError: Scenes are held out.
    """
    if first_seed + 2 * count > FIRST_HELD_OUT_SEED:
        raise ValueError(f"seeds from {FIRST_HELD_OUT_SEED} on are held out; got {first_seed} and {count} requests.")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        rng = random.Random(f"mix {first_seed} {index}")
        task = rng.choices(tuple(MIX), tuple(MIX.values()))[0]
        request = next(generate_requests(task, first_seed + 2 * index))
        if isinstance(request.ground_truth, Clip):
            file = folder / f"{index:05}.mp4"
            encode_video(request.ground_truth, file)
        else:
            file = folder / f"{index:05}.png"
            request.images[0].save(file)
        rows.append({"file_name": file.name, "prompt": request.question})
    listed = folder / LIST_FILE
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return listed


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=positive_int, default=2000, metavar="N", help="default 2000")
    add_scene_seed(parser, 10_000_000, "10,000,000")
    args = parser.parse_args()
    print(write_requests(args.folder, args.count, args.scene_seed))


if __name__ == "__main__":
    main()
