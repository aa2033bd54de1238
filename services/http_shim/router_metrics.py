"""Load of the models for routers, which read the shim's metrics."""

import asyncio
from collections.abc import Sequence

from services.common.vllm_metrics import ModelLoad
from services.http_shim.backends.model_source import ModelSource, ServedStatus
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["RouterMetrics"]

_ASK_SECONDS = 0.5
"""Age of a load, at most: metrics are read many times a second, by several routers"""


class RouterMetrics:
    """The load of each model, asked of its tokenizer services regularly."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models
        self._loads: Sequence[ModelLoad] = ()

    def loads(self) -> Sequence[ModelLoad]:
        """Return the last loads, without models that have no engine. Any thread may call it."""
        return self._loads

    async def follow(self) -> None:
        """Ask again and again."""
        while True:
            statuses = await self._models.statuses()
            self._loads = [load for each in statuses if (load := _load(each)) is not None]
            await asyncio.sleep(_ASK_SECONDS)


def _load(served: ServedStatus) -> ModelLoad | None:
    """Return the load of the engines that serve; None if there is none."""
    status = served.status
    if status is None:
        return None
    serving = models_pb2.ENGINE_STATE_SERVING
    engines = [each for each in status.engines if each.state == serving]
    if not engines:
        return None
    return ModelLoad(
        model=served.id,
        running=sum(each.running_sequences for each in engines),
        waiting=sum(each.waiting_sequences for each in engines),
        block_size=engines[0].block_size,
        used_blocks=sum(each.used_blocks for each in engines),
        total_blocks=sum(each.total_blocks for each in engines),
        prompt_tokens=status.prompt_tokens,
        cached_tokens=status.cached_tokens,
        generated_tokens=status.completion_tokens,
    )
