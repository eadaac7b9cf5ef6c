"""The example pictures and clips that ship with the package: held-out scenes, as files.

python -m mmspec.app.scenes.examples FOLDER       writes them again (clips need PyAV)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from mmspec.app.scenes.objects import KINDS
from mmspec.app.scenes.render import paint
from mmspec.app.scenes.world import HELD_OUT, Clip, clip, scene

FOLDER = Path(__file__).parent / "data" / "examples"
PICTURES = (3, 5, 15, 17, 41, 47)
"""Seeds after `HELD_OUT`."""
CLIPS = (0, 14, 16)


def files() -> list[Path]:
    """The shipped examples, pictures first."""
    return sorted(FOLDER.glob("*.png")) + sorted(FOLDER.glob("*.mp4"))


def name_of(kinds: Sequence[int]) -> str:
    """ "cat_pumpkin": the kinds, each once."""
    return "_".join(dict.fromkeys(KINDS[kind].name for kind in kinds))


def write(folder: Path) -> list[Path]:
    """Draw the examples into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for seed in PICTURES:
        drawn = scene(HELD_OUT + seed)
        made.append(folder / f"{name_of([thing.kind for thing in drawn.reading_order()])}.png")
        paint(drawn).save(made[-1], optimize=True)
    for seed in CLIPS:
        moving = clip(HELD_OUT + seed)
        made.append(folder / f"{name_of([moving.hero.kind])}_{moving.event.what}.mp4")
        encode(moving, made[-1])
    return made


def encode(moving: Clip, file: Path) -> None:
    """Write a clip as a video of two frames a second."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(2), options={"crf": "10", "preset": "veryslow"})
        first = paint(moving.frames[0])
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuv420p"
        for frame in moving.frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(paint(frame)), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)
