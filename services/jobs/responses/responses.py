"""Responses of all owners: kept ones, and those that run in the background."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

import grpc
import msgspec

from services.common.errors import draining_error, internal_error
from services.common.sharing.shares import Shares
from services.jobs.answers import Answering
from services.jobs.creator import Creator
from services.jobs.metrics import BACKGROUND
from services.jobs.responses.events import StreamedEvent, events_of, response_of
from services.jobs.store.database_guard import StoreUnavailableError
from services.jobs.store.event_log import EventLog, EventLogs
from services.jobs.store.response_store import ResponseStore, StoredResponse
from tokenwire.errors import ServiceError, invalid

__all__ = ["Responses", "StartedResponse", "fail_interrupted"]

_LOG = logging.getLogger("responses")
_PATH = "/v1/responses"
_KEEP_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between two attempts to keep the end of a response in the background"""
_LOST = "The server ended before the response was complete."
_UNEXPECTED = "The response ended unexpectedly."


@dataclass(frozen=True, slots=True)
class StartedResponse:
    """A response that runs in the background."""

    id: str
    json: bytes
    """The response as it began"""
    model: str
    ignored: list[str]
    """Paths of its body's parts that have no effect"""


class _Running:
    """A response that runs."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.id = ""
        self.json = b""
        """The response as it is now"""
        self.log: EventLog | None = None
        """Events of the response; None = they are not kept"""
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self.has_last_event = False


class Responses:
    """The responses of a store, and the events of those that are streamed in the background."""

    def __init__(
        self, store: ResponseStore, answering: Answering, most: int, max_event_bytes: int
    ) -> None:
        """most: running ones. max_event_bytes: of all kept events."""
        self._store = store
        self._answering = answering
        self._most = most
        self._admitted = Shares(most, reserve=most)
        self._logs = EventLogs(max_event_bytes)
        self._running: dict[str, _Running] = {}
        self._begun: set[str] = set()
        """Ids of the responses that are kept as running ones"""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    async def keep(self, stored: StoredResponse) -> bool:
        """Keep a response, in place of what is kept of it; return false if it is too large.

        Raises StoreUnavailableError, except for the end of one in the background: it can be read
        only later, so the store has some time to become usable again.
        """
        if stored.id not in self._begun:
            kept = await self._store.thread.run(self._store.put, stored)
            if kept and stored.is_running:
                self._begun.add(stored.id)
            return kept
        for pause in _KEEP_PAUSES:
            try:
                return await self._store.thread.run(self._store.put, stored)
            except StoreUnavailableError:
                await asyncio.sleep(pause)
        _LOG.error("the response %s in the background is lost: it could not be kept", stored.id)
        return True

    async def get(self, identity: str, owner: str) -> StoredResponse:
        """Return a response as it is now. Raises NOT_FOUND and StoreUnavailableError."""
        stored = await self._store.thread.run(self._store.get, identity, owner)
        running = self._find(identity, owner)
        return stored if running is None else replace(stored, response=running.json)

    async def delete(self, identity: str, owner: str) -> None:
        """Drop a response; one that runs is cancelled."""
        await self._end(identity, owner)
        await self._store.thread.run(self._store.delete, identity, owner)
        self._logs.delete(identity)

    async def cancel(self, identity: str, owner: str) -> bytes:
        """End a response in the background with the output that it has; return it.

        Raises INVALID_ARGUMENT for another response, and NOT_FOUND.
        """
        running = await self._end(identity, owner)
        if running is not None:
            return running.json
        found = (await self.get(identity, owner)).response
        if not msgspec.json.decode(found).get("background"):
            raise invalid(
                "response_id",
                "Only a response in the background can be cancelled, and this one is not. To end "
                "a stream, close its connection.",
            )
        return found

    async def events(self, identity: str, owner: str) -> EventLog:
        """Return the events of a response. Raises NOT_FOUND, and FAILED_PRECONDITION without."""
        await self.get(identity, owner)
        log = self._logs.find(identity, owner)
        if log is None:
            message = (
                "The events of this response are not kept: only those of a response with "
                "background and stream are, for a time."
            )
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NO_EVENTS", message)
        return log

    async def start(self, body: bytes, creator: Creator, *, keep_events: bool) -> StartedResponse:
        """Start a response in the background; return it once the model has accepted it.

        It goes on if the caller leaves. Raises ServiceError.
        """
        if self._is_draining:
            raise draining_error()
        started: asyncio.Future[StartedResponse] = asyncio.get_running_loop().create_future()
        started.add_done_callback(lambda done: done.cancelled() or done.exception())
        running = _Running(creator.owner)
        task = asyncio.ensure_future(self._run(running, body, creator, keep_events, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(started)

    async def drain(self) -> None:
        """Take no new responses in the background, and return when the running ones have ended."""
        self._is_draining = True
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _find(self, identity: str, owner: str) -> _Running | None:
        running = self._running.get(identity)
        return None if running is None or running.owner != owner else running

    async def _end(self, identity: str, owner: str) -> _Running | None:
        """Cancel a response if it runs, wait for its end, and return it."""
        running = self._find(identity, owner)
        if running is not None:
            running.cancelled.set()
            await running.ended.wait()
        return running

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        """Count a response while it runs. Raises RESOURCE_EXHAUSTED if too many do."""
        if not self._admitted.has_room(owner, 1):
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_BACKGROUND",
                f"{self._most} responses already run in the background; try again, or omit "
                "background.",
                field="background",
                retry_seconds=1,
            )
        self._admitted.add(owner, 1)
        BACKGROUND.inc()
        try:
            yield
        finally:
            self._admitted.add(owner, -1)
            BACKGROUND.dec()

    async def _run(
        self,
        running: _Running,
        body: bytes,
        creator: Creator,
        keep_events: bool,
        started: "asyncio.Future[StartedResponse]",
    ) -> None:
        """Run a response to its end; tell `started` of its beginning, or why there is none."""
        try:
            with self._counted(creator.owner):
                answer = await self._answering.begin(_PATH, body, creator, running.cancelled)
                async with aclosing(answer.events):
                    async for piece in answer.events:
                        for event in events_of(piece):
                            if not running.id:
                                self._register(running, event, keep_events=keep_events)
                                model, ignored = answer.model, [*answer.ignored]
                                beginning = (running.id, running.json, model, ignored)
                                _tell(started, StartedResponse(*beginning))
                            self._take(running, event)
        except ServiceError as error:
            _fail(started, error)
        except Exception:
            _LOG.exception("a response in the background failed")
            _fail(started, internal_error())
        finally:
            _fail(started, internal_error())
            await self._close(running)

    def _register(self, running: _Running, event: StreamedEvent, *, keep_events: bool) -> None:
        """Note a response by its first event, which has it."""
        running.json = response_of(event) or b"{}"
        running.id = msgspec.json.decode(running.json)["id"]
        self._running[running.id] = running
        if keep_events:
            running.log = self._logs.open(running.id, running.owner)

    def _take(self, running: _Running, event: StreamedEvent) -> None:
        """Note the next event."""
        running.json = response_of(event) or running.json
        running.has_last_event = event.is_last
        if running.log is not None:
            running.log.add(event.encoded)

    async def _close(self, running: _Running) -> None:
        """Note the end of a response. One without a last event has failed."""
        if not running.id:
            return
        try:
            if not running.has_last_event:
                await self._keep_failure(running)
        except ServiceError as error:
            _LOG.error("the failed response %s could not be kept: %r", running.id, error)
        finally:
            self._begun.discard(running.id)
            del self._running[running.id]
            if running.log is not None:
                running.log.end()
            running.ended.set()

    async def _keep_failure(self, running: _Running) -> None:
        running.json = failed_response(running.json, _UNEXPECTED)
        stored = await self._store.thread.run(self._store.get, running.id, running.owner)
        await self.keep(replace(stored, response=running.json, is_running=False))


def fail_interrupted(store: ResponseStore) -> None:
    """Fail the responses that an earlier process did not end. Raises StoreUnavailableError."""
    for each in store.interrupted():
        failed = failed_response(each.response, _LOST)
        store.put(replace(each, response=failed, is_running=False))


def failed_response(encoded: bytes, message: str) -> bytes:
    """Return the JSON of a running response as one that failed."""
    response = msgspec.json.decode(encoded)
    error = {"code": "server_error", "message": message}
    return msgspec.json.encode(response | {"status": "failed", "error": error})


def _tell(started: "asyncio.Future[StartedResponse]", response: StartedResponse) -> None:
    if not started.done():
        started.set_result(response)


def _fail(started: "asyncio.Future[StartedResponse]", error: ServiceError) -> None:
    if not started.done():
        started.set_exception(error)
