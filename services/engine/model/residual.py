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
    """[n, streams, hidden_size], the streams of AltUp; None: `hidden` is the only one"""


class Residual(ABC):
    """The residual of one layer."""

    @abstractmethod
    def begin(self, rows: ResidualRows) -> None:
        """Fill `hidden` with what the layer reads."""

    @abstractmethod
    def bypass(self, rows: ResidualRows) -> None:
        """Add to `hidden` what is computed from `normed` beside the mixer, which reads it too."""

    @abstractmethod
    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Complete the layer after both of its parts have added to `hidden`.

        inputs: what each token has for this layer alone; None: there is nothing.
        """


@dataclass(frozen=True, slots=True)
class OneStream(Residual):
    """The residual of most models: a sum."""

    operators: Operators
    input: LayerInput | None = None
    """Adds what a token has for this layer alone"""
    scalar: float = 1.0
    """Factor on the residual at the end"""

    def begin(self, rows: ResidualRows) -> None:
        """Leave `hidden` as the previous layer has left it."""

    def bypass(self, rows: ResidualRows) -> None:
        """Add nothing."""

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        if self.input is not None and inputs is not None:
            self.operators.arrange(rows.hidden, rows.normed)
            self.input.add_to(inputs, rows.normed, rows.hidden)
        if self.scalar != 1:
            self.operators.scale(rows.hidden, self.scalar)


@dataclass(frozen=True, slots=True)
class NormedResidual(Residual):
    """A residual that the norm before the mixer replaces by its output, as in MiniMax-01."""

    operators: Operators
    factor: float
    """Factor on the norm's output"""

    def begin(self, rows: ResidualRows) -> None:
        """Leave `hidden` as the previous layer has left it."""

    def bypass(self, rows: ResidualRows) -> None:
        rows.hidden.copy_(self.operators.plain(rows.normed)).mul_(self.factor)

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Leave `hidden` as the feed-forward layer has left it."""
