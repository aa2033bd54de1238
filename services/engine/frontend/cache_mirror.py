"""Mirror of the loop's prefix cache, and those who watch it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import grpc

from services.engine.messages import CacheChange
from tokenwire.errors import ServiceError

__all__ = ["CacheMirror", "CacheUpdate", "CacheWatch"]

_MOST_WATCHERS = 64


class CacheUpdate(NamedTuple):
    """Hashes that a watcher has not seen; with `is_whole`, `stored` is all that is cached."""

    is_whole: bool
    stored: Sequence[bytes]
    removed: Sequence[bytes]


class CacheWatch:
    """Changes for one watcher. If they are more than the cache itself, it gets the cache."""

    def __init__(self, hashes: set[bytes]) -> None:
        """hashes: all that is cached, which the mirror changes before it calls `note`."""
        self._hashes = hashes
        self._changes: dict[bytes, bool] | None = None
        """By hash, whether it was stored or removed; None = the watcher needs everything"""
        self._changed = asyncio.Event()
        self._changed.set()

    def note(self, change: CacheChange) -> None:
        """Take a change of the cache."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(change.removed, False))
            self._changes.update(dict.fromkeys(change.stored, True))
            if len(self._changes) > len(self._hashes):
                self._changes = None
        self._changed.set()

    async def take(self) -> CacheUpdate:
        """Return the next update, once there is one."""
        await self._changed.wait()
        self._changed.clear()
        changes, self._changes = self._changes, {}
        if changes is None:
            return CacheUpdate(is_whole=True, stored=tuple(self._hashes), removed=())
        return CacheUpdate(
            is_whole=False,
            stored=[each for each, is_stored in changes.items() if is_stored],
            removed=[each for each, is_stored in changes.items() if not is_stored],
        )


class CacheMirror:
    """Hashes of all cached blocks. Empty until the first watcher comes."""

    def __init__(self, follow: Callable[[], None]) -> None:
        """follow: called once, to make the loop report its changes."""
        self._follow = follow
        self._is_following = False
        self._hashes: set[bytes] = set()
        self._watches: set[CacheWatch] = set()

    def apply(self, change: CacheChange) -> None:
        """Take a change of the loop's cache."""
        self._hashes.difference_update(change.removed)
        self._hashes.update(change.stored)
        for watch in self._watches:
            watch.note(change)

    @contextmanager
    def watch(self) -> Iterator[CacheWatch]:
        """Watch the cache. Raises RESOURCE_EXHAUSTED if too many do."""
        if len(self._watches) >= _MOST_WATCHERS:
            message = f"{_MOST_WATCHERS} clients watch the cache already."
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message)
        if not self._is_following:
            self._is_following = True
            self._follow()
        watch = CacheWatch(self._hashes)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)
