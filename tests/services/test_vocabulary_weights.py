"""SPLADE's weights of the vocabulary behind the whole path, against sentence-transformers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from sentence_transformers import SparseEncoder

from tests.services.shim import assert_documented
from tests.services.text_stack import TextStack, running_text_stack
from tests.text_models import make_splade
from tokenwire.channel import connect
from tokenwire.pb.completion.v1.completion_pb2 import EmbedRequest, Prompt, ScoreRequest
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys", "fruit"]
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Served:
    stack: TextStack
    expected: Numbers
    """The weights of TEXTS, [texts, vocabulary]"""

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.stack.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = make_splade(tmp_path_factory.mktemp("splade") / "model")
    encoder = SparseEncoder(str(path), device="cpu")
    expected = np.asarray(encoder.encode(TEXTS, convert_to_sparse_tensor=False), dtype=np.float32)
    assert (expected == 0).any()
    assert (expected > 0).any(axis=1).all()
    async with running_text_stack(path) as stack:
        yield Served(stack, expected)


def is_close(found: Any, expected: Numbers) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


async def test_pooling_returns_the_weight_of_every_token_of_the_vocabulary(served: Served) -> None:
    """Without a task, as vLLM does: an index of sparse vectors has no other way to them."""
    for task in ({}, {"task": "embed"}):
        answer = await served.post("/v1/pooling", input=TEXTS, **task)
        assert_documented(answer, "PoolingList")
        is_close([each["data"] for each in answer["data"]], served.expected)


async def test_embeddings_of_ids_equal_those_of_their_text(served: Served) -> None:
    ids = [(await served.post("/tokenize", prompt=text))["tokens"] for text in TEXTS]
    for given in (TEXTS, ids):
        answer = await served.post("/v1/embeddings", input=given)
        is_close([each["embedding"] for each in answer["data"]], served.expected)


async def test_rankings_and_scores_are_dot_products(served: Served) -> None:
    """A cosine would rank long documents, which have more weights, otherwise."""
    products = served.expected[0] @ served.expected.T
    scored = await served.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    is_close([each["score"] for each in scored["data"]], products)
    ranking = await served.post("/v1/rerank", query=TEXTS[0], documents=TEXTS)
    best = sorted(range(len(TEXTS)), key=lambda index: -products[index])
    assert [each["index"] for each in ranking["results"]] == best
    is_close([each["relevance_score"] for each in ranking["results"]], products[best])


async def test_grpc_returns_the_same_weights_and_scores(served: Served) -> None:
    async with connect(served.stack.tokenizer) as channel:
        stub = CompletionServiceStub(channel)
        answer = await stub.Embed(EmbedRequest(inputs=[Prompt(text=text) for text in TEXTS]))
        scored = await stub.Score(ScoreRequest(first=TEXTS[:1], second=TEXTS))
    assert answer.width == served.expected.shape[1]
    vectors = np.frombuffer(answer.vectors, "<f4").reshape(len(TEXTS), answer.width)
    is_close(vectors, served.expected)
    is_close(scored.scores, served.expected[0] @ served.expected.T)


async def test_model_says_how_wide_its_vectors_are(served: Served) -> None:
    """A client that allocates an index by it needs the vocabulary's size."""
    response = await served.stack.client.get("/v1/models")
    [model] = response.json()["data"]
    assert model["embedding_width"] == served.expected.shape[1]
    assert not model["generates"]


async def test_tokens_have_no_weights_of_their_own(served: Served) -> None:
    body = {"input": "a", "task": "token_classify"}
    response = await served.stack.client.post("/v1/pooling", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "task")
