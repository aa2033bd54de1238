"""Runner of batches: one of an owner at a time, each with some requests in progress at once."""

import asyncio
import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import grpc

from services.common.accounts.account import Account
from services.common.background import keep_running
from services.common.json_limits import check_json_limits
from services.jobs.answers import Answering
from services.jobs.creator import Creator
from services.jobs.metrics import BATCHES
from services.jobs.store.database_guard import StoreUnavailableError
from services.jobs.store.file_store import (
    PAGE_BYTES,
    BatchStatus,
    FileStore,
    InvalidLine,
    StoredBatch,
    StoredFile,
    full,
)
from tokenwire.batch_run import INVALID_LINE, BatchRun, BatchSummary, InputError, Reply
from tokenwire.errors import ServiceError

__all__ = ["BatchRunner"]

_LOG = logging.getLogger("batches")
_AT_ONCE = 64
_VECTORS_AT_ONCE = 4
_OWNERS = 8
"""Owners of which a batch runs at a time"""
_PATIENCE = 600.0
_MOST_LINES = 50_000
_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling")
"""Endpoints whose answers may be large"""
_LOCK_SECONDS = 1.0
_POLL_SECONDS = 0.5
"""Time after which counts are written, and what other processes wrote is read"""
_FIRST_PAUSE, _MOST_PAUSE = 2.0, 60.0
"""Seconds after which a batch that the disk or the database stopped goes on"""
_OK = 200
_KINDS = ("output", "error")
_MOST_INVALID = 10
_PIECE = 1 << 20
"""Bytes that an output reserves at a time"""
_ID_BYTES = 40
"""Bytes of the `id` that each line gets when the output is divided"""
_FILES_BYTES = 2 * PAGE_BYTES
"""The files of answers and of errors each take a page of the disk"""
_Result = TypeVar("_Result")


class BatchRunner:
    """Runs the batches of a store. Those that a restart interrupts go on where they stopped."""

    def __init__(
        self,
        store: FileStore,
        answering: Answering,
        account_of: Callable[[str], Account | None],
        longest: int,
        most_output: int,
    ) -> None:
        """account_of: returns the account of a key by its id; raises ServiceError if it is gone.

        longest: characters of a line, at most. most_output: bytes of a batch's output, at most.
        """
        self._store = store
        self._account_of = account_of
        self._longest = longest
        self._most_output = most_output
        self._answering = answering
        self._added = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._cancelled = asyncio.Event()

    def start(self) -> None:
        """Begin to run batches."""
        self._running = keep_running("batches", self._run_all)

    async def stop(self) -> None:
        """Stop at once; unfinished batches stay in the store as they are."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def add(self, batch: StoredBatch) -> None:
        """Queue a new batch. Raises RESOURCE_EXHAUSTED."""
        await self._store.thread.run(self._store.add, batch)
        self._added.set()

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Have a batch that has not ended end with what it has. Returns its new state."""
        if batch.status != "in_progress":
            return batch
        wished = replace(batch, status="cancelling", cancelled=int(time.time()))
        await self._store.thread.run(self._store.update, wished)
        self._cancelled.set()
        self._added.set()
        return await self._state_of(batch)

    async def _state_of(self, batch: StoredBatch) -> StoredBatch:
        """Return a batch as it is now."""
        return await self._store.thread.run(self._store.batch, batch.id, batch.owner)

    async def _run_all(self) -> None:
        if not self._store.is_open:
            await self._added.wait()
        with self._store.path("lock").open("wb") as lock:
            await _locked(lock)  # another process may run the batches of this folder
            with contextlib.suppress(StoreUnavailableError):
                await self._store.thread.run(self._store.remove_strays)
            running: dict[str, _Running] = {}
            try:
                while True:
                    self._added.clear()
                    await self._start_some(running)
                    with contextlib.suppress(TimeoutError):  # another process may add some
                        # wait_for of Python 3.11 would lose a stop as a batch ends
                        async with asyncio.timeout(_POLL_SECONDS):
                            await self._added.wait()
            finally:
                for each in running.values():
                    each.task.cancel()
                if running:
                    await asyncio.wait([each.task for each in running.values()])

    async def _start_some(self, running: dict[str, "_Running"]) -> None:
        """Run a batch of each owner, as long as there are not too many. running: by id.

        Queued batches that are cancelled or expired end at once.
        """
        for identity, each in list(running.items()):
            if each.task.done():
                del running[identity]
                if not each.task.cancelled() and (error := each.task.exception()) is not None:
                    _LOG.error("a batch could not be run or kept: %r", error)
        owners = {each.owner for each in running.values() if not each.only_ends}
        try:
            for batch in await self._store.thread.run(self._store.unfinished):
                if batch.id in running:
                    continue
                only_ends = batch.status == "cancelling" or batch.expires <= time.time()
                if not only_ends:
                    if batch.owner in owners or len(owners) == _OWNERS:
                        continue
                    owners.add(batch.owner)
                task = asyncio.ensure_future(self._run(batch))
                task.add_done_callback(lambda _: self._added.set())
                running[batch.id] = _Running(task, batch.owner, only_ends)
        except StoreUnavailableError:
            return  # the next turn reads it
        finally:
            BATCHES.set(len(owners))

    async def _run(self, batch: StoredBatch) -> None:
        """Run a batch to its end, or end a cancelled one."""
        outcome = await _repeated(batch, partial(self._outcome, batch))
        await _repeated(batch, partial(self._end, batch, outcome))

    async def _outcome(self, batch: StoredBatch) -> "_Outcome":
        """Run the requests of a batch unless it is cancelled. Raises StoreUnavailableError."""
        run = self._new_run(batch)
        status: BatchStatus = "completed"
        problem = reason = ""
        line: int | None = None
        try:
            if batch.status == "in_progress":
                self._account_of(batch.account)  # raises if the key is gone
                async with asyncio.timeout(batch.expires - time.time()):
                    await self._finish(batch, run)
        except TimeoutError:
            status = "expired"
        except InputError as error:
            status, reason, line = "failed", "INVALID_FILE", error.line
            problem = f"{error.problem[:1].upper()}{error.problem[1:]}."
        except StoreUnavailableError:
            raise
        except ServiceError as error:
            status, problem, reason = "failed", str(error), error.reason
        except Exception:
            _LOG.exception("batch %s failed", batch.id)
            status, problem = "failed", "The server failed; its log has the details."
        return _Outcome(run.summary.total, status, problem, reason, line)

    async def _end(self, batch: StoredBatch, outcome: "_Outcome") -> None:
        """Keep the end of a batch with its files, then remove its output.

        Raises OSError and StoreUnavailableError, and can be repeated then.
        """
        now = await self._state_of(batch)
        if now.ended is None:
            if now.status == "cancelling":
                outcome = _Outcome(outcome.total, "cancelled")
            ended = replace(
                now,
                status=outcome.status,
                problem=outcome.problem,
                reason=outcome.reason,
                line=outcome.line,
                ended=int(time.time()),
                total=max(outcome.total, now.total),
            )
            ended, outputs = await self._with_files(ended)
            await self._store.thread.run(self._store.end, ended, outputs)
            counts = ended.answered, ended.total
            _LOG.info("batch %s: %s, %d of %d answered", batch.id, ended.status, *counts)
        self._store.path(batch.id).unlink(missing_ok=True)

    def _new_run(self, batch: StoredBatch) -> BatchRun:
        creator = Creator(batch.account, batch.tenant).at_lowest_priority()

        async def send(path: str, body: bytes) -> Reply:
            return await self._answering.answer(path, body, creator)

        return BatchRun(
            self._store.path(batch.input_file),
            self._store.path(batch.id),
            connect=lambda: contextlib.nullcontext(send),
            concurrency=_VECTORS_AT_ONCE if batch.endpoint in _VECTORS else _AT_ONCE,
            priority=0,
            patience=_PATIENCE,
            paths=(batch.endpoint,),
            longest=self._longest,
            most_lines=_MOST_LINES,
            repeats_failed=False,
            reserve=_Output(self._store, batch, self._most_output).grow,
            check_line=check_json_limits,
        )

    async def _finish(self, batch: StoredBatch, run: BatchRun) -> None:
        """Run the requests of a batch until all are answered, or it is cancelled."""
        running = asyncio.ensure_future(run.run())
        try:
            while not running.done():
                self._cancelled.clear()
                waking = asyncio.ensure_future(self._cancelled.wait())
                await asyncio.wait(
                    (running, waking),
                    timeout=_POLL_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waking.cancel()
                with contextlib.suppress(StoreUnavailableError):  # the next turn tries it again
                    now = await self._state_of(batch)
                    if now.status == "cancelling":
                        return
                    counted = _counted(now, run.summary)
                    await self._store.thread.run(self._store.update, counted)
            running.result()
        finally:
            running.cancel()
            await asyncio.wait((running,))

    async def _with_files(self, batch: StoredBatch) -> tuple[StoredBatch, list[StoredFile]]:
        """Divide a batch's output into a file of answers and one of errors. Raises OSError.

        Their ids follow from the batch's: an end that a crash interrupts can be repeated.
        """
        names = [f"{batch.id.replace('batch_', 'file-')}-{kind}" for kind in _KINDS]
        good, bad = map(self._store.path, names)
        source = self._store.path(batch.id)
        try:
            division = await asyncio.to_thread(_divide, source, good, bad)
        except OSError:  # other work needs the room that the halves take
            good.unlink(missing_ok=True)
            bad.unlink(missing_ok=True)
            raise
        files = []
        counts = division.answered, division.failed
        for name, count, kind in zip(names, counts, _KINDS, strict=True):
            path = self._store.path(name)
            if count:
                shown, size = f"{batch.id}_{kind}.jsonl", path.stat().st_size
                made = int(time.time())
                files.append(StoredFile(name, batch.owner, shown, "batch_output", made, size))
            else:
                path.unlink()
        ended = replace(
            batch,
            status="failed" if division.has_no_request else batch.status,
            output_file=names[0] if division.answered else None,
            error_file=names[1] if division.failed else None,
            answered=division.answered,
            failed=division.failed,
            invalid_lines=tuple(division.invalid),
        )
        return ended, files


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[None]
    owner: str
    only_ends: bool
    """True if it runs no requests"""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The end of a batch's run."""

    total: int
    """Lines of its input"""
    status: BatchStatus
    problem: str = ""
    """Reason of its failure, a sentence; empty = it did not fail"""
    reason: str = ""
    """Reason of that failure as errors have it, such as INVALID_FILE"""
    line: int | None = None
    """Line of its input at fault"""


class _Output:
    """The output of a running batch, which takes room in the store before it grows."""

    def __init__(self, store: FileStore, batch: StoredBatch, most: int) -> None:
        """most: bytes."""
        self._store = store
        self._batch = batch
        self._most = most
        self._size = _FILES_BYTES
        self._reserved = 0
        self._turn = asyncio.Lock()

    async def grow(self, size: int) -> None:
        """Take room for a line. Raises RESOURCE_EXHAUSTED."""
        async with self._turn:  # a second reservation replaces the first
            await self._grow(size)

    async def _grow(self, size: int) -> None:
        self._size += size + _ID_BYTES
        if self._size > self._most:
            message = f"The output would have more than {self._most:,} bytes; divide the batch."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "OUTPUT_TOO_LARGE", message)
        if self._size > self._reserved and not (
            await self._take(min(self._size + _PIECE, self._most)) or await self._take(self._size)
        ):
            raise full()

    async def _take(self, size: int) -> bool:
        is_taken = await self._store.thread.run(self._store.reserve, self._batch, size)
        if is_taken:
            self._reserved = size
        return is_taken


async def _repeated(batch: StoredBatch, step: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of a step; repeat it, ever more rarely, while it raises.

    Whatever it raises, its batch has answers that must not be lost.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            return await step()
        except Exception as error:
            _LOG.error("batch %s waits %g s: %r", batch.id, pause, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


def _counted(batch: StoredBatch, summary: BatchSummary) -> StoredBatch:
    answered = summary.answered + summary.skipped
    return replace(batch, total=summary.total, answered=answered, failed=summary.failed)


async def _locked(lock: BinaryIO) -> None:
    """Wait until no other process has the lock. Raises OSError if it can't be taken at all."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOCK_SECONDS)
        else:
            return


@dataclass(slots=True)
class _Division:
    """Numbers of the answers and errors of a batch."""

    answered: int = 0
    failed: int = 0
    invalid: list[InvalidLine] = field(default_factory=list)
    """First lines of the input that are no requests"""
    num_invalid: int = 0

    @property
    def has_no_request(self) -> bool:
        """True if every line of the input is invalid."""
        return not self.answered and 0 < self.failed == self.num_invalid

    def add(self, answer: Mapping[str, Any]) -> bool:
        """Count a line of the output; return whether it is an error."""
        response, error = answer["response"], answer["error"]
        if response is not None and response["status_code"] == _OK:
            self.answered += 1
            return False
        self.failed += 1
        if error is not None and error["code"] == INVALID_LINE:
            self.num_invalid += 1
            if len(self.invalid) < _MOST_INVALID:
                self.invalid.append(InvalidLine(error["line"], error["message"]))
        return True


def _divide(source: Path, good: Path, bad: Path) -> _Division:
    """Divide the lines of a batch into answers and errors; return their numbers."""
    division = _Division()
    with good.open("w") as answers, bad.open("w") as errors:
        for line in _lines(source):
            identity = f"batch_req_{division.answered + division.failed}"
            file = errors if division.add(json.loads(line)) else answers
            file.write(f'{{"id": "{identity}", {line[1:]}')
    return division


def _lines(source: Path) -> Iterator[str]:
    """Yield whole lines; an interrupted run may leave half of its last one."""
    if source.exists():
        with source.open() as lines:
            yield from (line for line in lines if line.endswith("\n"))
