"""Counts and timings of requests and their tokens."""

import time
from collections import deque

from services.engine.frontend import metrics
from services.engine.messages import DraftCount, FinishCause, LoadSnapshot, RequestDone

__all__ = [
    "LoadMetrics",
    "TokenLatency",
    "TokenRate",
    "count_error",
    "count_finished",
    "count_request",
    "observe_done",
]

_OUTCOMES = {
    "ABORTED": "aborted",
    "DEADLINE_EXCEEDED": "expired",
    "NOT_FINITE": "failed",
    "OUT_OF_MEMORY": "failed",
    "STEP_FAILED": "failed",
    "STALLED": "stalled",
}
"""Outcome of a request by the reason of its error; "refused" for all others"""
_REASONS = {
    FinishCause.EOS: "stop",
    FinishCause.STOP_TOKEN: "stop",
    FinishCause.GRAMMAR: "stop",
    FinishCause.LENGTH: "length",
    FinishCause.CANCELLED: "cancelled",
}
"""Finish reason in the metrics, by cause of the end"""
_RATE_SECONDS = 5.0
"""Window of the token rate, in seconds"""
_LEAST_RATE_SECONDS = 0.1


def count_request(outcome: str) -> None:
    """Count an ended request."""
    metrics.REQUESTS.labels(outcome).inc()


def count_error(reason: str) -> None:
    """Count a request that ended with an error of this reason."""
    count_request(_OUTCOMES.get(reason, "refused"))


def count_finished(cause: FinishCause) -> None:
    """Count an ended sequence by the reason that clients see."""
    metrics.FINISHED.labels(_REASONS[cause]).inc()


def observe_done(done: RequestDone) -> None:
    """Record the tokens and the queue time of a completed request."""
    metrics.PROMPT_TOKENS.inc(done.prompt_tokens)
    metrics.CACHED_TOKENS.inc(done.cached_tokens)
    metrics.QUEUE_SECONDS.observe(done.queue_seconds)


class LoadMetrics:
    """Metrics of the loop's load."""

    def __init__(self) -> None:
        self._preemptions = self._steps = self._oversized_steps = self._ungraphed_steps = 0
        self._drafts: dict[str, DraftCount] = {}
        """Drafts so far, by their source"""

    def observe(self, load: LoadSnapshot) -> None:
        """Publish a load. Loads must arrive in order."""
        used_share = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0
        metrics.RUNNING.set(load.running)
        metrics.WAITING.set(load.waiting)
        metrics.QUEUED_TOKENS.set(load.queued_tokens)
        metrics.KV_BLOCKS.set(load.total_blocks)
        metrics.KV_FREE_BLOCKS.set(load.free_blocks)
        metrics.KV_USED_RATIO.set(used_share)
        metrics.PREEMPTIONS.inc(load.preemptions - self._preemptions)
        metrics.STEPS.inc(load.steps - self._steps)
        metrics.OVERSIZED_STEPS.inc(load.oversized_steps - self._oversized_steps)
        metrics.UNGRAPHED_STEPS.inc(load.ungraphed_steps - self._ungraphed_steps)
        self._preemptions, self._steps = load.preemptions, load.steps
        self._oversized_steps = load.oversized_steps
        self._ungraphed_steps = load.ungraphed_steps
        for count in load.drafts:
            self._observe_drafts(count)

    def _observe_drafts(self, count: DraftCount) -> None:
        source = count.source
        known = self._drafts.get(source, DraftCount(source, 0, 0, 0))
        if count != known:
            metrics.DRAFTS.labels(source).inc(count.drafts - known.drafts)
            metrics.DRAFT_TOKENS.labels(source).inc(count.drafted - known.drafted)
            metrics.ACCEPTED_DRAFT_TOKENS.labels(source).inc(count.accepted - known.accepted)
            self._drafts[source] = count


class TokenLatency:
    """Time to first token, time between tokens and time to the end of one request."""

    def __init__(self, arrival: float) -> None:
        self.tokens = 0
        """Tokens of all sequences so far"""
        self._arrival = arrival
        self._last: dict[int, float] = {}
        """time.monotonic() of the last token, by sequence"""

    def observe(self, sequence: int, now: float) -> None:
        """Record a token of a sequence."""
        self.tokens += 1
        last = self._last.get(sequence)
        if last is None:
            metrics.FIRST_TOKEN_SECONDS.observe(now - self._arrival)
        else:
            metrics.INTER_TOKEN_SECONDS.observe(now - last)
        self._last[sequence] = now

    def observe_end(self, now: float) -> None:
        """Record the end of the request."""
        metrics.REQUEST_SECONDS.observe(now - self._arrival)


class TokenRate:
    """Generated tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        """Count the tokens of a step."""
        if tokens:
            metrics.GENERATED_TOKENS.inc(tokens)
            self._steps.append((now, tokens))
            self._drop_old()

    @property
    def per_second(self) -> float:
        """Average over the window."""
        self._drop_old()
        return sum(tokens for _, tokens in self._steps) / _RATE_SECONDS

    @property
    def while_busy(self) -> float:
        """Average since the first step in the window; 0 without one."""
        self._drop_old()
        if not self._steps:
            return 0.0
        seconds = time.monotonic() - self._steps[0][0]
        return sum(tokens for _, tokens in self._steps) / max(seconds, _LEAST_RATE_SECONDS)

    def _drop_old(self) -> None:
        horizon = time.monotonic() - _RATE_SECONDS
        while self._steps and self._steps[0][0] < horizon:
            self._steps.popleft()
