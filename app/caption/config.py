"""Configuration of a caption job, the part of it that determines the captions, and the shard of each process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.option_fields import PROMPT, VIDEO_PROMPT, CaptionOptions
from mmspec.app.caption.schema import schema_columns
from mmspec.app.cli.arguments import DEFAULT_MODEL
from mmspec.app.cli.options import described
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.fields import answer_number, field_names
from mmspec.app.io.table_options import TableOptions

if TYPE_CHECKING:
    from mmspec.app.io.item import SourceOptions
    from mmspec.app.modeling.prompt_format import ChatFormat
    from mmspec.app.modeling.sampling import Sampling
    from mmspec.interfaces import FrameSampler

SCENES_MODEL = DEFAULT_MODEL
"""The bundled toy model. `mmspec caption` has no default."""
MAX_PIXELS = 64_000_000
"""Pixels of a picture or frame, above which it is not decoded."""


@dataclass(frozen=True)
class CaptionConfig(CaptionOptions):
    """A caption job.

    Attributes:
        pixel_limit: pictures with more pixels are refused.
    """

    pixel_limit: int = MAX_PIXELS

    def fingerprint(self, world_size: int) -> dict[str, Any]:
        """The settings that determine the captions: a job is resumed only with the same ones.

        Drafter, compressor and device cannot change a caption. When sampling, a caption also depends on its batch.
        Options that were not there in earlier versions count where they are set, so that older jobs can be resumed.
        """
        is_sampled = self.temperature > 0
        found: dict[str, Any] = {}
        for name, one in described(CaptionConfig).items():
            value = getattr(self, name)
            is_set = value != one.default
            if (
                one.decides == "always"
                or (is_set and one.decides == "if set")
                or (is_sampled and one.decides == "if sampled" and (is_set or name != "limit"))
            ):
                found[name] = list(value) if isinstance(value, tuple) else value
        found["model"] = os.path.abspath(self.model) if Path(self.model).is_dir() else self.model
        derived = {
            "prompts": lambda: [prompt_sha1(prompt) for prompt in self.prompts],
            "root": lambda: os.path.abspath(self.root or ""),
            "fields": lambda: list(self.columns()),
            "shard": lambda: "{}/{}".format(*self.shard),
        }
        found |= {name: make() for name, make in derived.items() if name in found}
        return found | ({"batches": "by visual tokens", "processes": world_size} if is_sampled else {})

    def to_run_again(self) -> dict[str, Any]:
        """The options of the file beside an output: all that are set, with paths that do not depend on the folder."""
        from mmspec.app.io.content import is_local

        def absolute(name: str) -> str:
            return os.path.abspath(name) if os.path.exists(name) else name

        found = {name: getattr(self, name) for name, one in described(CaptionConfig).items() if one.in_file}
        found |= {name: absolute(found[name]) for name in ("model", "drafter", "root") if found[name]}
        found |= {name: os.path.abspath(found[name]) for name in ("out", "report") if found[name] not in (None, "-")}
        found |= {"shard": "{}/{}".format(*self.shard)} | ({"compare": "all"} if self.compare < 0 else {})
        paths = [os.path.join(os.getcwd(), path) if is_local(path) else path for path in self.paths]
        return {"paths": paths} | {name: value for name, value in found.items() if value not in ((), {})}

    def columns(self) -> tuple[str, ...]:
        """The columns of the rows.

        Raises:
            UsageError: `fields` names one that does not exist.
        """
        from mmspec.app.io.columns import ROW_COLUMNS, choose_columns

        own = choose_columns(self.fields, bool(self.compare)) if self.fields else tuple(ROW_COLUMNS)
        return (*own, *schema_columns(self.json_schema))

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        from mmspec.app.modeling.sampling import Sampling

        return Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty)

    def chat_format(self) -> ChatFormat:
        """What the model is given besides prompts and pictures."""
        from mmspec.app.modeling.prompt_format import ChatFormat

        return ChatFormat(
            self.system_prompt, self.chat_template_kwargs, self.max_pixels, in_place=True, start=self.start
        )

    @property
    def prompt_fields(self) -> tuple[str, ...]:
        """The fields of rows that the prompts name."""
        texts = (*self.prompts, self.prompt or "")
        return tuple(dict.fromkeys(name for text in texts for name in field_names(text) if not answer_number(name)))

    @property
    def uses_answers(self) -> bool:
        """Whether a prompt names the answer to another."""
        return any(answer_number(name) for text in self.prompts for name in field_names(text))

    @property
    def has_shards(self) -> bool:
        """Whether the output is a folder of shards."""
        return self.format in ("parquet", "webdataset")

    @property
    def writes_texts(self) -> bool:
        """Whether the output is a text file for each picture."""
        return self.format in ("txt", "caption")

    @property
    def num_variants(self) -> int:
        """Rows of a picture without a prompt of its own."""
        return max(1, len(self.prompts)) * self.num_captions

    @property
    def stores_pictures(self) -> bool:
        """Whether the output holds the pictures beside their captions."""
        return self.format == "webdataset"

    def source_options(self, base: Path) -> SourceOptions:
        """How inputs are read; names in the rows are relative to `base`, ids to where the output is."""
        from mmspec.app.io.item import SourceOptions

        return SourceOptions(
            base,
            base.parent if self.has_shards else base,
            self.limit,
            self.prompt_fields,
            **{name: getattr(self, name) for name in described(TableOptions)},
        )

    def frame_sampler(self) -> FrameSampler:
        """The sampler of video frames.

        Raises:
            UsageError: more frames than are read of a clip.
        """
        from mmspec.vision.video.samplers import MAX_CANDIDATES, Fps, Uniform

        if self.frames > MAX_CANDIDATES:
            raise UsageError(f"at most {MAX_CANDIDATES} frames of a clip are read; got --frames {self.frames}")
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
