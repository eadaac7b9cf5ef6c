"""Frees what Gradio stores of sessions that nobody reads: their messages, their queued events and their components.

Gradio creates 200 kB of component state for every session name that a client invents, and frees it only above 10,000
sessions; messages wait until somebody reads them. A request costs a client a few bytes, so a client that never opens an
event stream could fill the memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gradio.routes import file_upload_statuses

from mmspec.app.errors import one_line

logger = logging.getLogger("mmspec")

MAX_UPLOAD_RECORDS = 200
"""Records of the progress of uploads, which Gradio frees only where a client reads them to the end."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of the sessions of one server.

    Attributes:
        unread_timeout_s: seconds until a session loses its messages and events if nobody opens its event stream; a
            session that never had a connection loses its components too.
        disconnected_timeout_s: seconds until a session whose last connection closed loses its components, so that a
            page whose connection was interrupted can go on.
        max_disconnected: sessions without a connection that hold components, those that had a connection and those that
            never had one counted separately; above that, the oldest are freed.
        max_unread_messages: messages of one session that wait for its client.
        cleanup_interval_s: seconds between two checks.
    """

    unread_timeout_s: float = 60.0
    disconnected_timeout_s: float = 3600.0
    max_disconnected: int = 200
    max_unread_messages: int = 2000
    cleanup_interval_s: float = 2.0


@dataclass(frozen=True)
class Disconnected:
    """State of a session without a connection.

    Attributes:
        was_connected: whether it ever had a connection.
        since: when its last connection closed, or when it was first found, on the clock of the cleaner.
    """

    was_connected: bool
    since: float


class SessionCleaner:
    """Tracks connections and frees sessions that have none. All methods run in the event loop of the server."""

    def __init__(
        self,
        blocks: Any,
        limits: SessionLimits,
        end_session: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the sessions of an app.

        Args:
            blocks: the `gr.Blocks`.
            limits: when sessions are freed.
            end_session: called with the name of a session whose events are cancelled.
            clock: seconds.
        """
        self.blocks = blocks
        self.limits = limits
        self._end_session = end_session
        self._clock = clock
        self._num_connections = Counter[str]()
        self._num_streams = Counter[str]()
        self._unread_since: dict[str, float] = {}
        self._disconnected: dict[str, Disconnected] = {}

    @contextmanager
    def connection(self, session: str, is_event_stream: bool) -> Iterator[None]:
        """While the block runs, a client holds a connection of this session: its event stream, or its heartbeat."""
        counters = [self._num_connections, self._num_streams] if is_event_stream else [self._num_connections]
        for counter in counters:
            counter[session] += 1
        try:
            yield
        finally:
            for counter in counters:
                counter[session] -= 1
                if not counter[session]:
                    del counter[session]
            if session not in self._num_connections:
                self._disconnected[session] = Disconnected(True, self._clock())

    async def run(self) -> None:
        """Clean up at every `cleanup_interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(self.limits.cleanup_interval_s)
            try:
                await self.free_unused()
            except Exception as error:
                logger.warning("mmspec: sessions were not freed: %s: %s", type(error).__name__, one_line(error, 200))
                logger.debug("mmspec: stack trace", exc_info=error)

    async def free_unused(self) -> None:
        """Free all sessions and records beyond the limits."""
        for session in self._find_unread():
            await self._drop_events(session)
        for session in self._find_disconnected():
            await self._drop_session(session)
        self._trim_records()

    def _find_unread(self) -> list[str]:
        """Sessions that lose their messages: nobody has read them for too long, or there are none."""
        queue, now = self.blocks._queue, self._clock()
        unread = []
        since = {}
        for session in queue.pending_messages_per_session.keys() | queue.pending_event_ids_session.keys():
            messages = queue.pending_messages_per_session.get(session)
            num_messages = messages.qsize() if messages is not None else 0
            if session in self._num_streams:
                if num_messages > self.limits.max_unread_messages:
                    unread.append(session)
            elif not num_messages and not queue.pending_event_ids_session.get(session):
                self._forget_messages(session)
            else:
                since[session] = self._unread_since.get(session, now)
                is_expired = now - since[session] >= self.limits.unread_timeout_s
                if is_expired or num_messages > self.limits.max_unread_messages:
                    unread.append(session)
        self._unread_since = since
        return unread

    def _find_disconnected(self) -> list[str]:
        """Sessions that lose everything."""
        now, limits = self._clock(), self.limits
        names = [name for name in self.blocks.state_holder.session_data if name not in self._num_connections]
        self._disconnected = {name: self._disconnected.get(name, Disconnected(False, now)) for name in names}
        expired = []
        timeouts = ((False, limits.unread_timeout_s), (True, limits.disconnected_timeout_s))
        for was_connected, timeout_s in timeouts:
            group = [
                (state.since, name)
                for name, state in self._disconnected.items()
                if state.was_connected == was_connected
            ]
            group.sort()
            num_excess = max(0, len(group) - limits.max_disconnected)
            expired += [
                name for index, (since, name) in enumerate(group) if index < num_excess or now - since >= timeout_s
            ]
        return expired

    async def _drop_events(self, session: str) -> None:
        """Cancel the events of a session and forget their messages."""
        queue = self.blocks._queue
        self._end_session(session)
        await queue.clean_events(session_hash=session)
        for event_id in queue.pending_event_ids_session.get(session, ()):
            event = queue.event_ids_to_events.get(event_id)
            if event is not None:  # it left the queue for its run meanwhile; sends no message to a forgotten session
                event.alive = False
        self._forget_messages(session)

    def _forget_messages(self, session: str) -> None:
        self.blocks._queue.pending_messages_per_session.pop(session, None)
        self.blocks._queue.pending_event_ids_session.pop(session, None)

    async def _drop_session(self, session: str) -> None:
        """Free everything of a session."""
        await self._drop_events(session)
        holder = self.blocks.state_holder
        holder.delete_state(session)
        with holder.lock:
            holder.session_data.pop(session, None)
            holder.time_last_used.pop(session, None)
        self._disconnected.pop(session, None)

    def _trim_records(self) -> None:
        """Forget the oldest progress of uploads, and cancelled runs that no longer exist."""
        for records in (file_upload_statuses._statuses, file_upload_statuses._signals):
            for upload_id in list(records)[: max(0, len(records) - MAX_UPLOAD_RECORDS)]:
                records.pop(upload_id, None)
        app = self.blocks._queue.server_app
        if app is not None:
            app.iterators_to_reset.intersection_update(self.blocks._queue.event_ids_to_events)
