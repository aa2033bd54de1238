"""Mixers that keep a state of each sequence instead of pages of tokens."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from services.engine.batch.step_batch import StateSegments, StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["ProjectedScratch", "RecurrentMixer", "RecurrentScratch"]


class RecurrentScratch(Scratch):
    """Buffers of a recurrent mixer."""

    out: Tensor
    """[tokens, outputs], row by row"""
    arranged: Tensor
    """[tokens, outputs], in the layout that products read"""


@dataclass(frozen=True, slots=True)
class ProjectedScratch(RecurrentScratch):
    """Buffers of a mixer whose inputs are the outputs of one product."""

    inputs: Tensor
    """[tokens, outputs of the product]"""
    out: Tensor
    arranged: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.out, self.arranged


R = TypeVar("R", bound=RecurrentScratch)


class RecurrentMixer(Mixer[R], Generic[R]):
    """The mixer of layer `layer`, which advances the state of each sequence token by token."""

    is_capturable = False  # the host reads which runs continue others

    def __init__(self, layer: int, output: Projection, operators: Operators) -> None:
        self._layer = layer
        self._output = output
        self._operators = operators

    @abstractmethod
    def advance(self, scratch: R, state: tuple[Tensor, ...], segments: StateSegments) -> None:
        """Fill `scratch.out`, and the slots that the segments name as targets."""

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: R,
        kept: R | None = None,
    ) -> None:
        assert batch.states is not None
        tokens = len(batch.token_ids)
        mine = scratch if len(scratch.out) == tokens else scratch.first(tokens)
        self.advance(mine, cache.states[self._layer], batch.states)
        if kept is not None:
            outputs = batch.output_rows
            self._operators.keep(mine.out, None if outputs is None else outputs.indices)
            mine = kept
        self._operators.arrange(mine.out, mine.arranged)

    def into(self, scratch: R, out: Tensor) -> None:
        self._output.into(scratch.arranged, out)

    def add_to(self, scratch: R, hidden: Tensor) -> None:
        self._output.add_to(scratch.arranged, hidden)
