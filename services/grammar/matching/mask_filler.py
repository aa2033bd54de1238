"""Parallel computation of the masks of many matchers."""

import ctypes
import time
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLExecutor

from services.grammar.matching.matcher import Matcher
from services.grammar.matching.vocabulary import Vocabulary

__all__ = ["MaskFiller"]

_SLOW = 0.01  # seconds; after a slower step, the next ones are measured
_MEASURED_STEPS = 256


class MaskFiller:
    """Masks of one width, as integers: bit i = id i is allowed."""

    def __init__(self, vocabulary: Vocabulary, executor: LLExecutor, width: int) -> None:
        self._executor = executor
        self._width = width
        self._row = (vocabulary.size + 31) // 32 * 4  # bytes of one of llguidance's masks
        self._buffer = (ctypes.c_uint32 * 0)()
        self._measured_steps = 0  # steps still to measure
        # llguidance allows its own end ids where the grammar may end; each request has its own ones
        every_id = (1 << min(width, vocabulary.size)) - 1
        self._text_ids = every_id & ~_bits(vocabulary.end_ids, vocabulary.size)

    def fill(self, matchers: Sequence[Matcher]) -> list[int]:
        """Return one mask per matcher.

        This may break a matcher: check `inner.is_error()` and `is_too_slow` afterwards.
        """
        if not matchers:
            return []
        size = self._row * len(matchers)
        if ctypes.sizeof(self._buffer) < size:
            self._buffer = (ctypes.c_uint32 * (size // 4))()
        started = time.perf_counter()
        if self._measured_steps:
            self._measured_steps -= 1
            self._compute_each(matchers)
        else:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.inner, row) for row, matcher in enumerate(matchers)],
                ctypes.addressof(self._buffer),
                self._row,
                len(matchers),
            )
        if time.perf_counter() - started > _SLOW:
            self._measured_steps = _MEASURED_STEPS
        rows = memoryview(self._buffer).cast("B")
        return [
            self._finish(matcher, rows[row * self._row : (row + 1) * self._row])
            for row, matcher in enumerate(matchers)
        ]

    def _compute_each(self, matchers: Sequence[Matcher]) -> None:
        """Compute the masks one by one, and charge each matcher with its CPU time."""
        for row, matcher in enumerate(matchers):
            started = time.thread_time()
            address = ctypes.addressof(self._buffer) + row * self._row
            matcher.inner.unsafe_compute_mask_ptr(address, self._row)
            matcher.charge(time.thread_time() - started)

    def _finish(self, matcher: Matcher, row: memoryview) -> int:
        ends = _bits(matcher.end_ids, self._width)
        if matcher.terminated:
            return ends
        mask = matcher.allowed(int.from_bytes(row, "little") & self._text_ids & ~ends)
        return mask | ends if matcher.may_end else mask


@lru_cache(maxsize=256)
def _bits(ids: tuple[int, ...], width: int) -> int:
    return sum(1 << token for token in set(ids) if token < width)
