"""Status of the model: the process's counts since its start, and the engines' loads."""

import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from prometheus_client import Counter, Gauge
from prometheus_client.samples import Sample

from services.common.vllm_metrics import ModelLoad
from services.tokenizer import metrics
from services.tokenizer.engines.engine_load import EngineLoad
from services.tokenizer.recent_times import percentile
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["model_load", "model_status", "outcomes", "running_requests"]

_STARTED = time.monotonic()


def model_status(model: str, engines: Sequence[models_pb2.EngineStatus]) -> models_pb2.ModelStatus:
    """Return the status of the process, with that of the engines."""
    now = time.monotonic()
    return models_pb2.ModelStatus(
        model=model,
        version=version("tokenwire"),
        uptime_seconds=now - _STARTED,
        running_requests=running_requests(),
        outcomes=[
            models_pb2.OutcomeCount(outcome=outcome, requests=requests)
            for outcome, requests in outcomes().items()
        ],
        prompt_tokens=_count(metrics.PROMPT_TOKENS),
        completion_tokens=_count(metrics.COMPLETION_TOKENS),
        first_token=_first_token(now),
        engines=engines,
        cached_tokens=_count(metrics.CACHED_TOKENS),
    )


def model_load(model: str, engines: Sequence[EngineLoad]) -> ModelLoad | None:
    """Return the load of the engines that serve, with the counts; None if there is none."""
    if not engines:
        return None
    return ModelLoad(
        model=model,
        running=sum(engine.running for engine in engines),
        waiting=sum(engine.waiting for engine in engines),
        block_size=engines[0].block_size,
        used_blocks=sum(engine.used_blocks for engine in engines),
        total_blocks=sum(engine.total_blocks for engine in engines),
        prompt_tokens=_count(metrics.PROMPT_TOKENS),
        cached_tokens=_count(metrics.CACHED_TOKENS),
        generated_tokens=_count(metrics.COMPLETION_TOKENS),
    )


def running_requests() -> int:
    """Return the completions and chats that have not ended."""
    return _count(metrics.RUNNING)


def outcomes() -> dict[str, int]:
    """Return the ended completions and chats by outcome."""
    return {sample.labels["outcome"]: int(sample.value) for sample in _samples(metrics.REQUESTS)}


def _first_token(now: float) -> models_pb2.RecentTimes:
    recent = metrics.RECENT_FIRST_TOKENS
    times = recent.sorted(now)
    return models_pb2.RecentTimes(
        window_seconds=recent.window_seconds,
        count=len(times),
        p50_seconds=percentile(times, 0.5),
        p95_seconds=percentile(times, 0.95),
    )


def _count(metric: Counter | Gauge) -> int:
    return sum(int(sample.value) for sample in _samples(metric))


def _samples(metric: Counter | Gauge) -> Iterator[Sample]:
    """Yield the values of all labels, without the times of their creation."""
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample
