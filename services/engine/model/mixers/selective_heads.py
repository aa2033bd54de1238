"""Mamba with several heads (Zamba): equal parts of the channels, each a Mamba of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.selective import SelectiveMixer, SelectiveScratch
from services.engine.model.operators.rotation import Rotation

__all__ = ["SelectiveHeads", "SelectiveHeadsScratch"]


@dataclass(frozen=True, slots=True)
class SelectiveHeadsScratch(Scratch):
    heads: tuple[SelectiveScratch, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for head in self.heads for tensor in head.tensors)


class SelectiveHeads(Mixer[SelectiveHeadsScratch]):
    """The Mamba layer `layer`, whose heads all add to the residual."""

    is_capturable = False  # because it is false for one head

    def __init__(self, layer: int, heads: Sequence[SelectiveMixer]) -> None:
        self.scratch_key = ("heads", *(head.scratch_key for head in heads))
        self._layer = layer
        self._heads = heads

    def allocate(self, tokens: int) -> SelectiveHeadsScratch:
        return SelectiveHeadsScratch(tuple(head.allocate(tokens) for head in self._heads))

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        states = (head.allocate_states(slots, dtype) for head in self._heads)
        return tuple(tensor for state in states for tensor in state)

    def project(
        self, rows: Tensor, scratch: SelectiveHeadsScratch, rotations: Sequence[Rotation]
    ) -> None:
        for head, own in zip(self._heads, scratch.heads, strict=True):
            head.project(rows, own, rotations)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: SelectiveHeadsScratch,
        kept: SelectiveHeadsScratch | None = None,
    ) -> None:
        states, count = cache.states[self._layer], len(self._heads)
        each = len(states) // count
        for number, head in enumerate(self._heads):
            mine = {self._layer: states[number * each : (number + 1) * each]}
            kept_rows = None if kept is None else kept.heads[number]
            head.mix(batch, replace(cache, states=mine), scratch.heads[number], kept_rows)

    def into(self, scratch: SelectiveHeadsScratch, out: Tensor) -> None:
        self._heads[0].into(scratch.heads[0], out)
        for head, own in zip(self._heads[1:], scratch.heads[1:], strict=True):
            head.add_to(own, out)

    def add_to(self, scratch: SelectiveHeadsScratch, hidden: Tensor) -> None:
        for head, own in zip(self._heads, scratch.heads, strict=True):
            head.add_to(own, hidden)
