"""Ollama's API of a shim of its own: vectors, keys, catalogs, no template, without --ollama."""

import json
import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from ollama import AsyncClient, ResponseError

from services.common.accounts.key_file import add_key
from tests.services.shim import running_shim
from tests.services.text_stack import running_text_stack
from tests.stack import Stack
from tests.text_models import CONTEXT, make_embedder

HELLO = {"role": "user", "content": "Hello!"}
SHORT = {"num_predict": 4}


@pytest.fixture(scope="module")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of a model that makes embeddings."""
    model = make_embedder(tmp_path_factory.mktemp("embedder"))
    async with (
        running_text_stack(model) as text,
        running_shim("--tokenizer", text.tokenizer, "--ollama") as shim,
    ):
        yield AsyncClient(host=shim.url)


async def name_of(client: AsyncClient) -> str:
    [model] = (await client.list()).models
    assert model.model is not None
    return model.model


async def test_vectors_have_length_1_and_say_what_they_cost(embedder: AsyncClient) -> None:
    name = await name_of(embedder)
    assert (await embedder.show(name)).capabilities == ["embedding"]
    both = await embedder.embed(name, ["a lock", "what is a mutex ?"])
    one = await embedder.embed(name, "a lock")
    assert len(both.embeddings) == 2
    assert list(one.embeddings[0]) == pytest.approx(list(both.embeddings[0]), abs=1e-5)
    for vector in both.embeddings:
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-3)
    assert (both.prompt_eval_count or 0) > (one.prompt_eval_count or 0) > 0
    assert (both.total_duration or 0) > 0
    few = await embedder.embed(name, "a lock", dimensions=4)
    assert len(few.embeddings[0]) == 4
    assert math.hypot(*few.embeddings[0]) == pytest.approx(1, abs=1e-3)
    old = (await embedder.embeddings(name, "a lock")).embedding
    length = math.hypot(*old)
    assert [number / length for number in old] == pytest.approx(list(one.embeddings[0]), abs=1e-3)


async def test_long_texts_are_cut_unless_the_client_forbids_it(embedder: AsyncClient) -> None:
    name, long = await name_of(embedder), "a lock " * CONTEXT
    assert (await embedder.embed(name, long)).prompt_eval_count == CONTEXT
    with pytest.raises(ResponseError, match="context") as caught:
        await embedder.embed(name, long, truncate=False)
    assert caught.value.status_code == 400


async def test_nothing_to_embed_loads_the_model(embedder: AsyncClient) -> None:
    name = await name_of(embedder)
    assert (await embedder.embed(name, "")).embeddings == []
    assert (await embedder.embed(name, [])).embeddings == []
    assert (await embedder.embeddings(name, "")).embedding == []


async def test_model_that_only_embeds_refuses_a_chat(embedder: AsyncClient) -> None:
    with pytest.raises(ResponseError) as caught:
        await embedder.chat(await name_of(embedder), messages=[HELLO])
    assert caught.value.status_code == 400


async def test_keys_and_their_limits_apply(stack: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    tiers = {"default": {"max_tokens": 2}, "elsewhere": {"models": ["other"]}}
    keys.write_text(json.dumps({"tiers": tiers}))
    secret, other = add_key(keys, "default"), add_key(keys, "elsewhere")
    flags = ("--tokenizer", stack.tokenizer, "--keys", str(keys), "--ollama")
    async with running_shim(*flags) as shim:

        def client(key: str) -> AsyncClient:
            return AsyncClient(host=shim.url, headers={"Authorization": f"Bearer {key}"})

        with pytest.raises(ResponseError) as unknown:
            await AsyncClient(host=shim.url).list()
        assert unknown.value.status_code == 401
        assert "key" in unknown.value.error
        answer = await client(secret).chat(stack.model_id, messages=[HELLO])
        assert (answer.eval_count, answer.done_reason) == (2, "length")
        for call in (
            client(other).chat(stack.model_id, messages=[HELLO]),
            client(other).generate(stack.model_id),
            client(other).show(stack.model_id),
        ):
            with pytest.raises(ResponseError) as refused:
                await call
            assert refused.value.status_code == 403
        async with httpx.AsyncClient(base_url=shim.url) as http:
            assert (await http.get("/api/version")).status_code == 200


async def test_models_of_a_catalog_have_their_names(stack: Stack, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(
        f'[[models]]\nid = "m"\ntarget = "{stack.tokenizer}"\naliases = ["owner/m:q4"]\n'
        '[[models]]\nid = "later"\nplaceholder = true\n'
    )
    async with running_shim("--catalog", str(catalog), "--ollama") as shim:
        client = AsyncClient(host=shim.url)
        assert [each.model for each in (await client.list()).models] == ["m:latest"]
        for name in ("m", "m:latest", "owner/m:q4"):
            answer = await client.chat(name, messages=[HELLO], options=SHORT)
            assert answer.model == name
        with pytest.raises(ResponseError, match="model 'm:other' not found"):
            await client.chat("m:other", messages=[HELLO])


async def test_question_to_a_model_without_template_is_its_prompt(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Base models complete in Ollama; a client of it knows no other endpoint."""
    model = tmp_path / "base"
    shutil.copytree(embedded_model, model, ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    async with (
        running_text_stack(model) as text,
        running_shim("--tokenizer", text.tokenizer, "--ollama") as shim,
    ):
        client, options = AsyncClient(host=shim.url), {"temperature": 0, "num_predict": 4}
        name = await name_of(client)
        raw = await client.generate(name, "def add(a, b):", raw=True, options=options)
        asked = await client.generate(name, "def add(a, b):", options=options)
        assert raw.response
        assert (asked.response, asked.context) == (raw.response, None)
        stream = await client.generate(name, "def add(a, b):", options=options, stream=True)
        assert "".join([part.response or "" async for part in stream]) == raw.response
        for refused in ({"system": "Be brief."}, {"context": [1]}):
            with pytest.raises(ResponseError, match="no chat template"):
                await client.generate(name, "Hello!", options=options, **refused)
        with pytest.raises(ResponseError, match="no chat template"):
            await client.chat(name, messages=[HELLO], options=options)


async def test_without_the_flag_there_is_no_such_api(stack: Stack) -> None:
    async with running_shim("--tokenizer", stack.tokenizer) as shim:
        with pytest.raises(ResponseError) as caught:
            await AsyncClient(host=shim.url).list()
        assert caught.value.status_code == 404
