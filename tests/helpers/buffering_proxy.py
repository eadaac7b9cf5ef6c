"""A small HTTP proxy as nginx is set up in SECURITY.md: serves an app under a path, buffers what it may.

A response is passed on when it is complete, unless the app sends `X-Accel-Buffering: no`, as nginx does.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@contextmanager
def serve_proxy(app_url: str, path: str = "/demo") -> Iterator[str]:
    """Serve `app_url` under `path`; yields the address, with a slash at its end."""
    target = urlsplit(app_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a response ends with its connection

        def _pass_on(self) -> None:
            if not self.path.startswith(f"{path}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            sent = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            sent |= {"X-Forwarded-Host": self.headers["host"], "X-Forwarded-Proto": "http"}
            other = http.client.HTTPConnection(str(target.hostname), int(target.port or 80), timeout=120)
            with suppress(OSError):
                other.request(self.command, self.path.removeprefix(path), body, sent)
                answer = other.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                is_buffered = (answer.getheader("x-accel-buffering") or "") != "no"
                while chunk := answer.read() if is_buffered else answer.read1(65_536):
                    self.wfile.write(chunk)
                    self.wfile.flush()
            other.close()

        do_GET = do_POST = do_HEAD = do_OPTIONS = _pass_on

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{path}/"
    finally:
        server.shutdown()
        server.server_close()


__all__ = ["serve_proxy"]
