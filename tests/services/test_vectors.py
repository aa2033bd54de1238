"""Embeddings, rankings, scores and classes behind the whole path, against sentence-transformers."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.common.accounts.key_file import add_key
from tests.services.shim import assert_documented, running_shim
from tests.stack import Stack, is_idle, metrics_of, running_service
from tests.text_models import CONTEXT, LABELS, make_classifier, make_embedder, make_scorer
from tokenwire.channel import connect
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys", "fruit"]
QUERY = "What is a mutex?"
HANG_SECONDS = 120


@dataclass(frozen=True)
class Served:
    """Three models behind one shim: "embedder", "scorer" and "classifier"."""

    url: str
    embedder: Path
    scorer: Path
    classifier: Path
    tokenizer: str
    labeller: str
    """Tokenizer service of the classifier"""
    engine: str


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("vectors")
    paths = {
        "embedder": make_embedder(folder / "embedder"),
        "scorer": make_scorer(folder / "scorer"),
        "classifier": make_classifier(folder / "classifier"),
    }
    flags = ("--dtype", "float32", "--device", "cpu")
    async with AsyncExitStack() as stack:
        targets, engines, rows = {}, {}, []
        for name, path in paths.items():
            model = ("--model", str(path))
            log = folder / f"{name}.log"
            engine = await stack.enter_async_context(
                running_service("engine", *model, *flags, log=log)
            )
            tokenizer = await stack.enter_async_context(
                running_service(
                    "tokenizer", *model, "--engine", engine.target, log=folder / f"{name}-t.log"
                )
            )
            targets[name], engines[name] = tokenizer.target, engine.target
            rows.append(f'[[models]]\nid = "{name}"\ntarget = "{tokenizer.target}"\n')
        catalog = folder / "catalog.toml"
        catalog.write_text("".join(rows))
        shim = await stack.enter_async_context(running_shim("--catalog", str(catalog)))
        yield Served(
            shim.url,
            **paths,
            tokenizer=targets["embedder"],
            labeller=targets["classifier"],
            engine=engines["embedder"],
        )


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str | None]:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["param"]


def vectors_of(answer: dict[str, Any]) -> npt.NDArray[np.float32]:
    return np.array([each["embedding"] for each in answer["data"]], dtype=np.float32)


@pytest.fixture(scope="module")
def expected(served: Served) -> npt.NDArray[np.float32]:
    model = SentenceTransformer(str(served.embedder), device="cpu")
    return np.asarray(model.encode(TEXTS), dtype=np.float32)


async def test_embeddings_equal_those_of_sentence_transformers(
    client: httpx.AsyncClient, expected: npt.NDArray[np.float32]
) -> None:
    """Whether given as texts, by themselves, or as ids."""
    answer = await post(client, "/v1/embeddings", model="embedder", input=TEXTS)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose(vectors_of(answer), expected, atol=1e-5)
    tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    alone = await post(client, "/v1/embeddings", model="embedder", input=TEXTS[1])
    np.testing.assert_allclose(vectors_of(alone), expected[1:2], atol=1e-5)
    ids = [
        (await post(client, "/tokenize", model="embedder", prompt=text))["tokens"] for text in TEXTS
    ]
    assert sum(map(len, ids)) == tokens
    by_ids = await post(client, "/embeddings", model="embedder", input=ids)
    np.testing.assert_allclose(vectors_of(by_ids), expected, atol=1e-5)


async def test_forms_of_the_numbers(
    client: httpx.AsyncClient, served: Served, expected: npt.NDArray[np.float32]
) -> None:
    """The SDK asks for base64; fewer dimensions have length 1 again."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as sdk:
        answer = await sdk.embeddings.create(model="embedder", input=TEXTS)
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)
        few = await sdk.embeddings.create(model="embedder", input=TEXTS, dimensions=8)
    lengths = np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    shortened = expected[:, :8] / lengths
    np.testing.assert_allclose([each.embedding for each in few.data], shortened, atol=1e-5)
    raw = await post(
        client, "/v1/embeddings", model="embedder", input="fruit", encoding_format="base64"
    )
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[3], atol=1e-5)


async def test_many_texts_are_divided_among_requests_to_the_engine(
    client: httpx.AsyncClient, expected: npt.NDArray[np.float32]
) -> None:
    answer = await post(client, "/v1/embeddings", model="embedder", input=TEXTS * 75)
    np.testing.assert_allclose(vectors_of(answer), np.tile(expected, (75, 1)), atol=1e-5)


async def test_scores_equal_those_of_the_cross_encoder(
    client: httpx.AsyncClient, served: Served
) -> None:
    model = CrossEncoder(str(served.scorer), device="cpu")
    scores = model.predict([(QUERY, text) for text in TEXTS])
    answer = await post(client, "/v1/score", model="scorer", text_1=QUERY, text_2=TEXTS)
    given = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(given, scores, atol=1e-5)
    ranking = await post(
        client,
        "/v1/rerank",
        model="scorer",
        query=QUERY,
        documents=[*TEXTS[:3], {"text": TEXTS[3]}],
    )
    best = sorted(range(4), key=lambda index: -scores[index])
    assert [each["index"] for each in ranking["results"]] == best
    assert ranking["results"][0]["document"] == {"text": TEXTS[best[0]]}
    first = await post(
        client,
        "/rerank",
        model="scorer",
        query=QUERY,
        documents=TEXTS,
        top_n=1,
        return_documents=False,
    )
    [only] = first["results"]
    assert only == {"index": best[0], "relevance_score": pytest.approx(scores[best[0]], abs=1e-5)}


async def test_embedding_model_scores_by_cosine(
    client: httpx.AsyncClient, expected: npt.NDArray[np.float32]
) -> None:
    answer = await post(client, "/score", model="embedder", text_1=TEXTS, text_2=TEXTS[::-1])
    cosines = (expected * expected[::-1]).sum(axis=1)
    np.testing.assert_allclose([each["score"] for each in answer["data"]], cosines, atol=1e-5)


async def test_classes_equal_those_of_transformers(
    client: httpx.AsyncClient, served: Served
) -> None:
    """Texts and ids get the same classes; a client may ask for logits."""
    tokenizer = AutoTokenizer.from_pretrained(served.classifier)
    model = AutoModelForSequenceClassification.from_pretrained(served.classifier).eval()
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    expected = torch.stack(logits).softmax(dim=1).numpy()
    answer = await post(client, "/v1/classify", model="classifier", input=TEXTS)
    given = [each["probs"] for each in answer["data"]]
    np.testing.assert_allclose(given, expected, atol=1e-5)
    best = [LABELS[int(np.argmax(row))] for row in expected]
    assert [(each["label"], each["num_classes"]) for each in answer["data"]] == [
        (label, 3) for label in best
    ]
    path = {"model": "classifier", "prompt": TEXTS[0]}
    ids = (await post(client, "/tokenize", **path))["tokens"]
    raw = await post(client, "/classify", model="classifier", input=ids, use_activation=False)
    np.testing.assert_allclose(raw["data"][0]["probs"], logits[0].numpy(), atol=1e-5)


async def test_pooling_returns_vectors_of_texts_and_of_tokens(
    client: httpx.AsyncClient, served: Served, expected: npt.NDArray[np.float32]
) -> None:
    model = SentenceTransformer(str(served.embedder), device="cpu")
    tokens = [np.asarray(t) for t in model.encode(TEXTS, output_value="token_embeddings")]
    body = {"model": "embedder", "input": TEXTS}
    each = await post(client, "/v1/pooling", task="token_embed", **body)
    for found, states in zip(each["data"], tokens, strict=True):
        np.testing.assert_allclose(found["data"], states, atol=1e-5)
    raw = await post(client, "/pooling", use_activation=False, **body)
    given = np.array([found["data"] for found in raw["data"]])
    means = [states.mean(axis=0) for states in tokens]
    np.testing.assert_allclose(given, means, atol=1e-5)
    unit = await post(client, "/pooling", **body)
    np.testing.assert_allclose([found["data"] for found in unit["data"]], expected, atol=1e-5)
    coded = await post(client, "/v1/pooling", task="token_embed", encoding_format="base64", **body)
    numbers = np.frombuffer(base64.b64decode(coded["data"][1]["data"]), "<f4")
    np.testing.assert_allclose(numbers.reshape(tokens[1].shape), tokens[1], atol=1e-5)


async def test_single_label_has_the_probability_that_scores_have(
    client: httpx.AsyncClient,
) -> None:
    answer = await post(client, "/v1/classify", model="scorer", input="a lock")
    raw = await post(client, "/v1/classify", model="scorer", input="a lock", use_activation=False)
    [[probability], [reward]] = (each["data"][0]["probs"] for each in (answer, raw))
    assert answer["data"][0]["label"] == "LABEL_0"
    assert probability == pytest.approx(1 / (1 + np.exp(-reward)), abs=1e-5)


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
async def test_logits_are_returned_under_older_names(client: httpx.AsyncClient, name: str) -> None:
    """Of classes and of pairs; the newest name gives way if they differ, as in vLLM."""
    body = {"model": "classifier", "input": TEXTS[0]}
    raw, usual = [
        (await post(client, "/v1/classify", **body, **each))["data"][0]["probs"]
        for each in ({name: False}, {name: True})
    ]
    np.testing.assert_allclose(np.exp(raw) / np.exp(raw).sum(), usual, atol=1e-5)
    pair = {"model": "scorer", "text_1": QUERY, "text_2": TEXTS[0]}
    logit, score = [
        (await post(client, "/v1/score", **pair, **each))["data"][0]["score"]
        for each in ({name: False}, {})
    ]
    assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    both = await post(client, "/v1/classify", **body, use_activation=True, normalize=False)
    np.testing.assert_allclose(both["data"][0]["probs"], raw, atol=1e-6)


async def test_conversation_is_classified_by_its_prompt(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "a lock"}, {"role": "assistant", "content": "the key"}]
    asked = {"model": "classifier", "messages": messages}
    ids = await post(client, "/tokenize", **asked, add_generation_prompt=False)
    by_ids = await post(client, "/v1/classify", model="classifier", input=ids["tokens"])
    answer = await post(client, "/v1/classify", **asked)
    assert [each["probs"] for each in answer["data"]] == [by_ids["data"][0]["probs"]]
    assert answer["usage"] == by_ids["usage"]
    assert await refused(client, "/v1/classify", **asked, input="a") == (400, "input")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    asked["messages"] = [{"role": "user", "content": [picture]}]
    assert await refused(client, "/v1/classify", **asked) == (400, "messages")
    asked = {"model": "embedder", "messages": messages}
    assert (await refused(client, "/v1/pooling", **asked))[0] == 400


async def test_fields_without_effect_are_listed(client: httpx.AsyncClient) -> None:
    """Fields of conversations without messages, and the name of a text's prompt with them."""
    template = "{{ messages[0].content }}"
    text = {"model": "embedder", "input": "a lock", "chat_template": template}
    messages = [{"role": "user", "content": "a lock"}]
    chat = {"model": "classifier", "messages": messages, "chat_template_kwargs": {"a": 1}}
    for path, body, ignored in (
        ("/v1/embeddings", {**text, "add_generation_prompt": True}, 2),
        ("/v1/embeddings", {**text, "chat_template": None}, 0),
        ("/v1/classify", chat, 0),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        listed = response.headers.get("x-tokenwire-ignored", "")
        assert len(listed.split()) == ignored, listed


async def test_long_texts_are_refused_or_cut(client: httpx.AsyncClient) -> None:
    """A cut keeps the special tokens at the end."""
    long = "lock " * CONTEXT
    assert await refused(client, "/v1/embeddings", model="embedder", input=long) == (400, "input")
    huge = "lock " * 10_000
    assert await refused(client, "/v1/embeddings", model="embedder", input=huge) == (400, "input")
    fitting = "lock " * (CONTEXT - 2)
    whole = await post(client, "/v1/embeddings", model="embedder", input=fitting)
    for text in (long, huge):
        cut = await post(
            client, "/v1/embeddings", model="embedder", input=text, truncate_prompt_tokens=-1
        )
        np.testing.assert_allclose(vectors_of(cut), vectors_of(whole), atol=1e-6)
    pair = {"model": "scorer", "text_1": QUERY, "truncate_prompt_tokens": -1}
    scored = await post(client, "/v1/score", text_2=long, **pair)
    assert scored["usage"]["prompt_tokens"] == CONTEXT


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": "scorer", "input": "a"}, "model"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "model"),
        (
            "/v1/chat/completions",
            {"model": "scorer", "messages": [{"role": "user", "content": "a"}]},
            "model",
        ),
        ("/v1/embeddings", {"model": "classifier", "input": "a"}, "model"),
        ("/v1/score", {"model": "classifier", "text_1": "a", "text_2": "b"}, "model"),
        ("/v1/classify", {"model": "embedder", "input": "a"}, "model"),
        ("/v1/pooling", {"model": "classifier", "input": "a"}, "model"),
        ("/v1/pooling", {"model": "embedder"}, "input"),
        ("/v1/pooling", {"model": "embedder", "input": "a", "task": "token_classify"}, "task"),
        (
            "/v1/pooling",
            {"model": "embedder", "input": "a", "task": "token_embed", "dimensions": 8},
            "dimensions",
        ),
        ("/v1/classify", {"model": "classifier"}, "input"),
        ("/v1/classify", {"model": "classifier", "input": ["a", ""]}, "input"),
        ("/v1/classify", {"model": "classifier", "input": ["a"] * 2049}, "input"),
        ("/v1/classify", {"model": "classifier", "input": "lock " * CONTEXT}, "input"),
        (
            "/v1/classify",
            {"model": "classifier", "input": "a", "truncate_prompt_tokens": 65},
            "truncate_prompt_tokens",
        ),
        ("/v1/embeddings", {"model": "embedder"}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": []}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": ""}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": [1, 99_999]}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": "a", "dimensions": 33}, "dimensions"),
        (
            "/v1/embeddings",
            {"model": "embedder", "input": "a", "prompt_name": "code"},
            "prompt_name",
        ),
        ("/v1/embeddings", {"model": "embedder", "input": "", "prompt_name": "query"}, "input"),
        (
            "/v1/embeddings",
            {"model": "embedder", "input": "a", "truncate_prompt_tokens": 1},
            "truncate_prompt_tokens",
        ),
        ("/v1/rerank", {"model": "scorer", "query": "a"}, "documents"),
        ("/v1/rerank", {"model": "scorer", "query": "a", "documents": [""]}, "documents[0]"),
        ("/v1/rerank", {"model": "embedder", "query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/v1/rerank", {"model": "embedder", "query": "", "documents": ["b"]}, "query"),
        ("/v1/score", {"model": "embedder", "text_1": ["a", ""], "text_2": ["c"] * 2}, "text_1[1]"),
        (
            "/v1/rerank",
            {"model": "scorer", "query": "a", "documents": ["b"], "top_n": 0},
            "top_n",
        ),
        ("/v1/score", {"model": "scorer", "text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
    ],
)
async def test_wrong_input_names_its_field(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert await refused(client, path, **body) == (400, param)


async def test_prompts_equal_those_of_sentence_transformers(
    served: Served, client: httpx.AsyncClient
) -> None:
    """The pooling leaves their tokens out; ids get none; a text has to be left behind them."""
    model = SentenceTransformer(str(served.embedder), device="cpu")
    plain = vectors_of(await post(client, "/v1/embeddings", model="embedder", input=TEXTS))
    for name in ("query", "passage", "document"):
        answer = await post(
            client, "/v1/embeddings", model="embedder", input=TEXTS, prompt_name=name
        )
        expected = np.asarray(model.encode(TEXTS, prompt_name=name))
        np.testing.assert_allclose(vectors_of(answer), expected, atol=1e-5)
        assert (np.abs(vectors_of(answer) - plain).max() < 1e-5) == (name == "document")
    ids = (await post(client, "/tokenize", model="embedder", prompt=TEXTS[0]))["tokens"]
    answer = await post(client, "/v1/embeddings", model="embedder", input=ids, prompt_name="query")
    np.testing.assert_allclose(vectors_of(answer), plain[:1], atol=1e-5)
    cut = {"input": TEXTS, "prompt_name": "query", "truncate_prompt_tokens": 5}
    answer = await post(client, "/v1/embeddings", model="embedder", **cut)
    assert np.isfinite(vectors_of(answer)).all()
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as sdk:
        own = await sdk.embeddings.create(
            model="embedder", input=TEXTS[0], extra_body={"prompt_name": "query"}
        )
    expected = np.asarray(model.encode(TEXTS[0], prompt_name="query"))
    np.testing.assert_allclose(own.data[0].embedding, expected, atol=1e-5)


async def test_unknown_prompt_is_answered_with_the_known_ones(client: httpx.AsyncClient) -> None:
    body = {"model": "embedder", "input": "a", "prompt_name": "code"}
    message = (await client.post("/v1/embeddings", json=body)).json()["error"]["message"]
    assert "query, document, passage" in message


async def test_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    assert await refused(client, "/v1/embeddings", model="x", input="a") == (404, "model")


async def test_generating_model_makes_no_vectors(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/classify", {"input": "a"}),
            ("/v1/pooling", {"input": "a"}),
        ):
            assert await refused(client, path, model=stack.model_id, **body) == (400, "model")


async def test_cards_tell_what_a_model_does(client: httpx.AsyncClient) -> None:
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    does = {
        name: (card["embedding_width"], card["scores_pairs"], card["labels"], card["generates"])
        for name, card in cards.items()
    }
    assert does == {
        "embedder": (32, False, [], False),
        "scorer": (0, True, ["LABEL_0"], False),
        "classifier": (0, False, [*LABELS], False),
    }


async def test_answers_are_documented(client: httpx.AsyncClient) -> None:
    embedding = await post(client, "/v1/embeddings", model="embedder", input="a")
    assert_documented(embedding, "EmbeddingList")
    ranking = await post(client, "/v1/rerank", model="scorer", query="a", documents=["b"])
    assert_documented(ranking, "Reranking")
    scores = await post(client, "/v1/score", model="scorer", text_1="a", text_2="b")
    assert_documented(scores, "ScoreList")
    classes = await post(client, "/v1/classify", model="classifier", input="a")
    assert_documented(classes, "Classification")
    vectors = await post(client, "/v1/pooling", model="embedder", input="a", task="token_embed")
    assert_documented(vectors, "PoolingList")


async def test_grpc_clients_embed_at_both_levels(
    served: Served, expected: npt.NDArray[np.float32]
) -> None:
    async with connect(served.tokenizer) as channel:
        stub = CompletionServiceStub(channel)
        prompts = [completion_pb2.Prompt(text=text) for text in TEXTS]
        answer = await stub.Embed(completion_pb2.EmbedRequest(inputs=prompts))
        vectors = np.frombuffer(answer.vectors, "<f4").reshape(-1, answer.width)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        [model] = (await stub.ListModels(models_pb2.ListModelsRequest())).models
        assert (model.embedding_width, model.only_embeds) == (32, True)
    async with connect(served.engine) as channel:
        engine, control = EngineServiceStub(channel), EngineControlServiceStub(channel)
        ids = [engine_pb2.EmbeddedPrompt(ids=[2, 6, 3]), engine_pb2.EmbeddedPrompt(ids=[2, 3])]
        embedded = await engine.Embed(engine_pb2.EmbedRequest(prompts=ids))
        assert (embedded.width, embedded.usage.prompt_tokens) == (32, 5)
        described = await control.GetModel(engine_pb2.GetModelRequest())
        assert (described.vector_width, described.only_embeds) == (32, True)
        for wrong in (
            engine_pb2.EmbeddedPrompt(),
            engine_pb2.EmbeddedPrompt(ids=[2, 3], instruction_length=3),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await engine.Embed(engine_pb2.EmbedRequest(prompts=[wrong]))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        whole = engine_pb2.EmbeddedPrompt(ids=[2, 3], instruction_length=2)
        embedded = await engine.Embed(engine_pb2.EmbedRequest(prompts=[whole, ids[0], whole]))
        assert len(embedded.vectors) == 3 * 4 * 32


async def test_grpc_clients_sort_texts(served: Served) -> None:
    async with connect(served.labeller) as channel:
        stub = CompletionServiceStub(channel)
        inputs = [completion_pb2.Prompt(text=text) for text in TEXTS]
        answer = await stub.Classify(completion_pb2.ClassifyRequest(inputs=inputs))
    assert tuple(answer.labels) == LABELS
    probabilities = np.frombuffer(answer.probabilities, "<f4").reshape(len(TEXTS), -1)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert answer.usage.prompt_tokens > len(TEXTS)


async def cancelled_requests(tokenizer: str) -> float:
    metrics = await metrics_of(tokenizer)
    return metrics.get('tokenwire_tokenizer_requests_total{outcome="cancelled"}', 0.0)


async def test_client_that_leaves_ends_its_request(served: Served) -> None:
    body = {"model": "embedder", "input": ["lock " * (CONTEXT - 2)] * 2048}
    before = cancelled = await cancelled_requests(served.tokenizer)
    async with (
        asyncio.timeout(HANG_SECONDS),
        httpx.AsyncClient(base_url=served.url) as client,
        connect(served.engine) as channel,
    ):
        control = EngineControlServiceStub(channel)
        while cancelled == before:  # a fast server may answer before its client leaves
            sending = asyncio.ensure_future(client.post("/v1/embeddings", json=body))
            while not sending.done():
                load = (await control.GetLoad(engine_pb2.GetLoadRequest())).load
                if not is_idle(load):
                    break
            sending.cancel()
            async for each in control.WatchLoad(engine_pb2.WatchLoadRequest(interval_seconds=0.05)):
                if is_idle(each.load):
                    break
            cancelled = await cancelled_requests(served.tokenizer)


async def test_key_is_charged_for_the_tokens_of_the_texts(served: Served, tmp_path: Path) -> None:
    """The reservation, one token for 4 bytes, is less than half of them here."""
    limit, keys = 900, tmp_path / "keys.json"
    keys.write_text(json.dumps({"tiers": {"few": {"tokens_per_minute": limit}}}))
    headers = {"authorization": f"Bearer {add_key(keys, 'few')}"}
    async with (
        running_shim("--tokenizer", served.tokenizer, "--keys", str(keys)) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60, headers=headers) as client,
    ):
        began = time.monotonic()
        answer = await post(client, "/v1/embeddings", input=["a " * 10] * 20)
        left = (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"]
        refilled = (time.monotonic() - began) * limit / 60
    used = answer["usage"]["prompt_tokens"]
    assert used > 200
    assert limit - int(left) + refilled >= used - 1
