"""Vectors and weights of single tokens of BGE-M3 behind the whole path."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize
from transformers import AutoModel

from tests.services.shim import assert_documented
from tests.services.text_stack import running_text_stack
from tests.text_models import make_bge_m3

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys"]


@dataclass(frozen=True)
class Served:
    client: httpx.AsyncClient
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = make_bge_m3(tmp_path_factory.mktemp("weights") / "bge")
    async with running_text_stack(path, "--pooling", "cls") as stack:
        yield Served(stack.client, path)


async def pooled(served: Served, **body: Any) -> list[Any]:
    response = await served.client.post("/v1/pooling", json=body)
    assert response.status_code == 200, response.text
    assert_documented(response.json(), "PoolingList")
    return [each["data"] for each in response.json()["data"]]


async def ids_of(served: Served, text: str) -> list[int]:
    answer = await served.client.post("/tokenize", json={"prompt": text})
    ids: list[int] = answer.json()["tokens"]
    return ids


def states_of(served: Served, ids: list[int]) -> Tensor:
    model = AutoModel.from_pretrained(served.model)
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def head_of(served: Served, name: str, states: Tensor) -> Tensor:
    stored = torch.load(served.model / f"{name}_linear.pt")
    return linear(states, stored["weight"], stored["bias"])


@pytest.mark.parametrize("is_raw", [False, True])
async def test_weights_are_those_of_tokens_between_the_special_ones(
    served: Served, is_raw: bool
) -> None:
    """As FlagEmbedding's lexical weights, and vLLM's answer to this task."""
    for given in (TEXTS, [await ids_of(served, text) for text in TEXTS]):
        found = await pooled(served, input=given, task="token_classify", use_activation=not is_raw)
        for text, weights in zip(TEXTS, found, strict=True):
            logits = head_of(served, "sparse", states_of(served, await ids_of(served, text)))
            expected = logits[1:-1] if is_raw else logits[1:-1].relu()
            np.testing.assert_allclose(weights, expected, atol=1e-5)


async def test_vectors_of_tokens_are_those_of_the_head(served: Served) -> None:
    """Without the one of the first special token."""
    found = await pooled(served, input=TEXTS, task="token_embed")
    for text, vectors in zip(TEXTS, found, strict=True):
        states = states_of(served, await ids_of(served, text))[1:]
        expected = normalize(head_of(served, "colbert", states))
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


async def test_texts_keep_their_vectors_beside_those_of_tokens(served: Served) -> None:
    for task in ({}, {"task": "embed"}):
        found = await pooled(served, input=TEXTS, **task)
        for text, vector in zip(TEXTS, found, strict=True):
            states = states_of(served, await ids_of(served, text))
            np.testing.assert_allclose(vector, normalize(states[0], dim=0), atol=1e-5)


async def test_weights_have_no_dimensions(served: Served) -> None:
    body = {"input": "a", "task": "token_classify", "dimensions": 1}
    response = await served.client.post("/v1/pooling", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "dimensions")
