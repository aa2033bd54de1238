"""Vectors of tokens behind the whole path, against sentence-transformers' MultiVectorEncoder."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from sentence_transformers import MultiVectorEncoder

from tests.services.shim import assert_documented, running_shim
from tests.stack import running_service
from tests.text_models import QUERY_LENGTH, make_colbert

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUERY = "What is a mutex?"
DOCUMENTS = ["a lock.", "the keys, the keys", "fruit", "is the key a lock? the key is a lock." * 3]


@dataclass(frozen=True)
class Served:
    client: httpx.AsyncClient
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("tokens")
    path = make_colbert(folder / "colbert")
    model = ("--model", str(path))
    flags = ("--dtype", "float32", "--device", "cpu")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            running_service("engine", *model, *flags, log=folder / "engine.log")
        )
        target = ("--engine", engine.target)
        tokenizer = await stack.enter_async_context(
            running_service("tokenizer", *model, *target, log=folder / "tokenizer.log")
        )
        shim = await stack.enter_async_context(running_shim("--tokenizer", tokenizer.target))
        client = httpx.AsyncClient(base_url=shim.url, timeout=60)
        yield Served(await stack.enter_async_context(client), path)


async def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("role", ["query", "document"])
async def test_vectors_equal_those_of_sentence_transformers(served: Served, role: str) -> None:
    """Queries have vectors of their masks; documents have none of skipped words."""
    model = MultiVectorEncoder(str(served.model), device="cpu")
    encode = model.encode_query if role == "query" else model.encode_document
    texts = [QUERY, *DOCUMENTS]
    answer = await post(served, "/v1/pooling", input=texts, prompt_name=role)
    for found, expected in zip(answer["data"], encode(texts, convert_to_numpy=True), strict=True):
        np.testing.assert_allclose(found["data"], expected, atol=1e-5)
    if role == "query":
        assert {len(found["data"]) for found in answer["data"]} == {QUERY_LENGTH}
    assert_documented(answer, "PoolingList")


async def test_scores_are_the_sums_of_the_best_products(served: Served) -> None:
    model = MultiVectorEncoder(str(served.model), device="cpu")
    query, documents = model.encode_query([QUERY]), model.encode_document(DOCUMENTS)
    [expected] = model.similarity(query, documents).tolist()
    answer = await post(served, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    given = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    ranking = await post(served, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert [each["index"] for each in ranking["results"]] == best
    pairs = await post(served, "/v1/score", text_1=[QUERY] * 4, text_2=DOCUMENTS)
    given = [each["score"] for each in pairs["data"]]
    np.testing.assert_allclose(given, expected, rtol=1e-5)


async def test_score_of_a_document_does_not_depend_on_how_many_there_are(served: Served) -> None:
    few = await post(served, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    many = await post(served, "/v1/score", text_1=QUERY, text_2=DOCUMENTS * 75)
    expected = np.tile([each["score"] for each in few["data"]], 75)
    np.testing.assert_allclose([each["score"] for each in many["data"]], expected, rtol=1e-5)


async def test_text_without_a_role_is_encoded_as_it_is(served: Served) -> None:
    """Else a client that adds prefixes by itself would have them twice."""
    ids = (await served.client.post("/tokenize", json={"prompt": QUERY})).json()["tokens"]
    answers = [
        await post(served, "/v1/pooling", input=text, use_activation=activates)
        for text in (QUERY, ids)
        for activates in (True, False)
    ]
    unit, raw, *by_ids = (np.array(each["data"][0]["data"]) for each in answers)
    assert len(unit) == len(ids)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)
    for found, expected in zip(by_ids, (unit, raw), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_ids_keep_the_vectors_that_a_document_leaves_out(served: Served) -> None:
    ids = (await served.client.post("/tokenize", json={"prompt": QUERY})).json()["tokens"]
    for given in (ids, QUERY):  # the text has a marker, and no vector of "?"
        answer = await post(served, "/v1/pooling", input=given, prompt_name="document")
        assert len(answer["data"][0]["data"]) == len(ids)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/pooling", {"input": "a", "task": "embed"}, "model"),
        ("/v1/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
        ("/v1/classify", {"input": "a"}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/v1/pooling", {"input": "a " * 100}, "input"),
    ],
)
async def test_what_it_does_not_do_is_refused(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    response = await served.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_card_tells_that_it_scores(served: Served) -> None:
    [card] = (await served.client.get("/v1/models")).json()["data"]
    does = (card["embedding_width"], card["scores_pairs"], card["generates"])
    assert does == (0, True, False)
