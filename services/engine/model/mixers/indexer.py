"""Indexer of sparse attention (DSA, https://arxiv.org/abs/2512.02556)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.mixers.interface import Scratch
from services.engine.model.mixers.latent_pages import (
    PIECE,
    LatentBuffer,
    decode_groups,
    sequence_pages,
)
from services.engine.model.mixers.token_choice import best_places
from services.engine.model.operators.interface import LayerNorm, Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["IndexScratch", "IndexWeights", "Indexer", "index_scores"]

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Weights of one layer's indexer."""

    queries: Projection
    """Product that makes the queries' rotating numbers of all heads, then the rest"""
    keys: Projection
    key_norm: LayerNorm
    """[width]"""
    head_weights: Projection
    """Product that makes each head's factor from the residual"""


@dataclass(frozen=True, slots=True)
class IndexScratch(Scratch):
    """Outputs of an indexer's projections."""

    queries: Tensor
    """[tokens, heads * width], the rotating numbers of all heads, then the rest"""
    keys: Tensor
    """[tokens, width], keys that the cache holds"""
    head_weights: Tensor
    """float32 [tokens, heads]"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.queries, self.keys, self.head_weights

    def keep(self, operators: Operators, rows: Tensor | None) -> None:
        """Move the queries of `rows` to the front."""
        operators.keep(self.queries, rows)
        operators.keep(self.head_weights, rows)


class Indexer:
    """The indexer of one layer.

    A token's score is the sum of its heads' products of query and key, negative ones counted as 0,
    times the heads' weights. Published models rotate queries and keys by a Hadamard matrix before
    they round them. That does not change products, so it is left out here, as are constant factors,
    which don't change the choice.
    """

    def __init__(
        self, spec: LatentSpec, weights: IndexWeights, operators: Operators, buffer: LatentBuffer
    ) -> None:
        """buffer: memory for index keys, which all layers share."""
        assert spec.index is not None
        self._spec = spec
        self._shape = spec.index
        self._weights = weights
        self._operators = operators
        self._buffer = buffer

    def allocate(self, tokens: int) -> IndexScratch:
        shape, empty = self._shape, self._operators.empty
        queries, keys = empty(tokens, shape.num_heads * shape.width), empty(tokens, shape.width)
        factors = keys.new_empty((tokens, shape.num_heads), dtype=torch.float32)
        return IndexScratch(queries, keys, factors)

    def project(
        self, rows: Tensor, query_vectors: Tensor, scratch: IndexScratch, rotation: Rotation | None
    ) -> None:
        """Compute queries, keys and the heads' weights.

        rows: the normed residual; query_vectors: [tokens, query_width]. Both are in the layout that
        products read.
        """
        weights, norm = self._weights, self._weights.key_norm
        weights.queries.into(query_vectors, scratch.queries)
        weights.keys.into(rows, scratch.keys)
        weights.head_weights.into(rows, scratch.head_weights)
        keys = scratch.keys
        keys.copy_(layer_norm(keys, keys.shape[1:], norm.weight, norm.bias, _EPSILON))
        if rotation is not None:
            width = self._spec.shared_width
            rotating = scratch.queries[:, : self._shape.num_heads * width]
            for heads in (rotating.view(len(rows), -1, width), keys[:, None, :width]):
                self._operators.rotate(heads, heads.shape[1], rotation, None, None, 0.0)

    def choose(self, scratch: IndexScratch, pages: Tensor, batch: StepBatch) -> Tensor | None:
        """Choose the tokens to which each query attends, in the form of `TokenChoice.places`.

        pages: [blocks, block_size, page_width], which hold the step's keys.
        """
        count, lengths = self._spec.attended_tokens, batch.query_lengths_host
        if max(batch.context_lengths_host) <= count:
            return None
        keys = pages[..., self._spec.absorbed_width :]
        queries = self._by_head(scratch.queries[: sum(lengths)])
        factors = scratch.head_weights[: len(queries)]
        places = torch.empty((len(queries), count), dtype=torch.int64, device=pages.device)
        self._choose_for_decodes(queries, factors, keys, batch, places)
        start = batch.num_decodes
        for sequence in range(start, len(lengths)):
            rows = slice(start, start + lengths[sequence])
            start = rows.stop
            mine = sequence_pages(self._buffer, keys, batch, sequence)
            places[rows] = self._choose_for_chunk(queries[rows], factors[rows], mine)
        return places

    def _choose_for_decodes(
        self, queries: Tensor, factors: Tensor, keys: Tensor, batch: StepBatch, places: Tensor
    ) -> None:
        shape, size = self._shape, keys.shape[1]
        for sequences, longest in decode_groups(batch, max(shape.width, shape.num_heads)):
            tables = batch.block_tables[sequences, : -(-longest // size)].long()
            mine = self._buffer.gather(keys, tables.flatten()).view(len(tables), -1, shape.width)
            scores = index_scores(queries[sequences], factors[sequences], mine.float())
            ends = batch.context_lengths[sequences].long()
            places[sequences] = best_places(scores, ends, self._spec.attended_tokens)

    def _choose_for_chunk(self, queries: Tensor, factors: Tensor, keys: Tensor) -> Tensor:
        """Choose tokens for a sequence's last queries, some at a time. keys: [context, width]."""
        context, length, count = len(keys), len(queries), self._spec.attended_tokens
        ends = torch.arange(context - length + 1, context + 1, device=keys.device)
        if context <= count:
            return best_places(keys.new_empty(length, context), ends, count)
        keys, step = keys.float(), max(1, PIECE // (context * self._shape.num_heads))
        pieces = []
        for first in range(0, length, step):
            rows = slice(first, first + step)
            scores = index_scores(queries[rows], factors[rows], keys)
            pieces.append(best_places(scores, ends[rows], count))
        return torch.cat(pieces)

    def _by_head(self, queries: Tensor) -> Tensor:
        """Return float32 queries [rows, heads, width], each as wide as a key."""
        heads, width = self._shape.num_heads, self._spec.shared_width
        rotating = queries[:, : heads * width].view(len(queries), heads, width)
        rest = queries[:, heads * width :].view(len(queries), heads, self._shape.width - width)
        return torch.cat((rotating, rest), dim=2).float()


def index_scores(queries: Tensor, factors: Tensor, keys: Tensor) -> Tensor:
    """Return the score of each token, float32 [rows, context].

    queries: float32 [rows, heads, width]; factors: float32 [rows, heads]; keys: float32 [context,
    width] of all rows, or [rows, context, width].
    """
    products = torch.matmul(queries, keys.mT).relu_()
    return torch.bmm(factors[:, None], products)[:, 0]
