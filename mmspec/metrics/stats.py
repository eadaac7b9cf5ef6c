"""Counters of what the loop did, phase times, and the numbers derived from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.metrics.compression_stats import CompressionRecord


@dataclass
class Stats:
    """What happened in one call, or in all calls since `patch`. Times are seconds of wall clock.

    Attributes:
        calls: calls of `generate`. plain_calls: those of them that transformers served alone.
        fallback: why the last plain call went that way, or None.
        tokens: tokens in the output, padding after a row's end not counted.
        rounds: forwards after the prefill. row_rounds: the same, counted per row that was still being decoded.
        drafted_rounds: those of `rounds` that scored at least one draft token.
        drafted, accepted: guessed tokens that were scored, and how many of them were kept.
        lengths: {tokens emitted by one row in one round: how often}. nodes: {tree size: rounds}.
        prefill_s: vision encoding by transformers not included. draft_s: proposing and learning. score_s: the target's
            forward, picking and the one copy to the host. rest_s: everything else in the loop.
        ttft_s: from the start of `generate` to the first token (vision encoding included), summed over calls.
        decode_s: from the first token to the last, summed over calls. total_s: whole calls.
        visual, visual_kept: visual tokens of prompts that a compressor was given, and how many it showed the drafter.
        ways: {what the compressor did: rows}.
        row_tokens, row_forwards: per row of the last call. shown: the same for what the drafter was shown of the
            pictures; empty if no compressor was asked.
    """

    calls: int = 0
    fallback_calls: int = 0
    fallback_reason: str | None = None
    tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accept_length_hist: Counter[int] = field(default_factory=Counter)
    tree_size_hist: Counter[int] = field(default_factory=Counter)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    score_s: float = 0.0
    overhead_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    first_tokens: int = 0
    num_visual_tokens: int = 0
    num_compressed_tokens: int = 0
    compressor_choices: Counter[str] = field(default_factory=Counter)
    row_tokens: list[int] = field(default_factory=list)
    row_forwards: list[int] = field(default_factory=list)
    compression: list[CompressionRecord] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens emitted per forward of a live row, correction included, prefill excluded (1.0 is plain decoding)."""
        return (self.tokens - self.first_tokens) / self.row_rounds if self.row_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted nodes that were kept."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the rounds that kept a guess at every depth before, the share that kept one at depth 1, 2, ... too."""
        longest = max(self.accept_length_hist, default=0)
        reached = [sum(n for size, n in self.accept_length_hist.items() if size > depth) for depth in range(longest)]
        return [after / before for before, after in pairwise(reached) if before]

    @property
    def round_s(self) -> float:
        """Mean seconds of one round."""
        return self.decode_s / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second, from the first token to the last."""
        return (self.tokens - self.first_tokens) / self.decode_s if self.decode_s else 0.0

    def add_compression(self, shown: list[CompressionRecord]) -> None:
        """Take in what the drafter was shown in this call."""
        self.compression = shown
        self.num_visual_tokens += sum(row.num_visual_tokens for row in shown)
        self.num_compressed_tokens += sum(row.num_compressed_tokens for row in shown)
        self.compressor_choices.update(row.choice for row in shown)

    def add(self, call: Stats) -> None:
        """Take in the numbers of one more call."""
        for item in fields(self):
            old, new = getattr(self, item.name), getattr(call, item.name)
            if isinstance(old, Counter):
                old.update(new)
            elif item.name == "fallback_reason":
                self.fallback_reason = new if new is not None else old
            elif isinstance(old, list):
                setattr(self, item.name, list(new))
            else:
                setattr(self, item.name, old + new)

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived numbers included, ready for JSON."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["accept_length_hist"] = {str(key): value for key, value in sorted(self.accept_length_hist.items())}
        plain["tree_size_hist"] = {str(key): value for key, value in sorted(self.tree_size_hist.items())}
        plain["compressor_choices"] = dict(sorted(self.compressor_choices.items()))
        plain["compression"] = [row.as_dict() for row in self.compression]
        derived = ("tau", "acceptance_rate", "acceptance_by_depth", "round_s", "tokens_per_s")
        return plain | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        how = f", last plain call because of {self.fallback_reason}" if self.fallback_reason else ""
        seen = (
            f", {self.num_compressed_tokens}/{self.num_visual_tokens} visual tokens shown to it"
            if self.num_visual_tokens
            else ""
        )
        return (
            f"{self.calls} calls ({self.fallback_calls} plain{how}), {self.tokens} tokens, tau {self.tau:.2f}, "
            f"{self.tokens_per_s:.1f} tokens/s, {self.num_accepted_tokens}/{self.num_draft_tokens} drafted tokens kept{seen}"
        )
