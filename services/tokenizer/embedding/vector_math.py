"""Arithmetic on vectors. Imported on demand: numpy takes memory that other requests don't need."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

__all__ = ["cosines", "maxsims", "products", "selected", "shortened"]

_TINY = 1e-12
_ROWS = 512
"""Tokens of a query that are multiplied at a time, which bounds the memory of the products"""

_Vectors: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def shortened(vectors: bytes, width: int, dimensions: int, *, normalizes: bool) -> bytes:
    """Return the first `dimensions` numbers of each vector (float32), scaled if `normalizes`."""
    kept = _rows(vectors, width)[:, :dimensions]
    if normalizes:
        kept = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), _TINY)
    return kept.tobytes()


def cosines(firsts: bytes, seconds: bytes, width: int) -> list[float]:
    """Return the cosines of pairs of vectors (float32). A single first vector pairs with each."""
    first, second = _rows(firsts, width), _rows(seconds, width)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    ratios = _products(first, second) / np.maximum(lengths, _TINY)
    values: list[float] = ratios.clip(-1, 1).tolist()  # rounding may exceed them
    return values


def products(firsts: bytes, seconds: bytes, width: int) -> list[float]:
    """Return the dot product of each pair of vectors, as `cosines` pairs them."""
    values: list[float] = _products(_rows(firsts, width), _rows(seconds, width)).tolist()
    return values


def selected(vectors: bytes, width: int, kept: Sequence[bool]) -> bytes:
    """Return the vectors (float32) that are kept."""
    rows: bytes = _rows(vectors, width)[np.asarray(kept, bool)].tobytes()
    return rows


def maxsims(
    width: int,
    queries: bytes,
    kept_queries: Sequence[Sequence[bool]],
    documents: bytes,
    kept_documents: Sequence[Sequence[bool]],
) -> list[float]:
    """Return the MaxSim of each document and its query. A single query belongs to all documents.

    MaxSim adds up the highest product of each token of the query with a token of the document.
    queries, documents: float32 vectors of all tokens of all texts. kept_queries, kept_documents:
    for each text, which tokens count. A document without such tokens has the score 0. Source:
    Khattab and Zaharia, "ColBERT", 2020.
    """
    first, second = (
        [
            rows[np.asarray(kept, bool)]
            for rows, kept in zip(_texts(vectors, width, counts), counts, strict=True)
        ]
        for vectors, counts in ((queries, kept_queries), (documents, kept_documents))
    )
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    return [_maxsim(query, document) if len(document) else 0.0 for query, document in pairs]


def _maxsim(query: _Vectors, document: _Vectors) -> float:
    parts = [query[first : first + _ROWS] for first in range(0, len(query), _ROWS)]
    return float(sum((part @ document.T).max(axis=1).sum() for part in parts))


def _products(first: _Vectors, second: _Vectors) -> _Vectors:
    """Return the dot products of two matrices' rows, [n, width] each; the first may have one."""
    return (second[:, None] @ first[:, :, None])[:, 0, 0]


def _texts(vectors: bytes, width: int, counts: Sequence[Sequence[bool]]) -> list[_Vectors]:
    return np.split(_rows(vectors, width), np.cumsum([len(kept) for kept in counts])[:-1])


def _rows(vectors: bytes, width: int) -> _Vectors:
    return np.frombuffer(vectors, np.float32).reshape(-1, width)
