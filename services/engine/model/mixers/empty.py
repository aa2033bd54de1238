"""Mixer of layers that have none."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.operators.rotation import Rotation

__all__ = ["EmptyMixer", "EmptyScratch"]


@dataclass(frozen=True, slots=True)
class EmptyScratch(Scratch):
    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()


class EmptyMixer(Mixer[EmptyScratch]):
    """A mixer that adds nothing to the residual."""

    scratch_key = "empty"
    is_empty = True

    def allocate(self, tokens: int) -> EmptyScratch:
        return EmptyScratch()

    def project(self, rows: Tensor, scratch: EmptyScratch, rotations: Sequence[Rotation]) -> None:
        pass

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: EmptyScratch,
        kept: EmptyScratch | None = None,
    ) -> None:
        pass

    def into(self, scratch: EmptyScratch, out: Tensor) -> None:
        out.zero_()

    def add_to(self, scratch: EmptyScratch, hidden: Tensor) -> None:
        pass
