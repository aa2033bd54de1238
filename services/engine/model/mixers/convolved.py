"""A feed-forward layer whose output is convolved over tokens, as a mixer (Inkling)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import ConvolvedFeedForward
from services.engine.model.attention import KVCache
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.runs import RunGroups, convolve_rows
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.rotation import Rotation
from services.engine.model.parts.feed_forward import FeedForward

__all__ = ["ConvolvedMixer", "ConvolvedScratch", "ConvolvedWeights"]


@dataclass(frozen=True, slots=True)
class ConvolvedWeights:
    """A feed-forward layer, and the convolution of its output."""

    content: FeedForward
    convolution: Tensor
    """float32 [conv_width, hidden_size], the newest token's factors last"""


@dataclass(frozen=True, slots=True)
class ConvolvedScratch(Scratch):
    """Output of the feed-forward layer, and the scratch space that it needs."""

    out: Tensor
    """[tokens, hidden_size]"""
    inner: Tensor
    spares: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.out, self.inner, *self.spares


class ConvolvedMixer(Mixer[ConvolvedScratch]):
    """The feed-forward layer of layer `layer`, whose output for the last tokens is its state."""

    is_capturable = False  # the host reads which runs continue others

    def __init__(
        self,
        layer: int,
        spec: ConvolvedFeedForward,
        weights: ConvolvedWeights,
        operators: Operators,
        groups: RunGroups,
        dtype: torch.dtype,
    ) -> None:
        """groups: runs' groups, which all layers share; dtype: the model's."""
        self._layer = layer
        self._weights = weights
        self._operators = operators
        self._groups = groups
        self._dtype = dtype
        self._inner_width = spec.content.inner_width
        self.scratch_key = ("convolved", self._inner_width, weights.content.num_spares)

    def allocate(self, tokens: int) -> ConvolvedScratch:
        empty, hidden_size = self._operators.empty, self._weights.convolution.shape[1]
        return ConvolvedScratch(
            out=empty(tokens, hidden_size),
            inner=empty(tokens, self._inner_width),
            spares=tuple(
                empty(tokens, hidden_size) for _ in range(self._weights.content.num_spares)
            ),
        )

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the convolution's inputs of the last tokens: [slots, conv_width - 1, width]."""
        width, channels = self._weights.convolution.shape
        return (
            self._weights.convolution.new_zeros((slots, width - 1, channels), dtype=self._dtype),
        )

    def project(
        self, rows: Tensor, scratch: ConvolvedScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._operators.clear(scratch.out)
        self._weights.content.add_to(rows, scratch.out, scratch.inner, scratch.spares)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: ConvolvedScratch,
        kept: ConvolvedScratch | None = None,
    ) -> None:
        assert batch.states is not None
        out = scratch.out[: len(batch.token_ids)]
        (state,) = cache.states[self._layer]
        convolve_rows(out, state, self._groups.of(batch.states), self._weights.convolution)
        if kept is not None:
            outputs = batch.output_rows
            self._operators.keep(out, None if outputs is None else outputs.indices)

    def into(self, scratch: ConvolvedScratch, out: Tensor) -> None:
        out.copy_(scratch.out)

    def add_to(self, scratch: ConvolvedScratch, hidden: Tensor) -> None:
        hidden += scratch.out
