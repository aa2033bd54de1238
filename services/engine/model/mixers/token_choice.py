"""Tokens that sparse attention reads, chosen by their scores."""

import torch
from torch import Tensor

__all__ = ["TokenChoice", "best_places"]


class TokenChoice:
    """The choice of the last layer with an indexer, which the layers after it read too."""

    def __init__(self) -> None:
        self.places: Tensor | None = None
        """int64 [rows of the step, attended tokens], ascending indices of tokens in their
        sequences; a row that sees fewer repeats its last one. None: rows attend to all they see"""

    def of_rows(self, rows: Tensor | None) -> Tensor | None:
        """Return the choice of some rows of the step, int64 [n]; None = all."""
        return self.places if rows is None or self.places is None else self.places[rows]


def best_places(scores: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return the places of each row's `count` best scores, ascending; of equals the first ones.

    scores: float32 [rows, context]; ends: int64 [rows], a row sees the places below its end. The
    result is int64 [rows, count]. A row that sees fewer repeats its last place.
    """
    last = ends[:, None] - 1
    places = torch.arange(scores.shape[1], device=scores.device)
    if len(places) <= count:
        return torch.minimum(torch.arange(count, device=scores.device), last)
    scores = scores.masked_fill(places > last, -torch.inf)
    least = scores.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_above, is_equal = scores > least, scores == least
    num_equal = count - is_above.sum(dim=1, keepdim=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(dim=1) <= num_equal))
    # places that are not chosen go to one further column, which is not read
    columns = torch.where(is_chosen, is_chosen.cumsum(dim=1) - 1, count)
    chosen = places.new_zeros(len(scores), count + 1)
    chosen.scatter_(1, columns, places.expand_as(columns))
    return torch.minimum(chosen[:, :count], last)
