"""Tables whose rows are read by number, such as the embeddings of tokens."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from services.engine.model.checkpoint.quantized import StoredRows

__all__ = ["Embedding", "ModalEmbedding", "StoredEmbedding", "TensorEmbedding"]


class Embedding(ABC):
    """A table with a row of the model's width for each token id."""

    @abstractmethod
    def read(self, ids: Tensor, out: Tensor) -> None:
        """Copy the rows `ids` (int64 [n]) to `out` [n, width]."""


class TensorEmbedding(Embedding):
    """A table in memory, or in the mapped file."""

    def __init__(self, table: Tensor) -> None:
        """table: [ids, width] on the model's device; rows are converted to the model's dtype."""
        self._table = table

    def read(self, ids: Tensor, out: Tensor) -> None:
        if self._table.dtype == out.dtype:
            torch.index_select(self._table, 0, ids, out=out)
        else:
            out.copy_(self._table.index_select(0, ids))


class StoredEmbedding(Embedding):
    """A table in the format of its file, on a CPU: a step decodes the rows that it reads."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    def read(self, ids: Tensor, out: Tensor) -> None:
        out.copy_(self._rows.decode(ids))


class ModalEmbedding(Embedding):
    """A table of text, and rows in memory for consecutive ids that stand for no text."""

    def __init__(self, text: Embedding, first: int, rows: Tensor) -> None:
        """rows: [ids, width] in the dtype and on the device of the model, from the id `first`."""
        self._text = text
        self._first = first
        self._rows = rows

    def read(self, ids: Tensor, out: Tensor) -> None:
        self._text.read(ids, out)
        numbers = ids - self._first
        has_row = (numbers >= 0) & (numbers < len(self._rows))
        rows = self._rows[numbers.clamp(0, len(self._rows) - 1)]
        torch.where(has_row[:, None], rows, out, out=out)
