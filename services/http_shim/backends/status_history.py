"""Status history: samples of each model's load over the last ten minutes, kept in the shim."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from services.http_shim.backends.model_source import ModelSource, ServedStatus
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["LoadSample", "StatusHistory"]

_SAMPLE_SECONDS = 3.0
_SPAN_SECONDS = 600.0
_MOST_SAMPLES = int(_SPAN_SECONDS / _SAMPLE_SECONDS)


class LoadSample(Struct):
    """Load of a model at a time; null = not known, such as while its services are away."""

    time: float
    """Seconds since the start of the shim"""
    generated_per_second: float | None = None
    prompt_per_second: float | None = None
    running_sequences: int | None = None
    waiting_sequences: int | None = None
    kv_used_share: float | None = None
    """Share of the KV blocks that sequences hold, from 0 to 1"""
    p50_seconds: float | None = None
    """Median of the recent times to the first token"""
    p95_seconds: float | None = None


@dataclass(slots=True)
class _Model:
    """Samples of a model, and the counts of the last one."""

    samples: deque[LoadSample] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    last: models_pb2.ModelStatus | None = None


class StatusHistory:
    """Asks the models for their status, for all pages together."""

    def __init__(self, models: ModelSource) -> None:
        self._source = models
        self._began = time.monotonic()
        self._models: dict[str, _Model] = {}
        self._asking: asyncio.Task[list[ServedStatus]] | None = None

    @property
    def now(self) -> float:
        """Time of the samples' clock."""
        return time.monotonic() - self._began

    async def statuses(self) -> list[ServedStatus]:
        """Return the status of each model. Calls at a time share one call of the services."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._source.statuses())
        return await asyncio.shield(self._asking)

    def samples(self, model: str, since: float) -> Sequence[LoadSample]:
        """Return a model's samples after a time, in order."""
        known = self._models.get(model)
        return [] if known is None else [each for each in known.samples if each.time > since]

    async def run(self) -> None:
        """Until cancelled, take a sample of each model every few seconds."""
        while True:
            self.take(await self.statuses(), self.now)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def take(self, statuses: Sequence[ServedStatus], now: float) -> None:
        """Add a sample of each model; drop those of models that are gone."""
        models: dict[str, _Model] = {}
        for served in statuses:
            model = models[served.id] = self._models.get(served.id) or _Model()
            before = model.samples[-1].time if model.samples else now
            model.samples.append(_sample(served.status, model.last, now, now - before))
            model.last = served.status
        self._models = models


def _sample(
    status: models_pb2.ModelStatus | None,
    last: models_pb2.ModelStatus | None,
    now: float,
    seconds: float,
) -> LoadSample:
    if status is None:
        return LoadSample(now)
    serving = [each for each in status.engines if each.state == models_pb2.ENGINE_STATE_SERVING]
    blocks = sum(each.total_blocks for each in serving)
    times = status.first_token
    sample = LoadSample(
        now,
        p50_seconds=times.p50_seconds if times.count else None,
        p95_seconds=times.p95_seconds if times.count else None,
    )
    if serving:
        sample.running_sequences = sum(each.running_sequences for each in serving)
        sample.waiting_sequences = sum(each.waiting_sequences for each in serving)
    if blocks:
        sample.kv_used_share = sum(each.used_blocks for each in serving) / blocks
    if last is not None and seconds > 0 and status.uptime_seconds >= last.uptime_seconds:
        generated = status.completion_tokens - last.completion_tokens
        prompt = status.prompt_tokens - last.prompt_tokens
        if min(generated, prompt) >= 0:  # counts fall when one of several services restarts
            sample.generated_per_second = generated / seconds
            sample.prompt_per_second = prompt / seconds
    return sample
