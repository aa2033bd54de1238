"""The engine's metrics under vLLM's names, for dashboards and routers that expect them."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from services.common.vllm_metrics import cache_config, labels_of
from services.engine.frontend import metrics

__all__ = ["VllmMetrics"]

_NAMES: dict[str, MetricWrapperBase] = {
    "num_requests_running": metrics.RUNNING,
    "num_requests_waiting": metrics.WAITING,
    "kv_cache_usage_perc": metrics.KV_USED_RATIO,  # from 0 to 1, despite its name
    "gpu_cache_usage_perc": metrics.KV_USED_RATIO,  # its older name
    "num_preemptions": metrics.PREEMPTIONS,
    "prompt_tokens": metrics.PROMPT_TOKENS,
    "generation_tokens": metrics.GENERATED_TOKENS,
    "prefix_cache_queries": metrics.PROMPT_TOKENS,
    "prefix_cache_hits": metrics.CACHED_TOKENS,
    "gpu_prefix_cache_queries": metrics.PROMPT_TOKENS,
    "gpu_prefix_cache_hits": metrics.CACHED_TOKENS,
    "time_to_first_token_seconds": metrics.FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": metrics.INTER_TOKEN_SECONDS,
    "e2e_request_latency_seconds": metrics.REQUEST_SECONDS,
    "request_queue_time_seconds": metrics.QUEUE_SECONDS,
    "request_success": metrics.FINISHED,
    "spec_decode_num_drafts": metrics.DRAFTS,
    "spec_decode_num_draft_tokens": metrics.DRAFT_TOKENS,
    "spec_decode_num_accepted_tokens": metrics.ACCEPTED_DRAFT_TOKENS,
}
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""vLLM's names of finish reasons"""


class VllmMetrics(Collector):
    """Copies of the engine's metrics at each scrape, with vLLM's names and labels."""

    def __init__(self, model: str, block_size: int, total_blocks: int) -> None:
        self._labels = labels_of(model)
        self._cache = {"block_size": str(block_size), "num_gpu_blocks": str(total_blocks)}

    def collect(self) -> Iterator[Metric]:
        for name, source in _NAMES.items():
            for metric in source.collect():
                yield self._renamed(metric, f"vllm:{name}")
        cache = cache_config()
        cache.add_sample(cache.name, self._labels | self._cache, 1.0)
        yield cache

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = dict(sample.labels)
            if reason := labels.pop("reason", None):
                labels["finished_reason"] = _REASONS[reason]
            suffix = sample.name.removeprefix(metric.name)
            renamed.add_sample(name + suffix, labels | self._labels, sample.value)
        return renamed
