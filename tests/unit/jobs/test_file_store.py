"""Kept files and batches: their owners, their pages, and the room that they take."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.jobs.store.file_store import FileStore, Page, StoredBatch
from tokenwire.errors import ServiceError

PAGE = 4096
"""Bytes that a file takes at least"""


def batch(identity: str, tenant: str = "", account: str = "") -> StoredBatch:
    return StoredBatch(identity, tenant, account, "/v1/completions", "file-x", {}, 0, 100)


def add_file(store: FileStore, owner: str, size: int = 0, purpose: str = "batch") -> str:
    with store.adding(owner, "name", purpose) as new:
        new.write(b"a" * size)
    return new.stored.id


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a store's database as another process that writes does."""
    other = sqlite3.connect(folder / "files.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def test_pages_have_each_item_of_their_owner_once(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 2**20)
    mine = [add_file(store, "me") for _ in range(5)]
    add_file(store, "other")
    document = add_file(store, "me", purpose="user_data")

    def pages(purpose: str | None, *, is_ascending: bool) -> list[str]:
        seen: list[str] = []
        has_more = True
        while has_more:
            page = Page(2, seen[-1] if seen else None, is_ascending)
            found, has_more = store.files("me", page, purpose)
            assert 1 <= len(found) <= 2
            seen += [each.id for each in found]
        return seen

    assert pages(None, is_ascending=True) == [*mine, document]
    assert pages("batch", is_ascending=False) == mine[::-1]
    with pytest.raises(ServiceError) as refused:
        store.files("other", Page(2, after=mine[0]))
    assert refused.value.field == "after"


def test_batch_belongs_to_its_key_and_else_to_its_tenant(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 2**20)
    store.add(batch("a", tenant="shared", account="key"))
    store.add(batch("b", tenant="shared"))
    assert [each.id for each in store.batches("key", Page(9))[0]] == ["a"]
    assert [each.id for each in store.batches("shared", Page(9))[0]] == ["b"]
    with pytest.raises(ServiceError):
        store.batch("a", "shared")


def test_running_outputs_and_uploads_share_the_room(tmp_path: Path) -> None:
    """Of two servers of a folder, neither takes what the other has set aside."""
    one, other = (FileStore(str(tmp_path), 10 * PAGE) for _ in range(2))
    first, second = batch("a"), batch("b")
    one.add(first)
    one.add(second)
    assert one.reserve(first, 6 * PAGE)
    assert not other.reserve(second, 5 * PAGE)
    assert other.reserve(second, 2 * PAGE)
    assert one.reserve(first, 8 * PAGE)  # in place of what it had
    with pytest.raises(ServiceError) as refused:
        add_file(other, "me")
    assert refused.value.reason == "FILES_FULL"
    one.end(replace(first, status="completed"), [])
    add_file(other, "", 7 * PAGE)
    assert not one.reserve(second, 3 * PAGE)


def test_files_of_an_owner_leave_room_for_another(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 24 * PAGE)
    for _ in range(6):  # of two pages each: half of all
        add_file(store, "me", PAGE)
    with pytest.raises(ServiceError) as refused:
        add_file(store, "me")
    assert refused.value.reason == "FILES_FULL"
    add_file(store, "other", 5 * PAGE)
    mine, others = (replace(batch(each), account=each) for each in ("me", "third"))
    for each in (mine, others):
        store.add(each)
    assert not store.reserve(mine, PAGE)
    assert store.reserve(others, 3 * PAGE)
    assert not store.reserve(others, 4 * PAGE)


def test_locked_database_asks_for_another_try(tmp_path: Path) -> None:
    """Neither an internal error nor a store that is full."""
    store = FileStore(str(tmp_path), 2**20)
    file = add_file(store, "me")
    store.add(batch("a"))
    attempts = (
        lambda: store.add(batch("b")),
        lambda: store.update(replace(batch("a"), status="cancelling")),
        lambda: store.delete_file(file, "me"),
        lambda: add_file(store, "me"),
    )
    for attempt in attempts:
        with locked(tmp_path), pytest.raises(ServiceError) as refused:
            attempt()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert refused.value.reason == "FILES_UNAVAILABLE"
        attempt()
    assert [each.status for each in store.unfinished()] == ["cancelling", "in_progress"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Files of the API and running batches stay, new content, and what the operator put there."""
    store = FileStore(str(tmp_path), 2**20)
    file = add_file(store, "me")
    running, fresh = f"batch_{'a' * 24}", f"file-{'b' * 24}"
    store.add(batch(running))
    strays = [f"batch_{'c' * 24}", f"file-{'c' * 24}", f"file-{'c' * 24}-output"]
    foreign = ["batch_input.jsonl", "file-notes"]
    for name in (running, fresh, *strays, *foreign):
        store.path(name).touch()
    for name in (file, running, *strays, *foreign):
        os.utime(store.path(name), (0, 0))
    store.remove_strays()
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("files.sqlite")}
    assert left == {file, running, fresh, *foreign}
