"""The Compare tab: one question about a picture or a clip, answered plainly, then by mmspec, then both as a race."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.caption.config import MODEL, PROMPT, VIDEO_PROMPT, usual_prompt
from mmspec.app.errors import UsageError
from mmspec.app.io.images import pictures
from mmspec.app.modeling.chat import Turn
from mmspec.app.scenes.domain_check import ADVICE, like_a_scene
from mmspec.app.scenes.examples import files
from mmspec.app.ui import render as drawing
from mmspec.app.ui.comparison import Race, Side
from mmspec.app.ui.context import FAILED, HIDDEN, IN_LINE, QUICK, REFUSING, Context, Controls, controls, queued, told
from mmspec.app.ui.report import Report, Track, report_of
from mmspec.app.ui.streamer import Pieces
from mmspec.app.ui.worker import LeftError

SPEEDS = {"real time": 1, "4 times slower": 4, "16 times slower": 16}
SAYS = {
    "waiting": "Waiting for the device.",
    "loading": "Loading the model.",
    "looking": "Looking at the picture.",
    "plain": "Plain generate is answering; mmspec is next.",
    "mmspec": "mmspec is answering.",
    "done": "Putting it together.",
}


@dataclass(frozen=True)
class Parts:
    """The parts of the tab that change while it runs."""

    picture: Any
    clip: Any
    question: Any
    ask: Any
    stop: Any
    status: Any
    plain: Any
    mmspec: Any
    results: Any
    replay: Any
    download: Any
    talk: Any


def clock(count: int, rate: float, ttft_s: float, seconds: float) -> str:
    """What a side has done so far: tokens, tokens per second, seconds to the first token, seconds in all."""
    parts = [f"{count} tokens"] if count else []
    parts += [f"{rate:.1f} tokens/s"] if rate else []
    parts += [f"first after {ttft_s:.2f} s"] if ttft_s else []
    parts += [f"{seconds:.2f} s"] if seconds else []
    return ", ".join(parts)


@dataclass(frozen=True)
class Talk:
    """What was said so far, about the picture or clip at `path`. Another picture is another conversation."""

    path: str | None = None
    turns: tuple[Turn, ...] = ()


class View:
    """A race as it looks now."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self._pieces: dict[str, Pieces] = {}

    def now(self) -> tuple[str, str, str]:
        """The status, and both sides. What has not changed Gradio does not send."""
        race = self.race
        phase = "loading" if race.phase == "waiting" and race.shelf.loading else race.phase
        text = queued(race.ahead) if phase == "waiting" and race.ahead else SAYS[phase]
        return drawing.status(text), self._side("plain", race.plain), self._side("mmspec", race.mmspec)

    def _side(self, name: str, side: Side) -> str:
        race, told = self.race, clock(len(side.tape.ids), side.tape.rate, side.ttft_s, side.seconds)
        return drawing.growing(name, race.turns, race.question, self._text(name, side), told, race.phase == name)

    def _text(self, name: str, side: Side) -> str:
        if self.race.desk is None:
            return ""
        pieces = self._pieces.setdefault(name, Pieces(self.race.desk.processor.tokenizer))
        return "".join(pieces.upto(list(side.tape.ids)))


def compare_tab(context: Context, run: Any) -> Parts:
    """Draw the tab. run: the state that holds the last finished `Report`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picture, clip, tabs = _media()
            settings = controls(context, 128, "compare")
        with gr.Column(scale=5, min_width=320):
            parts = _panels(context, picture, clip)
    _wire(context, parts, tabs, settings, run)
    return parts


def _media() -> tuple[Any, Any, Any]:
    with gr.Tabs() as tabs:
        with gr.Tab("Picture", id="picture"):
            picture = gr.Image(
                sources=["upload", "webcam", "clipboard"],
                type="filepath",
                label="Picture",
                alt_text="The picture that is asked about",
                height=280,
                elem_id="mm-picture",
                buttons=["fullscreen"],
            )
            shown = [[str(path)] for path in files() if path.suffix == ".png"]
            gr.Examples(shown, picture, label="Example pictures", elem_id="mm-examples", api_visibility="private")
        with gr.Tab("Clip", id="clip"):
            clip = gr.Video(sources=["upload"], label="Clip", height=280, elem_id="mm-clip")
            shown = [[str(path)] for path in files() if path.suffix == ".mp4"]
            gr.Examples(shown, clip, label="Example clips", elem_id="mm-clip-examples", api_visibility="private")
    return picture, clip, tabs


def _panels(context: Context, picture: Any, clip: Any) -> Parts:
    talk = gr.State(Talk())
    question = gr.Textbox(
        PROMPT,
        label="Question",
        placeholder="Ask about the picture",
        lines=1,
        max_lines=4,
        elem_id="mm-question",
    )
    with gr.Row():
        ask = gr.Button("Ask both", variant="primary", elem_id="mm-ask", min_width=90)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="mm-stop", min_width=90)
        fresh = gr.Button("Start over", elem_id="mm-fresh", min_width=90)
    status = gr.HTML(drawing.status("Choose a picture or a clip, and ask."), elem_id="mm-status")
    with gr.Row():
        with gr.Column(min_width=280):
            plain = gr.HTML(drawing.growing("plain", (), "", "", "", False), elem_id="mm-plain")
        with gr.Column(min_width=280):
            ours = gr.HTML(drawing.growing("mmspec", (), "", "", "", False), elem_id="mm-mmspec")
    gr.HTML(drawing.LEGEND)
    with gr.Row(elem_classes="mm-end"):
        speed = gr.Dropdown(list(SPEEDS), value="real time", label="Replay speed", min_width=150, elem_id="mm-speed")
        replay = gr.Button("Replay the race", interactive=False, elem_id="mm-replay", min_width=150)
        download = gr.DownloadButton("Download as JSON", interactive=False, elem_id="mm-download", min_width=150)
    results = gr.HTML("", elem_id="mm-results")
    replay.click(None, speed, None, js=f"(speed) => {{ window.mmspecReplay({SPEEDS}[speed] ?? 1); }}", **HIDDEN)
    parts = Parts(picture, clip, question, ask, stop, status, plain, ours, results, replay, download, talk)
    cleared = [talk, plain, ours, results, status, replay, download]
    gr.on([fresh.click, picture.change, clip.change], lambda: _cleared(), None, cleared, **QUICK)
    return parts


def _cleared() -> tuple[Any, ...]:
    """An empty conversation."""
    sides = [drawing.growing(name, (), "", "", "", False) for name in ("plain", "mmspec")]
    off = gr.update(interactive=False)
    return (Talk(), *sides, "", drawing.status("Choose a picture or a clip, and ask."), off, off)


def _wire(context: Context, parts: Parts, tabs: Any, settings: Controls, run: Any) -> None:
    kind = gr.State("picture")

    def chosen(event: gr.SelectData, question: str) -> tuple[str, str]:
        """A question that nobody has touched goes with what is shown."""
        name = "clip" if event.value == "Clip" else "picture"
        return name, usual_prompt(name == "clip") if question in (PROMPT, VIDEO_PROMPT) else question

    tabs.select(chosen, parts.question, [kind, parts.question], **QUICK)
    asked = [parts.picture, parts.clip, kind, parts.question, parts.talk, *settings.all]

    @told
    def begin(request: gr.Request, question: str) -> tuple[Any, ...]:
        context.limits.question(question)  # before what is shown of the last one goes
        context.sessions.begin(_session(request))
        off = gr.update(interactive=False)
        return off, gr.update(interactive=True), "", off, off

    @told
    def answer(request: gr.Request, picture: Any, clip: Any, kind: Any, *rest: Any) -> Iterator[tuple[str, str, str]]:
        question, talk, *chosen = rest
        path = _path(clip if kind == "clip" else picture)
        yield from steps(context, path, question, talk, tuple(chosen), _session(request))

    @told
    def finish(request: gr.Request) -> dict[Any, Any]:
        made = context.sessions.take(_session(request))
        return {parts.status: drawing.status("Stopped.")} if made is None else closing(context, parts, run, made)

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(_session(request))
        return gr.update(interactive=True), gr.update(interactive=False)

    def failed(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), drawing.status(FAILED))

    def halt(request: gr.Request) -> None:
        context.sessions.stop(request.session_hash)

    buttons = [parts.ask, parts.stop]
    growing, late = [parts.status, parts.plain, parts.mmspec], [parts.results, parts.replay, parts.download]
    started = gr.on(
        [parts.ask.click, parts.question.submit],
        begin,
        parts.question,
        [*buttons, *late],
        show_progress_on=[parts.status],
        **REFUSING,
    )
    running = started.success(
        answer,
        asked,
        growing,  # no others: Gradio makes every output that is skipped anew, at each step, in the server's thread
        show_progress="minimal",
        preprocess=False,  # or Gradio would decode the picture without our limits; it still checks that it is an upload
        show_progress_on=[parts.status],
        **IN_LINE,
        **HIDDEN,
    )
    finished = running.success(
        finish, None, [*growing, *late, parts.talk, parts.question, run], show_progress_on=[parts.status], **REFUSING
    )
    finished.then(end, None, buttons, **QUICK)
    finished.failure(failed, None, [*buttons, parts.status], **QUICK)
    running.failure(failed, None, [*buttons, parts.status], **QUICK)  # gradio 6.31 leaves `then` out after an error
    parts.stop.click(halt, None, None, **QUICK)


def _path(upload: Any) -> str | None:
    """Where an uploaded file lies, as Gradio's own parts are given it."""
    path = upload.get("path") if isinstance(upload, dict) else None
    return path if isinstance(path, str) else None


def _session(request: gr.Request | None) -> str:
    return str(getattr(request, "session_hash", None) or "api")


@dataclass(frozen=True)
class Made:
    """What came of a question: its report, the conversation before it, and what else is to be said."""

    report: Report
    talk: Talk
    cut: bool
    note: str


def steps(
    context: Context, path: str | None, question: str, talk: Talk, chosen: tuple[Any, ...], session: str
) -> Iterator[tuple[str, str, str]]:
    """Answer one question; yields the status and both sides. What comes of it is left with the session.

    Raises:
        UsageError: the file, the question or the settings do not do.
    """
    limits, halt = context.limits, context.sessions.of(session)
    turns = talk.turns if talk.path == path else ()
    choice = context.choice(*chosen)
    asked = limits.question(question)
    if len(turns) >= limits.turns:
        raise UsageError(f"This conversation has {limits.turns} questions, which is the limit; begin a new one.")
    file = limits.given(path)
    race = Race(context.shelf, lambda: limits.shown(file), turns, asked, choice, halt)
    view = View(race)
    try:
        for ahead in context.worker.follow(race.run, halt, first=True):
            race.ahead = ahead
            yield view.now()
    except LeftError:
        return
    if race.desk is not None:
        note = "" if choice.model != MODEL or like_a_scene(pictures(race.shown)[0]) else f" The picture {ADVICE}."
        context.sessions.leave(session, Made(report_of(race), Talk(path, turns), race.cut, note))


def closing(context: Context, parts: Parts, run: Any, made: Made) -> dict[Any, Any]:
    """What is shown when a race is over."""
    on = gr.update(interactive=True)
    report, talk = made.report, made.talk
    keep = bool(report.plain.text) and not made.cut
    turns = talk.turns
    return {
        parts.status: drawing.status(("Stopped." if made.cut else "Done.") + made.note),
        parts.plain: _finished(report, report.plain, turns),
        parts.mmspec: _finished(report, report.mmspec, turns),
        parts.results: drawing.results(report) if report.identical is not None else drawing.badge(report),
        parts.replay: on,
        parts.download: gr.update(value=str(context.space.write(report)), interactive=True),
        parts.talk: Talk(talk.path, (*turns, Turn(report.question, report.plain.text))) if keep else talk,
        parts.question: gr.update(
            value=report.question if not keep or report.question in (PROMPT, VIDEO_PROMPT) else ""
        ),
        run: report,
    }


def _finished(report: Report, track: Track, turns: tuple[Turn, ...]) -> str:
    side = report.figures["sides"][track.name]
    told = clock(side["n_tokens"], side["tokens_per_s"], side["ttft_s"], side["total_s"])
    return drawing.finished(track, turns, report.question, told)


__all__ = ["Made", "Parts", "Talk", "View", "compare_tab", "steps"]
