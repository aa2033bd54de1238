"""Kept responses: who reads them, how long, and how many."""

import sqlite3
from pathlib import Path

import pytest

from services.http_shim.stored.response_store import ResponseStore, StoredResponse
from tokenwire.errors import ServiceError

DAY = 86400.0


def stored(identity: str, size: int = 10, tenant: str = "") -> StoredResponse:
    return StoredResponse(identity, tenant, b"r" * (size - 4), b"[]", b"[]")


def holds(store: ResponseStore, identity: str, tenant: str = "") -> bool:
    try:
        return store.get(identity, tenant).id == identity
    except ServiceError as error:
        if error.reason != "RESPONSE_NOT_FOUND":
            raise
        return False


def test_only_its_tenant_reads_and_drops_a_response() -> None:
    store = ResponseStore("", 100, DAY)
    store.put(stored("a", tenant="one"))
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
