"""Prometheus metrics of the tokenizer service."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS
from services.tokenizer.recent_times import RecentTimes

__all__ = [
    "CACHED_TOKENS",
    "CACHE_GAPS",
    "COMPLETION_TOKENS",
    "ENCODE_SECONDS",
    "ENGINES",
    "FIRST_TOKEN_SECONDS",
    "INTER_TOKEN_SECONDS",
    "LACKING_TOKENS",
    "MOVED",
    "PLACED",
    "PROMPT_TOKENS",
    "RECENT_FIRST_TOKENS",
    "REQUESTS",
    "RUNNING",
]

REQUESTS = Counter(
    "tokenwire_tokenizer_requests", "Completions that ended, by outcome.", ["outcome"]
)
RUNNING = Gauge("tokenwire_tokenizer_running_requests", "Running completions.")
PROMPT_TOKENS = Counter("tokenwire_tokenizer_prompt_tokens", "Tokens of admitted prompts.")
CACHED_TOKENS = Counter(
    "tokenwire_tokenizer_cached_tokens", "Prompt tokens that engines found in their prefix caches."
)
COMPLETION_TOKENS = Counter("tokenwire_tokenizer_completion_tokens", "Generated tokens.")
FIRST_TOKEN_SECONDS = Histogram(
    "tokenwire_tokenizer_time_to_first_token_seconds",
    "Seconds from the arrival of a request to its first token.",
    buckets=LATENCY_BUCKETS,
)
RECENT_FIRST_TOKENS = RecentTimes(window_seconds=300, most=1000)
"""Last times to first tokens: the buckets of FIRST_TOKEN_SECONDS are too wide for percentiles"""
INTER_TOKEN_SECONDS = Histogram(
    "tokenwire_tokenizer_inter_token_seconds",
    "Seconds between the tokens of a choice, by delta of the engine.",
    buckets=INTER_TOKEN_BUCKETS,
)
ENCODE_SECONDS = Histogram(
    "tokenwire_tokenizer_encode_seconds",
    "Seconds from the arrival of a request to its encoded prompts.",
    buckets=LATENCY_BUCKETS,
)
ENGINES = Gauge("tokenwire_tokenizer_engines", "Engines by state.", ["state"])
PLACED = Counter("tokenwire_tokenizer_placed_requests", "Requests given to an engine.", ["engine"])
MOVED = Counter(
    "tokenwire_tokenizer_moved_requests", "Requests continued on an engine, by why.", ["reason"]
)
CACHE_GAPS = Counter(
    "tokenwire_tokenizer_cache_gaps", "Times that an engine's account of its cache was refused."
)
LACKING_TOKENS = Counter(
    "tokenwire_tokenizer_lacking_prefix_tokens",
    "Prompt tokens that engines reported as cached and did not have.",
)
