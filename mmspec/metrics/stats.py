"""Counters and phase times of the decode loop, and the metrics derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.metrics.compression_stats import CompressionRecord


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round, by phase.

    Attributes:
        draft_s: `Drafter.propose` and `observe`, and the checks of the tree.
        score_s: the target's forward, sampling, acceptance, and the copy to the host.
        overhead_s: everything else.
    """

    draft_s: float
    score_s: float
    overhead_s: float


@dataclass
class Stats:
    """Counters of one call, or of all calls since `patch`. Times are wall-clock seconds.

    Attributes:
        calls: calls of `generate`.
        drafter: name of the drafter of the last call that used it, of EAGLE-3 heads with their visual mode, as in
            "name (placeholder)"; None before.
        fallback_calls: calls that transformers decoded alone.
        fallback_reason: reason of the last such call, or None.
        tokens: output tokens, padding after a row's end excluded.
        rounds: forwards of the target after the prefill.
        drafted_rounds: those of `rounds` that scored at least one draft token.
        row_rounds: `rounds`, counted once per active row.
        num_draft_tokens: draft tokens that were scored.
        num_accepted_tokens: draft tokens that were accepted.
        accept_length_hist: {tokens emitted by one row in one round: count}.
        tree_size_hist: {nodes of the scored tree: rounds}.
        reused_positions: positions of prompts that earlier calls had computed (`reuse_prefix`).
        prefill_s: prefill of the target, vision encoding excluded.
        draft_s: `Drafter.propose` and `observe`; without the draft itself in rounds that are recorded as a whole.
        score_s: the target's forward, sampling, and the copy to the host; the draft in rounds recorded as a whole.
        overhead_s: everything else in the loop.
        ttft_s: from the start of `generate` to the first token, vision encoding included; summed over calls.
        decode_s: from the first token to the last; summed over calls.
        total_s: whole calls.
        first_tokens: tokens that the prefill emitted (one per row and call).
        num_visual_tokens: visual tokens of prompts that a compressor was applied to.
        num_compressed_tokens: tokens that the drafter read instead of these.
        compressor_choices: {label such as "pool:49": rows}.
        row_tokens: `tokens` of each row of the last call.
        row_forwards: `row_rounds` of each row of the last call.
        waits_for: what the drafter may yet make, and what it would have saved so far; None for nothing.
        compression: result of the compressor for each row of the last call; empty if none was applied.
        copied_weight_bytes: of weights that were mapped from a file and are copied until `unpatch`, of `mmspec.stats`.
        description: what the model says of itself (`config.description`), of `mmspec.stats`; None if nothing.
    """

    calls: int = 0
    fallback_calls: int = 0
    fallback_reason: str | None = None
    drafter: str | None = None
    tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accept_length_hist: Counter[int] = field(default_factory=Counter)
    tree_size_hist: Counter[int] = field(default_factory=Counter)
    reused_positions: int = 0
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
    waits_for: str | None = None
    compression: list[CompressionRecord] = field(default_factory=list)
    copied_weight_bytes: int = 0
    description: str | None = None

    @property
    def tau(self) -> float:
        """Mean tokens emitted per active row and round, the target's own token included (1.0 is plain decoding).

        The prefill is not counted. Block efficiency in the papers (Leviathan et al., arXiv 2211.17192).
        """
        return (self.tokens - self.first_tokens) / self.row_rounds if self.row_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens as a fraction of the scored ones."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Conditional acceptance at depth 1, 2, ...: of the rounds that accepted all depths before, the fraction."""
        max_length = max(self.accept_length_hist, default=0)
        reached = [
            sum(count for length, count in self.accept_length_hist.items() if length > depth)
            for depth in range(max_length)
        ]
        return [after / before for before, after in pairwise(reached) if before]

    @property
    def round_s(self) -> float:
        """Mean seconds of one round."""
        return self.decode_s / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second from the first token to the last, the first ones excluded."""
        return (self.tokens - self.first_tokens) / self.decode_s if self.decode_s else 0.0

    def add_round(
        self,
        num_nodes: int,
        tree_sizes: Sequence[int],
        emitted_ids: Sequence[Sequence[int]],
        active: Sequence[bool],
        times: RoundTimes,
    ) -> None:
        """Count one round.

        Args:
            num_nodes: N of the scored tree.
            tree_sizes: nodes of each row's tree, padding excluded.
            emitted_ids: what each row emitted.
            active: the rows that could emit something.
            times: of the round.
        """
        num_drafted = sum(size - 1 for size, on in zip(tree_sizes, active, strict=True) if on)
        self.rounds += 1
        self.drafted_rounds += num_drafted > 0
        self.row_rounds += sum(active)
        self.tree_size_hist[num_nodes] += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += sum(len(ids) - 1 for ids, on in zip(emitted_ids, active, strict=True) if on)
        self.draft_s += times.draft_s
        self.score_s += times.score_s
        self.overhead_s += times.overhead_s
        for row, ids in enumerate(emitted_ids):
            if active[row]:
                self.row_forwards[row] += 1
                self.accept_length_hist[len(ids)] += 1

    def add_compression(self, records: list[CompressionRecord]) -> None:
        """Add the compressor's results of this call."""
        self.compression = records
        self.num_visual_tokens += sum(record.num_visual_tokens for record in records)
        self.num_compressed_tokens += sum(record.num_compressed_tokens for record in records)
        self.compressor_choices.update(record.choice for record in records)

    def add(self, call: Stats) -> None:
        """Add the counters of one more call; per-row lists, the drafter and the fallback reason become those of it."""
        for item in fields(self):
            old, new = getattr(self, item.name), getattr(call, item.name)
            if isinstance(old, Counter):
                old.update(new)
            elif item.name == "waits_for":
                self.waits_for = new
            elif item.name in ("fallback_reason", "drafter", "description"):
                setattr(self, item.name, new if new is not None else old)
            elif isinstance(old, list):
                setattr(self, item.name, list(new))
            else:
                setattr(self, item.name, old + new)

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived metrics, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("accept_length_hist", "tree_size_hist"):
            values[name] = {str(key): count for key, count in sorted(values[name].items())}
        values["compressor_choices"] = dict(sorted(self.compressor_choices.items()))
        values["compression"] = [record.as_dict() for record in self.compression]
        derived = ("tau", "acceptance_rate", "acceptance_by_depth", "round_s", "tokens_per_s")
        return values | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        reason = f", last reason: {self.fallback_reason}" if self.fallback_reason else ""
        compression = (
            f", drafter read {self.num_compressed_tokens}/{self.num_visual_tokens} visual tokens"
            if self.num_visual_tokens
            else ""
        )
        calls = f"{self.calls} calls ({self.fallback_calls} decoded by transformers{reason})"
        model = f"; the model: {self.description}" if self.description else ""
        if self.calls and self.fallback_calls == self.calls:  # whose tokens are not counted
            return f"{calls}, nothing drafted{model}"
        waits = f"; waits for {self.waits_for}" if self.waits_for else ""
        others = " of the others" if self.fallback_calls else ""
        return (
            f"{calls}, {self.tokens} tokens{others}, "
            f"tau {self.tau:.2f}, {self.tokens_per_s:.1f} tokens/s, "
            f"{self.num_accepted_tokens}/{self.num_draft_tokens} draft tokens accepted{compression}{waits}{model}"
        )
