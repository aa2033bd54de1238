"""What the service counts, for Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS

__all__ = ["METRICS", "Metrics"]


class Metrics:
    """The service's series; one instance per process."""

    def __init__(self) -> None:
        name = "tokenwire_tokenizer"
        self.requests = Counter(
            f"{name}_requests", "Completions that ended, by outcome.", ["outcome"]
        )
        self.running = Gauge(f"{name}_running_requests", "Completions that run.")
        self.prompt_tokens = Counter(f"{name}_prompt_tokens", "Tokens of admitted prompts.")
        self.completion_tokens = Counter(f"{name}_completion_tokens", "Generated tokens.")
        self.first_token_seconds = Histogram(
            f"{name}_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            buckets=LATENCY_BUCKETS,
        )
        self.inter_token_seconds = Histogram(
            f"{name}_inter_token_seconds",
            "Seconds between the tokens of a choice, by delta of the engine.",
            buckets=INTER_TOKEN_BUCKETS,
        )
        self.encode_seconds = Histogram(
            f"{name}_encode_seconds",
            "Seconds that the prompts of a request took to encode.",
            buckets=LATENCY_BUCKETS,
        )


METRICS = Metrics()
