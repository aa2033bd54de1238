"""Arithmetic on vectors. Imported on demand: numpy takes memory that other requests don't need."""

import numpy as np

__all__ = ["cosines", "shortened"]

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
