"""HTTP shim with a catalog: model names, limits, reloads and multi-model requests."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.shim import Shim, assert_documented, running_shim
from tests.stack import Stack, free_ports, left_early, running_service, watch_load

PROMPT = "def add(a, b):\n    return a +"
HELLO = {"role": "user", "content": "Hello!"}
LONG = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "stream": True, "seed": 1}


@pytest.fixture(scope="module")
async def second_tokenizer(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """Yield the target of a second tokenizer service, with another model id, on the same engine."""
    log = tmp_path_factory.mktemp("second") / "tokenizer.log"
    async with running_service(
        "tokenizer", "--model", str(stack.model), "--engine", stack.engine, "--model-id", "inner",
        log=log,
    ) as service:  # fmt: skip
        yield service.target


def written_catalog(folder: Path, stack: Stack, second_tokenizer: str) -> Path:
    (nobody,) = free_ports(1)
    path = folder / "catalog.toml"
    path.write_text(f"""
[[models]]
id = "acme/one"
aliases = ["one"]
target = "{stack.tokenizer}"
owned_by = "acme"
created = 1700000000

[models.variants.short]
max_output_length = 3

[models.variants.narrow]
context = 24

[[models]]
id = "two"
target = "{second_tokenizer}"
max_output_length = 8

[[models]]
id = "away"
target = "127.0.0.1:{nobody}"
context = 4096

[[models]]
id = "soon"
placeholder = true
""")
    return path


@pytest.fixture(scope="module")
async def shim(
    stack: Stack, second_tokenizer: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Shim]:
    """Yield a shim for tests that do not change the catalog."""
    catalog = written_catalog(tmp_path_factory.mktemp("catalog"), stack, second_tokenizer)
    async with running_shim("--catalog", str(catalog)) as running:
        yield running


@pytest.fixture
def own_catalog(stack: Stack, second_tokenizer: str, tmp_path: Path) -> Path:
    """Return a catalog for tests that change it."""
    return written_catalog(tmp_path, stack, second_tokenizer)


@pytest.fixture
async def own_shim(own_catalog: Path) -> AsyncIterator[Shim]:
    async with running_shim("--catalog", str(own_catalog)) as running:
        yield running


@pytest.fixture
async def http(shim: Shim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True} | fields
    return await http.post("/v1/completions", json=body)


# verbatim from the reference of mistral.rs
MISTRAL_RS_EXAMPLE = """
{ "best_of": 1, "dry_allowed_length": null, "dry_base": null, "dry_multiplier": null,
"dry_sequence_breakers": null, "echo": false, "frequency_penalty": null,
"grammar": { "type": "regex", "value": "example" }, "logit_bias": null, "logprobs": null,
"max_tokens": 16, "min_p": null, "model": "mistral", "n": 1, "presence_penalty": null,
"prompt": "Say this is a test.", "repetition_penalty": null, "stop": "example", "stream": true,
"suffix": null, "temperature": 0.7, "tool_choice": "none", "tools": null, "top_k": null,
"top_p": null, "truncate_sequence": null, "user": "example" }
"""


@pytest.mark.parametrize("stop", ["example", None])
async def test_mistral_rs_reference_example_is_answered(
    stack: Stack, tmp_path: Path, stop: str | None
) -> None:
    """Clients generated from such a reference send every field."""
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(f'[[models]]\nid = "mistral"\ntarget = "{stack.tokenizer}"\n')
    body = MISTRAL_RS_EXAMPLE.replace('"stop": "example"', f'"stop": {json.dumps(stop)}')
    async with (
        running_shim("--catalog", str(catalog)) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        response = await http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
    assert response.status_code == 200, response.text
    assert "x-tokenwire-ignored" not in response.headers
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == ("" if stop else "example")
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == stop


def token_ids_of(response: httpx.Response) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert "x-tokens-used" not in response.headers
    return error


@pytest.mark.parametrize(
    ("name", "canonical", "tokens"),
    [
        ("acme/one", "acme/one", 12),
        ("one", "acme/one", 12),
        ("acme/one:short", "acme/one", 3),
        ("one:short", "acme/one", 3),
        ("two", "two", 8),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_alias_or_variant_selects_its_model_and_limits(
    http: httpx.AsyncClient, name: str, canonical: str, tokens: int, streams: bool
) -> None:
    response = await complete(http, model=name, max_tokens=12, stream=streams)
    assert response.status_code == 200, response.text
    if streams:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {chunk["model"] for chunk in chunks} == {canonical}
        answer = chunks[-1]
    else:
        answer = response.json()
        assert_documented(response.json(), "Completion")
    assert answer["model"] == canonical
    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("name", "canonical", "tokens"),
    [("one", "acme/one", 12), ("one:short", "acme/one", 3), ("two", "two", 8)],
)
async def test_chat_selects_its_model_by_name(
    http: httpx.AsyncClient, name: str, canonical: str, tokens: int
) -> None:
    body = {"messages": [HELLO], "model": name, "max_tokens": 12, "ignore_eos": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert (answer["model"], answer["usage"]["completion_tokens"]) == (canonical, tokens)


async def test_chat_is_limited_to_the_context_of_its_variant(http: httpx.AsyncClient) -> None:
    body = {"messages": [HELLO], "model": "one:narrow", "ignore_eos": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == 24


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"model": "inner"}, 404, "model_not_found"),
        ({"model": "two:short"}, 404, "model_not_found"),
        ({"model": "soon"}, 404, "model_not_found"),
        ({"model": "away"}, 503, None),
        ({}, 400, "invalid_field"),
        ({"model": "default"}, 400, "invalid_field"),
        ({"model": None}, 400, "invalid_field"),
    ],
)
async def test_unknown_or_unavailable_model_is_refused(
    http: httpx.AsyncClient, fields: dict[str, object], status: int, code: str | None
) -> None:
    for response in (
        await complete(http, **fields),
        await http.post("/v1/chat/completions", json={"messages": [HELLO]} | fields),
        await http.post("/tokenize", json={"prompt": "x"} | fields),
        await http.post("/detokenize", json={"tokens": [1]} | fields),
    ):
        assert response.status_code == status, response.text
        error = error_of(response)
        if code is not None:
            assert (error["code"], error["param"]) == (code, "model")


async def test_models_list_shows_aliases_variants_and_limits(http: httpx.AsyncClient) -> None:
    response = await http.get("/v1/models")
    assert_documented(response.json(), "ModelList")
    one, two, away, soon = response.json()["data"]
    assert (one["id"], one["owned_by"], one["created"]) == ("acme/one", "acme", 1700000000)
    assert (one["aliases"], one["variants"]) == (["one"], ["acme/one:short", "acme/one:narrow"])
    assert one["max_model_len"] == two["max_model_len"] == one["max_output_length"]
    assert two["max_output_length"] == 8
    assert [each["model_code"] for each in (one, two, away)] == ["native", "native", None]
    assert (away["max_model_len"], away["placeholder"], away["grammar"]) == (4096, False, None)
    assert (soon["placeholder"], soon["max_model_len"]) == (True, None)
    assert (await http.get("/v1/models/one")).json() == one
    assert (await http.get("/v1/models/acme/one")).json() == one
    short = (await http.get("/v1/models/one:short")).json()
    assert short == (await http.get("/v1/models/acme/one:short")).json()
    assert (short["id"], short["aliases"], short["variants"]) == (
        "acme/one:short",
        ["one:short"],
        [],
    )
    assert short["max_output_length"] == 3
    assert (await http.get("/v1/models/soon")).json() == soon
    assert error_of(await http.get("/v1/models/nobody"))["code"] == "model_not_found"


async def test_variant_can_reduce_the_context_length(http: httpx.AsyncClient) -> None:
    card = (await http.get("/v1/models/one:narrow")).json()
    assert (card["max_model_len"], card["max_output_length"]) == (24, 24)
    body = {"model": card["id"], "prompt": "x"}
    assert (await http.post("/tokenize", json=body)).json()["max_model_len"] == 24
    info = await http.get("/tokenizer_info", params={"model": card["id"]})
    assert info.json()["model_max_length"] == 24
    fitting = await complete(
        http, model="one:narrow", prompt=[[5] * 10, [5] * 20], max_tokens=100,
        return_token_ids=True)  # fmt: skip
    assert [len(ids) for ids in token_ids_of(fitting)] == [14, 4]
    too_much = {"context_length_exceeded_behavior": "error", "max_tokens": 20}
    for fields in ({"prompt": [5] * 25}, {"prompt": [5] * 10} | too_much):
        refused = await complete(http, model="one:narrow", **fields)
        assert refused.status_code == 400
        assert error_of(refused)["code"] == "context_length_exceeded"


async def test_catalog_context_beyond_the_model_is_logged(stack: Stack, tmp_path: Path) -> None:
    """Without the warning, an operator learns of it only by refused prompts."""
    path = tmp_path / "catalog.toml"
    [port] = free_ports(1)
    path.write_text(
        f'[[models]]\nid = "wide"\ntarget = "127.0.0.1:{port}"\ncontext = 100_000\n'
        "[models.variants.narrow]\ncontext = 24\n"
    )
    flags = ("--model", str(stack.model), "--engine", stack.engine)
    log = tmp_path / "tokenizer.log"
    async with running_shim("--catalog", str(path)) as shim:
        async with (
            running_service("tokenizer", *flags, log=log, port=port),
            httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
        ):
            line = await shim.logged("The catalog gives")
            card = (await http.get("/v1/models/wide")).json()
        assert line["level"] == "warning"
        length = card["max_model_len"]
        assert f"wide a context of 100000 tokens; its model's {length} tokens" in line["message"]
        assert shim.count("The catalog gives") == 1


async def test_tokenizer_routes_accept_a_model_name(http: httpx.AsyncClient) -> None:
    asked = {"prompt": PROMPT, "model": "two"}
    response = await http.post("/tokenize", json=asked)
    assert_documented(response.json(), "Tokenized")
    back = await http.post(
        "/detokenize", json={"tokens": response.json()["tokens"], "model": "one"}
    )
    assert back.json() == {"prompt": PROMPT}
    info = await http.get("/tokenizer_info", params={"model": "one:short"})
    assert_documented(info.json(), "TokenizerInfo")
    assert info.json()["model"] == "acme/one"


async def test_shim_is_ready_while_one_model_is_unavailable(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ready")).status_code == 200


async def test_model_name_is_optional_with_a_single_model(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(
        f'[[models]]\nid = "a"\ntarget = "{stack.tokenizer}"\n'
        "[models.variants.v]\nmax_output_length = 1\n"
        '[[models]]\nid = "soon"\nplaceholder = true\n'
    )
    async with (
        running_shim("--catalog", str(path)) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        for fields in ({}, {"model": "default"}):
            assert (await complete(http, max_tokens=1, **fields)).json()["model"] == "a"


async def test_stream_continues_after_its_model_leaves_the_catalog(
    own_shim: Shim, own_catalog: Path, stack: Stack
) -> None:
    same = stack.tokenizer.replace("127.0.0.1", "localhost")
    async with (
        httpx.AsyncClient(base_url=own_shim.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=LONG | {"model": "one"}) as response,
    ):
        lines = response.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
        _write(own_catalog, f'[[models]]\nid = "new"\ntarget = "{same}"')
        own_shim.hang_up()
        await own_shim.logged("catalog reloaded")
        assert (await complete(http, model="one")).status_code == 404
        assert (await complete(http, max_tokens=2)).json()["model"] == "new"
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 600


async def test_invalid_catalog_keeps_the_previous_models(own_shim: Shim, own_catalog: Path) -> None:
    async with httpx.AsyncClient(base_url=own_shim.url, timeout=60) as http:
        for number, text in enumerate(("x = [", '[[models]]\nid = "m"\npath = "here"'), 1):
            _write(own_catalog, text)
            own_shim.hang_up()
            line = await own_shim.logged("The previous models stay.", number)
            assert line["level"] == "error"
            assert (await complete(http, model="one", max_tokens=1)).status_code == 200


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(
    ("names", "models", "tokens"),
    [
        ("two", ["two"], [8]),
        (["one"], ["acme/one"], [12]),
        (
            ["two", "one", "one:short", "two"],
            ["two", "acme/one", "acme/one", "two"],
            [8, 12, 3, 8],
        ),
    ],
)
async def test_multi_model_answer_has_one_choice_per_model(
    http: httpx.AsyncClient, names: str | list[str], models: list[str], tokens: list[int]
) -> None:
    body = {"model": names, "prompt": "x = [1, 2, 3, 4, 5, 6, 7,", "max_tokens": 12,
            "temperature": 0, "unheard_of": 1}  # fmt: skip
    response = await http.post("/v1/completion", json=body)
    assert response.status_code == 200, response.text
    assert_documented(response.json(), "MultiAnswer")
    answer = response.json()
    assert set(answer) == {"id", "object", "created", "choices", "usage"}
    assert str(uuid.UUID(answer["id"])) == answer["id"]
    assert datetime.fromisoformat(answer["created"]).tzinfo is not None
    choices = answer["choices"]
    assert [choice["model"] for choice in choices] == models
    assert [choice["usage"]["completion_tokens"] for choice in choices] == tokens
    usage = answer["usage"]
    for choice in choices:
        assert set(choice) == {"text", "created", "model", "finish_reason", "usage"}
        assert isinstance(choice["created"], int)
        assert choice["finish_reason"] == "length"
        assert set(choice["usage"]) == set(usage)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == sum(choice["usage"][name] for choice in choices)
    assert usage["prediction_time_ms"] == max(
        choice["usage"]["prediction_time_ms"] for choice in choices
    )
    assert response.headers["x-tokens-used"] == str(usage["total_tokens"])
    assert response.headers["x-tokenwire-ignored"] == "unheard_of"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": ["one", "nobody"]}, 404, "model"),
        ({"model": ["one", "soon"]}, 404, "model"),
        ({"model": ["one", "away"]}, 503, None),
        ({"model": []}, 400, "model"),
        ({"model": None}, 400, "model"),
        ({"model": 5}, 400, "model"),
        ({"model": ["one", 5]}, 400, "model"),
        ({"model": ["one"] * 129}, 400, "model"),
        ({"stream": True}, 400, "stream"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ["x"]}, 400, "prompt"),
        ({"temperature": 1.5}, 400, "temperature"),
        ({"top_p": -1}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": "x"}, 400, "stop"),
        ({"stop": [""]}, 400, "stop"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"frequency_penalty": -3}, 400, "frequency_penalty"),
        ({"prompt": "x " * 4000}, 400, "prompt"),
    ],
)
async def test_invalid_multi_model_request_is_refused(
    http: httpx.AsyncClient, fields: dict[str, object], status: int, param: str | None
) -> None:
    response = await http.post("/v1/completion", json={"model": "one", "prompt": "x"} | fields)
    assert response.status_code == status, response.text
    assert error_of(response)["param"] == param


async def test_multi_model_request_works_without_a_catalog(stack: Stack) -> None:
    """The shim checks the backend's model names before it starts any generation."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        for names in (stack.model_id, [stack.model_id, "default"]):
            response = await http.post("/v1/completion", json={"model": names, "prompt": "x"})
            assert {choice["model"] for choice in response.json()["choices"]} == {stack.model_id}
        body = {"model": ["default", "nobody"], "prompt": "x"}
        response = await http.post("/v1/completion", json=body)
        assert (response.status_code, error_of(response)["param"]) == (404, "model")


async def test_disconnect_cancels_all_models_of_a_request(
    http: httpx.AsyncClient, shim: Shim, stack: Stack
) -> None:
    # the greedy output keeps counting: no choice ends by itself
    body = {"model": ["one"] * 40, "prompt": "x = [1, 2, 3,", "max_tokens": 1900, "temperature": 0}
    async with left_early(stack.engine, 40 * 1900):
        asking = asyncio.ensure_future(
            http.post("/v1/completion", json=body, headers={"x-request-id": "leaves"})
        )
        await watch_load(stack.engine, until=lambda load: load.running_sequences > 1)
        asking.cancel()
        assert (await shim.answered("leaves"))["status"] == 499
