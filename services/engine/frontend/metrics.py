"""Prometheus metrics of the engine."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import INTER_TOKEN_BUCKETS, LATENCY_BUCKETS

__all__ = [
    "ACCEPTED_DRAFT_TOKENS",
    "CACHED_TOKENS",
    "DRAFTS",
    "DRAFT_TOKENS",
    "FINISHED",
    "FIRST_TOKEN_SECONDS",
    "GENERATED_TOKENS",
    "GRAMMAR_SERVICES",
    "IMAGES",
    "IMAGE_CACHE_BYTES",
    "INTER_TOKEN_SECONDS",
    "KV_BLOCKS",
    "KV_BLOCK_SIZE",
    "KV_FREE_BLOCKS",
    "KV_USED_RATIO",
    "MOVED_MATCHERS",
    "OVERSIZED_STEPS",
    "PREEMPTIONS",
    "PROMPT_TOKENS",
    "QUEUED_TOKENS",
    "QUEUE_SECONDS",
    "REQUESTS",
    "REQUEST_SECONDS",
    "RUNNING",
    "STEPS",
    "WAITING",
    "WAITING_IMAGES",
]

REQUESTS = Counter("tokenwire_engine_requests", "Requests that ended, by outcome.", ["outcome"])
FINISHED = Counter(
    "tokenwire_engine_finished_sequences",
    "Sequences that ended: stop, length, cancelled.",
    ["reason"],
)
REQUEST_SECONDS = Histogram(
    "tokenwire_engine_request_seconds",
    "Seconds from the arrival of a completed request to its end.",
    buckets=LATENCY_BUCKETS,
)
PROMPT_TOKENS = Counter("tokenwire_engine_prompt_tokens", "Prompt tokens of ended requests.")
CACHED_TOKENS = Counter(
    "tokenwire_engine_cached_tokens", "Prompt tokens served from the prefix cache."
)
GENERATED_TOKENS = Counter("tokenwire_engine_generated_tokens", "Tokens generated.")
FIRST_TOKEN_SECONDS = Histogram(
    "tokenwire_engine_time_to_first_token_seconds",
    "Seconds from arrival to the first token of a sequence.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN_SECONDS = Histogram(
    "tokenwire_engine_inter_token_seconds",
    "Seconds between two tokens of a sequence.",
    buckets=INTER_TOKEN_BUCKETS,
)
QUEUE_SECONDS = Histogram(
    "tokenwire_engine_queue_seconds",
    "Seconds from arrival to the first step of a request.",
    buckets=LATENCY_BUCKETS,
)
RUNNING = Gauge("tokenwire_engine_running_sequences", "Sequences that run.")
WAITING = Gauge("tokenwire_engine_waiting_sequences", "Sequences that wait.")
QUEUED_TOKENS = Gauge("tokenwire_engine_queued_tokens", "Tokens that wait and are not cached.")
KV_USED_RATIO = Gauge("tokenwire_engine_kv_used_ratio", "Share of KV blocks that sequences hold.")
KV_BLOCKS = Gauge("tokenwire_engine_kv_blocks", "KV blocks in all.")
KV_BLOCK_SIZE = Gauge("tokenwire_engine_kv_block_size", "Tokens of a KV block.")
KV_FREE_BLOCKS = Gauge(
    "tokenwire_engine_kv_free_blocks", "KV blocks that no sequence holds; they may be cached."
)
PREEMPTIONS = Counter("tokenwire_engine_preemptions", "Sequences preempted.")
STEPS = Counter("tokenwire_engine_steps", "Steps.")
DRAFTS = Counter("tokenwire_engine_drafts", "Drafts that steps computed.", ["source"])
DRAFT_TOKENS = Counter("tokenwire_engine_draft_tokens", "Tokens of drafts.", ["source"])
ACCEPTED_DRAFT_TOKENS = Counter(
    "tokenwire_engine_accepted_draft_tokens",
    "Tokens of drafts that became tokens of the output.",
    ["source"],
)
OVERSIZED_STEPS = Counter(
    "tokenwire_engine_oversized_steps",
    "Steps larger than the memory that CUDA graphs reserve, which run without graphs.",
)
UNGRAPHED_STEPS = Counter(
    "tokenwire_engine_ungraphed_steps",
    "Steps of an engine with CUDA graphs that ran without one, launched kernel by kernel.",
)
IMAGES = Counter(
    "tokenwire_engine_images", "Images of prompts: encoded, cached or unreadable.", ["outcome"]
)
WAITING_IMAGES = Gauge("tokenwire_engine_waiting_images", "Images that wait for the encoder.")
IMAGE_CACHE_BYTES = Gauge(
    "tokenwire_engine_image_cache_bytes", "Bytes of encoded images that requests may use again."
)
GRAMMAR_SERVICES = Gauge(
    "tokenwire_engine_grammar_services", "Grammar services: serving, away, refused.", ["state"]
)
MOVED_MATCHERS = Counter(
    "tokenwire_engine_moved_matchers", "Constrained sequences whose grammar service changed."
)
