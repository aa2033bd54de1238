"""Residual of layers whose experts run beside the next layer (LongCat-Flash)."""

from dataclasses import dataclass

from torch import Tensor

from services.engine.model.layer_inputs import LayerRows
from services.engine.model.operators.interface import Operators
from services.engine.model.parts.feed_forward import FeedForward
from services.engine.model.residual import Residual, ResidualRows

__all__ = ["ShortcutEnd", "ShortcutStart"]


@dataclass(frozen=True, slots=True)
class ShortcutStart(Residual):
    """The residual of a layer with experts, whose output waits for the end of the next layer."""

    experts: FeedForward
    """Experts without a shared one, which use no scratch space"""
    operators: Operators

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as the previous layer has left it."""
        return rows.hidden

    def bypass_again(self, rows: ResidualRows) -> None:
        waiting = _waiting(rows)
        self.operators.clear(waiting)
        self.experts.add_to(rows.normed, waiting, rows.normed, ())

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        """Leave `hidden` as the dense layer has left it."""


@dataclass(frozen=True, slots=True)
class ShortcutEnd(Residual):
    """The residual of the layer after one with experts, whose output joins it at the end."""

    operators: Operators

    def begin(self, rows: ResidualRows) -> Tensor:
        """Leave `hidden` as the previous layer has left it."""
        return rows.hidden

    def end(self, rows: ResidualRows, inputs: LayerRows | None) -> None:
        self.operators.add(_waiting(rows), rows.hidden)


def _waiting(rows: ResidualRows) -> Tensor:
    assert rows.waiting is not None, "the model has no shortcuts"
    return rows.waiting
