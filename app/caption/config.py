"""What a caption job was asked for, in one frozen value; which of it decides the captions, and who does which share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmspec.app.errors import UsageError

if TYPE_CHECKING:
    from mmspec.interfaces import FrameSampler

SCENES_MODEL = "scenes"
DEFAULT_MODEL = SCENES_MODEL
"""Of the commands that show or measure mmspec: the bundled toy model. `mmspec caption` has no default."""
PROMPT = "Describe the image."
VIDEO_PROMPT = "Describe the video."
FRAMES = 8
SAMPLERS = ("uniform", "differing")
"""How the frames of a clip are chosen."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_PIXELS = 64_000_000
T = TypeVar("T")


@dataclass(frozen=True)
class CaptionConfig:
    """Options of `mmspec caption`, named like its flags.

    Attributes:
        prompt: None is `PROMPT` for pictures and `VIDEO_PROMPT` for clips. frames: of a clip, at most.
        fps: so many frames of each second of a clip, or None. sampler: one of `SAMPLERS`.
        compare: how many pictures to decode plainly as well; 0 none, -1 all.
        progress: True or False, or None for "if standard error is a terminal".
    """

    paths: tuple[str, ...]
    model: str
    out: str = "-"
    drafter: str = "auto"
    compressor: str | None = None
    prompt: str | None = None
    frames: int = FRAMES
    fps: float | None = None
    sampler: str = SAMPLERS[0]
    batch_size: int = 8
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    shard: tuple[int, int] = (0, 1)
    overwrite: bool = False
    retry_errors: bool = False
    compare: int = 0
    max_pixels: int = MAX_PIXELS
    threads: int = 4
    progress: bool | None = None

    def fingerprint(self, world_size: int) -> dict[str, Any]:
        """What decides the captions: a job is resumed only with the same.

        Drafter, compressor and device cannot change a caption.

        When sampling, the words of a picture also depend on which others share its batch.
        """
        model = os.path.abspath(self.model) if Path(self.model).is_dir() else self.model
        decisive: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "frames": self.frames,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop),
            "dtype": self.dtype,
        }
        # Said only where it is not usual, so that jobs from before these choices can be gone on with.
        decisive |= {"fps": self.fps} if self.fps is not None else {}
        decisive |= {"sampler": self.sampler} if self.sampler != SAMPLERS[0] else {}
        if self.temperature > 0:
            decisive |= {"seed": self.seed, "batch_size": self.batch_size}
            decisive |= {"shard": "{}/{}".format(*self.shard), "processes": world_size}
        return decisive

    def frame_sampler(self) -> FrameSampler:
        """What chooses the frames of a clip.

        Raises:
            UsageError: frames by the second and frames that differ, of which there can be one; more frames than a
                sampler looks at.
        """
        from mmspec.vision.video.samplers import MAX_CANDIDATES, Fps, MostDifferent, Uniform

        if self.sampler == "differing":
            if self.fps is not None:
                raise UsageError("--fps spreads frames evenly, --sampler differing does not: give one of them")
            if self.frames > MAX_CANDIDATES:
                raise UsageError(
                    f"--sampler differing chooses among {MAX_CANDIDATES} frames; got --frames {self.frames}"
                )
            return MostDifferent(self.frames, max(64, self.frames))
        return Uniform(self.frames) if self.fps is None else Fps(self.fps, self.frames)


@dataclass(frozen=True)
class ProcessInfo:
    """Which of several processes this is, as `accelerate launch` and `torchrun` say in the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> ProcessInfo:
        """Read RANK, WORLD_SIZE and LOCAL_RANK."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        try:
            rank, world, local = (int(environ.get(name, default)) for name, default in zip(names, "010", strict=True))
        except ValueError as error:
            raise UsageError(f"{', '.join(names)} in the environment must be numbers: {error}") from error
        if not 0 <= rank < world:
            raise UsageError(f"RANK must be from 0 to WORLD_SIZE - 1; got RANK={rank} and WORLD_SIZE={world}")
        return ProcessInfo(rank, world, local)


def shard_items(items: Sequence[T], shard: tuple[int, int], place: ProcessInfo) -> tuple[Sequence[T], Sequence[T]]:
    """The items of this shard, and those of them that are this process's."""
    ours = items[shard[0] :: shard[1]]
    return ours, ours[place.rank :: place.world_size]


def split_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Fixed batches. They never depend on what is done already, so that a resumed job sees the same ones."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def derive_seed(seed: int, index: int) -> int:
    """A seed for the batch that begins with picture `index`; the same however often the job was stopped."""
    digest = hashlib.sha256(f"mmspec:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:7])


def default_prompt(is_clip: bool) -> str:
    """What is asked of a picture or a clip if nobody says otherwise."""
    return VIDEO_PROMPT if is_clip else PROMPT


def prompt_sha1(text: str) -> str:
    """Short name of a prompt."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


__all__ = [
    "DEFAULT_MODEL",
    "DTYPES",
    "FRAMES",
    "MAX_PIXELS",
    "PROMPT",
    "SAMPLERS",
    "SCENES_MODEL",
    "VIDEO_PROMPT",
    "CaptionConfig",
    "ProcessInfo",
    "default_prompt",
    "derive_seed",
    "prompt_sha1",
    "shard_items",
    "split_batches",
]
