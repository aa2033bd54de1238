"""Gated delta net as a mixer: projections around the gated delta rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.rotary import Rotation
from services.engine.model.attention import KVCache
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaState,
    DeltaWeights,
)
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["DeltaNetMixer", "DeltaNetScratch", "DeltaNetWeights"]


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Weights of one layer's gated delta net."""

    inputs: Projection
    """To what the convolution reads, and to the output gate"""
    rates: Projection
    """To beta and to the decay"""
    rule: DeltaWeights
    output: Projection


@dataclass(frozen=True, slots=True)
class DeltaNetScratch(Scratch):
    """Outputs of the input projections, and the output of the rule."""

    inputs: Tensor
    mixed: Tensor
    """[tokens, channels]"""
    gate: Tensor
    """[tokens, outputs]"""
    rates: Tensor
    beta: Tensor
    """[tokens, value_heads]"""
    decay: Tensor
    """[tokens, decays]"""
    out: Tensor
    """[tokens, outputs], row by row"""
    arranged: Tensor
    """[tokens, outputs], in the layout that products read"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.rates, self.out, self.arranged

    def first(self, tokens: int) -> "DeltaNetScratch":
        views = (self.inputs, self.mixed, self.gate, self.rates, self.beta, self.decay)
        others = (self.out, self.arranged)
        return DeltaNetScratch(*(view[:tokens] for view in (*views, *others)))


class DeltaNetMixer(Mixer[DeltaNetScratch]):
    """The gated delta net of layer `layer`."""

    is_capturable = False  # torch's rule reads on the host which runs continue others

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        weights: DeltaNetWeights,
        operators: Operators,
        rule: DeltaRule,
    ) -> None:
        self.scratch_key = shape
        self._layer = layer
        self._shape = shape
        self._weights = weights
        self._operators = operators
        self._rule = rule

    def allocate(self, tokens: int) -> DeltaNetScratch:
        shape, empty = self._shape, self._operators.empty
        inputs = empty(tokens, shape.channels + shape.outputs)
        mixed, gate = inputs.split_with_sizes((shape.channels, shape.outputs), dim=1)
        rates = empty(tokens, shape.value_heads + shape.decays)
        beta, decay = rates.split_with_sizes((shape.value_heads, shape.decays), dim=1)
        out, arranged = (empty(tokens, shape.outputs) for _ in range(2))
        return DeltaNetScratch(inputs, mixed, gate, rates, beta, decay, out, arranged)

    def allocate_states(self, slots: int) -> tuple[Tensor, ...]:
        state = self._rule.allocate(slots)
        return state.convolution, state.recurrent

    def project(
        self, rows: Tensor, scratch: DeltaNetScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)
        self._weights.rates.into(rows, scratch.rates)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: DeltaNetScratch,
        kept: DeltaNetScratch | None = None,
        *,
        is_written: bool = False,
    ) -> None:
        assert batch.states is not None
        tokens = len(batch.token_ids)
        mine = scratch if len(scratch.out) == tokens else scratch.first(tokens)
        inputs = DeltaInputs(mine.mixed, mine.gate, mine.beta, mine.decay, mine.out)
        state = DeltaState(*cache.states[self._layer])
        self._rule.apply(self._weights.rule, inputs, state, batch.states)
        if kept is not None:
            outputs = batch.output_rows
            self._operators.keep(mine.out, None if outputs is None else outputs.indices)
            mine = kept
        self._operators.arrange(mine.out, mine.arranged)

    def add_to(self, scratch: DeltaNetScratch, hidden: Tensor) -> None:
        self._weights.output.add_to(scratch.arranged, hidden)
