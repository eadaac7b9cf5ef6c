"""All pages as one Gradio app, and how it is served: to this machine alone, and without a trace in the end."""

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

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is told to anyone; read when gradio is imported
os.environ.setdefault("MPLBACKEND", "agg")  # or Gradio, which asks for it, waits a second at the first question

from mmspec.app.ui.gradio_import import skip_stub_generation

with skip_stub_generation():
    import gradio as gr

from mmspec.app.errors import one_line
from mmspec.app.scenes.examples import EXAMPLES_FOLDER as EXAMPLES
from mmspec.app.ui.api import register_endpoints
from mmspec.app.ui.context import Context
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.middleware.bodies import RequestLimits, UploadFolder
from mmspec.app.ui.middleware.filtered_app import FilteredApp, suppress_tracebacks
from mmspec.app.ui.middleware.hosts import HostPolicy
from mmspec.app.ui.middleware.request_filter import RequestFilter
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.tabs.batch import build_batch_tab
from mmspec.app.ui.tabs.compare import build_compare_tab
from mmspec.app.ui.tabs.inside import build_inside_tab
from mmspec.app.ui.worker import MAX_QUEUED_RUNS

logger = logging.getLogger("mmspec")

HERE = Path(__file__).parent
PAGE_TITLE = "mmspec: the same answer, sooner"
CLEANUP_INTERVAL_S, UPLOAD_MAX_AGE_S = 600, 3600
"""Seconds between two looks for old uploads, and how long one is kept."""
QUEUE_POLL_INTERVAL_S = 0.02
"""Seconds between two looks of Gradio at its queue. By itself it looks every millisecond, and each look takes Python
from the thread that decodes."""


def build_app(context: Context) -> Any:
    """The app, not yet served."""
    with gr.Blocks(
        title=PAGE_TITLE, analytics_enabled=False, delete_cache=(CLEANUP_INTERVAL_S, UPLOAD_MAX_AGE_S)
    ) as app:
        gr.HTML(f"<h1>{PAGE_TITLE}</h1>", elem_id="mm-title")
        run = gr.State(None, time_to_live=UPLOAD_MAX_AGE_S)
        with gr.Tabs():
            with gr.Tab("Compare"):
                build_compare_tab(context, run)
            with gr.Tab("Inside") as inside:
                build_inside_tab(run, inside)
            with gr.Tab("Batch"):
                build_batch_tab(context)
        register_endpoints(context)

        def left(request: gr.Request) -> None:
            """The page was closed: nobody waits for its answer any more."""
            context.sessions.end(str(request.session_hash))

        app.unload(left)
    app.queue(default_concurrency_limit=1, max_size=MAX_QUEUED_RUNS, status_update_rate=1, api_open=False)
    if hasattr(app._queue, "sleep_when_free"):
        app._queue.sleep_when_free = QUEUE_POLL_INTERVAL_S
    return app


def build_theme() -> Any:
    """Gradio's plain one, with the fonts of the reader's own machine: nothing is fetched from elsewhere."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
    return gr.themes.Base(primary_hue="blue", font=fonts, font_mono=["ui-monospace", "Consolas", "monospace"])


@dataclass(frozen=True)
class DemoServer:
    """A running app."""

    url: str
    app: Any
    context: Context


@contextmanager
def serve(
    model_store: ModelStore,
    *,
    limits: Limits | None = None,
    request_limits: RequestLimits | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    allowed: Sequence[str] = (),
) -> Iterator[DemoServer]:
    """Serve the pages until the block is left; then end all runs and remove all files.

    Args:
        bounds: what the server takes of requests. allowed: host names it answers to, besides its own.
        port: None takes the first free one from Gradio's usual one on; 0 any that is free.

    Raises:
        OSError: the port is taken.
        ValueError: an allowed host is no host name.
    """
    hosts = HostPolicy(host, allowed)
    space = TempStorage(UPLOAD_MAX_AGE_S)
    before = os.environ.get("GRADIO_TEMP_DIR")
    os.environ["GRADIO_TEMP_DIR"] = str(space.root / "uploads")  # read when the parts are made
    context, stack = Context(model_store, space, limits or Limits()), ExitStack()
    try:
        app = build_app(context)
        guarded = _build_filtered_app(app, context, hosts, request_limits or RequestLimits())
        context.worker.submit(lambda: model_store.get(model_store.model_names[0])).add_done_callback(
            _log_load_error
        )  # the page is there
        stack.enter_context(suppress_tracebacks())
        _, url, _ = app.launch(
            _app=guarded,
            enable_monitoring=False,
            mcp_server=False,
            server_name=host,
            server_port=_free_port(host) if port == 0 else port,
            share=False,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            show_error=False,
            max_file_size=context.limits.max_file_mb * 1_000_000,
            allowed_paths=[str(EXAMPLES)],  # besides uploads, nothing else can be read
            footer_links=["api"],
            theme=build_theme(),
            css_paths=[HERE / "static" / "styles.css"],
            head=f"<script>{(HERE / 'static' / 'replay.js').read_text(encoding='utf-8')}</script>",
        )
        if app.app is not guarded:
            raise RuntimeError("this version of gradio serves an app of its own; it would be open to other sites")
        try:
            yield DemoServer(url, app, context)
        finally:
            context.sessions.cancel_all()
            app.close(verbose=False)
    finally:
        stack.close()
        context.worker.close()
        space.close()
        if before is None:
            os.environ.pop("GRADIO_TEMP_DIR", None)
        else:
            os.environ["GRADIO_TEMP_DIR"] = before


def _build_filtered_app(app: Any, context: Context, hosts: HostPolicy, bounds: RequestLimits) -> FilteredApp:
    """The server app for `app`, behind our edge."""
    uploads = UploadFolder(context.temp_storage.root / "uploads", bounds, context.limits.max_files)
    return FilteredApp(lambda inner: RequestFilter(inner, hosts, bounds, uploads, app))


def _free_port(host: str) -> int:
    """Gradio itself would tell 0 as its address."""
    with socket.create_server((host, 0)) as one:
        number: int = one.getsockname()[1]
        return number


def _log_load_error(first: Future[Any]) -> None:
    """Tell at once if the model cannot be loaded; a page is told when it asks."""
    error = None if first.cancelled() else first.exception()
    if error is not None:
        logger.error("mmspec: the model cannot be used: %s", one_line(error, 600))


__all__ = ["DemoServer", "build_app", "serve"]
