"""Metrics of the engine."""

import time
from collections import deque

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS
from services.engine.messages import LoadSnapshot, RequestDone

__all__ = [
    "TokenLatency",
    "TokenRate",
    "count_error",
    "count_request",
    "observe_done",
    "observe_load",
]

_REQUESTS = Counter("tokenwire_engine_requests_total", "Requests ended, by outcome.", ["outcome"])
_PROMPT_TOKENS = Counter("tokenwire_engine_prompt_tokens_total", "Prompt tokens of ended requests.")
_CACHED_TOKENS = Counter(
    "tokenwire_engine_cached_tokens_total", "Prompt tokens served from the prefix cache."
)
_GENERATED_TOKENS = Counter("tokenwire_engine_generated_tokens_total", "Tokens generated.")
_TIME_TO_FIRST_TOKEN = Histogram(
    "tokenwire_engine_time_to_first_token_seconds",
    "From arrival to the first token of a sequence.",
    buckets=LATENCY_BUCKETS,
)
_INTER_TOKEN = Histogram(
    "tokenwire_engine_inter_token_seconds",
    "Between two tokens of a sequence.",
    buckets=INTER_TOKEN_BUCKETS,
)
_QUEUE_TIME = Histogram(
    "tokenwire_engine_queue_seconds",
    "From arrival to the first step of a request.",
    buckets=LATENCY_BUCKETS,
)
_RUNNING = Gauge("tokenwire_engine_running_sequences", "Sequences that run.")
_WAITING = Gauge("tokenwire_engine_waiting_sequences", "Sequences that wait.")
_QUEUED = Gauge("tokenwire_engine_queued_tokens", "Tokens that wait and are not cached.")
_KV_USED = Gauge("tokenwire_engine_kv_used_ratio", "Share of KV blocks that sequences hold.")
_PREEMPTIONS = Gauge("tokenwire_engine_preemptions", "Sequences preempted since the start.")
_STEPS = Gauge("tokenwire_engine_steps", "Steps since the start.")
_OUTCOMES = {
    "ABORTED": "aborted",
    "DEADLINE_EXCEEDED": "expired",
    "NOT_FINITE": "failed",
    "OUT_OF_MEMORY": "failed",
    "STEP_FAILED": "failed",
    "STALLED": "stalled",
}
"""Outcome of a request by the reason of its error; "refused" for all others"""
_RATE_SECONDS = 5.0
"""Window of the token rate"""


def count_request(outcome: str) -> None:
    """Count an ended request."""
    _REQUESTS.labels(outcome).inc()


def count_error(reason: str) -> None:
    """Count a request that ended with an error of this reason."""
    count_request(_OUTCOMES.get(reason, "refused"))


def observe_done(done: RequestDone) -> None:
    """Record the tokens and the queue time of a completed request."""
    _PROMPT_TOKENS.inc(done.prompt_tokens)
    _CACHED_TOKENS.inc(done.cached_tokens)
    _QUEUE_TIME.observe(done.queue_seconds)


def observe_load(load: LoadSnapshot) -> None:
    """Publish the loop's load."""
    _RUNNING.set(load.running)
    _WAITING.set(load.waiting)
    _QUEUED.set(load.queued_tokens)
    _KV_USED.set(1 - load.free_blocks / load.total_blocks if load.total_blocks else 0)
    _PREEMPTIONS.set(load.preemptions)
    _STEPS.set(load.steps)


class TokenLatency:
    """Time to first token and time between tokens of one request."""

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._last: dict[int, float] = {}
        """time.monotonic() of the last token, by sequence"""

    def observe(self, sequence: int, now: float) -> None:
        """Record a token of a sequence."""
        last = self._last.get(sequence)
        if last is None:
            _TIME_TO_FIRST_TOKEN.observe(now - self._arrival)
        else:
            _INTER_TOKEN.observe(now - last)
        self._last[sequence] = now


class TokenRate:
    """Generated tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        """Count the tokens of a step."""
        if tokens:
            _GENERATED_TOKENS.inc(tokens)
            self._steps.append((now, tokens))
            self._drop_old()

    @property
    def per_second(self) -> float:
        """Average over the window."""
        self._drop_old()
        return sum(tokens for _, tokens in self._steps) / _RATE_SECONDS

    def _drop_old(self) -> None:
        horizon = time.monotonic() - _RATE_SECONDS
        while self._steps and self._steps[0][0] < horizon:
            self._steps.popleft()
