"""Prometheus metrics of the shim."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS

__all__ = [
    "FIRST_TOKEN_SECONDS",
    "INTER_TOKEN_SECONDS",
    "IN_FLIGHT",
    "MODEL_WAITS",
    "NO_ROUTE",
    "REQUESTS",
    "REQUEST_SECONDS",
    "TOKENS",
]

NO_ROUTE = "unknown"
"""Label of requests that reached no route"""

REQUESTS = Counter(
    "tokenwire_http_requests",
    "Requests answered; 499 = the client left.",
    ["route", "status", "model"],
)
IN_FLIGHT = Gauge("tokenwire_http_in_flight", "Requests in progress, without probes.")
MODEL_WAITS = Gauge("tokenwire_http_model_waits", "Requests that wait until their model is loaded.")
REQUEST_SECONDS = Histogram(
    "tokenwire_http_request_seconds",
    "Seconds from the arrival of a request to the end of its answer.",
    ["route", "model"],
    buckets=LATENCY_BUCKETS,
)
FIRST_TOKEN_SECONDS = Histogram(
    "tokenwire_http_time_to_first_token_seconds",
    "Seconds from the arrival of a streamed request to its first token.",
    ["model"],
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN_SECONDS = Histogram(
    "tokenwire_http_inter_token_seconds",
    "Seconds between tokens of a streamed choice; tokens of one chunk share its time.",
    ["model"],
    buckets=INTER_TOKEN_BUCKETS,
)
TOKENS = Counter("tokenwire_http_tokens", "Tokens by kind: prompt, completion.", ["kind", "model"])
