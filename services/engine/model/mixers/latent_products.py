"""Products of latent attention, whose outputs the engine reorders."""

import torch
from torch import Tensor

from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, take_rows

__all__ = ["ordered_product", "pair_order"]


def ordered_product(
    reader: TensorReader, stored: StoredLinear, norm: StoredNorm | None, order: Tensor | None
) -> Projection:
    """Read a product whose outputs are the stored ones in an order; None = as stored."""
    (part,) = reader.linear(stored, norm)
    if order is not None:
        part = take_rows(part, order)
    product = reader.product([part], reader.operators_of(stored))
    return reader.adapted(product, reader.site(stored, norm, order))


def pair_order(width: int, *, is_interleaved: bool) -> Tensor:
    """Return the order in which the two rows of a RoPE pair lie half the width apart.

    is_interleaved: True if the two rows are stored side by side.
    """
    places = torch.arange(width)
    return places.view(-1, 2).T.flatten() if is_interleaved else places
