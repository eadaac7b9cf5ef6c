"""A finished comparison as plain data: rendered by the pages, downloaded as JSON, returned by the API."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmspec.app.io.images import Video
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.ui.comparison import AnswerLane, ComparisonRun, Difference
from mmspec.app.ui.credit import Credit
from mmspec.app.ui.model_store import RunSettings
from mmspec.app.ui.repeat_code import RunRequest, describe_request
from mmspec.app.ui.rounds import NOT_DRAFTED, Round, classify_tokens
from mmspec.app.ui.streamer import detokenize, token_label
from mmspec.app.ui.thumbnails import TimedImage, draw_media
from mmspec.app.ui.visible_tokens import draw_visible_tokens, uses_center_crop, visible_tokens_to_dict
from mmspec.app.versions import mmspec_version
from mmspec.hints import looks_like_path


@dataclass(frozen=True)
class AnswerTrace:
    """One answer, token by token, for rendering and replay.

    Attributes:
        name: of the lane; see `AnswerLane`.
        drafter: that drafted it; None for plain `generate`.
        token_texts: text of each token; joined, the answer.
        token_times: seconds from the start to each token.
        token_kinds: "accepted", "corrected" or "plain" for each token.
        total_s: seconds of the whole answer.
        tokens_per_s: tokens per second after the first.
        speedup: ratio of `tokens_per_s` to that of plain `generate`; None if it is not measured.
        identical: whether it is the plain answer; None if one is empty.
        credit: of the loop and of the drafts; None for the baseline.
        round_lengths: tokens that each forward after the prompt's emitted.
    """

    name: str
    drafter: str | None
    token_texts: tuple[str, ...]
    token_times: tuple[float, ...]
    token_kinds: tuple[str, ...]
    total_s: float
    tokens_per_s: float = 0.0
    speedup: float | None = None
    identical: bool | None = None
    credit: Credit | None = None
    round_lengths: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.token_texts)


@dataclass(frozen=True, eq=False)
class Report:
    """A finished comparison. Equality is identity, so that Gradio compares two states without their content.

    Attributes:
        question: as sent to the model.
        plain: answer of plain `generate`.
        lanes: answers of mmspec, one per drafter.
        rounds: of the first lane.
        token_labels: {token id: label in a drawn tree}.
        identical: whether both answers are equal; None if one is empty.
        verdict: the same as one line of text.
        metrics: numbers, ready for JSON.
        image_uris: pictures as data URIs, with the tokens that the drafter did not read greyed.
        media: small pictures of the input, frames with their times.
        is_clip: the input is a clip.
        file_name: of the input, without a folder.
        turns: earlier turns of the conversation.
        request: what the processor and `generate` were given, for code that repeats the run.
    """

    question: str
    plain: AnswerTrace
    lanes: tuple[AnswerTrace, ...]
    rounds: tuple[Round, ...]
    token_labels: dict[int, str]
    identical: bool | None
    verdict: str
    metrics: dict[str, Any]
    image_uris: tuple[str, ...] = ()
    media: tuple[TimedImage, ...] = ()
    is_clip: bool = False
    file_name: str = ""
    turns: tuple[ChatTurn, ...] = ()
    request: RunRequest = field(default_factory=RunRequest)

    @property
    def mmspec(self) -> AnswerTrace:
        """The first lane."""
        return self.lanes[0]

    @property
    def best(self) -> AnswerTrace:
        """The fastest lane of mmspec, which the headline names."""
        return max(self.lanes, key=lambda lane: lane.speedup or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "question": self.question,
            "badge": self.verdict,
            **self.metrics,
            "plain": _trace_to_dict(self.plain, self.metrics["sides"]["plain"]),
            "mmspec": _trace_to_dict(self.mmspec, self.metrics["sides"]["mmspec"]),
            "more_lanes": [_trace_to_dict(lane, self.metrics["sides"][lane.name]) for lane in self.lanes[1:]],
            "rounds": [asdict(item) for item in self.rounds],
            "names": {str(token): label for token, label in self.token_labels.items()},
        }


def _trace_to_dict(trace: AnswerTrace, metrics: dict[str, Any]) -> dict[str, Any]:
    rows = zip(trace.token_texts, trace.token_times, trace.token_kinds, strict=True)
    tokens = [{"text": text, "t": round(time_s, 6), "kind": kind} for text, time_s, kind in rows]
    return {"answer": trace.text, "drafter": trace.drafter, **metrics, "tokens": tokens}


def build_report(comparison: ComparisonRun) -> Report:
    """The report of a run that has ended and whose model was loaded."""
    assert comparison.loaded_model is not None
    tokenizer = comparison.loaded_model.processor.tokenizer
    rounds = comparison.mmspec.rounds
    token_ids = {token for item in rounds for token in (*item.tokens, *item.emitted)}
    visible = comparison.visible_tokens
    is_cropped = uses_center_crop(comparison.loaded_model.processor)
    image_uris = draw_visible_tokens(comparison.media, visible, is_cropped) if visible else []
    return Report(
        question=comparison.question,
        plain=_build_trace(comparison, comparison.plain),
        lanes=tuple(_build_trace(comparison, lane) for lane in comparison.lanes),
        rounds=tuple(rounds),
        token_labels={token: token_label(tokenizer, token) for token in token_ids},
        identical=comparison.identical,
        verdict=format_verdict(comparison),
        metrics=collect_metrics(comparison),
        image_uris=tuple(image_uris),
        media=tuple(draw_media(comparison.media)),
        is_clip=isinstance(comparison.media, Video),
        file_name=comparison.file_name,
        turns=comparison.turns,
        request=describe_request(comparison),
    )


def _build_trace(comparison: ComparisonRun, lane: AnswerLane) -> AnswerTrace:
    assert comparison.loaded_model is not None
    rounds, num_tokens = lane.rounds, len(lane.streamer.token_ids)
    is_plain = lane is comparison.plain
    return AnswerTrace(
        name=lane.name,
        drafter=lane.resolved_drafter,
        token_texts=tuple(detokenize(comparison.loaded_model.processor.tokenizer, lane.streamer.token_ids)),
        token_times=tuple(lane.streamer.token_times),
        token_kinds=tuple([NOT_DRAFTED] * num_tokens if is_plain else classify_tokens(rounds, num_tokens)),
        total_s=lane.total_s,
        tokens_per_s=lane.tokens_per_s,
        speedup=None if is_plain else comparison.speedup_decode(lane),
        identical=None if is_plain else comparison.is_identical(lane),
        credit=None if is_plain else comparison.credit(lane),
        round_lengths=(1,) * (num_tokens - 1) if is_plain else tuple(len(item.emitted) for item in rounds[1:]),
    )


def format_verdict(comparison: ComparisonRun) -> str:
    """Whether all answers are equal, in one line."""
    if comparison.identical is None:
        return "Stopped before all lanes had answered"
    differing = next((lane for lane in comparison.lanes if lane.difference is not None), None)
    if differing is not None and differing.difference is not None:
        assert comparison.loaded_model is not None
        difference, tokenizer = differing.difference, comparison.loaded_model.processor.tokenizer
        plain, ours = (token_label(tokenizer, token) for token in (difference.plain, difference.mmspec))
        margin = "not measured" if math.isnan(difference.margin) else f"{difference.margin:.2e}"
        position = difference.index + 1
        return f"Outputs differ from token {position} on: {plain} (plain), {ours} (mmspec); logit margin {margin}"
    num_equal = min(len(lane.streamer.token_ids) for lane in (comparison.plain, *comparison.lanes))
    if comparison.cancelled:
        return f"Outputs identical up to token {num_equal}, where the run was stopped"
    return f"Outputs identical: all {num_equal} tokens"


def collect_metrics(comparison: ComparisonRun) -> dict[str, Any]:
    """The numbers of a run, those of mmspec for its first lane. They are `mmspec.stats` of its call."""
    assert comparison.loaded_model is not None
    lane, model = comparison.mmspec, comparison.loaded_model.model
    return {
        "identical": comparison.identical,
        "stopped": comparison.cancelled,
        "difference": _difference_to_dict(lane.difference) if lane.difference else None,
        "speedup_decode": comparison.speedup_decode(lane),
        "speedup_e2e": comparison.speedup_e2e(lane),
        "speedup_loop": comparison.credit(lane).loop,
        "speedup_drafts": comparison.credit(lane).drafts,
        "why_not_drafted": comparison.credit(lane).reason or None,
        "tau": lane.stats.tau,
        "R": comparison.round_cost(lane),
        "vision_s": comparison.encode_s,
        "vision_reused": comparison.is_media_reused,
        "visible_tokens": visible_tokens_to_dict(comparison.visible_tokens) if comparison.visible_tokens else None,
        "prompt_tokens": comparison.prompt_tokens,
        "choice": settings_to_dict(comparison.settings),
        "stats": lane.stats.as_dict(),
        "run": {
            "mmspec": mmspec_version(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "description": comparison.loaded_model.description,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "sides": {one.name: _lane_metrics(one) for one in (comparison.plain, *comparison.lanes)},
    }


def settings_to_dict(settings: RunSettings) -> dict[str, Any]:
    """Folders are shortened to their name."""
    names = {key: _shorten_folder(getattr(settings, key)) for key in ("model", "drafter")}
    return asdict(settings) | names


def _shorten_folder(name: str) -> str:
    """The name of a folder without those above it, which pages do not tell; a hub id stays as it is."""
    return Path(name).name if looks_like_path(name) or Path(name).is_dir() else name


def _difference_to_dict(difference: Difference) -> dict[str, Any]:
    margin = None if math.isnan(difference.margin) else difference.margin  # JSON has no nan
    return {"column": difference.index, "plain": difference.plain, "mmspec": difference.mmspec, "margin": margin}


def _lane_metrics(lane: AnswerLane) -> dict[str, Any]:
    stats = lane.stats
    if lane.drafter is not None and stats.calls and not stats.fallback_calls:
        return {
            "n_tokens": stats.tokens,
            "tokens_per_s": stats.tokens_per_s,
            "ttft_s": stats.ttft_s,
            "decode_s": stats.decode_s,
            "total_s": stats.total_s,
        }
    return {
        "n_tokens": len(lane.streamer.token_ids),
        "tokens_per_s": lane.streamer.tokens_per_s,
        "ttft_s": lane.ttft_s,
        "decode_s": lane.decode_s,
        "total_s": lane.total_s,
    }


class TempStorage:
    """A temporary folder for uploads, results and reports. Old files are removed, and all of them by `close`."""

    def __init__(self, max_age_s: float = 3600.0) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mmspec-demo-"))
        self.max_age_s = max_age_s

    def new_folder(self) -> Path:
        """Create an empty folder with a random name."""
        self.remove_expired()
        folder = self.root / "runs" / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder

    def write_report(self, report: Report) -> Path:
        """Write a report as JSON and return its path."""
        return self.write_text("mmspec-run.json", json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file into a new folder and return its path."""
        file = self.new_folder() / name
        file.write_text(text, encoding="utf-8")
        return file

    def remove_expired(self) -> None:
        """Remove folders older than `max_age_s` seconds."""
        now = time.time()
        for folder in (self.root / "runs").glob("*"):
            if now - folder.stat().st_mtime > self.max_age_s:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)
