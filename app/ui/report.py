"""A finished comparison as plain data: rendered by the pages, downloaded as JSON, returned by the API."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmspec.app.bench.rounds import NOT_DRAFTED, Round, classify_tokens
from mmspec.app.ui.comparison import ComparisonRun, ComparisonSide, Difference
from mmspec.app.ui.model_store import RunSettings
from mmspec.app.ui.streamer import detokenize, token_label
from mmspec.app.ui.visible_tokens import draw_visible_tokens, uses_center_crop, visible_tokens_to_dict
from mmspec.app.versions import mmspec_version


@dataclass(frozen=True)
class AnswerTrace:
    """One answer, token by token, for rendering and replay.

    Attributes:
        name: "plain" or "mmspec".
        token_texts: text of each token; joined, the answer.
        token_times: seconds from the start to each token.
        token_kinds: "accepted", "corrected" or "plain" for each token.
        total_s: seconds of the whole answer.
    """

    name: str
    token_texts: tuple[str, ...]
    token_times: tuple[float, ...]
    token_kinds: tuple[str, ...]
    total_s: float

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
        mmspec: answer of mmspec.
        rounds: of the mmspec call.
        token_labels: {token id: label in a drawn tree}.
        identical: whether both answers are equal; None if one is empty.
        verdict: the same as one line of text.
        metrics: numbers, ready for JSON.
        image_uris: pictures as data URIs, with the tokens that the drafter did not read greyed.
    """

    question: str
    plain: AnswerTrace
    mmspec: AnswerTrace
    rounds: tuple[Round, ...]
    token_labels: dict[int, str]
    identical: bool | None
    verdict: str
    metrics: dict[str, Any]
    image_uris: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "question": self.question,
            "badge": self.verdict,
            **self.metrics,
            "plain": _trace_to_dict(self.plain, self.metrics["sides"]["plain"]),
            "mmspec": _trace_to_dict(self.mmspec, self.metrics["sides"]["mmspec"]),
            "rounds": [asdict(item) for item in self.rounds],
            "names": {str(token): label for token, label in self.token_labels.items()},
        }


def _trace_to_dict(trace: AnswerTrace, metrics: dict[str, Any]) -> dict[str, Any]:
    rows = zip(trace.token_texts, trace.token_times, trace.token_kinds, strict=True)
    tokens = [{"text": text, "t": round(time_s, 6), "kind": kind} for text, time_s, kind in rows]
    return {"answer": trace.text, **metrics, "tokens": tokens}


def build_report(comparison: ComparisonRun) -> Report:
    """The report of a run that has ended and whose model was loaded."""
    assert comparison.loaded_model is not None
    tokenizer = comparison.loaded_model.processor.tokenizer
    rounds = comparison.rounds
    num_plain = len(comparison.plain.streamer.token_ids)
    num_tokens = len(comparison.mmspec.streamer.token_ids)
    token_ids = {token for item in rounds for token in (*item.tokens, *item.emitted)}
    visible = comparison.visible_tokens
    is_cropped = uses_center_crop(comparison.loaded_model.processor)
    image_uris = draw_visible_tokens(comparison.media, visible, is_cropped) if visible else []
    return Report(
        question=comparison.question,
        plain=_build_trace("plain", comparison.plain, tokenizer, [NOT_DRAFTED] * num_plain),
        mmspec=_build_trace("mmspec", comparison.mmspec, tokenizer, classify_tokens(rounds, num_tokens)),
        rounds=tuple(rounds),
        token_labels={token: token_label(tokenizer, token) for token in token_ids},
        identical=comparison.identical,
        verdict=format_verdict(comparison),
        metrics=collect_metrics(comparison),
        image_uris=tuple(image_uris),
    )


def _build_trace(name: str, side: ComparisonSide, tokenizer: Any, kinds: list[str]) -> AnswerTrace:
    texts = detokenize(tokenizer, side.streamer.token_ids)
    return AnswerTrace(name, tuple(texts), tuple(side.streamer.token_times), tuple(kinds), side.total_s)


def format_verdict(comparison: ComparisonRun) -> str:
    """Whether both answers are equal, in one line."""
    if comparison.identical is None:
        return "Stopped before both sides had answered"
    difference = comparison.difference
    if difference is not None:
        assert comparison.loaded_model is not None
        tokenizer = comparison.loaded_model.processor.tokenizer
        plain, ours = (token_label(tokenizer, token) for token in (difference.plain, difference.mmspec))
        margin = "not measured" if math.isnan(difference.margin) else f"{difference.margin:.2e}"
        position = difference.index + 1
        return f"Outputs differ from token {position} on: {plain} (plain), {ours} (mmspec); logit margin {margin}"
    num_equal = min(len(comparison.plain.streamer.token_ids), len(comparison.mmspec.streamer.token_ids))
    if comparison.cancelled:
        return f"Outputs identical up to token {num_equal}, where the run was stopped"
    return f"Outputs identical: all {num_equal} tokens"


def collect_metrics(comparison: ComparisonRun) -> dict[str, Any]:
    """The numbers of a run. Those of the mmspec side are `mmspec.stats` of its call."""
    assert comparison.loaded_model is not None
    stats, model = comparison.stats, comparison.loaded_model.model
    return {
        "identical": comparison.identical,
        "stopped": comparison.cancelled,
        "difference": _difference_to_dict(comparison.difference) if comparison.difference else None,
        "speedup_decode": comparison.speedup_decode,
        "speedup_e2e": comparison.speedup_e2e,
        "tau": stats.tau,
        "R": comparison.round_cost,
        "vision_s": comparison.encode_s,
        "visible_tokens": visible_tokens_to_dict(comparison.visible_tokens) if comparison.visible_tokens else None,
        "prompt_tokens": comparison.prompt_tokens,
        "choice": _settings_to_dict(comparison.settings),
        "stats": stats.as_dict(),
        "run": {
            "mmspec": mmspec_version(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "sides": {"plain": _side_metrics(comparison.plain), "mmspec": _mmspec_metrics(comparison)},
    }


def _settings_to_dict(settings: RunSettings) -> dict[str, Any]:
    """ "nodes" is the key of `tree_size` in files of earlier versions; model paths are shortened to their name."""
    return asdict(settings) | {"model": Path(settings.model).name, "nodes": settings.tree_size}


def _difference_to_dict(difference: Difference) -> dict[str, Any]:
    margin = None if math.isnan(difference.margin) else difference.margin  # JSON has no nan
    return {"column": difference.index, "plain": difference.plain, "mmspec": difference.mmspec, "margin": margin}


def _side_metrics(side: ComparisonSide) -> dict[str, Any]:
    return {
        "n_tokens": len(side.streamer.token_ids),
        "tokens_per_s": side.streamer.tokens_per_s,
        "ttft_s": side.ttft_s,
        "decode_s": side.decode_s,
        "total_s": side.total_s,
    }


def _mmspec_metrics(comparison: ComparisonRun) -> dict[str, Any]:
    stats = comparison.stats
    if not stats.calls or stats.fallback_calls:
        return _side_metrics(comparison.mmspec)
    return {
        "n_tokens": stats.tokens,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "total_s": stats.total_s,
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
        file = self.new_folder() / "mmspec-run.json"
        file.write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
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


__all__ = ["AnswerTrace", "Report", "TempStorage", "build_report", "collect_metrics", "format_verdict"]
