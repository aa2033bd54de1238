"""Attention and a recurrent mixer side by side, whose outputs both join the residual."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.operators.rotation import Rotation

__all__ = ["ParallelMixer", "ParallelScratch"]


@dataclass(frozen=True, slots=True)
class ParallelScratch(Scratch):
    attention: Any
    recurrent: Any

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.attention.tensors, *self.recurrent.tensors


class ParallelMixer(Mixer[ParallelScratch]):
    """Two mixers that read the same norm of the residual."""

    def __init__(self, attention: Mixer[Any], recurrent: Mixer[Any]) -> None:
        self.scratch_key = (attention.scratch_key, recurrent.scratch_key)
        self.is_capturable = attention.is_capturable and recurrent.is_capturable
        self._attention = attention
        self._recurrent = recurrent

    def allocate(self, tokens: int) -> ParallelScratch:
        return ParallelScratch(self._attention.allocate(tokens), self._recurrent.allocate(tokens))

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._recurrent.allocate_states(slots, dtype)

    def project(
        self, rows: Tensor, scratch: ParallelScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._attention.project(rows, scratch.attention, rotations)
        self._recurrent.project(rows, scratch.recurrent, rotations)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: ParallelScratch,
        kept: ParallelScratch | None = None,
    ) -> None:
        attending, advancing = (None, None) if kept is None else (kept.attention, kept.recurrent)
        self._attention.mix(batch, cache, scratch.attention, attending)
        self._recurrent.mix(batch, cache, scratch.recurrent, advancing)

    def into(self, scratch: ParallelScratch, out: Tensor) -> None:
        self._attention.into(scratch.attention, out)
        self._recurrent.add_to(scratch.recurrent, out)

    def add_to(self, scratch: ParallelScratch, hidden: Tensor) -> None:
        self._attention.add_to(scratch.attention, hidden)
        self._recurrent.add_to(scratch.recurrent, hidden)
