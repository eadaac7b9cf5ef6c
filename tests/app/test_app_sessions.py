"""What the server of `mmspec demo` stores of sessions that nobody reads: it is bounded, and it is freed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")

import httpx
from gradio.routes import file_upload_statuses

from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.middleware.sessions import MAX_UPLOAD_RECORDS, SessionCleaner, SessionLimits
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.server import DemoServer, serve

pytestmark = pytest.mark.pages

API = "gradio_api"
LIMITS = SessionLimits(unread_timeout_s=1.0, disconnected_timeout_s=2.0, max_disconnected=1000, cleanup_interval_s=0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[DemoServer]:
    with serve(ModelStore("tiny"), session_limits=LIMITS, port=0) as running:
        running.context.worker.submit(lambda: None).result()
        yield running


def find_event(server: DemoServer, name: str, num_inputs: int) -> int:
    fns = server.app.fns.items()
    return next(index for index, fn in fns if fn.fn and fn.fn.__name__ == name and len(fn.inputs) == num_inputs)


def join(server: DemoServer, session: str, event: int, data: list[Any]) -> None:
    body = {"data": data, "fn_index": event, "session_hash": session}
    httpx.post(f"{server.url}{API}/queue/join", json=body, timeout=60).raise_for_status()


def begin(server: DemoServer, session: str) -> None:
    """Start a quick event, which creates component state, messages, and a run that could be cancelled."""
    join(server, session, find_event(server, "begin", 0), [])


def stored(server: DemoServer) -> dict[str, int]:
    """Number of sessions in each of the tables."""
    queue = server.app._queue
    return {
        "messages": len(queue.pending_messages_per_session),
        "event ids": len(queue.pending_event_ids_session),
        "components": len(server.app.state_holder.session_data),
        "last used": len(server.app.state_holder.time_last_used),
        "runs": len(server.context.sessions._signals),
        "events": len(queue.event_ids_to_events) + len(queue.event_analytics),
    }


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_sessions_that_never_read_are_freed(server: DemoServer) -> None:
    assert wait_until(lambda: not any(stored(server).values())), stored(server)
    for number in range(30):
        begin(server, f"unread {number}")
    full = stored(server)
    assert full["components"] > 0 and full["messages"] > 0, full
    assert wait_until(lambda: not any(stored(server).values())), stored(server)


def test_a_connected_page_keeps_its_state_and_loses_unread_messages(server: DemoServer) -> None:
    with httpx.stream("GET", f"{server.url}{API}/heartbeat/page", timeout=60) as heartbeat:
        lines = heartbeat.iter_lines()  # a name, since httpx closes the connection with its iterator
        next(lines)
        begin(server, "page")
        queue = server.app._queue
        assert "page" in queue.pending_messages_per_session
        assert wait_until(lambda: "page" not in queue.pending_messages_per_session)
        assert "page" not in queue.pending_event_ids_session
        time.sleep(LIMITS.disconnected_timeout_s)
        assert "page" in server.app.state_holder.session_data
        begin(server, "page")
        with httpx.stream("GET", f"{server.url}{API}/queue/data?session_hash=page", timeout=60) as stream:
            assert any("process_completed" in line for line in stream.iter_lines())
    time.sleep(LIMITS.unread_timeout_s)
    assert "page" in server.app.state_holder.session_data, "it may connect again"
    assert wait_until(lambda: "page" not in server.app.state_holder.session_data)


def test_the_run_of_an_unread_session_is_cancelled(server: DemoServer, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    server.context.worker.submit(lambda: gate.wait(60))
    file = list_example_files()[0]
    with file.open("rb") as content:
        sent = httpx.post(f"{server.url}{API}/upload", files={"files": (file.name, content)}, timeout=60)
    image = {"path": sent.json()[0], "meta": {"_type": "gradio.FileData"}}
    settings = ["tiny", "auto", "none", 0, 0, 8]
    with caplog.at_level(logging.WARNING, "mmspec"):
        join(server, "running", find_event(server, "compare", 8), [image, "what is it?", *settings])
        assert wait_until(lambda: len(server.context.worker._queue) > 1), "it waits for the device"
        assert wait_until(lambda: not any(stored(server).values())), stored(server)
        assert wait_until(lambda: sum(not run.future.done() for run in server.context.worker._queue) == 1)
    gate.set()
    assert not caplog.records, "nothing has failed"


def test_records_of_uploads_are_bounded(server: DemoServer) -> None:
    for number in range(MAX_UPLOAD_RECORDS + 10):
        file_upload_statuses.track(f"upload {number}")
    statuses, signals = file_upload_statuses._statuses, file_upload_statuses._signals
    assert wait_until(lambda: max(len(statuses), len(signals)) <= MAX_UPLOAD_RECORDS)
    assert f"upload {MAX_UPLOAD_RECORDS + 9}" in statuses, "the oldest are forgotten"


# the rules, with a clock of the test


class FakeQueue:
    """The tables of Gradio's queue."""

    def __init__(self) -> None:
        self.pending_messages_per_session: dict[str, Any] = {}
        self.pending_event_ids_session: dict[str, set[str]] = {}
        self.event_ids_to_events: dict[str, Any] = {}
        self.server_app = None
        self.cleaned = list[str]()

    async def clean_events(self, session_hash: str) -> None:
        self.cleaned.append(session_hash)

    def push(self, session: str, num_messages: int = 1) -> None:
        """Add an event with so many messages."""
        event_id = f"event of {session}"
        self.pending_messages_per_session[session] = SimpleNamespace(qsize=lambda: num_messages)
        self.pending_event_ids_session[session] = {event_id}
        self.event_ids_to_events[event_id] = SimpleNamespace(alive=True, session_hash=session)


class FakeApp:
    """A cleaner on a clock that a test advances."""

    def __init__(self, **limits: float) -> None:
        self.now = 0.0
        self.queue = FakeQueue()
        self.components: dict[str, Any] = {}
        holder = SimpleNamespace(
            session_data=self.components, time_last_used={}, delete_state=lambda _: None, lock=threading.Lock()
        )
        self.ended = list[str]()
        blocks = SimpleNamespace(_queue=self.queue, state_holder=holder)
        self.cleaner = SessionCleaner(blocks, SessionLimits(**limits), self.ended.append, lambda: self.now)  # type: ignore[arg-type]

    def clean_at(self, now: float) -> set[str]:
        """Clean up; returns the sessions that still have components."""
        self.now = now
        asyncio.run(self.cleaner.free_unused())
        return set(self.components)


def test_a_session_has_time_to_connect_and_to_come_back() -> None:
    app = FakeApp(unread_timeout_s=60, disconnected_timeout_s=600)
    app.components |= dict.fromkeys(["never", "open", "closed"])
    assert app.clean_at(0) == {"never", "open", "closed"}
    with app.cleaner.connection("open", is_event_stream=False):
        with app.cleaner.connection("closed", is_event_stream=True):
            assert app.clean_at(59) == {"never", "open", "closed"}
            assert app.clean_at(60) == {"open", "closed"}
        assert app.clean_at(659) == {"open", "closed"}
        assert app.clean_at(660) == {"open"}
        assert app.clean_at(10_000) == {"open"}
    assert app.clean_at(10_599) == {"open"}, "its time starts when its connection closes"
    assert app.clean_at(10_600) == set() and app.ended == ["never", "closed", "open"]


def test_the_oldest_sessions_are_freed_above_the_limit() -> None:
    app = FakeApp(max_disconnected=2)
    for now, name in enumerate(["a", "b", "c"]):
        app.components[f"closed {name}"] = None
        app.now = now
        with app.cleaner.connection(f"closed {name}", is_event_stream=True):
            pass
    for now, name in enumerate(["a", "b", "c"]):
        app.components[f"new {name}"] = None
        left = app.clean_at(3 + now)
    assert left == {"closed b", "closed c", "new b", "new c"}, "new sessions cannot displace those that may come back"


def test_messages_wait_for_a_minute_and_not_without_end() -> None:
    app = FakeApp(unread_timeout_s=60, max_unread_messages=100)
    for name, num_messages in (("unread", 1), ("flood", 101), ("read", 100), ("stalled", 101)):
        app.queue.push(name, num_messages)
    app.queue.push("delivered", 0)
    app.queue.pending_event_ids_session["delivered"].clear()
    streams = [app.cleaner.connection(name, is_event_stream=True) for name in ("read", "stalled")]
    for stream in streams:
        stream.__enter__()
    unread, read = app.queue.event_ids_to_events["event of unread"], app.queue.event_ids_to_events["event of read"]
    app.clean_at(0)
    assert set(app.queue.pending_messages_per_session) == {"unread", "read"}
    assert sorted(app.queue.cleaned) == sorted(app.ended) == ["flood", "stalled"], "no event of a read one is cancelled"
    app.clean_at(59)
    assert set(app.queue.pending_messages_per_session) == {"unread", "read"} and unread.alive
    app.clean_at(60)
    assert set(app.queue.pending_messages_per_session) == set(app.queue.pending_event_ids_session) == {"read"}
    assert not unread.alive and read.alive
