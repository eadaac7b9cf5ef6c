"""`python -m mmspec.app.study_visual`: what it costs and what it brings to show a drafter fewer visual tokens.

Each way decodes the same held-out requests, in turn and in rotating order: one picture, four pictures, clips. Told are
tau, overall and on names of things, with intervals over requests (bootstrap); the time, the work and the memory of the
drafter's own prefill; and the time of decoding and of whole calls, as ratios of paired runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mmspec
from mmspec.app.caption import check_drafter
from mmspec.app.captioner import Captioner
from mmspec.app.load import load
from mmspec.app.measure import OWN, PLAIN, Run, System, clone, once, synchronise
from mmspec.app.rounds import Recorder
from mmspec.app.scenes.paint import paint
from mmspec.app.scenes.tasks import Request, requests
from mmspec.app.scenes.world import HELD_OUT, clip
from mmspec.app.settings import DEFAULT
from mmspec.app.study import Answer, answer_of, interval
from mmspec.interfaces import Drafter, Prompt, Verdict
from mmspec.options import checked_drafter
from mmspec.targets import family_of

SHAPES = {"short": 1, "one": 1, "four": 4, "clip8": 8, "clip32": 32}
"""What is shown, and how many pictures that is. `short` and `one` differ in what is asked."""
EPILOG = """\
shapes
  short    a picture and a short question     one      a picture to describe
  four     four pictures to describe          clip8, clip32   a clip of so many frames

examples
  python -m mmspec.app.study_visual out/msd --compressors pool,stride,relevant --json study.json --plot study.png
  python -m mmspec.app.study_visual out/msd out/msd+measured out/msd-latent --shapes short,one,clip8
"""


def asked(shape: str, first: int) -> Iterator[Request]:
    """Requests of a shape without end, from a seed on."""
    pictures = SHAPES[shape]
    if shape == "short":
        yield from requests("answer", first)
    if shape == "one":
        yield from requests("describe", first)
    if shape == "four":
        singles = requests("describe", first)
        while True:
            four = list(islice(singles, pictures))
            yield replace(four[0], pictures=tuple(one.pictures[0] for one in four))
    for one in requests("clip", first):
        moving = clip(one.seed, pictures)
        yield replace(one, pictures=tuple(map(paint, moving.frames)), truth=moving)


@dataclass
class Reading:
    """What a drafter's prefill cost: seconds, floating-point operations (if counted), bytes of keys and values."""

    seconds: float = 0.0
    flops: int = 0
    kv_bytes: int = 0


class Reader(Recorder):
    """A `Recorder` that measures how the drafter reads its prompt, on a device that it waits for."""

    def __init__(self, inner: Any, device: torch.device, count: bool) -> None:
        """
        Args:
            count: count operations instead of taking the time, which counting would spoil.
        """
        super().__init__(inner)
        self.device, self.count, self.reading = device, count, Reading()
        self._read = False

    def begin(self, prompt: Prompt) -> Any:
        """See `Drafter`."""
        return self._measured(lambda: super(Reader, self).begin(prompt))

    def observe(self, state: Any, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        """See `Drafter`; the first time the prompt is read, whether a draft is asked for or not."""
        super().observe(state, verdict, taps)
        read = getattr(self.inner, "read", None)
        if self._read or read is None:
            return
        self._read = True
        self._measured(lambda: read(state))
        buffer = getattr(state, "buffer", None)
        if buffer is not None:
            config = self.inner.head.config  # type: ignore[attr-defined]
            each = 2 * config.num_key_value_heads * config.head_dim * state.last.element_size()
            self.reading.kv_bytes = sum(buffer.lengths) * each

    def _measured(self, do: Callable[[], Any]) -> Any:
        synchronise(self.device)
        began = time.perf_counter()
        if self.count:
            with FlopCounterMode(display=False) as counter:
                result = do()
            self.reading.flops += counter.get_total_flops()
        else:
            result = do()
        synchronise(self.device)
        self.reading.seconds += time.perf_counter() - began
        return result


@dataclass
class Way:
    """A drafter, perhaps with a compressor, and what was measured of it, request by request."""

    name: str
    system: System
    drafter: Drafter | None = None
    answers: list[Answer] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)


def ways_of(names: Sequence[str], compressors: Sequence[str], shares: Sequence[int], visual: int) -> list[str]:
    """Every drafter alone, then the first with each compressor at 1/share of the visual tokens (0: one token)."""
    sizes = dict.fromkeys(1 if not share else max(1, visual // share) for share in shares)
    return list(dict.fromkeys([*names, *(f"{names[0]}+{what}:{size}" for what in compressors for size in sizes)]))


def contest(
    model: Any, processor: Any, names: Sequence[str], shape: str, first: int, count: int, most: int, tick: Any
) -> list[Way]:
    """Plain `generate`, our loop without drafts, and each way, on the same requests; the first request warms up."""
    maker = Captioner(model, processor)
    field_ = [Way(PLAIN, System(PLAIN, clone(model)))]
    for name in dict.fromkeys((OWN, *names)):
        what, _, compressor = name.partition("+")
        drafter = checked_drafter(what, family_of(model), processor.tokenizer)
        patched = mmspec.patch(clone(model), drafter, compressor or None, processor=processor)
        field_.append(Way(name, System(name, patched), drafter))
    for number, one in enumerate(islice(asked(shape, first), count + 1)):
        inputs = maker.inputs([one.pictures], [one.question])
        start = number % len(field_)
        for way in (*field_[start:], *field_[:start]):
            run, reader = _once(way, inputs, most)
            tick(1)
            if not number:
                if reader is not None:
                    _, counted = _once(way, inputs, 2, count=True)
                    way.flops.append(counted.reading.flops if counted else 0)
                continue
            way.system.runs.append(run)
            if reader is not None:
                emitted = [made.emitted for made in reader.rounds()]
                way.answers.append(answer_of(emitted, processor.tokenizer, maker.ends))
                way.readings.append(reader.reading)
    return field_


def _once(way: Way, inputs: Mapping[str, Any], most: int, count: bool = False) -> tuple[Run, Reader | None]:
    """One call, with the drafter watched."""
    if way.drafter is None:
        return once(way.system, inputs, most, 0.0, 0), None
    reader = Reader(way.drafter, way.system.model.device, count)
    return once(way.system, inputs, most, 0.0, 0, drafter=reader), reader


def rows_of(field_: Sequence[Way], shape: str, base: str) -> Iterator[dict[str, Any]]:
    """A row per way; times of prefill, decoding and calls as ratios to those of `base`, run by run.

    `*_over` are multiples of what the base takes (below 1 is less), `speedup_*` of its speed (above 1 is faster).
    """
    by_name = {way.name: way for way in field_}
    plain, whole = by_name[PLAIN].system.runs, by_name[base]
    for way in field_:
        if way.name == PLAIN:
            continue
        runs, stats = way.system.runs, [run.stats for run in way.system.runs if run.stats]
        kept = sum(s.visual_kept for s in stats) / len(stats) if any(s.visual for s in stats) else None
        row: dict[str, Any] = {"shape": shape, "way": Path(way.name).name, "requests": len(runs)}
        row |= {"kept": kept, "tau": interval(way.answers, None), "names": interval(way.answers, "names")}
        if any(reading.kv_bytes for reading in way.readings):
            reading = list(zip(way.readings, whole.readings, strict=True))
            row["prefill_ms"] = 1e3 * median(one.seconds for one, _ in reading)
            row["prefill_over"] = median(one.seconds / other.seconds for one, other in reading)
            row["kv_kib"] = mean(one.kv_bytes for one, _ in reading) / 1024
            row["kv_over"] = median(one.kv_bytes / other.kv_bytes for one, other in reading)
            row["mflops"] = median(way.flops) / 1e6
        pairs = list(zip(runs, whole.system.runs, plain, strict=True))
        row["speedup_decode"] = median(w.decode_s / max(r.decode_s, 1e-9) for r, w, _ in pairs)
        row["speedup_e2e"] = median(w.total_s / r.total_s for r, w, _ in pairs)
        row["speedup_hf"] = median(p.decode_s / max(r.decode_s, 1e-9) for r, _, p in pairs)
        row["speedup_hf_e2e"] = median(p.total_s / r.total_s for r, _, p in pairs)
        row["total_s"] = mean(run.total_s for run in runs)
        row["identical"] = all(torch.equal(r.ids, p.ids) for r, _, p in pairs)
        yield row


def line_of(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    kept = "" if row["kept"] is None else f"{row['kept']:.0f}"
    cells = [f"{row['shape']:<7} {row['way']:<28} {kept:>5}", "tau {:.2f} [{:.2f}, {:.2f}]".format(*row["tau"])]
    cells.append("names {:.2f}".format(row["names"][0]))
    if "prefill_ms" in row:
        cells.append("prefill {prefill_ms:.1f} ms (x{prefill_over:.2f}), KV x{kv_over:.3f}".format(**row))
    cells.append("decode x{speedup_decode:.2f}, call x{speedup_e2e:.2f}, hf x{speedup_hf:.2f}".format(**row))
    return "  ".join(cells) + ("" if row["identical"] else "  DIFFERS")


def words(text: str) -> list[str]:
    """Comma-separated names."""
    return [word.strip() for word in text.split(",") if word.strip()]


def shapes(text: str) -> list[str]:
    """Comma-separated shapes."""
    for name in words(text):
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    return words(text)


def whole_numbers(text: str) -> list[int]:
    """Comma-separated numbers from 0 on."""
    try:
        values = [int(word) for word in words(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"shares are whole numbers; got {text!r}") from error
    if min(values, default=0) < 0:
        raise argparse.ArgumentTypeError(f"shares are 0 (one token) or more; got {text!r}")
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmspec.app.study_visual",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("drafters", nargs="+", metavar="D", help="trained drafters; the first is what others are compared with")
    add("--compressors", type=words, default=[], metavar="C,C", help="with the first drafter, at every share")
    add("--shares", type=whole_numbers, default=[2, 4, 8, 16, 0], metavar="N,N", help="1/N of the tokens; 0: one token")
    add("--shapes", type=shapes, default=["one", "clip8"], metavar="S,S", help=f"of {', '.join(SHAPES)}")
    add("--model", default=DEFAULT)
    add("--first-seed", type=int, default=HELD_OUT, metavar="S")
    add("--count", type=int, default=12, metavar="N", help="requests of each shape (default 12)")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--json", metavar="FILE")
    add("--plot", metavar="FILE.png", help="tau against tokens kept")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty())
    args = parser.parse_args(argv)
    from tqdm import tqdm

    model, processor = load(args.model)
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        maker, one = Captioner(model, processor), next(asked(shape, args.first_seed))
        family = family_of(model)
        ids = maker.inputs([one.pictures], [one.question])["input_ids"]
        visual = int(torch.isin(ids, torch.tensor(family.placeholders)).sum())
        names = ways_of(args.drafters, args.compressors, args.shares, visual)
        for name in names:
            drafter, _, compressor = name.partition("+")
            check_drafter(drafter, compressor or None)
        with tqdm(total=(args.count + 1) * (len(names) + 2), desc=shape, disable=not args.progress) as bar:
            made = contest(model, processor, names, shape, args.first_seed, args.count, args.max_new_tokens, bar.update)
        for row in rows_of(made, shape, args.drafters[0]):
            row["visual"] = visual
            rows.append(row)
            print(line_of(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from mmspec.app.plot import plot_kept

        plot_kept(rows, Path(args.plot))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
