"""Remarks of `research.bench --shape`: cost of a round, share of the bandwidth, launches and waits on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmspec.metrics.stats import Stats
from research.bench.bandwidth import WeightReading
from research.bench.peers.base import Peer, PeerPrompt
from research.bench.suite.runner import CallRecord
from research.bench.suite.summary import ALL, SuiteRow

SIMULATED = "@tau"
"""In the name of every peer whose acceptance is given."""
RUNTIME_CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaGraphLaunch"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""Calls of the CUDA runtime that the profiler counts."""


def round_notes(rows: Sequence[SuiteRow], calls: Sequence[CallRecord]) -> list[str]:
    """Of each row with rounds: tau, R (the cost of a round in rounds of `none`), and milliseconds by phase."""
    own = {row.batch: row for row in rows if row.peer == "none" and row.category == ALL}
    lines = []
    for row in (row for row in rows if row.category == ALL and row.tau is not None):
        total = Stats()
        for one in calls:
            if (one.peer, one.batch) == (row.peer, row.batch) and one.run is not None and one.run.stats is not None:
                total.add(one.run.stats)
        base = own.get(row.batch)
        if base is None or not (total.rounds and row.tau and row.ms_per_token and base.ms_per_token):
            continue
        phases = ", ".join(f"{name} {1e3 * getattr(total, f'{name}_s') / total.rounds:.2f}" for name in PHASES)
        gain = base.ms_per_token / row.ms_per_token
        what = "measured tau" if SIMULATED in row.peer else "tau"
        lines.append(
            f"{row.peer}, batch {row.batch}: {what} {row.tau:.2f}, R {row.tau / gain:.2f}, {gain:.2f}x `none`; "
            f"ms a round: {phases}"
        )
    return lines


PHASES = ("score", "draft", "overhead")
"""Of a round, as `Stats` names them."""


def bandwidth_notes(rows: Sequence[SuiteRow], reading: WeightReading) -> list[str]:
    """Share of the measured bandwidth that rows of batch 1 without drafts reach, if weights were all that is read."""
    plain = [row for row in rows if row.category == ALL and row.batch == 1 and SIMULATED not in row.peer]
    shares = [f"{row.peer} {100 * reading.ms / row.ms_per_token:.0f}%" for row in plain if row.ms_per_token]
    return [f"share of the measured bandwidth at batch 1, weights only: {', '.join(shares)}"] if shares else []


def count_runtime_calls(peer: Peer, prompt: PeerPrompt, new_tokens: int) -> dict[str, float]:
    """{"launches" or "waits": calls of the CUDA runtime per decoded token}, of one call of a peer, prefill included."""
    with torch.profiler.profile() as profile:
        run = peer.generate(prompt, new_tokens)
    found = {event.key: event.count for event in profile.key_averages()}
    tokens = max(1, run.num_tokens // prompt.batch)
    return {kind: sum(found.get(name, 0) for name in names) / tokens for kind, names in RUNTIME_CALLS.items()}


def runtime_notes(peers: Sequence[Peer], prompt: PeerPrompt, new_tokens: int) -> list[str]:
    """Launches and waits per token of each peer, on CUDA; nothing elsewhere."""
    if prompt.inputs["input_ids"].device.type != "cuda":
        return []
    lines = []
    for peer in peers:
        counts = count_runtime_calls(peer, prompt, new_tokens)
        lines.append(f"{peer.name}: {', '.join(f'{value:.0f} {kind}' for kind, value in counts.items())} a token")
    return lines
