"""Prometheus metrics of the tokenizer service."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS
from services.tokenizer.recent_times import RecentTimes

__all__ = [
    "COMPLETION_TOKENS",
    "ENCODE_SECONDS",
    "FIRST_TOKEN_SECONDS",
    "INTER_TOKEN_SECONDS",
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
COMPLETION_TOKENS = Counter("tokenwire_tokenizer_completion_tokens", "Generated tokens.")
FIRST_TOKEN_SECONDS = Histogram(
    "tokenwire_tokenizer_time_to_first_token_seconds",
    "Seconds from the arrival of a request to its first token.",
    buckets=LATENCY_BUCKETS,
)
RECENT_FIRST_TOKENS = RecentTimes(window_seconds=300, most=1000)
"""The last times of FIRST_TOKEN_SECONDS, whose buckets are too wide for percentiles"""
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
