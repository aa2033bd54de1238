"""MaxSim of queries and documents, from the vectors of their tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.common.contract import MAX_TOKEN_STATES
from services.common.vector_sizes import check_token_states
from services.tokenizer.embedding.parts import parts
from services.tokenizer.embedding.text_roles import TextRole
from services.tokenizer.embedding.vector_request import VectorRequest
from services.tokenizer.model_limits import ModelLimits
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["LateScores"]

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LateScores:
    """Scores of one request, computed for a part of the documents at a time to bound memory."""

    engines: VectorRequest
    limits: ModelLimits
    query: TextRole
    document: TextRole
    averages: bool
    """True if scores are divided by the number of the query's tokens"""

    async def scores(
        self,
        queries: Sequence[engine_pb2.EmbeddedPrompt],
        documents: Sequence[engine_pb2.EmbeddedPrompt],
    ) -> list[float]:
        """Return the score of each document and its query. A single query belongs to all documents.

        Raises ServiceError.
        """
        for number, prompt in enumerate(queries):
            field = "first" if len(queries) == 1 else f"first[{number}]"
            check_token_states(len(prompt.ids), self.limits.token_width, field)
        for number, prompt in enumerate(documents):
            check_token_states(len(prompt.ids), self.limits.token_width, f"second[{number}]")
        scores: list[float] = []
        alone = await self._vectors(queries) if len(queries) == 1 else None
        for part in self._parts(queries, documents):
            first, second = queries if alone else queries[part], documents[part]
            vectors = await self._vectors(second)
            own = alone or await self._vectors(first)
            scores += await asyncio.to_thread(self._maxsims, first, own, second, vectors)
        return scores

    async def _vectors(self, prompts: Sequence[engine_pb2.EmbeddedPrompt]) -> bytes:
        vectors = await self.engines.vectors(prompts, self.limits, keeps_tokens=True)
        return vectors.data

    def _parts(
        self,
        queries: Sequence[engine_pb2.EmbeddedPrompt],
        documents: Sequence[engine_pb2.EmbeddedPrompt],
    ) -> Iterator[slice]:
        """Yield slices of pairs; the vectors of each side fit into one answer of an engine."""
        lengths = [len(each.ids) for each in documents]
        if len(queries) > 1:
            own = [len(each.ids) for each in queries]
            lengths = [max(pair) for pair in zip(own, lengths, strict=True)]
        most = MAX_TOKEN_STATES // (self.limits.token_width * _FLOAT_BYTES)
        return parts(lengths, most, self.limits.max_sequences)

    def _maxsims(
        self,
        queries: Sequence[engine_pb2.EmbeddedPrompt],
        query_vectors: bytes,
        documents: Sequence[engine_pb2.EmbeddedPrompt],
        document_vectors: bytes,
    ) -> list[float]:
        from services.tokenizer.embedding.vector_math import maxsims

        kept_queries = [self.query.keeps(each.ids) for each in queries]
        kept_documents = [self.document.keeps(each.ids) for each in documents]
        scores = maxsims(
            self.limits.token_width, query_vectors, kept_queries, document_vectors, kept_documents
        )
        if not self.averages:
            return scores
        counts = [max(1, sum(kept)) for kept in kept_queries]
        counts *= len(scores) // len(counts)
        return [score / count for score, count in zip(scores, counts, strict=True)]
