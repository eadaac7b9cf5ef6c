"""A client that acts as a page without a browser: uploads a file, starts events, reads the event stream.

Runs in a process of its own, as a browser does, so it imports neither torch nor gradio.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

API = "gradio_api"
TIMEOUT_S = 600.0


def run_events(url: str, events: Sequence[int], data: list[Any], file_index: int) -> list[Any]:
    """Run events of the app one after the other, each to its end.

    Args:
        url: of the app, with a slash at the end.
        events: numbers of the events; all but the first have no inputs.
        data: inputs of the first event; `gr.State` inputs are None.
        file_index: index in `data` of a file path, which is uploaded first.

    Returns:
        Last values of the outputs of the last event.

    Raises:
        RuntimeError: an event failed.
    """
    session = secrets.token_hex(8)
    with httpx.Client(timeout=TIMEOUT_S) as client:
        file = Path(data[file_index])
        with file.open("rb") as stream:
            uploaded = client.post(f"{url}{API}/upload", files={"files": (file.name, stream)}).json()
        data = [
            *data[:file_index],
            {"path": uploaded[0], "meta": {"_type": "gradio.FileData"}},
            *data[file_index + 1 :],
        ]
        output = _run_event(client, url, {"data": data, "fn_index": events[0], "session_hash": session})
        for event in events[1:]:
            output = _run_event(client, url, {"data": [], "fn_index": event, "session_hash": session})
        return output


def _run_event(client: httpx.Client, url: str, request: dict[str, Any]) -> list[Any]:
    request = request | {"event_data": None, "trigger_id": None}
    client.post(f"{url}{API}/queue/join", json=request).raise_for_status()
    with client.stream("GET", f"{url}{API}/queue/data", params={"session_hash": request["session_hash"]}) as stream:
        for line in stream.iter_lines():
            message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            if message.get("msg") == "process_completed":
                if not message["success"]:
                    raise RuntimeError(f"the page failed: {message['output']}")
                return list(message["output"]["data"])
    raise RuntimeError("the event stream ended without a result")


def download_json(url: str, path: str) -> Any:
    """Download and parse a JSON file that the app offers."""
    return httpx.get(f"{url}{API}/file={path}", timeout=TIMEOUT_S).raise_for_status().json()
