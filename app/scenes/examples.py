"""The example pictures and clips that ship with the package: held-out scenes, as files.

python -m mmspec.app.scenes.examples FOLDER       writes them again (clips need PyAV)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, Clip, generate_clip, generate_scene

EXAMPLES_FOLDER = Path(__file__).parent / "data" / "examples"
IMAGE_SEEDS = (3, 5, 15, 17, 41, 47)
"""Seeds after `HELD_OUT`."""
CLIP_SEEDS = (0, 14, 16)


def list_example_files() -> list[Path]:
    """The shipped examples, pictures first."""
    return sorted(EXAMPLES_FOLDER.glob("*.png")) + sorted(EXAMPLES_FOLDER.glob("*.mp4"))


def format_file_stem(kinds: Sequence[int]) -> str:
    """ "cat_pumpkin": the kinds, each once."""
    return "_".join(dict.fromkeys(OBJECT_KINDS[kind].name for kind in kinds))


def write_examples(folder: Path) -> list[Path]:
    """Draw the examples into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for seed in IMAGE_SEEDS:
        drawn = generate_scene(FIRST_HELD_OUT_SEED + seed)
        made.append(folder / f"{format_file_stem([thing.kind for thing in drawn.reading_order()])}.png")
        render_scene(drawn).save(made[-1], optimize=True)
    for seed in CLIP_SEEDS:
        moving = generate_clip(FIRST_HELD_OUT_SEED + seed)
        made.append(folder / f"{format_file_stem([moving.hero.kind])}_{moving.event.what}.mp4")
        encode_video(moving, made[-1])
    return made


def encode_video(moving: Clip, file: Path) -> None:
    """Write a clip as a video of two frames a second."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(2), options={"crf": "10", "preset": "veryslow"})
        first = render_scene(moving.frames[0])
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuv420p"
        for frame in moving.frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(render_scene(frame)), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


if __name__ == "__main__":
    for path in write_examples(Path(sys.argv[1])):
        print(path)
