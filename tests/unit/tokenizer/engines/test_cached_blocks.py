"""Account of an engine's cache: what can't be true is refused, broken promises count less."""

import pytest

from services.tokenizer.engines.cached_blocks import CachedBlocks, CacheEventError
from tokenwire.pb.engine.v1.engine_pb2 import (
    CacheGroup,
    CacheGroupChange,
    GetModelResponse,
    WatchCacheResponse,
)

A, B, C = (bytes([letter]) * 16 for letter in range(3))
SIZE = 16


def cache_of(*groups: CacheGroup) -> CachedBlocks:
    """Return the account of an engine with these groups."""
    cached = CachedBlocks()
    cached.describe(
        GetModelResponse(block_size=SIZE, cache_groups=groups or [CacheGroup(blocks=4)])
    )
    return cached


def response(number: int, stored: bytes = b"", removed: bytes = b"") -> WatchCacheResponse:
    change = CacheGroupChange(stored=stored, removed=removed)
    return WatchCacheResponse(number=number, groups=[change])


def whole(*groups: bytes) -> WatchCacheResponse:
    """Return the first response. groups: the hashes of each, one after the other."""
    changes = [CacheGroupChange(stored=stored) for stored in groups]
    return WatchCacheResponse(number=1, is_whole=True, groups=changes)


def test_prefix_ends_at_the_first_block_that_is_gone() -> None:
    cached = cache_of()
    cached.apply(whole(A + B + C))
    assert cached.prefix([A, B, C]) == 3
    cached.apply(response(2, removed=B))
    assert cached.prefix([A, B, C]) == 1


def test_prefix_is_one_from_which_all_groups_continue() -> None:
    cached = cache_of(
        CacheGroup(blocks=4),
        CacheGroup(blocks=4, window=SIZE),
        CacheGroup(blocks=4, snapshot_interval=SIZE),
    )
    cached.apply(whole(A + B + C, B + C, A + B))
    assert cached.prefix([A, B, C]) == 2
    removed = [CacheGroupChange(), CacheGroupChange(removed=B)]
    cached.apply(WatchCacheResponse(number=2, groups=removed))
    assert cached.prefix([A, B, C]) == 0


def test_first_response_may_come_before_the_sizes_of_the_cache() -> None:
    """A busy machine describes an engine late. Its cache must not be read anew for that."""
    cached = CachedBlocks()
    cached.apply(whole())
    cached.describe(GetModelResponse(block_size=SIZE, cache_groups=[CacheGroup(blocks=4)]))
    cached.apply(response(2, stored=A))
    assert cached.prefix([A]) == 1


def test_block_that_moved_within_one_response_is_held() -> None:
    cached = cache_of()
    cached.apply(whole(A))
    cached.apply(response(2, removed=A, stored=A))
    assert cached.prefix([A]) == 1


def test_prompts_of_open_requests_count_until_they_end() -> None:
    cached = cache_of()
    cached.expect([A, B])
    cached.expect([A])
    assert (cached.prefix([A, B]), cached.reported_prefix([A, B])) == (2, 0)
    cached.expect_no_more([A, B])
    assert cached.prefix([A, B]) == 1
    cached.expect_no_more([A])
    assert cached.prefix([A, B]) == 0


@pytest.mark.parametrize(
    "update",
    [
        response(3, stored=C),
        response(1, stored=C),
        response(2**64 - 1, stored=C),
        response(2, stored=C[:-1]),
        response(2, removed=b"x"),
        response(2, stored=b"".join(bytes([i]) * 16 for i in range(5, 9))),
        WatchCacheResponse(number=2, groups=[CacheGroupChange()] * 2),
    ],
    ids=[
        "gap",
        "past",
        "future",
        "half a hash",
        "no hash",
        "more blocks than there are",
        "more groups",
    ],
)
def test_response_that_can_not_be_true_is_refused(update: WatchCacheResponse) -> None:
    cached = cache_of()
    cached.apply(whole(A + B))
    with pytest.raises(CacheEventError):
        cached.apply(update)
    cached.forget()
    cached.apply(whole(C))
    assert (cached.prefix([C]), cached.prefix([A])) == (1, 0)


def test_engine_that_lacks_what_it_promises_is_trusted_less_until_it_keeps_its_word() -> None:
    cached = cache_of()
    for _ in range(20):
        cached.on_admitted(promised=100, found=0)
    assert cached.trust < 0.05
    for _ in range(20):
        cached.on_admitted(promised=100, found=100)
    assert cached.trust > 0.95
