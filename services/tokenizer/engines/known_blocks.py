"""KV blocks of the engines whose token ids this process knows, for those who watch them."""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from services.common.block_hash import prefix_hashes, tenant_salt
from tokenwire.errors import ServiceError

__all__ = ["BlockUpdate", "BlockWatch", "KnownBlock", "KnownBlocks"]

_MOST_IDLE = 65_536
"""Blocks to keep that no engine holds: those of prompts on their way, and of evicted ones"""
_MOST_WATCHERS = 64
_SALT = tenant_salt("")


@dataclass(slots=True)
class KnownBlock:
    """Token ids of a block, and its place in its prompt."""

    parent: bytes
    """Hash of the block before; the salt for the first"""
    ids: Sequence[int]
    children: set[bytes] = field(default_factory=set)
    """Hashes of known blocks that follow this one in some prompt"""

    @property
    def is_first(self) -> bool:
        """True for the first block of a prompt."""
        return self.parent == _SALT


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Changes that a watcher has not seen; with `is_whole`, `stored` is all that is held."""

    is_whole: bool
    stored: Sequence[tuple[bytes, KnownBlock]]
    """Parents before their children"""
    removed: Sequence[bytes]


class BlockWatch:
    """Changes for one watcher. If they are more than the blocks themselves, it gets the blocks."""

    def __init__(self, held: dict[bytes, KnownBlock], wake: asyncio.Event) -> None:
        self._held = held
        self._changes: dict[bytes, KnownBlock | None] | None = None
        """By hash, in order: None = removed. None in all = the watcher needs everything"""
        self._wake = wake
        self._wake.set()

    def note(self, block_hash: bytes, block: KnownBlock | None) -> None:
        """Take a change: the block that is held now, or None if it is held no longer."""
        if self._changes is not None:
            self._changes.pop(block_hash, None)  # behind its parent again
            self._changes[block_hash] = block
            if len(self._changes) > max(len(self._held), _MOST_IDLE):
                self._changes = None
        self._wake.set()

    def take(self) -> BlockUpdate | None:
        """Return the changes since the last call; None if there are none."""
        changes, self._changes = self._changes, {}
        if changes is None:
            return BlockUpdate(is_whole=True, stored=tuple(self._held.items()), removed=())
        if not changes:
            return None
        return BlockUpdate(
            is_whole=False,
            stored=[(each, block) for each, block in changes.items() if block is not None],
            removed=[each for each, block in changes.items() if block is None],
        )


class KnownBlocks:
    """Blocks of prompts and outputs without a tenant.

    An engine names its blocks by hashes. A block is told to watchers while at least one engine
    holds it and all blocks before it, and its ids are known because its prompt was placed here.
    """

    def __init__(self, is_reported: Callable[[bytes], bool]) -> None:
        """is_reported: whether an engine says that it holds the block of a hash."""
        self._is_reported = is_reported
        self._idle: OrderedDict[bytes, KnownBlock] = OrderedDict()
        """Blocks that nobody is told of; the oldest goes if they are too many"""
        self._held: dict[bytes, KnownBlock] = {}
        """Blocks that watchers were told of, parents before their children"""
        self._watches: set[BlockWatch] = set()

    def learn(
        self, prompt: Sequence[int], block_size: int, outputs: Iterable[Sequence[int]] = ()
    ) -> None:
        """Take the token ids of a prompt, and of the outputs that follow it."""
        full = len(prompt) // block_size * block_size
        last = self._learn_run(_SALT, prompt[:full], block_size)
        for output in outputs:
            self._learn_run(last, [*prompt[full:], *output], block_size)
        self._forget_oldest()

    def on_changed(self, stored: Collection[bytes], removed: Collection[bytes]) -> None:
        """Take a change of one engine's cache."""
        for block_hash in removed:
            if block_hash in self._held and not self._is_reported(block_hash):
                self._drop(block_hash)
        for block_hash in stored:
            if block_hash in self._idle and self._is_reported(block_hash):
                self._hold(block_hash)
        self._forget_oldest()

    @contextmanager
    def watch(self, wake: asyncio.Event) -> Iterator[BlockWatch]:
        """Watch the blocks; `wake` is set when there is a change.

        Raises RESOURCE_EXHAUSTED if too many do.
        """
        if len(self._watches) >= _MOST_WATCHERS:
            message = f"{_MOST_WATCHERS} clients watch the cache already."
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message)
        watch = BlockWatch(self._held, wake)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    @property
    def num_held(self) -> int:
        """Blocks that watchers are told of."""
        return len(self._held)

    def _learn_run(self, parent: bytes, ids: Sequence[int], block_size: int) -> bytes:
        """Take ids that follow the block `parent`. Return the hash of their last full block."""
        for place, block_hash in enumerate(prefix_hashes(ids, parent, block_size)):
            if block_hash in self._held:
                pass
            elif block_hash in self._idle:
                self._idle.move_to_end(block_hash)
            else:
                begin = place * block_size
                block = KnownBlock(parent, array("I", ids[begin : begin + block_size]))
                self._idle[block_hash] = block
            if (before := self._find(parent)) is not None:
                before.children.add(block_hash)
            if block_hash in self._idle and self._is_reported(block_hash):
                self._hold(block_hash)
            parent = block_hash
        return parent

    def _forget_oldest(self) -> None:
        while len(self._idle) > _MOST_IDLE:
            oldest, block = self._idle.popitem(last=False)
            if (before := self._find(block.parent)) is not None:
                before.children.discard(oldest)

    def _find(self, block_hash: bytes) -> KnownBlock | None:
        return self._held.get(block_hash) or self._idle.get(block_hash)

    def _hold(self, block_hash: bytes) -> None:
        """Tell of a block and of those that follow it, if the one before it is held."""
        block = self._idle[block_hash]
        if not block.is_first and block.parent not in self._held:
            return
        waiting = [block_hash]
        while waiting:
            each = waiting.pop()
            found = self._idle.get(each)
            if found is not None and self._is_reported(each):
                del self._idle[each]
                self._held[each] = found
                self._tell(each, found)
                waiting.extend(found.children)

    def _drop(self, block_hash: bytes) -> None:
        """Tell of a block no more, nor of those that follow it: without it they are of no use."""
        waiting = [block_hash]
        while waiting:
            each = waiting.pop()
            if (found := self._held.pop(each, None)) is not None:
                self._idle[each] = found
                self._tell(each, None)
                waiting.extend(found.children)

    def _tell(self, block_hash: bytes, block: KnownBlock | None) -> None:
        for watch in self._watches:
            watch.note(block_hash, block)
