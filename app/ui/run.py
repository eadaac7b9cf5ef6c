"""One question on the device: the answer by mmspec, then by plain `generate`, then which part of the speed is drafts.

A `Run` is what a page sees of it: its `as_dict` is the one shape of an answer, stored, sent and drawn. `Run.work` is
called in the worker's thread; other threads may read the fields meanwhile.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

import mmspec
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import Media, Video, media_images
from mmspec.app.modeling.chat import ChatTurn, build_inputs, check_length
from mmspec.app.modeling.load import synchronize
from mmspec.app.modeling.sampling import Sampling
from mmspec.app.scenes.domain_check import looks_like_scene
from mmspec.app.ui.kept_media import KeptMedia
from mmspec.app.ui.lane import AnswerLane
from mmspec.app.ui.model import NO_DRAFTS, DemoModel
from mmspec.app.ui.thumbnails import draw_media
from mmspec.app.ui.uploads import StoredFile
from mmspec.app.ui.worker import CancelSignal
from mmspec.app.versions import mmspec_version
from mmspec.economy.store import unchanged_costs
from mmspec.vision.registry import build_compressor

SPLIT_TOKENS, SPLIT_PAIRS, SPLIT_S = 64, 3, 0.7
"""Tokens at most of a call that measures the share of drafts; pairs of such calls; seconds at most of one."""
NOISE = 1.05
"""Ratio below which drafts are not credited with anything."""
SEED = 0


@dataclass(frozen=True)
class RunSettings:
    """What a page may choose.

    Attributes:
        drafter: name from `DemoModel.drafters`.
        compressor: of the visual tokens that the drafter reads, one of `model.COMPRESSORS`.
        temperature: 0 is greedy decoding.
        max_new_tokens: per answer.
        tree_size: nodes of every draft tree; None lets the controller choose, as a page always does.
    """

    drafter: str = "auto"
    compressor: str = "none"
    temperature: float = 0.0
    max_new_tokens: int = 200
    tree_size: int | None = None


@dataclass
class Run:
    """One question and its two answers.

    Attributes:
        model: answers.
        file: of the picture or clip; None without one.
        load_media: decodes it, in the worker's thread, so that queued runs hold no pixels.
        turns: earlier turns of the conversation.
        question: as sent to the model.
        settings: of the run.
        signal: ends it.
        page: who asks; what was computed of the earlier turns is kept under this name. Empty: nothing is kept.
        kept: encoded pictures of pages.
        phase: "waiting", "encoding", "answering", "comparing", "measuring" or "done".
        encode_s: seconds of encoding the picture, once for both answers.
        file_id, after: of the file and of the turn before, as the page names them.
        split: measured parts of the speed-up, see `measure_split`; None where they are within noise or not measured.
    """

    model: DemoModel
    file: StoredFile | None
    load_media: Callable[[], Media | None]
    turns: Sequence[ChatTurn]
    question: str
    settings: RunSettings
    signal: CancelSignal = field(default_factory=CancelSignal)
    page: str = ""
    kept: KeptMedia = field(default_factory=KeptMedia)

    def __post_init__(self) -> None:
        self.id = secrets.token_urlsafe(9)
        self.phase = "waiting"
        self.encode_s = 0.0
        self.is_media_reused = False
        self.prompt_tokens = 0
        self.file_id: str | None = None
        self.after: str | None = None
        self.media: Media | None = None
        self.mmspec = AnswerLane("mmspec", self.settings.drafter)
        self.plain = AnswerLane("plain")
        self.split: dict[str, float] | None = None
        self.time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    @property
    def lanes(self) -> tuple[AnswerLane, AnswerLane]:
        """Both answers."""
        return self.mmspec, self.plain

    @property
    def num_equal(self) -> int:
        """Tokens before the first difference."""
        pairs = list(zip(self.mmspec.streamer.token_ids, self.plain.streamer.token_ids, strict=False))
        return next((index for index, (ours, plain) in enumerate(pairs) if ours != plain), len(pairs))

    @property
    def identical(self) -> bool | None:
        """Whether both answers are the same tokens; None before both are complete."""
        if not self.plain.total_s or self.signal.should_stop:
            return None
        return self.mmspec.streamer.token_ids == self.plain.streamer.token_ids

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain data."""
        tokenizer, images = self.model.tokenizer, [] if self.media is None else draw_media(self.media)
        is_strange = self.model.is_toy and self.media is not None and not looks_like_scene(media_images(self.media)[0])
        compression = self.mmspec.stats.compression
        return {
            "id": self.id,
            "question": self.question,
            "images": list(map(list, images)),
            "is_clip": isinstance(self.media, Video),
            "file_name": self.file.name if self.file else None,
            "file_id": self.file_id,
            "after": self.after,
            "turns": [asdict(turn) for turn in self.turns],
            "lanes": [lane.as_dict(tokenizer) for lane in self.lanes],
            "rounds": self.mmspec.rounds_as_dicts(tokenizer),
            "identical": self.identical,
            "num_equal": self.num_equal,
            "encode_s": self.encode_s,
            "is_media_reused": self.is_media_reused,
            "prompt_tokens": self.prompt_tokens,
            "visual_tokens": [compression[0].num_visual_tokens, compression[0].num_compressed_tokens]
            if compression
            else None,
            "is_strange": is_strange,
            "split": self.split,
            "settings": asdict(self.settings),
            "stats": self.mmspec.stats.as_dict(),
            "model": self.model.name,
            "description": self.model.description,
            "device": str(self.model.model.device),
            "dtype": str(self.model.model.dtype).removeprefix("torch."),
            "mmspec": mmspec_version(),
            "time": self.time,
        }

    @unchanged_costs()  # what scripts have learned of costs stays as it is
    def work(self, on_answered: Callable[[], None]) -> None:
        """Generate both answers. A cancelled run ends early with partial answers.

        Args:
            on_answered: called when both answers are complete, and again when the shares are measured.

        Raises:
            UsageError: the picture, the question or the settings are refused.
        """
        self.phase = "encoding"
        if not self.turns:
            self.model.forget(self.page)  # a first question is measured without what others have computed
        request = self.prepare()
        self.phase = "answering"
        self._speculate(request)
        self.phase = "comparing"
        if not self.signal.should_stop:
            with mmspec.disabled(self.model.model):
                self.generate(request, self.plain, streamer=self.plain.streamer)
        if not self.signal.should_stop:
            on_answered()
            self.phase = "measuring"
            self.split = self._measure_split(request)
            if not self.signal.should_stop:
                on_answered()
        self.phase = "done"

    def prepare(self) -> dict[str, Any]:
        """Decode and encode the picture; returns keyword arguments of `generate`.

        Raises:
            UsageError: the picture or the question is refused.
        """
        self.media = self.load_media()
        media = [() if self.media is None else self.media]
        inputs = build_inputs(self.model.model, self.model.processor, media, [self.question], [self.turns])
        self.prompt_tokens = inputs["input_ids"].shape[1]
        check_length(self.model.model, inputs, self.settings.max_new_tokens)
        request = inputs
        if self.media is not None:
            request, self.encode_s = self.kept.encode(self.page, self.model.model, inputs)
            self.is_media_reused = "mm_encoder_outputs" in request and not self.encode_s
        return request

    def options(self, drafter: str) -> dict[str, Any]:
        """`mmspec` options of a call with this drafter."""
        has_compressor = drafter != NO_DRAFTS and self.settings.compressor != "none"
        compressor = build_compressor(self.settings.compressor) if has_compressor else None
        return {
            "drafter": self.model.get_drafter(drafter),
            "compressor": compressor,
            "tree_size": self.settings.tree_size,
        }

    def _speculate(self, request: dict[str, Any]) -> None:
        lane, name = self.mmspec, self.settings.drafter
        try:
            options = self.options(name) | self.model.prompt_options(self.page, name)
            lane.drafter = options["drafter"].name
            ids = self.generate(request, lane, mmspec=options | {"observers": [lane.recorder]})
        except ValueError as error:  # the drafter does not take this compressor
            raise UsageError(one_line(error)) from error
        lane.streamer.truncate(len(ids))  # a cancelled run drops the rest of its last round
        if lane.streamer.token_ids != ids:  # transformers answered alone, and no round was observed
            lane.streamer.record(ids[len(lane.streamer.token_ids) :])
        lane.stats = mmspec.stats(self.model.model, last=True)

    def generate(
        self, request: dict[str, Any], lane: AnswerLane, max_new_tokens: int | None = None, **extra: Any
    ) -> list[int]:
        """Run `generate`, timed; returns the new token ids. `max_new_tokens` replaces that of the settings."""
        model, outputs = self.model.model, request.get("mm_encoder_outputs")
        if outputs is not None:
            request = request | {"mm_encoder_outputs": dict(outputs)}  # transformers may write into it
        options = Sampling(self.settings.temperature).generation_kwargs(model.generation_config)
        torch.manual_seed(SEED)
        synchronize(model.device)
        lane.streamer.start()
        lane.start_s = time.perf_counter()
        count = max_new_tokens or self.settings.max_new_tokens
        criteria = self.signal.stopping_criteria()
        output = model.generate(**request, **options, **extra, max_new_tokens=count, stopping_criteria=criteria)
        synchronize(model.device)
        lane.total_s = time.perf_counter() - lane.start_s
        ids: list[int] = output[0, request["input_ids"].shape[1] :].tolist()
        return ids

    def _measure_split(self, request: dict[str, Any]) -> dict[str, float] | None:
        """Seconds of the start of the answer without drafts over those with them, in turns; see `split_speedup`."""
        lane, plain = self.mmspec, self.plain
        count = min(SPLIT_TOKENS, len(plain.streamer.token_ids), int(SPLIT_S * lane.stats.tokens_per_s))
        if count < 8 or not lane.stats.drafted_rounds or lane.stats.fallback_calls or not self.identical:
            return None
        ratios = []
        for _ in range(SPLIT_PAIRS):
            seconds = []
            for name in (NO_DRAFTS, self.settings.drafter):
                self.generate(request, AnswerLane("split"), count, mmspec=self.options(name))
                seconds.append(mmspec.stats(self.model.model, last=True).decode_s)
                if self.signal.should_stop or not seconds[-1]:
                    return None
            ratios.append(seconds[0] / seconds[1])
        return split_speedup(ratios, lane.stats.tokens_per_s / plain.streamer.tokens_per_s, lane.stats.tau)


def split_speedup(ratios: Sequence[float], total: float, tau: float) -> dict[str, float] | None:
    """The parts of a speed-up of decoding: that of the loop without drafts, and that of the drafts.

    Args:
        ratios: seconds of the same tokens without drafts over with them, one of each pair of calls in turn.
        total: tokens per second of the answer over those of plain `generate`.
        tau: tokens per forward; drafts give at most that.

    Returns:
        "loop" and "drafts"; None where the drafts are within noise.
    """
    if min(ratios) < NOISE and max(ratios) > 1 / NOISE:
        return None
    drafts = min(median(ratios), tau)
    return {"loop": total / drafts, "drafts": drafts}
