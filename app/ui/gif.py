"""A finished race as an animated GIF: the same words at the recorded times, in real time or at a stated tempo.

Drawn with Pillow, in the font that Pillow brings: characters that it lacks appear as boxes. Independent of gradio.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from mmspec.app.io.images import load_image
from mmspec.app.ui.plots import LANE_COLORS
from mmspec.app.ui.race import lane_title
from mmspec.app.ui.report import AnswerTrace, Report

GIF_WIDTH, GIF_MARGIN, HEAD = 760, 16, 140
"""Pixels: the picture, the space around it, the height above the lanes."""
LINE, LANE_HEAD, MAX_LINES, MAX_DRAWN_LANES = 19, 56, 12, 3
"""Pixels of a line, and of a lane above its text; lines of an answer and lanes that are drawn, at most."""
FRAMES_PER_S, MIN_S, MAX_S, HOLD_S = 10, 5.0, 9.0, 2.5
"""Frames per second; seconds that the race takes at least and at most; seconds that the end is held."""
TEMPOS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds of the GIF per recorded second."""
INK, FAINT, PAPER, LINE_COLOR = "#1b1f24", "#5d6470", "#ffffff", "#d4d7dd"
KIND_COLORS = {"accepted": ("#d3f0da", "#0d5524"), "corrected": ("#fde3c3", "#7a3b00"), "plain": (None, INK)}
"""{kind of token: (background, ink)}."""


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@dataclass
class _DrawnLane:
    """A lane with the position of each token.

    Attributes:
        trace: the answer.
        left: pixels.
        color: of the bar.
        spots: (x, y, text) of each token; None for those that do not fit.
        num_drawn: tokens on the canvas.
    """

    trace: AnswerTrace
    left: int
    width: int
    color: str
    spots: list[tuple[int, int, str] | None] = field(default_factory=list)
    num_drawn: int = 0

    def rate(self, now: float) -> float:
        """Tokens per second after the first, until `now`; the recorded rate at the end."""
        times = self.trace.token_times
        visible = sum(time <= now for time in times)
        if visible == len(times):
            return self.trace.tokens_per_s
        return (visible - 1) / (times[visible - 1] - times[0]) if visible > 1 and times[visible - 1] > times[0] else 0.0


def choose_tempo(seconds: float) -> float:
    """The tempo nearest to real time with which a race of that length takes `MIN_S` to `MAX_S` seconds, if one does."""
    fitting = [tempo for tempo in TEMPOS if MIN_S <= seconds * tempo <= MAX_S]
    if fitting:
        return min(fitting, key=lambda tempo: abs(tempo - 1))
    return max((tempo for tempo in TEMPOS if seconds * tempo <= MAX_S), default=TEMPOS[0])


def format_tempo(tempo: float) -> str:
    """A tempo in words."""
    if tempo == 1:
        return "in real time"
    return f"{tempo:g} times slower than recorded" if tempo > 1 else f"{1 / tempo:g} times faster than recorded"


def write_gif(report: Report, file: Path) -> None:
    """Write the race as a GIF.

    Args:
        report: of a run whose answers are not empty.
        file: to write.
    """
    traces = choose_lanes(report)
    lanes = _layout(traces)
    tempo = choose_tempo(max(trace.token_times[-1] for trace in traces if trace.token_times))
    bottom = max((spot[1] for lane in lanes for spot in lane.spots if spot), default=HEAD + LANE_HEAD) + LINE
    canvas = Image.new("RGB", (GIF_WIDTH, bottom + 34), PAPER)
    _draw_head(canvas, report, tempo)
    end_s = max(trace.token_times[-1] for trace in traces if trace.token_times)
    count = max(2, int(end_s * tempo * FRAMES_PER_S) + 1)
    frames = [
        _draw_frame(canvas, report, lanes, min(end_s, number / (count - 1) * end_s), number == count - 1)
        for number in range(count)
    ]
    palette = frames[-1].quantize(64, dither=Image.Dither.NONE)
    paletted = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [1000 // FRAMES_PER_S] * (count - 1) + [int(1000 * HOLD_S)]
    paletted[0].save(file, save_all=True, append_images=paletted[1:], duration=durations, loop=0, optimize=True)


def choose_lanes(report: Report) -> tuple[AnswerTrace, ...]:
    """The baseline and the lanes that are drawn, the fastest among them."""
    lanes = report.lanes[: MAX_DRAWN_LANES - 1]
    return (report.plain, *(lanes if report.best in lanes else (*lanes[:-1], report.best)))


def _layout(traces: tuple[AnswerTrace, ...]) -> list[_DrawnLane]:
    """The lanes in columns, and the position of every token."""
    width = (GIF_WIDTH - 2 * GIF_MARGIN - (len(traces) - 1) * GIF_MARGIN) // len(traces)
    font = _font(14)
    lanes = []
    for number, trace in enumerate(traces):
        lane = _DrawnLane(trace, GIF_MARGIN + number * (width + GIF_MARGIN), width, LANE_COLORS[number])
        x, line = 0, 0
        for index, text in enumerate(trace.token_texts):
            text = " ".join(text.splitlines()) if index else text.lstrip()
            advance = int(font.getlength(text))
            if x and x + advance > width and text[:1].isspace():
                x, line, text = 0, line + 1, text.lstrip()
                advance = int(font.getlength(text))
            fits = line < MAX_LINES
            lane.spots.append((lane.left + x, HEAD + LANE_HEAD + line * LINE, text) if fits else None)
            x += advance
        lanes.append(lane)
    return lanes


def _draw_head(canvas: Image.Image, report: Report, tempo: float) -> None:
    """What stays the same: picture, question, titles and where it was recorded."""
    draw, run, choice = ImageDraw.Draw(canvas), report.metrics["run"], report.metrics["choice"]
    x = GIF_MARGIN
    if report.media:
        data = base64.b64decode(report.media[0].uri.partition(",")[2])
        picture = load_image(data)
        picture.thumbnail((100, 100))
        canvas.paste(picture.convert("RGB"), (GIF_MARGIN, GIF_MARGIN - 6))
        x += picture.width + GIF_MARGIN
    draw.text((x, 12), "mmspec: the same answer, sooner", INK, _font(20))
    draw.text((x, 42), _shorten(report.question, 15, GIF_WIDTH - x - 220), INK, _font(15))
    draw.text((x, 68), f"{choice['model']} on {run['device']} ({run['dtype']})", FAINT, _font(13))
    draw.text((x, 88), f"played {format_tempo(tempo)}", FAINT, _font(13))


def _shorten(text: str, size: int, width: int) -> str:
    """Text on one line, cut with dots where it exceeds `width` pixels."""
    font, text = _font(size), " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _draw_frame(canvas: Image.Image, report: Report, lanes: list[_DrawnLane], now: float, is_last: bool) -> Image.Image:
    """Draw the tokens up to `now` onto the canvas, and bars and ratio onto a copy of it."""
    for lane in lanes:
        _draw_tokens(canvas, lane, now)
    frame = canvas.copy()
    draw = ImageDraw.Draw(frame)
    fastest = max(lane.trace.tokens_per_s for lane in lanes) or 1.0
    for lane in lanes:
        top, rate = HEAD + 4, lane.rate(now)
        draw.text((lane.left, top), lane_title(lane.trace.drafter), INK, _font(15))
        label = f"{rate:.0f} tokens/s" if rate else ""
        room = lane.width - 92
        draw.rectangle((lane.left, top + 26, lane.left + room, top + 38), LINE_COLOR)
        draw.rectangle((lane.left, top + 26, lane.left + min(1.0, rate / fastest) * room, top + 38), lane.color)
        draw.text((lane.left + room + 8, top + 22), label, INK, _font(14))
    best = next(lane for lane in lanes if lane.trace is report.best)
    plain, ours = lanes[0].rate(now), best.rate(now)
    ratio = report.best.speedup if is_last else ours / plain if plain and ours else None
    if ratio:
        draw.text((GIF_WIDTH - GIF_MARGIN, 8), f"{ratio:.1f}x", LANE_COLORS[1], _font(56), anchor="ra")
    if is_last:
        credit = report.best.credit.sentence if report.best.credit else ""
        draw.text((GIF_MARGIN, HEAD - 20), _shorten(credit, 13, GIF_WIDTH - 2 * GIF_MARGIN), INK, _font(13))
        text = "identical, token for token" if report.identical else "outputs differ"
        draw.text(
            (GIF_WIDTH - GIF_MARGIN, 78),
            text,
            LANE_COLORS[1] if report.identical else "#b3261e",
            _font(16),
            anchor="ra",
        )
    return frame


def _draw_tokens(canvas: Image.Image, lane: _DrawnLane, now: float) -> None:
    draw, font, trace = ImageDraw.Draw(canvas), _font(14), lane.trace
    while lane.num_drawn < len(trace.token_times) and trace.token_times[lane.num_drawn] <= now:
        spot, kind = lane.spots[lane.num_drawn], trace.token_kinds[lane.num_drawn]
        lane.num_drawn += 1
        if spot is None:
            continue
        x, y, text = spot
        background, ink = KIND_COLORS[kind]
        if background and text.strip():
            draw.rectangle((x, y, x + font.getlength(text), y + LINE - 3), background)
        draw.text((x, y), text, ink, font)
