"""Load of models under vLLM's names, for routers that read a replica's metrics.

A router reads one series of each gauge and adds none up: llm-d's endpoint picker reads the first,
vLLM's production stack the last. So one series holds the sum over all engines of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.registry import Collector

__all__ = ["ModelLoad", "VllmLoadMetrics", "cache_config", "labels_of"]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Total load of those engines of a model that serve."""

    model: str
    running: int
    """Number of running sequences"""
    waiting: int
    """Number of waiting sequences"""
    block_size: int
    """Tokens of a KV block"""
    used_blocks: int
    """KV blocks that sequences hold"""
    total_blocks: int
    """KV blocks in all"""
    prompt_tokens: int
    """Tokens of admitted prompts since the start"""
    cached_tokens: int
    """Tokens of admitted prompts that prefix caches had, since the start"""
    generated_tokens: int
    """Tokens generated since the start"""

    @property
    def block_share(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0


_GAUGES: dict[str, Callable[[ModelLoad], float]] = {
    "num_requests_running": lambda load: load.running,
    "num_requests_waiting": lambda load: load.waiting,
    "kv_cache_usage_perc": lambda load: load.block_share,  # from 0 to 1, despite its name
    "gpu_cache_usage_perc": lambda load: load.block_share,  # its older name
}
_COUNTERS: dict[str, Callable[[ModelLoad], float]] = {
    "prompt_tokens": lambda load: load.prompt_tokens,
    "generation_tokens": lambda load: load.generated_tokens,
    "prefix_cache_queries": lambda load: load.prompt_tokens,
    "prefix_cache_hits": lambda load: load.cached_tokens,
    "gpu_prefix_cache_queries": lambda load: load.prompt_tokens,
    "gpu_prefix_cache_hits": lambda load: load.cached_tokens,
}


class VllmLoadMetrics(Collector):
    """Collector of the load of models. A model without an engine has no series."""

    def __init__(self, loads: Callable[[], Sequence[ModelLoad]]) -> None:
        """loads: returns the load of each model; called in the thread of a scrape."""
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        loads = self._loads()
        for kind, names, suffix in (("gauge", _GAUGES, ""), ("counter", _COUNTERS, "_total")):
            for name, value in names.items():
                metric = Metric(f"vllm:{name}", "Load of the engines, added up.", kind)
                for load in loads:
                    metric.add_sample(metric.name + suffix, labels_of(load.model), value(load))
                yield metric
        cache = cache_config()
        for load in loads:
            blocks = {"block_size": str(load.block_size), "num_gpu_blocks": str(load.total_blocks)}
            cache.add_sample(cache.name, labels_of(load.model) | blocks, 1.0)
        yield cache


def cache_config() -> Metric:
    """Return vLLM's description of the KV cache, without a sample."""
    return Metric("vllm:cache_config_info", "The KV cache.", "gauge")


def labels_of(model: str) -> dict[str, str]:
    """Return the labels that vLLM's metrics have."""
    return {"model_name": model, "engine": "0"}
