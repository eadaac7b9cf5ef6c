"""All tabs as one Gradio app, and its server: on this machine by default; temporary files are removed at the end."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # no telemetry; read when gradio is imported
os.environ.setdefault("MPLBACKEND", "agg")  # Gradio selects it at the first event, which takes a second

from mmspec.app.ui.gradio_import import skip_stub_generation

with skip_stub_generation():
    import gradio as gr

from mmspec.app.errors import one_line
from mmspec.app.scenes.examples import EXAMPLES_FOLDER as EXAMPLES
from mmspec.app.ui.api import register_endpoints
from mmspec.app.ui.context import Context
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.links import render_links
from mmspec.app.ui.middleware.bodies import RequestLimits, UploadFolder, limit_upload_parts
from mmspec.app.ui.middleware.filtered_app import FilteredApp, build_edge, suppress_tracebacks
from mmspec.app.ui.middleware.names import ServedNames
from mmspec.app.ui.middleware.password import check_password
from mmspec.app.ui.middleware.sessions import SessionCleaner, SessionLimits
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.opening import Opening
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.tabs.batch import build_batch_tab
from mmspec.app.ui.tabs.compare import build_compare_tab
from mmspec.app.ui.tabs.inside import build_inside_tab
from mmspec.app.ui.tabs.learning import build_learning_tab
from mmspec.app.ui.worker import MAX_QUEUED_RUNS

logger = logging.getLogger("mmspec")

HERE = Path(__file__).parent
STYLES, SCRIPTS = ("race.css", "styles.css"), ("race.js", "tree.js", "labels.js")
PAGE_TITLE = "mmspec: the same answer, sooner"
CLEANUP_INTERVAL_S, UPLOAD_MAX_AGE_S = 600, 3600
"""Seconds between two removals of old uploads, and their maximum age."""
QUEUE_POLL_INTERVAL_S, BUSY_POLL_INTERVAL_S = 0.02, 0.25
"""Seconds between two polls of Gradio's queue, and while the device is busy. Its default of a millisecond takes the
interpreter lock from the thread that decodes."""
MAX_SESSIONS = 1000
"""Sessions with components, open pages included, above which Gradio frees the least recently used."""


def build_app(context: Context, opening: Opening | None = None) -> Any:
    """Create the app without serving it; pages open with the race that `opening` records."""
    with gr.Blocks(
        title=PAGE_TITLE, analytics_enabled=False, delete_cache=(CLEANUP_INTERVAL_S, UPLOAD_MAX_AGE_S)
    ) as app:
        gr.HTML(f"<h1>{PAGE_TITLE}</h1>", elem_id="mm-title")
        opening = opening or Opening(context)
        report = gr.State(None, time_to_live=UPLOAD_MAX_AGE_S)
        with gr.Tabs():
            with gr.Tab("Compare"):
                build_compare_tab(context, report, opening)
            with gr.Tab("Inside") as inside:
                build_inside_tab(report, inside)
            with gr.Tab("Batch"):
                build_batch_tab(context)
            with gr.Tab("Learning"):
                build_learning_tab(context, opening)
        gr.HTML(render_links(), elem_id="mm-links")
        register_endpoints(context)

        def end_session(request: gr.Request) -> None:
            """End the run of a page that was closed, and free what is kept of its conversation."""
            context.end_page(str(request.session_hash))

        app.unload(end_session)
    app.queue(default_concurrency_limit=1, max_size=MAX_QUEUED_RUNS, status_update_rate=1, api_open=False)
    if hasattr(app._queue, "sleep_when_free"):

        def set_poll_interval(is_busy: bool) -> None:
            app._queue.sleep_when_free = BUSY_POLL_INTERVAL_S if is_busy else QUEUE_POLL_INTERVAL_S

        set_poll_interval(False)
        context.worker.on_busy = set_poll_interval
    app._queue.ANALYTICS_MAX_EVENTS = 0  # it stores 10,000 events, and evaluates them all with pandas after each one
    return app


def build_theme() -> Any:
    """Gradio's base theme with system fonts, as the page loads nothing from other servers, and with legible colours.

    The base theme has texts of a contrast below 4.5 (WCAG AA) in white on `primary_500`, and in `neutral_400` on white.
    """
    fonts = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
    theme = gr.themes.Base(primary_hue="blue", font=fonts, font_mono=["ui-monospace", "Consolas", "monospace"])
    return theme.set(
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        body_text_color_subdued="*neutral_600",
        input_placeholder_color="*neutral_600",
        input_placeholder_color_dark="*neutral_400",
        color_accent="*primary_600",  # without a variant for dark, which styles.css has
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        link_text_color_dark="*primary_400",
        link_text_color_hover_dark="*primary_300",
        link_text_color_visited_dark="*primary_400",
    )


@dataclass(frozen=True)
class DemoServer:
    """A running app.

    Attributes:
        url: of the page, with a slash at the end.
        app: the `gr.Blocks`.
        context: its state.
        share_url: of the tunnel; None if there is none.
    """

    url: str
    app: Any
    context: Context
    share_url: str | None = None


@contextmanager
def serve(
    model_store: ModelStore,
    *,
    limits: Limits | None = None,
    request_limits: RequestLimits | None = None,
    session_limits: SessionLimits | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    allowed: Sequence[str] = (),
    record_opening: bool = False,
    password: str | None = None,
    share: bool = False,
    root_path: str = "",
) -> Iterator[DemoServer]:
    """Serve the pages until the block is left; then end all runs and remove all files.

    Args:
        model_store: the offered models.
        limits: of questions, files and answers.
        request_limits: of HTTP requests.
        session_limits: of what is stored of sessions that nobody reads.
        host: address to listen on.
        port: None takes the first free port from 7860 on; 0 any free port.
        allowed: further host names to answer to, each with or without a port.
        record_opening: record a race at the start, which pages open with.
        password: asked of every request; None for none.
        share: open a tunnel of Gradio, so that the app is reached from the internet.
        root_path: path under which a proxy serves the app, which it removes from requests; empty for none.

    Raises:
        OSError: the port is in use.
        ShareError: the tunnel cannot be opened.
        ValueError: an allowed host is not a host name, or the password is refused.
    """
    names = ServedNames(host, allowed)
    if password is not None:
        check_password(password)
    limits = limits or Limits()
    with ExitStack() as stack:
        storage = TempStorage(UPLOAD_MAX_AGE_S)
        stack.callback(storage.close)
        uploads = UploadFolder(storage.root / "uploads", request_limits or RequestLimits())
        stack.enter_context(_gradio_temp_dir(uploads.folder))
        context = Context(model_store, storage, limits)
        stack.callback(context.worker.close)
        opening = Opening(context)
        app = build_app(context, opening)
        sessions = SessionCleaner(app, session_limits or SessionLimits(), context.end_page)
        filtered_app = FilteredApp(build_edge(names, uploads, sessions, password))
        load = context.worker.submit(lambda: model_store.get(model_store.model_names[0]))  # while the page is opened
        load.add_done_callback(_log_load_error)
        if record_opening:
            opening.start()
            stack.callback(opening.stop)
        stack.enter_context(suppress_tracebacks())
        stack.enter_context(limit_upload_parts(limits.max_files))
        url = _launch(app, filtered_app, context, host, port, share, root_path)
        try:
            share_url = _allow_share(app, names) if share else None
            yield DemoServer(url, app, context, share_url)
        finally:
            context.sessions.cancel_all()
            app.close(verbose=False)


@contextmanager
def _gradio_temp_dir(folder: Path) -> Iterator[None]:
    """Within this block Gradio stores uploads in `folder`, which it reads when components are created."""
    previous = os.environ.get("GRADIO_TEMP_DIR")
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop("GRADIO_TEMP_DIR", None)
        else:
            os.environ["GRADIO_TEMP_DIR"] = previous


def _launch(
    app: Any, filtered_app: FilteredApp, context: Context, host: str, port: int | None, share: bool, root_path: str
) -> str:
    """Start the server of `app` inside its layers; returns its URL.

    Raises:
        OSError: the port is in use.
        RuntimeError: Gradio would serve without them.
    """
    _, url, _ = app.launch(
        _app=filtered_app,
        enable_monitoring=False,
        mcp_server=False,
        server_name=host,
        server_port=_free_port(host) if port == 0 else port,
        share=share,
        root_path=root_path,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        show_error=False,
        max_file_size=context.limits.max_file_mb * 1_000_000,
        state_session_capacity=MAX_SESSIONS,
        allowed_paths=[str(EXAMPLES)],  # uploads and these are the only readable files
        footer_links=["api"],
        theme=build_theme(),
        css_paths=[HERE / "static" / name for name in STYLES],
        head="".join(f"<script>{(HERE / 'static' / name).read_text(encoding='utf-8')}</script>" for name in SCRIPTS),
    )
    if app.app is not filtered_app:
        app.close(verbose=False)
        raise RuntimeError(
            "this version of gradio ignores _app and would serve without its limits; install the version "
            "that the extra app requires"
        )
    return str(url)


class ShareError(Exception):
    """Gradio could not open its tunnel."""


def _allow_share(app: Any, names: ServedNames) -> str:
    """The address of the tunnel, which the app then answers to.

    Raises:
        ShareError: there is none.
    """
    if not app.share_url:
        raise ShareError("no share link could be obtained: Gradio needs the internet for its tunnel")
    url = str(app.share_url)
    names.allow(url.partition("://")[2].strip("/"))
    return url


def _free_port(host: str) -> int:
    """A port that is free now. Gradio would report 0 in its URL."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _log_load_error(load: Future[Any]) -> None:
    """Log at once if the model cannot be loaded; pages report it at their first run."""
    error = None if load.cancelled() else load.exception()
    if error is not None:
        logger.error("mmspec: the model cannot be used: %s", one_line(error, 600))
