"""Inputs that a token has for each layer alone (Gemma 3n's and 4's per-layer embeddings)."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.batch.step_batch import StepBatch
from services.engine.model.embedding import Embedding
from services.engine.model.image_inputs import ids_without_images
from services.engine.model.operators.composed_projections import OutputNorm
from services.engine.model.operators.interface import Gate, Operators, Projection

__all__ = ["InputRows", "LayerInput", "LayerInputs", "LayerRows"]


class LayerRows(NamedTuple):
    """Inputs that each token has for one layer alone, and scratch space: [n, width] each."""

    inputs: Tensor
    gated: Tensor
    """Scratch space in the layout of products"""


@dataclass(frozen=True, slots=True)
class InputRows:
    """Inputs that each token has for each layer alone."""

    whole: Tensor
    """[n, layers, width]"""
    gated: Tensor
    """[n, width], scratch space in the layout of products"""
    layers: tuple[Tensor, ...]
    """Views of `whole`, [n, width] each"""

    def of(self, layer: int) -> LayerRows:
        return LayerRows(self.layers[layer], self.gated)

    def first(self, tokens: int) -> "InputRows":
        """View the rows of the first `tokens` tokens."""
        layers = tuple(rows[:tokens] for rows in self.layers)
        return InputRows(self.whole[:tokens], self.gated[:tokens], layers)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computation of the inputs of all layers from a token's id and its embedding."""

    table: Embedding
    """[ids, layers * width]"""
    projection: Projection
    """hidden_size → layers * width"""
    norm: Tensor
    """[width]"""
    layers: int
    width: int
    hidden_size: int
    epsilon: float
    operators: Operators
    pad_token_id: int | None
    """Id whose row of the table the tokens of images take; None: the id of the image token"""
    num_ids: int
    """Number of rows of the table, beyond which ids read row 0; 0: every id has a row"""

    def allocate(self, tokens: int) -> InputRows:
        """Allocate the inputs of this number of tokens."""
        empty = self.operators.empty
        whole = empty(tokens, self.layers * self.width).view(tokens, self.layers, -1)
        return InputRows(whole, empty(tokens, self.width), whole.unbind(1))

    def compute(self, batch: StepBatch, hidden: Tensor, normed: Tensor, out: Tensor) -> None:
        """Fill `out` for the tokens of a step with these embeddings.

        hidden: [tokens, hidden_size]; normed: scratch space of the same shape.
        """
        flat = out.view(len(hidden), -1)
        self.operators.arrange(hidden, normed)
        self.projection.into(normed, flat)
        scaled = out * self.hidden_size**-0.5
        projected = rms_norm(scaled, (self.width,), self.norm, self.epsilon)
        self.table.read(self._ids(batch), flat)
        out.mul_(self.width**0.5).add_(projected).mul_(0.5**0.5)

    def _ids(self, batch: StepBatch) -> Tensor:
        """Return the ids whose rows of the table the tokens take."""
        ids = batch.token_ids
        if self.num_ids:
            ids = ids.where(ids < self.num_ids, 0)
        if self.pad_token_id is None:
            return ids
        return ids_without_images(batch, ids, self.pad_token_id)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Addition of a layer's own input to the residual."""

    gate: Gate
    """hidden_size → width"""
    output: Projection
    """width → hidden_size"""
    norm: OutputNorm
    operators: Operators

    def add_to(self, own: LayerRows, rows: Tensor, out: Tensor) -> None:
        """Add to `out` the outputs that follow from tokens' inputs and residuals.

        rows: [n, hidden_size] in the layout of products, which are overwritten; out:
        [n, hidden_size].
        """
        self.gate.into(rows, own.gated)
        self.operators.multiply(own.inputs, own.gated)
        self.output.into(own.gated, rows)
        self.norm.add(rows, out)
