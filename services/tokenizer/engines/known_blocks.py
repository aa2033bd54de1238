"""KV blocks of the engines whose token ids this process knows, for subscribers."""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from services.common.block_hash import prefix_hashes, tenant_salt
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["BlockKey", "BlockUpdate", "BlockWatch", "KnownBlock", "KnownBlocks"]

_MOST_IDLE = 65_536
"""Most blocks to keep that no engine holds, because they are not computed yet or were evicted"""
_MOST_WATCHERS = 64
_SALT = tenant_salt("")


class BlockKey(NamedTuple):
    """Identity of a block in one group of layers. Each group holds and evicts blocks by itself."""

    group: int
    hash: bytes


@dataclass(slots=True)
class KnownBlock:
    """Token ids of a block, and its place in its prompt."""

    parent: bytes
    """Hash of the block before; the salt for the first"""
    ids: Sequence[int]
    children: set[bytes] = field(default_factory=set)
    """Hashes of known blocks that follow this one in some prompt"""
    groups: set[int] = field(default_factory=set)
    """Groups of layers for which the block was published to watchers"""

    @property
    def is_first(self) -> bool:
        """True for the first block of a prompt."""
        return self.parent == _SALT


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Changes that a watcher has not seen; if `is_whole`, `stored` has all held blocks."""

    is_whole: bool
    stored: Sequence[tuple[BlockKey, KnownBlock]]
    """Stored blocks, parents before their children"""
    removed: Sequence[BlockKey]


class BlockWatch:
    """Changes for one watcher, who gets all blocks instead if these are fewer than the changes."""

    def __init__(self, held: dict[BlockKey, KnownBlock], wake: asyncio.Event) -> None:
        self._held = held
        self._changes: dict[BlockKey, KnownBlock | None] | None = None
        """Changes in order, with None for a removed block; None = the watcher needs all blocks"""
        self._wake = wake
        self._wake.set()

    def note(self, key: BlockKey, block: KnownBlock | None) -> None:
        """Record a change. block: the block that is now held; None = it was removed."""
        if self._changes is not None:
            self._changes.pop(key, None)  # to come behind its parent again
            self._changes[key] = block
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

    An engine names its blocks by hashes. A block is published for a group of layers while at least
    one engine holds it there, if its ids are known because this process placed its prompt. In a
    group that sees all tokens, an engine must hold all blocks before it, too. This does not apply
    to a group with a window, or to a group whose hashes name the state behind a block.
    """

    def __init__(self, is_reported: Callable[[int, bytes], bool]) -> None:
        """is_reported: returns whether an engine has reported the block of a hash in a group."""
        self._is_reported = is_reported
        self.groups: dict[int, engine_pb2.CacheGroup] = {}
        """Groups of layers for which engines have reported blocks, by number"""
        self._idle: OrderedDict[bytes, KnownBlock] = OrderedDict()
        """Blocks that are not published to watchers, oldest first; their number is bounded"""
        self._published: dict[bytes, KnownBlock] = {}
        """Blocks that were published to watchers in some group"""
        self._held: dict[BlockKey, KnownBlock] = {}
        """Blocks that were published to watchers, by group; parents come before their children"""
        self._watches: set[BlockWatch] = set()

    def learn(
        self, prompt: Sequence[int], block_size: int, outputs: Iterable[Sequence[int]] = ()
    ) -> None:
        """Record the token ids of a prompt, and of the outputs that follow it."""
        full = len(prompt) // block_size * block_size
        last = self._learn_run(_SALT, prompt[:full], block_size)
        for output in outputs:
            self._learn_run(last, [*prompt[full:], *output], block_size)
        self._forget_oldest()

    def on_changed(
        self,
        number: int,
        group: engine_pb2.CacheGroup,
        stored: Collection[bytes],
        removed: Collection[bytes],
    ) -> None:
        """Apply a change of one engine's cache. number: number of the group of layers."""
        self.groups[number] = group
        for block_hash in removed:
            key = BlockKey(number, block_hash)
            if key in self._held and not self._is_reported(*key):
                self._drop(key)
        for block_hash in stored:
            self._hold(BlockKey(number, block_hash))
        self._forget_oldest()

    @contextmanager
    def watch(self, wake: asyncio.Event) -> Iterator[BlockWatch]:
        """Watch the blocks; `wake` is set when there is a change.

        Raises RESOURCE_EXHAUSTED if there are too many watchers.
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
        """Number of blocks that are published to watchers, over all groups."""
        return len(self._held)

    def _learn_run(self, parent: bytes, ids: Sequence[int], block_size: int) -> bytes:
        """Record ids that follow the block `parent`. Return the hash of their last full block."""
        for place, block_hash in enumerate(prefix_hashes(ids, parent, block_size)):
            if block_hash in self._idle:
                self._idle.move_to_end(block_hash)
            elif block_hash not in self._published:
                begin = place * block_size
                block = KnownBlock(parent, array("I", ids[begin : begin + block_size]))
                self._idle[block_hash] = block
            if (before := self._find(parent)) is not None:
                before.children.add(block_hash)
            for number in self.groups:
                self._hold(BlockKey(number, block_hash))
            parent = block_hash
        return parent

    def _forget_oldest(self) -> None:
        while len(self._idle) > _MOST_IDLE:
            oldest, block = self._idle.popitem(last=False)
            if (before := self._find(block.parent)) is not None:
                before.children.discard(oldest)

    def _find(self, block_hash: bytes) -> KnownBlock | None:
        return self._published.get(block_hash) or self._idle.get(block_hash)

    def _needs_parents(self, number: int) -> bool:
        """Return whether a block of a group is useless without all blocks before it."""
        return not self.groups[number].window and not self.groups[number].snapshot_interval

    def _hold(self, key: BlockKey) -> None:
        """Publish a known block that an engine holds, and the blocks that waited for it."""
        number, needs_parents = key.group, self._needs_parents(key.group)
        waiting = [key.hash]
        while waiting:
            each = waiting.pop()
            found = self._find(each)
            if found is None or number in found.groups or not self._is_reported(number, each):
                continue
            if needs_parents:
                if not found.is_first and BlockKey(number, found.parent) not in self._held:
                    continue
                waiting.extend(found.children)
            if not found.groups:
                self._published[each] = self._idle.pop(each)
            found.groups.add(number)
            self._held[BlockKey(number, each)] = found
            self._publish(BlockKey(number, each), found)

    def _drop(self, key: BlockKey) -> None:
        """Publish the removal of a block, and of the blocks that are useless without it."""
        number, needs_parents = key.group, self._needs_parents(key.group)
        waiting = [key.hash]
        while waiting:
            each = waiting.pop()
            if (found := self._held.pop(BlockKey(number, each), None)) is None:
                continue
            found.groups.discard(number)
            if not found.groups:
                self._idle[each] = self._published.pop(each)
            self._publish(BlockKey(number, each), None)
            if needs_parents:
                waiting.extend(found.children)

    def _publish(self, key: BlockKey, block: KnownBlock | None) -> None:
        for watch in self._watches:
            watch.note(key, block)
