"""A finished race as plain data: what the pages draw, what can be downloaded, what the API returns."""

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

from mmspec.app.bench.rounds import PLAIN, Round, classify_tokens
from mmspec.app.ui.comparison import ComparisonRun, ComparisonSide, Difference
from mmspec.app.ui.streamer import detokenize, token_label
from mmspec.app.ui.visible_tokens import draw_visible_tokens, uses_center_crop, visible_tokens_to_dict
from mmspec.app.versions import mmspec_version


@dataclass(frozen=True)
class AnswerTrace:
    """One side, ready to be shown and played again: per token its piece of text, its second, its kind."""

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
    """A finished race. Each is itself alone, so that Gradio need not look into it to see whether it is another.

    Attributes:
        plain, mmspec: both sides. rounds: of mmspec's. names: token -> how it is shown in a tree.
        badge: whether both said the same, in one line. figures: the numbers, ready for JSON.
        marked: the pictures as data URIs, with what the drafter saw of them.
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
            "rounds": [asdict(one) for one in self.rounds],
            "names": {str(token): name for token, name in self.token_labels.items()},
        }


def _trace_to_dict(track: AnswerTrace, figures: dict[str, Any]) -> dict[str, Any]:
    rows = zip(track.token_texts, track.token_times, track.token_kinds, strict=True)
    tokens = [{"text": text, "t": round(at, 6), "kind": kind} for text, at, kind in rows]
    return {"answer": track.text, **figures, "tokens": tokens}


def build_report(comparison: ComparisonRun) -> Report:
    """The report of a race that is over and has been loaded."""
    assert comparison.loaded_model is not None
    tokenizer = comparison.loaded_model.processor.tokenizer
    rounds = comparison.rounds
    ours = len(comparison.mmspec.streamer.token_ids)
    known = {token for one in rounds for token in (*one.tokens, *one.emitted)}
    return Report(
        question=comparison.question,
        plain=_build_trace("plain", comparison.plain, tokenizer, [PLAIN] * len(comparison.plain.streamer.token_ids)),
        mmspec=_build_trace("mmspec", comparison.mmspec, tokenizer, classify_tokens(rounds, ours)),
        rounds=tuple(rounds),
        token_labels={token: token_label(tokenizer, token) for token in known},
        identical=comparison.identical,
        verdict=format_verdict(comparison),
        metrics=collect_metrics(comparison),
        image_uris=tuple(
            draw_visible_tokens(
                comparison.media, comparison.visible_tokens, uses_center_crop(comparison.loaded_model.processor)
            )
        )
        if comparison.visible_tokens
        else (),
    )


def _build_trace(name: str, side: ComparisonSide, tokenizer: Any, kinds: list[str]) -> AnswerTrace:
    tape = side.streamer
    return AnswerTrace(
        name, tuple(detokenize(tokenizer, tape.token_ids)), tuple(tape.token_times), tuple(kinds), side.total_s
    )


def format_verdict(comparison: ComparisonRun) -> str:
    """Whether both sides said the same, in one line."""
    found, same = (
        comparison.difference,
        min(len(comparison.plain.streamer.token_ids), len(comparison.mmspec.streamer.token_ids)),
    )
    if comparison.identical is None:
        return "Stopped before both sides had answered"
    if found is not None:
        assert comparison.loaded_model is not None
        mine, other = (
            token_label(comparison.loaded_model.processor.tokenizer, token) for token in (found.plain, found.mmspec)
        )
        return (
            f"Outputs differ from token {found.index + 1} on: {mine} (plain), {other} (mmspec); "
            f"logit margin {'not measured' if math.isnan(found.margin) else f'{found.margin:.2e}'}"
        )
    if comparison.cancelled:
        return f"Outputs identical as far as both came: {same} tokens, then stopped"
    return f"Outputs identical: all {same} tokens"


def collect_metrics(comparison: ComparisonRun) -> dict[str, Any]:
    """The numbers of a race. Those of mmspec's side are `mmspec.stats` of its call."""
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
        "drafter_saw": visible_tokens_to_dict(comparison.visible_tokens) if comparison.visible_tokens else None,
        "prompt_tokens": comparison.prompt_tokens,
        "choice": asdict(comparison.settings) | {"model": Path(comparison.settings.model).name},
        "stats": stats.as_dict(),
        "run": {
            "mmspec": mmspec_version(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "sides": {"plain": _side_metrics(comparison.plain), "mmspec": _mmspec_metrics(comparison)},
    }


def _difference_to_dict(found: Difference) -> dict[str, Any]:
    return asdict(found) | ({"margin": None} if math.isnan(found.margin) else {})  # JSON knows no nan


def _side_metrics(side: ComparisonSide) -> dict[str, Any]:
    return {
        "n_tokens": len(side.streamer.token_ids),
        "tokens_per_s": side.streamer.tokens_per_s,
        "ttft_s": side.ttft_s,
        "decode_s": side.decode_s,
        "total_s": side.total_s,
    }


def _mmspec_metrics(race: ComparisonRun) -> dict[str, Any]:
    stats = race.stats
    if not stats.calls or stats.fallback_calls:
        return _side_metrics(race.mmspec)
    return {
        "n_tokens": stats.tokens,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "total_s": stats.total_s,
    }


class TempStorage:
    """A folder for what the pages write. Old things in it are swept away, and all of it in the end."""

    def __init__(self, max_age_s: float = 3600.0) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mmspec-demo-"))
        self.max_age_s = max_age_s

    def new_folder(self) -> Path:
        """An empty folder of its own, with a name that nobody can guess."""
        self.remove_expired()
        made = self.root / "runs" / secrets.token_hex(8)
        made.mkdir(parents=True)
        return made

    def write_report(self, report: Report) -> Path:
        """The report as a file."""
        file = self.new_folder() / "mmspec-run.json"
        file.write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return file

    def remove_expired(self) -> None:
        """Remove what is older than `keep_s` seconds."""
        now = time.time()
        for folder in (self.root / "runs").glob("*"):
            if now - folder.stat().st_mtime > self.max_age_s:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


__all__ = ["AnswerTrace", "Report", "TempStorage", "build_report", "collect_metrics", "format_verdict"]
