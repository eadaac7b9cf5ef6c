"""`research.bench --overview`: the speed table of research/results, each line by one command, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from research.bench.config import BenchConfig
from research.bench.rows import ResultRow
from research.bench.ties import bench_ties, intervals_overlap

OVERVIEW_COMMAND = "python -m research.bench --overview --json speed.json"
HEADS = ("task", "drafter", "tau", "R", "x `generate`", "x own loop", "x whole calls")


@dataclass(frozen=True)
class OverviewSetting:
    """One part of the table.

    Attributes:
        title: of the part. task: of the toy world. batch, temperature: of its calls.
        drafters: besides `none`. rounds: that are measured.
    """

    title: str
    task: str = "describe"
    batch: int = 1
    temperature: float = 0.0
    drafters: tuple[str, ...] = ("msd", "flash")
    rounds: int = 21


OVERVIEW = (
    OverviewSetting("long descriptions", drafters=("hybrid", "msd", "flash")),
    OverviewSetting("the same, temperature 1", temperature=1.0, rounds=15),
    OverviewSetting("the same, batch 8", batch=8, rounds=9),
    OverviewSetting("answers of a few words", task="answer", rounds=41),
    OverviewSetting("video clips", task="clip"),
)
"""Four minutes in all on two idle cores."""


def overview_configs(config: BenchConfig) -> list[tuple[str, BenchConfig]]:
    """(title, settings) of every part; the model, precision, device and seeds are those of `config`."""
    return [
        (
            one.title,
            replace(
                config,
                drafters=("none", *one.drafters),
                task=one.task,
                batch_sizes=(one.batch,),
                temperature=one.temperature,
                repeats=one.rounds,
                count=None,
                minutes=None,
                processes=1,
            ),
        )
        for one in OVERVIEW
    ]


def overview_markdown(rows: Sequence[ResultRow]) -> str:
    """Where and when the rows were measured, the table, and what is no difference in it."""
    lines, ties = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)], []
    for title in dict.fromkeys(row["setting"] for row in rows):
        part = [row for row in rows if row["setting"] == title]
        again = next(row for row in part if row["drafter"] == "hf-again")
        pairs = [" and ".join(f"`{name}`" for name in pair) for _, tied in bench_ties(part) for pair in tied]
        ties += [f"{title}: {', '.join(pairs)}"] if pairs else []
        for row in part:
            if row["drafter"] != "hf":
                lines.append(f"| {' | '.join(_cells(row, again, title))} |")
                title = ""
    remarks = ["", f"Ties (95% intervals overlap): {'; '.join(ties)}."] if ties else []
    return "\n".join([*_provenance_lines(rows), "", *lines, *remarks])


def _provenance_lines(rows: Sequence[ResultRow]) -> list[str]:
    """Model, processor, date, commits and commands; each once."""

    def every(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row["run"][key]) for row in rows))

    first = rows[0]
    names = list(dict.fromkeys(row["run"]["command"] for row in rows))
    where = f"{first['model']}, {first['dtype']}, {every('threads')} threads of {every('processor')}"
    versions = f"mmspec {every('mmspec')}, torch {every('torch')}, transformers {every('transformers')}"
    same = "all outputs identical" if all(row["identical"] for row in rows) else "NOT all outputs identical"
    return [
        f"Medians of paired rounds with 95% intervals, {same}: {where}, {every('date')}, commit {every('commit')};",
        f"{versions}; {', '.join(f'`{name}`' for name in names)}.",
    ]


def _cells(row: ResultRow, again: ResultRow, title: str) -> list[str]:
    is_again = row is again
    name = "`generate` again" if is_again else f"`{row['drafter']}`"
    share = row["drafted_share"]
    if row["not_used"] and share is not None:
        name += f", used in {share:.0%} of rounds"
    limits, noise = row["speedup_hf_ci"], again["speedup_hf_ci"]
    tie = " (tie)" if not is_again and limits and noise and intervals_overlap(limits, noise) else ""
    speed = f"{row['speedup_hf']:.2f} [{limits[0]:.2f}, {limits[1]:.2f}]{tie}"
    cost = "" if row["R"] is None else f"{row['R']:.2f}"
    return [title, name, f"{row['tau']:.2f}", cost, speed, f"{row['speedup_own']:.2f}", f"{row['speedup_e2e']:.2f}"]
