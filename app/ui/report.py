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

from mmspec.app.bench.rounds import PLAIN, Round, kinds_of
from mmspec.app.ui.comparison import Difference, Race, Side
from mmspec.app.ui.streamer import name_of, pieces_of
from mmspec.app.ui.visible_tokens import crops, marked, numbers_of
from mmspec.app.versions import mmspec_version


@dataclass(frozen=True)
class Track:
    """One side, ready to be shown and played again: per token its piece of text, its second, its kind."""

    name: str
    pieces: tuple[str, ...]
    times: tuple[float, ...]
    kinds: tuple[str, ...]
    total_s: float

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.pieces)


@dataclass(frozen=True, eq=False)
class Report:
    """A finished race. Each is itself alone, so that Gradio need not look into it to see whether it is another.

    Attributes:
        plain, mmspec: both sides. rounds: of mmspec's. names: token -> how it is shown in a tree.
        badge: whether both said the same, in one line. figures: the numbers, ready for JSON.
        marked: the pictures as data URIs, with what the drafter saw of them.
    """

    question: str
    plain: Track
    mmspec: Track
    rounds: tuple[Round, ...]
    names: dict[int, str]
    identical: bool | None
    badge: str
    figures: dict[str, Any]
    marked: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "question": self.question,
            "badge": self.badge,
            **self.figures,
            "plain": _track_dict(self.plain, self.figures["sides"]["plain"]),
            "mmspec": _track_dict(self.mmspec, self.figures["sides"]["mmspec"]),
            "rounds": [asdict(one) for one in self.rounds],
            "names": {str(token): name for token, name in self.names.items()},
        }


def _track_dict(track: Track, figures: dict[str, Any]) -> dict[str, Any]:
    rows = zip(track.pieces, track.times, track.kinds, strict=True)
    tokens = [{"text": text, "t": round(at, 6), "kind": kind} for text, at, kind in rows]
    return {"answer": track.text, **figures, "tokens": tokens}


def report_of(race: Race) -> Report:
    """The report of a race that is over and has been loaded."""
    assert race.desk is not None
    tokenizer = race.desk.processor.tokenizer
    rounds = race.rounds
    ours = len(race.mmspec.tape.ids)
    known = {token for one in rounds for token in (*one.tokens, *one.emitted)}
    return Report(
        question=race.question,
        plain=_track("plain", race.plain, tokenizer, [PLAIN] * len(race.plain.tape.ids)),
        mmspec=_track("mmspec", race.mmspec, tokenizer, kinds_of(rounds, ours)),
        rounds=tuple(rounds),
        names={token: name_of(tokenizer, token) for token in known},
        identical=race.identical,
        badge=badge(race),
        figures=figures(race),
        marked=tuple(marked(race.shown, race.sight, crops(race.desk.processor))) if race.sight else (),
    )


def _track(name: str, side: Side, tokenizer: Any, kinds: list[str]) -> Track:
    tape = side.tape
    return Track(name, tuple(pieces_of(tokenizer, tape.ids)), tuple(tape.times), tuple(kinds), side.total_s)


def badge(race: Race) -> str:
    """Whether both sides said the same, in one line."""
    found, same = race.difference, min(len(race.plain.tape.ids), len(race.mmspec.tape.ids))
    if race.identical is None:
        return "Stopped before both sides had answered"
    if found is not None:
        assert race.desk is not None
        mine, other = (name_of(race.desk.processor.tokenizer, token) for token in (found.plain, found.mmspec))
        return (
            f"Outputs differ from token {found.column + 1} on: {mine} (plain), {other} (mmspec); "
            f"logit margin {'not measured' if math.isnan(found.margin) else f'{found.margin:.2e}'}"
        )
    if race.cut:
        return f"Outputs identical as far as both came: {same} tokens, then stopped"
    return f"Outputs identical: all {same} tokens"


def figures(race: Race) -> dict[str, Any]:
    """The numbers of a race. Those of mmspec's side are `mmspec.stats` of its call."""
    assert race.desk is not None
    stats, model = race.stats, race.desk.model
    return {
        "identical": race.identical,
        "stopped": race.cut,
        "difference": _difference(race.difference) if race.difference else None,
        "speedup_decode": race.speedup_decode,
        "speedup_e2e": race.speedup_e2e,
        "tau": stats.tau,
        "R": race.cost,
        "vision_s": race.encode_s,
        "drafter_saw": numbers_of(race.sight) if race.sight else None,
        "prompt_tokens": race.prompt_tokens,
        "choice": asdict(race.choice) | {"model": Path(race.choice.model).name},
        "stats": stats.as_dict(),
        "run": {
            "mmspec": mmspec_version(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "sides": {"plain": _side(race.plain), "mmspec": _ours(race)},
    }


def _difference(found: Difference) -> dict[str, Any]:
    return asdict(found) | ({"margin": None} if math.isnan(found.margin) else {})  # JSON knows no nan


def _side(side: Side) -> dict[str, Any]:
    return {
        "n_tokens": len(side.tape.ids),
        "tokens_per_s": side.tape.rate,
        "ttft_s": side.ttft_s,
        "decode_s": side.decode_s,
        "total_s": side.total_s,
    }


def _ours(race: Race) -> dict[str, Any]:
    stats = race.stats
    if not stats.calls or stats.plain_calls:
        return _side(race.mmspec)
    return {
        "n_tokens": stats.tokens,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "total_s": stats.total_s,
    }


class Space:
    """A folder for what the pages write. Old things in it are swept away, and all of it in the end."""

    def __init__(self, keep_s: float = 3600.0) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mmspec-demo-"))
        self.keep_s = keep_s

    def new(self) -> Path:
        """An empty folder of its own, with a name that nobody can guess."""
        self.sweep()
        made = self.root / "runs" / secrets.token_hex(8)
        made.mkdir(parents=True)
        return made

    def write(self, report: Report) -> Path:
        """The report as a file."""
        file = self.new() / "mmspec-run.json"
        file.write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return file

    def sweep(self) -> None:
        """Remove what is older than `keep_s` seconds."""
        now = time.time()
        for folder in (self.root / "runs").glob("*"):
            if now - folder.stat().st_mtime > self.keep_s:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


__all__ = ["Report", "Space", "Track", "badge", "figures", "report_of"]
