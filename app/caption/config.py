"""Configuration of a caption job, the part of it that determines the captions, and the shard of each process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.errors import UsageError, one_line

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions
    from mmspec.app.modeling.prompt_format import ChatFormat
    from mmspec.app.modeling.sampling import Sampling
    from mmspec.interfaces import FrameSampler

SCENES_MODEL = "scenes"
DEFAULT_MODEL = SCENES_MODEL
"""Of the commands that show or measure mmspec: the bundled toy model. `mmspec caption` has no default."""
PROMPT = "Describe the image."
VIDEO_PROMPT = "Describe the video."
FRAMES = 8
DEFAULT_BATCH_SIZE = 16
"""Rows per batch: on two cores 1.15 times the rows per second of 8; 32 would add a fifteenth."""
SAMPLERS = ("uniform", "differing")
"""How the frames of a video are selected."""
FORMATS = ("jsonl", "parquet", "webdataset", "txt")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_PIXELS = 64_000_000
"""Pixels of a picture or frame, above which it is not decoded."""


@dataclass(frozen=True)
class CaptionConfig:
    """Options of `mmspec caption`, named like its flags.

    Attributes:
        prompt: None is `PROMPT` for images and `VIDEO_PROMPT` for videos.
        prompts: several, each a row of every picture; () for `prompt` alone.
        num_captions: rows for each prompt, which differ by sampling.
        reuse_prefix: what is computed of a picture and its prompt serves its other rows; None: if there are any, and in
            float32, where it changes no caption.
        frames: frames per video, at most.
        fps: frames per second of a video, or None for evenly spread ones.
        sampler: one of `SAMPLERS`.
        system_prompt: of every row; None for that of the chat template.
        chat_template_kwargs: variables of the chat template; thinking is off where the template can switch it.
        temperature: 0 is greedy. top_p, top_k, repetition_penalty: None for those of the model's own generation config.
        max_pixels: larger pictures and frames are shrunk to as many pixels; None: only as the processor does anyway.
        pixel_limit: larger ones are refused.
        compare: number of rows to decode with plain `generate` as well; 0 none, -1 all.
        progress: True or False, or None for a bar if standard error is a terminal.
        batch_size: rows per batch; `AUTO_BATCH_SIZE` to find it while the job runs.
        prefix, suffix: texts before and after each caption.
        report: folder of a report in HTML, or None.
        fields: columns of the rows besides those that a resumed job needs; None: all.
        format: of the output, one of `FORMATS`.
        rows_per_shard: of a Parquet file or an archive.
        ray: address of a Ray cluster, "" for one on this machine; None: without Ray.
        actors: of Ray, at most; None: one per GPU of the cluster, or per core if it has none.
        working_folder: that relative paths belong to, for workers of Ray; None: that of this process.
        image_column, prompt_column, id_column, split, urls, root: as in `SourceOptions`.
    """

    paths: tuple[str, ...]
    model: str
    out: str = "-"
    drafter: str = "auto"
    compressor: str | None = None
    prompt: str | None = None
    prompts: tuple[str, ...] = ()
    num_captions: int = 1
    reuse_prefix: bool | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    frames: int = FRAMES
    fps: float | None = None
    sampler: str = SAMPLERS[0]
    batch_size: int = DEFAULT_BATCH_SIZE
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    shard: tuple[int, int] = (0, 1)
    overwrite: bool = False
    retry_errors: bool = False
    compare: int = 0
    max_pixels: int | None = None
    pixel_limit: int = MAX_PIXELS
    threads: int = 4
    progress: bool | None = None
    working_folder: str | None = None
    image_column: str | None = None
    prompt_column: str | None = None
    id_column: str | None = None
    split: str = "train"
    urls: str | None = None
    root: str | None = None
    format: str = "jsonl"
    rows_per_shard: int = 1000
    fields: tuple[str, ...] | None = None
    report: str | None = None
    prefix: str = ""
    suffix: str = ""
    ray: str | None = None
    actors: int | None = None

    def fingerprint(self, world_size: int) -> dict[str, Any]:
        """The settings that determine the captions: a job is resumed only with the same ones.

        Drafter, compressor and device cannot change a caption. When sampling, a caption also depends on its batch.
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
        # Only where they differ from the default, so that jobs of versions without these options can be resumed.
        decisive |= {"fps": self.fps} if self.fps is not None else {}
        decisive |= {"prompts": [prompt_sha1(prompt) for prompt in self.prompts]} if self.prompts else {}
        decisive |= {"num_captions": self.num_captions} if self.num_captions > 1 else {}
        decisive |= {"sampler": self.sampler} if self.sampler != SAMPLERS[0] else {}
        columns = {"image_column": self.image_column, "prompt_column": self.prompt_column, "id_column": self.id_column}
        decisive |= {key: name for key, name in columns.items() if name is not None}
        decisive |= {"split": self.split} if self.split != "train" else {}
        decisive |= {"root": os.path.abspath(self.root)} if self.root is not None else {}
        optional = ("system_prompt", "max_pixels", "top_p", "top_k", "repetition_penalty")
        decisive |= {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        decisive |= {name: getattr(self, name) for name in ("prefix", "suffix") if getattr(self, name)}
        decisive |= {"fields": list(self.columns())} if self.fields is not None else {}
        decisive |= {"chat_template_kwargs": dict(self.chat_template_kwargs)} if self.chat_template_kwargs else {}
        if self.temperature > 0:
            decisive |= {"seed": self.seed, "batch_size": self.batch_size, "batches": "by visual tokens"}
            decisive |= {"shard": "{}/{}".format(*self.shard), "processes": world_size}
        return decisive

    def columns(self) -> tuple[str, ...]:
        """The columns of the rows.

        Raises:
            UsageError: `fields` names one that does not exist.
        """
        from mmspec.app.io.columns import ROW_COLUMNS, choose_columns

        return tuple(ROW_COLUMNS) if self.fields is None else choose_columns(self.fields, bool(self.compare))

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        from mmspec.app.modeling.sampling import Sampling

        return Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty)

    def chat_format(self) -> ChatFormat:
        """What the model is given besides prompts and pictures."""
        from mmspec.app.modeling.prompt_format import ChatFormat

        return ChatFormat(self.system_prompt, self.chat_template_kwargs, self.max_pixels, in_place=True)

    @property
    def num_variants(self) -> int:
        """Rows of a picture without a prompt of its own."""
        return max(1, len(self.prompts)) * self.num_captions

    @property
    def planned_batch_size(self) -> int:
        """Rows of a batch; the largest that is tried if the size is to be found."""
        from mmspec.app.caption.batch_size import AUTO_BATCH_SIZE, MAX_AUTO_SIZE

        return MAX_AUTO_SIZE if self.batch_size == AUTO_BATCH_SIZE else self.batch_size

    @property
    def stores_pictures(self) -> bool:
        """Whether the output holds the pictures beside their captions."""
        return self.format == "webdataset"

    def source_options(self, base: Path) -> SourceOptions:
        """How inputs are read; names in the rows are relative to `base`, ids to where the output is."""
        from mmspec.app.io.item import SourceOptions

        return SourceOptions(
            base,
            self.image_column,
            self.prompt_column,
            self.id_column,
            self.split,
            self.urls,
            self.root,
            base.parent if self.format in ("parquet", "webdataset") else base,
        )

    def frame_sampler(self) -> FrameSampler:
        """The sampler of video frames.

        Raises:
            UsageError: `fps` with the sampler "differing"; more frames than are read of a clip.
        """
        from mmspec.vision.video.samplers import MAX_CANDIDATES, Fps, MostDifferent, Uniform

        if self.frames > MAX_CANDIDATES:
            raise UsageError(f"at most {MAX_CANDIDATES} frames of a clip are read; got --frames {self.frames}")
        if self.sampler == "differing":
            if self.fps is not None:
                raise UsageError("--fps spreads frames evenly, --sampler differing does not: give one of them")
            return MostDifferent(self.frames, max(64, self.frames))
        return Uniform(self.frames) if self.fps is None else Fps(self.fps, self.frames)


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of this process, as `accelerate launch` and `torchrun` set it in the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> ProcessInfo:
        """Read RANK, WORLD_SIZE and LOCAL_RANK."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        try:
            rank, world, local = (int(environ.get(name) or default) for name, default in zip(names, "010", strict=True))
        except ValueError as error:
            raise UsageError(
                f"{', '.join(names)} in the environment must be numbers ({one_line(error, 100)}); for one, unset them"
            ) from error
        if not 0 <= rank < world or (world > 1 and not environ.get("RANK")):
            raise UsageError(
                f"RANK must be from 0 to WORLD_SIZE - 1; got RANK={environ.get('RANK') or 'nothing'} and "
                f"WORLD_SIZE={environ.get('WORLD_SIZE') or 'nothing'}: for one process, unset them"
            )
        return ProcessInfo(rank, world, local)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the batch that begins at `index`; independent of interruptions."""
    digest = hashlib.sha256(f"mmspec:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:7])


def default_prompt(is_video: bool) -> str:
    """The prompt of an image or a video without one of its own."""
    return VIDEO_PROMPT if is_video else PROMPT


@lru_cache(maxsize=4096)
def prompt_sha1(text: str) -> str:
    """SHA-1 of a prompt, which identifies it in a row."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
