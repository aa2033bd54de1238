"""Hyper-connections as a residual: streams that each part of a layer reads and mixes.

Source: manifold-constrained hyper-connections (https://arxiv.org/abs/2512.24880).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.engine.model.architecture.layers import HyperSpec
from services.engine.model.layer_inputs import LayerRows
from services.engine.model.residual import Residual, ResidualRows

__all__ = ["HYPER_ROWS", "Connection", "HyperConnections", "StreamMixture"]

HYPER_ROWS = 256
"""Number of rows whose streams are in memory as float32 at once"""


@dataclass(frozen=True, slots=True)
class StreamMixture:
    """Product that computes factors from a row's streams."""

    weight: Tensor
    """float32 [factors, streams * hidden_size]"""
    bias: Tensor
    """float32 [factors]"""
    scales: Tensor
    """float32 [factors]"""
    epsilon: float
    """Epsilon of the norm over all streams, which has no weight"""

    def factors(self, streams: Tensor) -> Tensor:
        """Return float32 [n, factors]. streams: float32 [n, streams, hidden_size]."""
        flat = streams.flatten(1)
        length = torch.rsqrt(flat.square().mean(1, keepdim=True) + self.epsilon)
        return linear(flat, self.weight) * length * self.scales + self.bias


@dataclass(frozen=True, slots=True)
class Connection:
    """Streams around one part of a layer."""

    reading: StreamMixture
    """Factors of the streams in the input of the part"""
    writing: StreamMixture
    """Factors of the part's output in the streams, then those of the old streams in the new ones"""
    spec: HyperSpec

    def read(self, streams: Tensor, hidden: Tensor) -> None:
        """Fill `hidden` [n, hidden_size] with the input of the part."""
        for rows in _pieces(len(hidden)):
            hidden[rows] = _collapsed(self.reading, streams[rows].float(), self.spec.epsilon)

    def write(self, hidden: Tensor, streams: Tensor) -> None:
        """Mix the streams, and add the part's output `hidden`."""
        count = self.spec.streams
        for rows in _pieces(len(hidden)):
            old = streams[rows].float()
            added, mixed = self.writing.factors(old).split_with_sizes((count, count * count), 1)
            mixture = self._balanced(mixed.view(-1, count, count))
            new = torch.matmul(mixture.mT, old)
            streams[rows] = new + 2 * added.sigmoid()[..., None] * hidden[rows, None].float()

    def _balanced(self, scores: Tensor) -> Tensor:
        """Return mixtures whose rows and columns have sums near 1 (Sinkhorn and Knopp).

        scores: [n, streams, streams].
        """
        epsilon = self.spec.epsilon
        mixture = scores.softmax(dim=2) + epsilon
        mixture = mixture / (mixture.sum(dim=1, keepdim=True) + epsilon)
        for _ in range(self.spec.iterations - 1):
            mixture = mixture / (mixture.sum(dim=2, keepdim=True) + epsilon)
            mixture = mixture / (mixture.sum(dim=1, keepdim=True) + epsilon)
        return mixture


@dataclass(frozen=True, slots=True)
class HyperConnections(Residual):
    """The streams around the mixer and the feed-forward layer of a layer."""

    mixer: Connection
    feed_forward: Connection
    is_first: bool
    """True if this is the first layer, in which all streams begin as the embedding"""
    head: StreamMixture | None
    """Factors of the streams in the output of the last layer; None: this is not the last layer"""

    def begin(self, rows: ResidualRows) -> Tensor:
        streams = _streams(rows)
        if self.is_first:
            streams.copy_(rows.hidden[:, None].expand_as(streams))
        self.mixer.read(streams, rows.hidden)
        return rows.hidden

    def bypass(self, rows: ResidualRows) -> None:
        rows.hidden.zero_()

    def turn(self, rows: ResidualRows) -> None:
        streams = _streams(rows)
        self.mixer.write(rows.hidden, streams)
        self.feed_forward.read(streams, rows.hidden)

    def bypass_again(self, rows: ResidualRows) -> None:
        rows.hidden.zero_()

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        streams = _streams(rows)
        self.feed_forward.write(rows.hidden, streams)
        if self.head is not None:
            epsilon = self.mixer.spec.epsilon
            for some in _pieces(len(streams)):
                rows.hidden[some] = _collapsed(self.head, streams[some].float(), epsilon)


def _collapsed(mixture: StreamMixture, streams: Tensor, epsilon: float) -> Tensor:
    """Return the weighted sum of streams, float32 [n, hidden_size]."""
    weights = mixture.factors(streams).sigmoid() + epsilon
    return torch.bmm(weights[:, None], streams)[:, 0]


def _pieces(count: int) -> Iterator[slice]:
    for first in range(0, count, HYPER_ROWS):
        yield slice(first, min(first + HYPER_ROWS, count))


def _streams(rows: ResidualRows) -> Tensor:
    assert rows.streams is not None, "the model has one stream"
    return rows.streams
