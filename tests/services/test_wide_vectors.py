"""Scores of texts whose vectors do not fit into one answer, beyond which an engine refuses."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from services.common.contract import MAX_TOKEN_STATES, MAX_VECTORS
from tests.services.shim import running_shim
from tests.stack import running_service
from tests.text_models import make_colbert, make_embedder

pytestmark = pytest.mark.asyncio

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys", "fruit", "a key is a lock, the lock"]
TOKEN_WIDTH, TEXT_WIDTH = 16_384, 400_000
FLOAT_BYTES = 4


@asynccontextmanager
async def serving(folder: Path, make: Callable[[Path], Path]) -> AsyncIterator[httpx.AsyncClient]:
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
        shim = await stack.enter_async_context(running_shim("--tokenizer", tokenizer.target))
        client = httpx.AsyncClient(base_url=shim.url, timeout=120)
        yield await stack.enter_async_context(client)


@pytest.mark.parametrize("queries", [1, 20])
async def test_maxsim_of_many_tokens(queries: int, tmp_path: Path) -> None:
    first = [TEXTS[place % 3] for place in range(queries)]
    second = [TEXTS[place % 5] for place in range(20)]
    assert 20 * 5 * TOKEN_WIDTH * FLOAT_BYTES > MAX_TOKEN_STATES
    async with serving(tmp_path, lambda path: make_colbert(path, TOKEN_WIDTH)) as client:
        body = {"text_1": first if queries > 1 else first[0], "text_2": second}
        answer = await client.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    model = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    table = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS)).numpy()
    expected = [table[place % queries % 3, place % 5] for place in range(20)]
    np.testing.assert_allclose(
        [each["score"] for each in answer.json()["data"]], expected, rtol=1e-4
    )


async def test_similarity_of_many_texts(tmp_path: Path) -> None:
    second = [TEXTS[place % 5] for place in range(40)]
    assert len(second) * TEXT_WIDTH * FLOAT_BYTES > MAX_VECTORS
    async with serving(tmp_path, lambda path: make_embedder(path, TEXT_WIDTH)) as client:
        answers = [
            await client.post("/v1/score", json={"text_1": first, "text_2": second})
            for first in (TEXTS[0], second[::-1])
        ]
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    vectors = model.encode(TEXTS)
    table = vectors @ vectors.T
    for answer, places in zip(answers, ([0] * 40, range(39, -1, -1)), strict=True):
        assert answer.status_code == 200, answer.text
        expected = [table[place % 5, index % 5] for index, place in enumerate(places)]
        found = [each["score"] for each in answer.json()["data"]]
        np.testing.assert_allclose(found, expected, atol=1e-4)
