"""Writes the example images and clips of the package: held-out scenes as PNG and MP4 files.

`python -m research.scenes.write_examples FOLDER`; clips need PyAV.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, generate_scene
from research.scenes.clips import Clip, generate_clip

IMAGE_SEEDS = (3, 5, 15, 17, 41, 47)
"""Offsets of the images' seeds from `FIRST_HELD_OUT_SEED`."""
CLIP_SEEDS = (0, 14, 16)
"""Offsets of the clips' seeds from `FIRST_HELD_OUT_SEED`."""


def format_file_stem(kinds: Sequence[int]) -> str:
    """Return the names of the kinds without repetition, such as "cat_pumpkin"."""
    return "_".join(dict.fromkeys(OBJECT_KINDS[kind].name for kind in kinds))


def write_examples(folder: Path) -> list[Path]:
    """Write the examples into `folder`, created if needed, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for seed in IMAGE_SEEDS:
        scene = generate_scene(FIRST_HELD_OUT_SEED + seed)
        files.append(folder / f"{format_file_stem([thing.kind for thing in scene.reading_order()])}.png")
        render_scene(scene).save(files[-1], optimize=True)
    for seed in CLIP_SEEDS:
        clip = generate_clip(FIRST_HELD_OUT_SEED + seed)
        files.append(folder / f"{format_file_stem([clip.hero.kind])}_{clip.event.what}.mp4")
        encode_video(clip, files[-1])
    return files


def encode_video(clip: Clip, file: Path) -> None:
    """Write a clip as an H.264 video of two frames per second."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(2), options={"crf": "10", "preset": "veryslow"})
        first = render_scene(clip.frames[0])
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuv420p"
        for scene in clip.frames:
            frame = av.VideoFrame.from_ndarray(np.asarray(render_scene(scene)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


if __name__ == "__main__":
    for path in write_examples(Path(sys.argv[1])):
        print(path)
