"""Arithmetic on vectors. Imported on demand: numpy takes memory that other requests don't need."""

from collections.abc import Sequence

import numpy as np

__all__ = ["cosines", "maxsims", "selected", "shortened"]

_TINY = 1e-12


def shortened(vectors: bytes, width: int, dimensions: int, *, normalizes: bool) -> bytes:
    """Return the first numbers of each vector (float32), of length 1 if `normalizes`."""
    kept = np.frombuffer(vectors, np.float32).reshape(-1, width)[:, :dimensions]
    if normalizes:
        kept = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), _TINY)
    return kept.tobytes()


def cosines(vectors: bytes, width: int, firsts: int) -> list[float]:
    """Return the cosine of each later vector and its own of the first ones, or the only one."""
    rows = np.frombuffer(vectors, np.float32).reshape(-1, width)
    first, second = rows[:firsts], rows[firsts:]
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found = (first * second).sum(axis=1) / np.maximum(lengths, _TINY)
    values: list[float] = found.clip(-1, 1).tolist()  # rounding may exceed them
    return values


def selected(vectors: bytes, width: int, kept: Sequence[bool]) -> bytes:
    """Return the vectors (float32) that are kept."""
    rows = np.frombuffer(vectors, np.float32).reshape(-1, width)
    left: bytes = rows[np.asarray(kept, bool)].tobytes()
    return left


def maxsims(
    width: int,
    queries: bytes,
    kept_queries: Sequence[Sequence[bool]],
    documents: bytes,
    kept_documents: Sequence[Sequence[bool]],
) -> list[float]:
    """Return the MaxSim of each document and its own query, or the only one.

    It sums up the highest product of each token of the query with a token of the document. queries,
    documents: float32 vectors of all their tokens; kept_…: for each text, which of them count. A
    document without any has the score 0. Source: Khattab and Zaharia, "ColBERT", 2020.
    """
    first, second = (
        [
            rows[np.asarray(kept, bool)]
            for rows, kept in zip(_texts(vectors, width, counts), counts, strict=True)
        ]
        for vectors, counts in ((queries, kept_queries), (documents, kept_documents))
    )
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    return [float((a @ b.T).max(axis=1).sum()) if len(b) else 0.0 for a, b in pairs]


def _texts(
    vectors: bytes, width: int, counts: Sequence[Sequence[bool]]
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    rows = np.frombuffer(vectors, np.float32).reshape(-1, width)
    return np.split(rows, np.cumsum([len(kept) for kept in counts])[:-1])
