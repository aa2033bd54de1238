"""Zamba's shared block: attention and a feed-forward layer whose weights several depths share.

A block reads the residual and the embedding. Its output joins the input of the next layer, but not
the residual. Sources: https://arxiv.org/abs/2405.16712, https://arxiv.org/abs/2411.15242.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.layer_inputs import LayerRows
from services.engine.model.operators.activations import activated
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.parts.feed_forward import FeedForward
from services.engine.model.residual import Residual, ResidualRows

__all__ = ["AfterBlock", "BlockFeedForward", "BlockResidual", "DepthGate", "DepthProjection"]


class BlockResidual(Residual):
    """Residual of a shared block, whose output reaches only the next mixer's input."""

    def begin(self, rows: ResidualRows) -> Tensor:
        """Keep the residual; return it with the embedding: [n, 2 * hidden_size]."""
        _residual(rows).copy_(rows.hidden)
        assert rows.joined is not None
        return rows.joined

    def bypass(self, rows: ResidualRows) -> None:
        """Clear `hidden`: the feed-forward layer reads attention's output alone."""
        rows.hidden.zero_()

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        rows.hidden.add_(_residual(rows))


class AfterBlock(Residual):
    """Residual after a shared block: the mixer reads the block's output too, but adds to the
    residual without it."""

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as the block has left it."""
        return rows.hidden

    def bypass(self, rows: ResidualRows) -> None:
        rows.hidden.copy_(_residual(rows))

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Leave `hidden` as the mixer has left it."""


@dataclass(frozen=True, slots=True)
class BlockFeedForward(FeedForward):
    """A feed-forward layer followed by a product of its depth, which replaces the residual."""

    feed_forward: FeedForward
    output: Projection
    """hidden_size → hidden_size"""
    operators: Operators

    @property
    def num_spares(self) -> int:
        return self.feed_forward.num_spares

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        product, arranged = (self.operators.temporary(*out.shape) for _ in range(2))
        self.feed_forward.add_to(rows, product.zero_(), inner, spares)
        self.operators.arrange(product, arranged)
        self.output.into(arranged, out)


class DepthProjection(Projection):
    """A product that several depths share, and one of low rank that a depth adds to it."""

    def __init__(self, shared: Projection, own: Projection) -> None:
        self._shared = shared
        self._own = own
        self.weight_bytes = shared.weight_bytes + own.weight_bytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._shared.into(rows, out)
        self._own.add_to(rows, out)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._shared.add_to(rows, out)
        self._own.add_to(rows, out)


class DepthGate(Gate):
    """A gate of one product, which computes gate and up side by side."""

    def __init__(
        self, projection: Projection, activation: Activation, width: int, operators: Operators
    ) -> None:
        """width: number of outputs of the gate alone."""
        self._projection = projection
        self._activation = activation
        self._width = width
        self._operators = operators
        self.weight_bytes = projection.weight_bytes

    def adapt(self, delta: Delta) -> None:
        """Raise an error: the gate's projection has adapters' additions already."""
        raise NotImplementedError

    def into(self, rows: Tensor, out: Tensor) -> None:
        product = self._operators.temporary(len(rows), 2 * self._width)
        self._projection.into(rows, product)
        self._operators.arrange(activated(self._activation, product), out)


def _residual(rows: ResidualRows) -> Tensor:
    """Return the residual before the block, [n, hidden_size]."""
    assert rows.joined is not None, "the model keeps no embedding"
    return rows.joined[:, : rows.hidden.shape[1]]
