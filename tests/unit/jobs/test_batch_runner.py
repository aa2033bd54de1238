"""Runner of batches on a disk that is full, and with a database that can't be written."""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.jobs.answers import BackgroundAnswer
from services.jobs.batches import batch_runner
from services.jobs.batches.batch_runner import BatchRunner
from services.jobs.creator import Creator
from services.jobs.store.file_store import FileStore, StoredBatch
from tokenwire.batch_run import Reply

HANG_SECONDS = 60
OUTPUT = "file-a-output"
ANSWER = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}


class NoAnswers:
    """Answers of a service that is never asked."""

    async def answer(self, path: str, body: bytes, creator: Creator) -> Reply:
        raise NotImplementedError

    async def begin(
        self, path: str, body: bytes, creator: Creator, cancelled: asyncio.Event
    ) -> BackgroundAnswer:
        raise NotImplementedError


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store with a cancelled batch that has an answer."""
    store = FileStore(str(tmp_path), 2**20)
    now = int(time.time())
    store.add(
        StoredBatch(
            *("batch_a", "", "", "/v1/completions", "file-x", {}, now, now + 3600, "cancelling")
        )
    )
    store.path("batch_a").write_text(json.dumps(ANSWER) + "\n")
    return store


@asynccontextmanager
async def running(store: FileStore) -> AsyncIterator[None]:
    runner = BatchRunner(store, NoAnswers(), lambda _: None, 1000, 2**20)
    runner.start()
    try:
        yield
    finally:
        await runner.stop()


async def assert_ends_with_its_answer(store: FileStore) -> None:
    batch = store.batch("batch_a", "")
    async with asyncio.timeout(HANG_SECONDS):
        while batch.ended is None:
            await asyncio.sleep(0.02)  # the store has no event
            batch = store.batch("batch_a", "")
    assert (batch.status, batch.answered, batch.output_file) == ("cancelled", 1, OUTPUT)
    [line] = store.path(OUTPUT).read_text().splitlines()
    assert json.loads(line) == {"id": "batch_req_0", **ANSWER}


async def test_answers_outlive_a_full_disk(store: FileStore) -> None:
    store.path(OUTPUT).symlink_to("/dev/full")
    async with running(store):
        await assert_ends_with_its_answer(store)


async def test_end_that_the_database_refuses_is_tried_again_later(
    store: FileStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ever more rarely: streams need the time, the log the room."""
    monkeypatch.setattr(batch_runner, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(batch_runner, "_MOST_PAUSE", 0.04)
    errors: list[str] = []
    often = asyncio.Event()

    def see(record: logging.LogRecord) -> bool:
        if record.name == "batches":
            errors.append(record.getMessage())
        if len(errors) == 4:
            often.set()
        return True

    caplog.handler.addFilter(see)
    other = sqlite3.connect(tmp_path / "files.sqlite", isolation_level=None)
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON files BEGIN SELECT RAISE(FAIL, 'full'); END"
    )
    async with running(store):
        async with asyncio.timeout(HANG_SECONDS):
            await often.wait()
        pauses = [each.split(" waits ")[1].split(" s: ")[0] for each in errors[:4]]
        assert pauses == ["0.01", "0.02", "0.04", "0.04"]
        assert store.path("batch_a").exists()
        other.execute("DROP TRIGGER full")
        await assert_ends_with_its_answer(store)
    other.close()
