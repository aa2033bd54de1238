"""Similarities of pairs of texts, from the vectors of both."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.contract import MAX_VECTORS
from services.tokenizer.embedding.parts import parts
from services.tokenizer.embedding.vector_request import VectorRequest
from services.tokenizer.model_limits import ModelLimits
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["VectorScores"]

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class VectorScores:
    """Scores of one request, computed for a part of the pairs at a time to bound memory."""

    engines: VectorRequest
    limits: ModelLimits
    are_products: bool
    """True if scores are dot products rather than cosines"""

    async def scores(
        self,
        firsts: Sequence[engine_pb2.EmbeddedPrompt],
        seconds: Sequence[engine_pb2.EmbeddedPrompt],
    ) -> list[float]:
        """Return the scores of pairs of texts. A single first text pairs with each second text.

        Raises ServiceError.
        """
        size = self.limits.vector_width * _FLOAT_BYTES
        alone = firsts if len(firsts) == 1 else None
        sizes = [size if alone else 2 * size] * len(seconds)
        scores: list[float] = []
        own = b""
        for part in parts(sizes, MAX_VECTORS - size):
            asked = firsts[part] if alone is None else [] if own else alone
            vectors = await self.engines.vectors([*asked, *seconds[part]], self.limits)
            end = len(asked) * size
            own = vectors.data[:end] or own
            scores += await asyncio.to_thread(self._similarities, own, vectors.data[end:])
        return scores

    def _similarities(self, firsts: bytes, seconds: bytes) -> list[float]:
        from services.tokenizer.embedding.vector_math import cosines, products

        score = products if self.are_products else cosines
        return score(firsts, seconds, self.limits.vector_width)
