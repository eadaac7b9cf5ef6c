"""A page without a browser: uploads, asks, and reads what the server streams, as the script of a page does.

Imports nothing heavy, since it is run in a process of its own: a browser shares no Python with the server either.
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
    """Start events of the app, one after the other, and follow each to its end.

    Args:
        url: of the app, with a slash. events: their numbers. data: inputs of the first; at `place` the path of a file,
            which is uploaded before. States of the app are None. The others have no inputs.

    Returns:
        What the last one gave out last, per output.

    Raises:
        RuntimeError: it failed.
    """
    session = secrets.token_hex(8)
    with httpx.Client(timeout=TIMEOUT_S) as client:
        file = Path(data[file_index])
        with file.open("rb") as stream:
            sent = client.post(f"{url}{API}/upload", files={"files": (file.name, stream)}).json()
        data = [*data[:file_index], {"path": sent[0], "meta": {"_type": "gradio.FileData"}}, *data[file_index + 1 :]]
        told = _run_event(client, url, {"data": data, "fn_index": events[0], "session_hash": session})
        for event in events[1:]:
            told = _run_event(client, url, {"data": [], "fn_index": event, "session_hash": session})
        return told


def _run_event(client: httpx.Client, url: str, asked: dict[str, Any]) -> list[Any]:
    asked = asked | {"event_data": None, "trigger_id": None}
    client.post(f"{url}{API}/queue/join", json=asked).raise_for_status()
    with client.stream("GET", f"{url}{API}/queue/data", params={"session_hash": asked["session_hash"]}) as answer:
        for line in answer.iter_lines():
            told = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
            if told.get("msg") == "process_completed":
                if not told["success"]:
                    raise RuntimeError(f"the page failed: {told['output']}")
                return list(told["output"]["data"])
    raise RuntimeError("the page said nothing")


def download_json(url: str, path: str) -> Any:
    """A JSON file that the app offers."""
    return httpx.get(f"{url}{API}/file={path}", timeout=TIMEOUT_S).raise_for_status().json()


__all__ = ["download_json", "run_events"]
