"""Kept responses: who reads them, how long, and how many."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.common.faults import faulty_parts
from services.jobs.store.response_store import ResponseStore, StoredResponse
from tokenwire.errors import ServiceError

DAY = 86400.0


def stored(identity: str, size: int = 10, owner: str = "") -> StoredResponse:
    return StoredResponse(identity, owner, b"r" * (size - 4), b"[]", b"[]")


def holds(store: ResponseStore, identity: str, owner: str = "") -> bool:
    try:
        return store.get(identity, owner).id == identity
    except ServiceError as error:
        if error.reason != "RESPONSE_NOT_FOUND":
            raise
        return False


def test_only_its_owner_reads_and_drops_a_response() -> None:
    store = ResponseStore("", 100, DAY)
    store.put(stored("a", owner="one"))
    assert store.get("a", "one").response == b"rrrrrr"
    assert not holds(store, "a", "two")
    with pytest.raises(ServiceError):
        store.delete("a", "two")
    store.delete("a", "one")
    assert not holds(store, "a", "one")


def test_oldest_responses_give_way() -> None:
    store = ResponseStore("", 100, DAY)
    for identity in ("a", "b", "c"):
        store.put(stored(identity, 40))
    assert [holds(store, each) for each in ("a", "b", "c")] == [False, True, True]
    assert not store.put(stored("d", 101))  # larger than the whole store
    assert [holds(store, each) for each in ("b", "c", "d")] == [True, True, False]
    store.delete("b", "")
    store.put(stored("e", 60))  # has room beside c
    assert [holds(store, each) for each in ("c", "e")] == [True, True]


def test_owner_with_most_bytes_displaces_its_own_responses() -> None:
    store = ResponseStore("", 100, DAY)
    store.put(stored("kept", 10, "other"))
    for number in range(9):
        store.put(stored(f"r{number}", 40, "me"))
    assert holds(store, "kept", "other")
    assert [holds(store, f"r{number}", "me") for number in (6, 7, 8)] == [False, True, True]


def test_huge_responses_are_not_kept() -> None:
    """To read one would hold up all streams."""
    store = ResponseStore("", 2**30, DAY)
    assert not store.put(stored("a", 2**24 + 1))
    assert store.put(stored("b", 2**24))


def test_expired_responses_are_gone() -> None:
    store = ResponseStore("", 100, 0)
    store.put(stored("a"))
    assert not holds(store, "a")


def test_file_survives_a_restart_and_counts_what_it_holds(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    first = ResponseStore(path, 100, DAY)
    first.put(stored("a", 60))
    first.close()
    second = ResponseStore(path, 100, DAY)
    assert holds(second, "a")
    second.put(stored("b", 60))
    assert [holds(second, each) for each in ("a", "b")] == [False, True]


def test_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.Error):
        ResponseStore(str(tmp_path / "none" / "responses.sqlite"), 100, DAY)


def test_running_response_is_replaced_by_its_end(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    first = ResponseStore(path, 100, DAY)
    running = replace(stored("a", 30), is_running=True)
    first.put(running)
    first.put(replace(stored("b", 30), is_running=True))
    assert first.get("a", "").is_running
    first.put(stored("a", 50))
    assert not first.get("a", "").is_running
    first.close()
    second = ResponseStore(path, 100, DAY)
    assert [each.id for each in second.interrupted()] == ["b"]
    second.put(stored("c", 50))  # all bytes are counted: b gives way
    assert [holds(second, each) for each in ("a", "b", "c")] == [True, False, True]
    assert second.interrupted() == []


def test_state_that_can_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """A full disk would lose the response, or a kill would leave it queued for ever."""
    path = tmp_path / "responses"
    store = ResponseStore(str(path), 1_000, 3_600)
    assert store.put(replace(stored("a"), is_running=True))
    with sqlite3.connect(path) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON responses WHEN NEW.id = 'a' "
            "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
    with pytest.raises(ServiceError) as refused:
        store.put(stored("a"))
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert store.get("a", "").is_running
    assert [each.id for each in store.interrupted()] == ["a"]
    assert store.put(stored("b", 990))  # the bytes of what failed are not counted
    assert holds(store, "a")


def test_removed_file_takes_nothing_until_it_is_put_back(tmp_path: Path) -> None:
    """Responses in a removed file are lost when the server ends."""
    path = tmp_path / "responses"
    store = ResponseStore(str(path), 1_000, DAY)
    store.put(stored("a"))
    path.rename(tmp_path / "elsewhere")
    for attempt in (lambda: store.put(stored("b")), lambda: store.get("a", "")):
        with pytest.raises(ServiceError, match="removed or replaced") as refused:
            attempt()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert faulty_parts() == ["responses"]
    (tmp_path / "elsewhere").rename(path)
    assert holds(store, "a")
    assert faulty_parts() == []
