"""Addends to the scores of two tokens, which depend on their distance."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.disentangled import DisentangledSpec

__all__ = ["AlibiScores", "DisentangledScores", "DistanceKeys", "DistanceScores", "PairScores"]


class PairScores(ABC):
    """Addends to attention's scores for each pair of a text's tokens, in all layers."""

    @abstractmethod
    def addends(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Return the addends of one text: [heads, queries, keys].

        queries: [heads, tokens, head_dim]; keys: the same of the text's first tokens, or of all;
        scale: factor on products of queries and keys.
        """


class DistanceScores(PairScores):
    """A number for each distance and head, the same in all layers (MPNet)."""

    def __init__(self, bias: Tensor) -> None:
        """bias: [heads, 2 * context_length - 1], by the place of the key minus that of the query,
        from 1 - context_length on."""
        self._bias = bias
        self._longest = bias[:, :0, None]
        """Addends of the longest text so far"""

    def addends(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        length = queries.shape[1]
        if self._longest.shape[1] < length:
            index = torch.arange(length, device=queries.device)
            self._longest = self._bias[:, index - index[:, None] + self._bias.shape[1] // 2]
        return self._longest[:, :length, : keys.shape[1]]


class AlibiScores(PairScores):
    """The distance times a negative factor of each head, in both directions (ALiBi)."""

    def __init__(self, slopes: Tensor) -> None:
        """slopes: float32 [heads]."""
        self._slopes = slopes

    def addends(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        index = torch.arange(queries.shape[1], device=queries.device)
        distances = (index[:, None] - index[: keys.shape[1]]).abs()
        return (-self._slopes[:, None, None] * distances).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class DistanceKeys:
    """Queries and keys that one layer computes from the embeddings of distances."""

    keys: Tensor | None
    """[heads, 2 * span, head_dim], multiplied with the queries of tokens"""
    queries: Tensor | None
    """[heads, 2 * span, head_dim], multiplied with the keys of tokens"""


class DisentangledScores(PairScores):
    """Products of tokens with keys and queries of their distance (DeBERTa)."""

    def __init__(self, spec: DisentangledSpec, layers: Sequence[DistanceKeys]) -> None:
        self._spec = spec
        self._layers = layers
        self._rows = torch.empty((0, 0), dtype=torch.int64)
        """Row of each pair of tokens in the table of distances, of the longest text so far"""

    def addends(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        length = queries.shape[1]
        if len(self._rows) < length:
            index = torch.arange(length)
            self._rows = _rows(self._spec, index[:, None] - index).to(queries.device)
        rows = self._rows[:length, : keys.shape[1]].expand(len(queries), -1, -1)
        distances = self._layers[layer]
        parts = []
        if distances.keys is not None:
            parts.append((queries @ distances.keys.mT).gather(2, rows))
        if distances.queries is not None:
            # rows are by query and key, and these products by key
            parts.append((keys @ distances.queries.mT).gather(2, rows.mT).mT)
        return scale * sum(parts[1:], parts[0])


def _rows(spec: DisentangledSpec, distances: Tensor) -> Tensor:
    """Return the row of each distance in the table of 2 * span embeddings.

    distances: int64, place of the query minus that of the key.
    """
    near = distances if not spec.buckets else _bucketed(spec, distances)
    return (near + spec.span).clamp(0, 2 * spec.span - 1)


def _bucketed(spec: DisentangledSpec, distances: Tensor) -> Tensor:
    """Return the distances' buckets, which far ones share."""
    middle = spec.buckets // 2
    apart = distances.abs().clamp(min=middle - 1 or 1)
    steps = torch.log(apart / middle) / torch.log(torch.tensor((spec.farthest - 1) / middle))
    far = (torch.ceil(steps * (middle - 1)) + middle).long() * distances.sign()
    return torch.where(distances.abs() <= middle, distances, far)
