"""One answer of a question: its tokens, their times, and the rounds that gave them."""

from __future__ import annotations

import threading
from typing import Any

from mmspec.app.ui.rounds import Round, RoundRecorder, classify_tokens
from mmspec.app.ui.streamer import TimingStreamer, TokenTexts, token_label
from mmspec.metrics.stats import Stats


class AnswerLane:
    """One answer, token by token.

    Attributes:
        name: "mmspec" or "plain".
        drafter: that drafted it; None for plain `generate`.
        streamer: its tokens and their times.
        total_s: seconds of `generate`; 0 until it returns.
        stats: `mmspec.stats` of the call.
        recorder: of the rounds; None for plain `generate`.
    """

    def __init__(self, name: str, drafter: str | None = None) -> None:
        self.name, self.drafter = name, drafter
        self.streamer = TimingStreamer()
        self.recorder = None if drafter is None else RoundRecorder(self.streamer.record)
        self.start_s = self.total_s = 0.0
        self.stats = Stats()
        self._lock = threading.Lock()  # the page's thread and that of the device both ask what there is
        self._texts: TokenTexts | None = None

    def as_dict(self, tokenizer: Any, first: int = 0) -> dict[str, Any]:
        """The lane so far, from its token `first` on."""
        with self._lock:
            ids, times = list(self.streamer.token_ids), self.streamer.token_times
            rounds = self.recorder.rounds() if self.recorder is not None else []
            self._texts = self._texts or TokenTexts(tokenizer)
            texts = list(self._texts.decode(ids))
        kinds = classify_tokens(rounds, len(ids))
        owners = [number for number, one in enumerate(rounds) for _ in one.emitted]
        owners += [-1] * (len(ids) - len(owners))
        rows = zip(texts, times, kinds, owners, strict=False)
        is_speculative = self.recorder is not None and self.total_s and not self.stats.fallback_calls
        return {
            "name": self.name,
            "drafter": self.drafter,
            "first": first,
            "tokens": [[text, round(at, 5), kind, owner] for text, at, kind, owner in list(rows)[first:]],
            "seconds": round(self.total_s or self.streamer.elapsed_s, 5),
            "is_done": bool(self.total_s),
            "tokens_per_s": self.stats.tokens_per_s if is_speculative else self.streamer.tokens_per_s,
            "tau": self.stats.tau if is_speculative else 1.0,
            "num_rounds": self.stats.rounds,
            "num_drafted": self.stats.drafted_rounds,
            "num_reused": self.stats.reused_positions,
            "fallback": self.stats.fallback_reason if self.stats.fallback_calls else None,
        }

    def rounds_as_dicts(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The rounds, for drawing their trees: labels instead of ids."""
        with self._lock:
            rounds = self.recorder.rounds() if self.recorder is not None else []
        ends = [self.start_s, *(one.end_s for one in rounds)]
        return [_draw_round(one, tokenizer, one.end_s - end) for one, end in zip(rounds, ends, strict=False)]


def _draw_round(one: Round, tokenizer: Any, seconds: float) -> dict[str, Any]:
    scores = one.scores or (None,) * len(one.tokens)
    parents = [0.0 if parent < 0 else scores[parent] for parent in one.parents]
    shares = [
        round(min(1.0, score / above), 3) if score is not None and above else None
        for score, above in zip(scores, parents, strict=True)
    ]
    return {
        "start": one.start,
        "labels": [token_label(tokenizer, token) for token in one.tokens],
        "parents": list(one.parents),
        "shares": [None, *shares[1:]],
        "path": list(one.accepted_nodes),
        "emitted": [token_label(tokenizer, token) for token in one.emitted],
        "num_proposed": one.num_proposed,
        "num_accepted": one.num_accepted_tokens,
        "ms": round(1000 * seconds, 2),
    }
