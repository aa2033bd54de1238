"""Gemma 3n's residual: several streams, of which a layer reads and writes one.

Sources: AltUp (https://arxiv.org/abs/2301.13310), LAuReL (https://arxiv.org/abs/2411.07501).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.layer_inputs import LayerInput, LayerRows
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.residual import Residual, ResidualRows

__all__ = ["AltUp", "Expansion", "Laurel", "Merger", "StreamRouter"]

_LEAST_SQUARE = 1e-5
"""Lower bound of a row's mean square where it is a divisor"""


@dataclass(frozen=True, slots=True)
class StreamRouter:
    """Weights of the streams for a row, from which the coefficients of a layer are computed."""

    norm: Tensor
    """[hidden_size], the norm's weight divided by hidden_size"""
    projection: Projection
    """hidden_size → streams"""
    count: int
    """Number of streams"""
    epsilon: float
    operators: Operators

    def weights(self, rows: ResidualRows) -> Tensor:
        """Return the weights of `rows.hidden`: float32 [n, streams]."""
        hidden = rows.hidden
        self.operators.rms_norm(hidden, self.norm, self.epsilon, rows.normed)
        weights = torch.empty(len(hidden), self.count, device=hidden.device)
        self.projection.into(rows.normed, weights)
        return weights.tanh_()


@dataclass(frozen=True, slots=True)
class Laurel:
    """Product of low rank beside the mixer, whose sum with its input joins the residual."""

    left: Projection
    """hidden_size → rank"""
    right: Projection
    """rank → hidden_size, normed"""
    rank: int
    operators: Operators

    def add_to(self, normed: Tensor, hidden: Tensor) -> None:
        """Add the product to `hidden`; `normed` is in the layout of products."""
        product, arranged = (self.operators.temporary(len(hidden), self.rank) for _ in range(2))
        self.left.into(normed, product)
        self.operators.arrange(product, arranged)
        self.right.add_to(arranged, hidden)
        hidden += self.operators.plain(normed)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Streams of the first layer: the embedding, and its projections scaled to its length."""

    projections: Sequence[Projection]
    """hidden_size → hidden_size, for each stream but the first"""
    operators: Operators

    def fill(self, rows: ResidualRows, streams: Tensor) -> None:
        """Fill `streams` from `rows.hidden`."""
        length = _length(rows.hidden)
        self.operators.arrange(rows.hidden, rows.normed)
        product = self.operators.temporary(*rows.hidden.shape)
        streams[:, 0] = rows.hidden
        for number, projection in enumerate(self.projections, start=1):
            projection.into(rows.normed, product)
            streams[:, number] = product * (length / _length(product, _LEAST_SQUARE))


@dataclass(frozen=True, slots=True)
class Merger:
    """Mean of the last layer's streams: the first, and projections of the others of its length."""

    projections: Sequence[Projection]
    """hidden_size → hidden_size, for each stream but the first"""
    operators: Operators

    def fill(self, rows: ResidualRows, streams: Tensor) -> None:
        """Fill `rows.hidden` from `streams`."""
        total, length = streams[:, 0].float(), _length(streams[:, 0])
        product = self.operators.temporary(*rows.hidden.shape)
        for number, projection in enumerate(self.projections, start=1):
            rows.hidden.copy_(streams[:, number])
            self.operators.arrange(rows.hidden, rows.normed)
            projection.into(rows.normed, product)
            total += product * (length / _length(product, _LEAST_SQUARE))
        rows.hidden.copy_(total / streams.shape[1])


@dataclass(frozen=True, slots=True)
class AltUp(Residual):
    """Streams that a layer predicts, then corrects by the change of the active stream."""

    router: StreamRouter
    prediction: Tensor
    """float32 [streams, streams * streams]"""
    correction: Tensor
    """float32 [streams, streams]"""
    active: int
    """Number of the stream that the layer reads"""
    scale: Tensor | None
    """[hidden_size], factor of the active stream from which the layer's input is computed"""
    laurel: Laurel
    input: LayerInput
    operators: Operators
    expansion: Expansion | None
    """Streams made from the embedding; None: this is not the first layer"""
    merger: Merger | None
    """Merging of the streams; None: this is not the last layer"""

    def begin(self, rows: ResidualRows) -> Tensor:
        streams = _streams(rows)
        if self.expansion is not None:
            self.expansion.fill(rows, streams)
        count = self.router.count
        rows.hidden.copy_(streams[:, self.active])
        coefficients = self.router.weights(rows) @ self.prediction
        streams += coefficients.view(-1, count, count).to(streams.dtype) @ streams
        rows.hidden.copy_(streams[:, self.active])
        return rows.hidden

    def bypass(self, rows: ResidualRows) -> None:
        self.laurel.add_to(rows.normed, rows.hidden)
        rows.hidden.mul_(0.5**0.5)  # the norm behind the mixer has this factor in its weight

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        streams = _streams(rows)
        assert inputs is not None, "the model has no inputs of layers"
        coefficients = self.router.weights(rows) @ self.correction + 1
        innovation = rows.hidden - streams[:, self.active]
        streams += coefficients[:, :, None].to(streams.dtype) * innovation[:, None]
        active = streams[:, self.active]
        rows.hidden.copy_(active if self.scale is None else active * self.scale)
        self.operators.arrange(rows.hidden, rows.normed)
        self.input.add_to(inputs, rows.normed, rows.hidden.zero_())
        streams[:, 1:] += rows.hidden[:, None]
        if self.merger is not None:
            self.merger.fill(rows, streams)


def _streams(rows: ResidualRows) -> Tensor:
    assert rows.streams is not None, "the model has one stream"
    return rows.streams


def _length(rows: Tensor, least: float = 0.0) -> Tensor:
    """Return the root of each row's mean square, at least `least` ** 0.5: float32 [n, 1]."""
    return rows.float().square().mean(1, keepdim=True).clamp(min=least).sqrt()
