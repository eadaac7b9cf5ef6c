"""The demo's server: the page and its few routes, by Gradio's server on this machine's loopback address."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # no telemetry; read when gradio is imported

from mmspec.app.ui.gradio_import import skip_stub_generation

with skip_stub_generation():
    import gradio as gr

from fastapi import Depends, HTTPException, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from mmspec.app.errors import UsageError
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.demo import Demo
from mmspec.app.ui.guard import Guard, host_of
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model import DemoModel
from mmspec.app.ui.run import Run

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 100_000


class GuardedServer(gr.Server):
    """Gradio's server behind `Guard`. What is added as middleware would be inside Gradio's CORS headers.

    Attributes:
        hosts: see `Guard`.
    """

    def __init__(self, hosts: set[str]) -> None:
        super().__init__(title="mmspec demo", openapi_url=None, docs_url=None, redoc_url=None)
        self.hosts = hosts

    def build_middleware_stack(self) -> Any:
        """See Starlette. Called once, when the server starts."""
        return Guard(super().build_middleware_stack(), self.hosts)


def build_app(demo: Demo, hosts: set[str]) -> GuardedServer:
    """The app without serving it."""
    app = GuardedServer(hosts)

    def signed_in(request: Request) -> None:
        """With a password: refuse who has not signed in, by Gradio's cookie."""
        names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
        if app.auth is not None and not any(request.cookies.get(name) in app.tokens for name in names):
            raise HTTPException(401, "Please sign in.")

    _add_files(app)
    _add_routes(app, demo, [Depends(signed_in)])
    return app


def _add_files(app: gr.Server) -> None:
    """What everybody may read: the page and the examples."""

    def one_of(files: Iterable[Path], name: str) -> Response:
        path = next((file for file in files if file.name == name), None)
        if path is None:
            raise HTTPException(404)
        return FileResponse(path, headers={"cache-control": "no-cache"})

    @app.get("/")
    def page() -> Response:
        return one_of(STATIC.iterdir(), "index.html")

    @app.get("/page/{name}")
    def static(name: str) -> Response:
        return one_of(STATIC.iterdir(), name)

    @app.get("/examples/{name}")
    def example(name: str) -> Response:
        return one_of(list_example_files(), name)


def _add_routes(app: gr.Server, demo: Demo, private: list[Any]) -> None:
    @app.get("/state", dependencies=private)
    def state() -> Response:
        return JSONResponse(demo.state())

    @app.post("/file", dependencies=private)
    async def file(request: Request) -> Response:
        announced = request.headers.get("content-length", "0")
        name = unquote(request.headers.get("x-file-name", "file")[:1000])
        try:
            demo.uploads.check_size(name, int(announced) if announced.isdecimal() else 0)
            return JSONResponse({"id": await demo.uploads.save(request.stream(), name)})
        except UsageError as error:
            return _refusal(error, 413)

    async def events(request: Request, answer: Callable[[Run], AsyncIterator[bytes]]) -> Response:
        try:
            run = demo.parse(await _read_json(request))
        except UsageError as error:
            return _refusal(error, 422)
        return StreamingResponse(answer(run), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.post("/ask", dependencies=private)
    async def ask(request: Request) -> Response:
        return await events(request, demo.stream)

    @app.post("/compare", dependencies=private)
    async def compare(request: Request) -> Response:
        return await events(request, demo.compare)

    @app.get("/report/{name}", dependencies=private)
    def report(name: str) -> Response:
        """A stored answer as JSON, or, by `ID.py`, the code that repeats it."""
        found = demo.reports.get(name.removesuffix(".py"))
        if found is None:
            return _refusal("This answer is no longer kept; ask again.", 404)
        if not name.endswith(".py"):
            return JSONResponse(found)
        headers = {"content-disposition": 'attachment; filename="mmspec_run.py"'}
        return PlainTextResponse(demo.script(found["id"]), headers=headers)


def _refusal(reason: object, status: int) -> Response:
    return JSONResponse({"error": str(reason)}, status, headers={"connection": "close"})  # a body may be unread


async def _read_json(request: Request) -> object:
    """The body of a request.

    Raises:
        UsageError: it is too large, or no JSON.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise UsageError(f"The request has more than {MAX_BODY_BYTES} bytes.")
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise UsageError("The request must be application/json.")
    try:
        found: object = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise UsageError("The request is no JSON.") from None
    return found


@contextmanager
def serve(
    model: DemoModel,
    *,
    limits: Limits | None = None,
    port: int | None = None,
    auth: tuple[str, str] | None = None,
    share: bool = False,
    root_path: str = "",
) -> Iterator[Demo]:
    """Serve the page on the loopback address until the block is left; then end all runs and remove all files.

    Args:
        model: is loaded while the page is opened.
        limits: of questions, files and answers.
        port: None takes the first free port from 7860 on; 0 any free port.
        auth: name and password of Gradio's login; None for none.
        share: open a tunnel of Gradio, so that the app is reached from the internet.
        root_path: path, or address, under which a proxy serves the app; see Gradio. Its host may use the app.

    Raises:
        OSError: the port is in use.
        UsageError: the tunnel cannot be opened.
    """
    demo = Demo(model, limits or Limits())
    hosts = {host_of(urlsplit(root_path).netloc)} - {""}
    with ExitStack() as stack:
        stack.callback(demo.close)
        app = build_app(demo, hosts)
        demo.start()
        if port == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
        app.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=share,
            auth=auth,
            root_path=root_path,
            max_file_size=demo.limits.max_file_mb * 1_000_000,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            show_error=False,
        )
        blocks: Any = app.get_blocks()
        stack.callback(blocks.close, verbose=False)
        stack.callback(demo.worker.close)  # first, so that no open stream keeps the server
        demo.url = str(blocks.local_url)
        if share:
            demo.share_url = blocks.share_url
            if not demo.share_url:
                raise UsageError("no share link could be obtained: Gradio needs the internet for its tunnel")
            hosts.add(host_of(urlsplit(str(demo.share_url)).netloc))
        yield demo
