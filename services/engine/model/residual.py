"""Residual of a layer: its input, and its update after the mixer and the feed-forward layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from services.engine.model.layer_inputs import LayerInput, LayerRows
from services.engine.model.operators.interface import Operators

__all__ = ["NormedResidual", "OneStream", "Residual", "ResidualRows"]


@dataclass(frozen=True, slots=True)
class ResidualRows:
    """Rows of a pass between two layers."""

    hidden: Tensor
    """[n, hidden_size], the residual that mixers and feed-forward layers add to"""
    normed: Tensor
    """[n, hidden_size] in the layout of products, scratch space between the parts of a layer"""
    streams: Tensor | None
    """[n, streams, hidden_size]: the streams of AltUp or hyper-connections; None: there is only
    `hidden`"""
    waiting: Tensor | None = None
    """[n, hidden_size], output of experts that joins the residual at the end of the next layer;
    None: there are no such experts"""
    joined: Tensor | None = None
    """[n, 2 * hidden_size], input of a mixer that reads two parts side by side: the residual before
    a shared block and the embedding, or what a draft head reads; None: there is no such mixer"""


class Residual(ABC):
    """The residual of one layer."""

    @abstractmethod
    def begin(self, rows: ResidualRows) -> Tensor:
        """Fill `hidden` with the layer's input; return the rows that the mixer's norm reads."""

    def bypass(self, rows: ResidualRows) -> None:  # noqa: B027
        """Change `hidden` before the mixer, which reads `normed`, adds to it; most do nothing."""

    def turn(self, rows: ResidualRows) -> None:  # noqa: B027
        """Fill `hidden` with the feed-forward layer's input, after the mixer has added to it; most
        do nothing."""

    def bypass_again(self, rows: ResidualRows) -> None:  # noqa: B027
        """Change `hidden` before the feed-forward layer, which reads `normed`, adds to it; most do
        nothing."""

    @abstractmethod
    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Complete the layer after both of its parts have added to `hidden`.

        inputs: inputs that each token has for this layer alone; None: there are none.
        """


@dataclass(frozen=True, slots=True)
class OneStream(Residual):
    """The residual of most models: a sum."""

    operators: Operators
    input: LayerInput | None = None
    """Addition of a token's input for this layer alone; None: tokens have no such inputs"""
    scalar: float = 1.0
    """Factor on the residual at the end of the layer"""

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as the previous layer has left it."""
        return rows.hidden

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        if self.input is not None and inputs is not None:
            self.operators.arrange(rows.hidden, rows.normed)
            self.input.add_to(inputs, rows.normed, rows.hidden)
        if self.scalar != 1:
            self.operators.scale(rows.hidden, self.scalar)


@dataclass(frozen=True, slots=True)
class NormedResidual(Residual):
    """A residual that the norms of a layer replace by their outputs, as in MiniMax-01."""

    operators: Operators
    factors: tuple[float, float]
    """Factors on the outputs of the norms before the mixer and before the feed-forward layer"""

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as the previous layer has left it."""
        return rows.hidden

    def bypass(self, rows: ResidualRows) -> None:
        rows.hidden.copy_(self.operators.plain(rows.normed)).mul_(self.factors[0])

    def bypass_again(self, rows: ResidualRows) -> None:
        rows.hidden.copy_(self.operators.plain(rows.normed)).mul_(self.factors[1])

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Leave `hidden` as the feed-forward layer has left it."""
