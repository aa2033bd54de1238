"""Mirror of the loop's prefix cache, and the watches of its clients."""

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
    """Changes that a watcher has not seen; if `is_whole`, `stored` has all cached blocks."""

    is_whole: bool
    groups: Sequence[CacheChange]


class CacheWatch:
    """Changes for one watcher, who gets the whole cache if that is smaller than the changes."""

    def __init__(self, hashes: list[set[bytes]]) -> None:
        """hashes: all hashes of each group, which the mirror updates before it calls `note`."""
        self._hashes = hashes
        self._changes: list[dict[bytes, bool]] | None = None
        """Changes by group and hash: stored or removed; None = the watcher needs the whole cache"""
        self._changed = asyncio.Event()
        self._changed.set()

    def note(self, changes: Sequence[CacheChange | None]) -> None:
        """Record a change of each group; None = the group has not changed."""
        if self._changes is not None:
            self._changes += [{} for _ in changes[len(self._changes) :]]
            for noted, change in zip(self._changes, changes, strict=True):
                if change is not None:
                    noted.update(dict.fromkeys(change.removed, False))
                    noted.update(dict.fromkeys(change.stored, True))
            if sum(map(len, self._changes)) > sum(map(len, self._hashes)):
                self._changes = None
        self._changed.set()

    async def take(self) -> CacheUpdate:
        """Wait for the next update and return it."""
        await self._changed.wait()
        self._changed.clear()
        changes, self._changes = self._changes, []
        if changes is None:
            whole = [CacheChange(tuple(hashes), ()) for hashes in self._hashes]
            return CacheUpdate(is_whole=True, groups=whole)
        groups = [
            CacheChange(
                stored=[each for each, is_stored in of_group.items() if is_stored],
                removed=[each for each, is_stored in of_group.items() if not is_stored],
            )
            for of_group in changes
        ]
        return CacheUpdate(is_whole=False, groups=groups)


class CacheMirror:
    """Hashes of all cached blocks. Empty until the first watcher comes."""

    def __init__(self, follow: Callable[[], None]) -> None:
        """follow: called once, to make the loop report its changes."""
        self._follow = follow
        self._is_following = False
        self._hashes: list[set[bytes]] = []
        """Cached hashes by group of layers"""
        self._watches: set[CacheWatch] = set()

    def apply(self, changes: Sequence[CacheChange | None]) -> None:
        """Apply a change of each group of the loop's cache; None = the group has not changed."""
        self._hashes += [set() for _ in changes[len(self._hashes) :]]
        for hashes, change in zip(self._hashes, changes, strict=True):
            if change is not None:
                hashes.difference_update(change.removed)
                hashes.update(change.stored)
        for watch in self._watches:
            watch.note(changes)

    @contextmanager
    def watch(self) -> Iterator[CacheWatch]:
        """Watch the cache. Raises RESOURCE_EXHAUSTED if there are too many watchers."""
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
