"""Graphs of draft passes, simulated on a CPU."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.execution.step_graphs import StepGraphs, key_of
from services.engine.model.attention import KVCache
from services.engine.model.model import Model


class CheckedGraphs(StepGraphs):
    """Graphs of a draft model's passes, all of which must have been captured before."""

    runs: ClassVar[int] = 0

    def __init__(
        self,
        decoder: Model,
        cache: KVCache,
        compute: Callable[[StepBatch], Tensor] | None = None,
    ) -> None:
        super().__init__(decoder, cache, compute)
        self._keys: set[tuple[int, ...]] = set()

    def capture(self, batch: StepBatch) -> None:
        self._keys.add(key_of(batch))
        super().capture(batch)

    def run(self, batch: StepBatch) -> Tensor:
        assert key_of(batch) in self._keys
        CheckedGraphs.runs += 1
        return super().run(batch)
