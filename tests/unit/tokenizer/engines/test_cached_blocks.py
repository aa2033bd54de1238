"""Account of an engine's cache: what can't be true is refused, broken promises count less."""

import pytest

from services.tokenizer.engines.cached_blocks import CachedBlocks, CacheEventError
from tokenwire.pb.engine.v1.engine_pb2 import WatchCacheResponse

A, B, C = (bytes([letter]) * 16 for letter in range(3))
MOST = 4


def whole(*hashes: bytes) -> WatchCacheResponse:
    return WatchCacheResponse(number=1, is_whole=True, stored=b"".join(hashes))


def test_prefix_ends_at_the_first_block_that_is_gone() -> None:
    cached = CachedBlocks()
    cached.apply(whole(A, B, C), MOST)
    assert cached.prefix([A, B, C]) == 3
    cached.apply(WatchCacheResponse(number=2, removed=B), MOST)
    assert cached.prefix([A, B, C]) == 1


def test_block_that_moved_within_one_response_is_held() -> None:
    cached = CachedBlocks()
    cached.apply(whole(A), MOST)
    cached.apply(WatchCacheResponse(number=2, removed=A, stored=A), MOST)
    assert cached.prefix([A]) == 1


def test_prompts_of_open_requests_count_until_they_end() -> None:
    cached = CachedBlocks()
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
        WatchCacheResponse(number=3, stored=C),
        WatchCacheResponse(number=1, stored=C),
        WatchCacheResponse(number=2**64 - 1, stored=C),
        WatchCacheResponse(number=2, stored=C[:-1]),
        WatchCacheResponse(number=2, removed=b"x"),
        WatchCacheResponse(number=2, stored=b"".join(bytes([i]) * 16 for i in range(5, 9))),
    ],
    ids=["gap", "past", "future", "half a hash", "no hash", "more blocks than there are"],
)
def test_response_that_can_not_be_true_is_refused(update: WatchCacheResponse) -> None:
    cached = CachedBlocks()
    cached.apply(whole(A, B), MOST)
    with pytest.raises(CacheEventError):
        cached.apply(update, MOST)
    cached.forget()
    cached.apply(whole(C), MOST)
    assert (cached.prefix([C]), cached.prefix([A])) == (1, 0)


def test_engine_that_lacks_what_it_promises_is_trusted_less_until_it_keeps_its_word() -> None:
    cached = CachedBlocks()
    for _ in range(20):
        cached.on_admitted(promised=100, found=0)
    assert cached.trust < 0.05
    for _ in range(20):
        cached.on_admitted(promised=100, found=100)
    assert cached.trust > 0.95
