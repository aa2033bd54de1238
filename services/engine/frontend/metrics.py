"""The engine's metrics."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS
from services.engine.messages import LoadSnapshot

__all__ = [
    "CACHED_TOKENS",
    "GENERATED_TOKENS",
    "INTER_TOKEN",
    "PROMPT_TOKENS",
    "QUEUE_TIME",
    "REQUESTS",
    "TIME_TO_FIRST_TOKEN",
    "observe_load",
]

REQUESTS = Counter("tokenwire_engine_requests_total", "Requests ended, by outcome.", ["outcome"])
PROMPT_TOKENS = Counter("tokenwire_engine_prompt_tokens_total", "Prompt tokens of ended requests.")
CACHED_TOKENS = Counter(
    "tokenwire_engine_cached_tokens_total", "Prompt tokens served from the prefix cache."
)
GENERATED_TOKENS = Counter("tokenwire_engine_generated_tokens_total", "Tokens generated.")
TIME_TO_FIRST_TOKEN = Histogram(
    "tokenwire_engine_time_to_first_token_seconds",
    "From arrival to the first token of a sequence.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN = Histogram(
    "tokenwire_engine_inter_token_seconds",
    "Between two tokens of a sequence.",
    buckets=INTER_TOKEN_BUCKETS,
)
QUEUE_TIME = Histogram(
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


def observe_load(load: LoadSnapshot) -> None:
    """Publish a snapshot of the loop."""
    _RUNNING.set(load.running)
    _WAITING.set(load.waiting)
    _QUEUED.set(load.queued_tokens)
    _KV_USED.set(1 - load.free_blocks / load.total_blocks if load.total_blocks else 0)
    _PREEMPTIONS.set(load.preemptions)
    _STEPS.set(load.steps)
