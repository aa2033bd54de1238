"""Scores of texts whose vectors do not fit into one answer, beyond which an engine refuses."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from services.common.contract import MAX_TOKEN_STATES, MAX_VECTORS
from tests.stack import metrics_of, running_service
from tests.text_models import make_colbert, make_embedder
from tokenwire.channel import connect
from tokenwire.pb.completion.v1.completion_pb2 import ScoreRequest, ScoreResponse
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub

pytestmark = pytest.mark.asyncio

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys", "fruit", "a key is a lock, the lock"]
TOKEN_WIDTH, TEXT_WIDTH = 16_384, 400_000
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Served:
    tokenizer: grpc.aio.Channel
    engine: str

    async def score(self, first: list[str], second: list[str]) -> tuple[ScoreResponse, int]:
        """Return an answer, and how many requests the engine got for it."""
        before = await self._requests()
        stub = CompletionServiceStub(self.tokenizer)
        answer = await stub.Score(ScoreRequest(first=first, second=second))
        return answer, await self._requests() - before

    async def _requests(self) -> int:
        counts = await metrics_of(self.engine)
        name = "tokenwire_engine_requests_total"
        return int(sum(count for key, count in counts.items() if key.startswith(name)))


@asynccontextmanager
async def serving(folder: Path, make: Callable[[Path], Path]) -> AsyncIterator[Served]:
    path = make(folder / "model")
    model, flags = ("--model", str(path)), ("--dtype", "float32", "--device", "cpu")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            running_service("engine", *model, *flags, log=folder / "engine.log")
        )
        tokenizer = await stack.enter_async_context(
            running_service(
                "tokenizer", *model, "--engine", engine.target, log=folder / "tokenizer.log"
            )
        )
        channel = await stack.enter_async_context(connect(tokenizer.target))
        yield Served(channel, engine.target)


async def test_maxsim_of_many_tokens(tmp_path: Path) -> None:
    """Of each query's tokens, the mean; each answer of the engine is at least half full."""
    second = [TEXTS[place % 5] for place in range(20)]

    def make(path: Path) -> Path:
        return make_colbert(path, TOKEN_WIDTH, similarity_fn_name="meanmaxsim")

    async with serving(tmp_path, make) as served:
        answers = [
            (queries, *await served.score([TEXTS[place % 3] for place in range(queries)], second))
            for queries in (1, 20)
        ]
    model = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    assert model.similarity_fn_name == "meanmaxsim"
    table = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS)).numpy()
    for queries, answer, requests in answers:
        size = answer.usage.prompt_tokens * TOKEN_WIDTH * FLOAT_BYTES
        assert size > 2 * MAX_TOKEN_STATES
        assert 0 < requests <= 2 * size / MAX_TOKEN_STATES + 1
        expected = [table[place % queries % 3, place % 5] for place in range(20)]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-4)


async def test_similarity_of_many_texts(tmp_path: Path) -> None:
    second = [TEXTS[place % 5] for place in range(40)]
    assert len(second) * TEXT_WIDTH * FLOAT_BYTES > MAX_VECTORS
    async with serving(tmp_path, lambda path: make_embedder(path, TEXT_WIDTH)) as served:
        answers = [await served.score(first, second) for first in ([TEXTS[0]], second[::-1])]
    vectors = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(TEXTS)
    table = vectors @ vectors.T
    for (answer, requests), places in zip(answers, ([0] * 40, range(39, -1, -1)), strict=True):
        size = (len(second) + len(set(places))) * TEXT_WIDTH * FLOAT_BYTES
        assert 0 < requests <= 2 * size / MAX_VECTORS + 1
        expected = [table[place % 5, index % 5] for index, place in enumerate(places)]
        np.testing.assert_allclose(answer.scores, expected, atol=1e-4)
