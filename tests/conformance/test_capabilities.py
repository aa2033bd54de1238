"""Advertised capabilities: a server does what it advertises and refuses everything else.

The tests compare two servers: the usual one, and a bare one without grammars and infill and with
other limits.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import httpx
import pytest
import pytest_asyncio

from tests.services.shim import running_shim
from tests.stack import Stack, running_service
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import Capability, GenerateRequest, GetModelRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.pb.types.v1 import types_pb2 as types

Sampling, Stopping = types.SamplingParams, types.StoppingParams
Fields: TypeAlias = dict[str, Any]

PROMPT = [300 + index % 7 for index in range(70)]  # longer than two blocks of the cache
CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello!"}
SUFFIX = "\n# the end"
LIMITS = ("--max-logprobs", "20", "--max-stop-strings", "2")


@dataclass(frozen=True, slots=True)
class Server:
    """Addresses of a server's services."""

    url: str
    tokenizer: str
    engine: str


@dataclass(slots=True)
class Reply:
    """The outcome of one Generate call."""

    ids: list[int] = field(default_factory=list)
    scores: int = 0
    prompt_scores: int = 0
    cached: int = 0
    match: types.StopMatch = field(default_factory=types.StopMatch)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bare(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """Start a server without a grammar service and without infill."""
    logs = tmp_path_factory.mktemp("logs")
    model = ("--model", str(embedded_model))
    small = ("--dtype", "float32", "--kv-memory", "64MiB")
    async with (
        running_service("engine", *model, *small, log=logs / "engine") as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, "--infill", "none", *LIMITS,
            log=logs / "tokenizer",
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
    ):  # fmt: skip
        yield Server(shim.url, tokenizer.target, engine.target)


@pytest_asyncio.fixture(params=["usual", "bare"])
async def server(request: pytest.FixtureRequest, stack: Stack, bare: Server) -> Server:
    return bare if request.param == "bare" else Server(stack.url, stack.tokenizer, stack.engine)


@pytest_asyncio.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


# Capabilities of the engine.

USES: Mapping[str, Sequence[tuple[Fields, Callable[[Reply], bool]]]] = {
    "SAMPLING": [
        ({"sampling": Sampling(temperature=2, top_k=1)}, lambda r: len(r.ids) == 8),
        ({"sampling": Sampling(temperature=0.7, top_p=0.9, min_p=0.1)}, lambda r: len(r.ids) == 8),
    ],
    "PENALTIES": [
        ({"sampling": Sampling(temperature=0, frequency_penalty=2)}, lambda r: len(r.ids) == 8),
        ({"sampling": Sampling(temperature=0, presence_penalty=2)}, lambda r: len(r.ids) == 8),
        ({"sampling": Sampling(temperature=0, repetition_penalty=2)}, lambda r: len(r.ids) == 8),
    ],
    "LOGIT_BIAS": [({"sampling": Sampling(logit_bias={400: 100})}, lambda r: set(r.ids) == {400})],
    "DRY": [({"sampling": Sampling(dry=types.DryParams(multiplier=1))}, lambda r: len(r.ids) == 8)],
    "MIROSTAT": [
        ({"sampling": Sampling(mirostat=types.MirostatParams())}, lambda r: len(r.ids) == 8)
    ],
    "STOPPING": [
        (
            {
                "stopping": Stopping(max_tokens=8, min_tokens=3, stop_token_ids=[400]),
                "sampling": Sampling(logit_bias={400: 100}),
            },
            lambda r: len(r.ids) == 4 and r.match.stop_token_id == 400,
        )
    ],
    "LOGPROBS": [({"logprobs": 2}, lambda r: r.scores == 8)],
    "PROMPT_LOGPROBS": [({"prompt_logprobs": 2}, lambda r: r.prompt_scores == len(PROMPT) - 1)],
    "GRAMMAR": [
        (
            {"grammar": types.GrammarSpec(regex="(ab)+"), "stopping": Stopping(max_tokens=8)},
            lambda r: len(r.ids) > 0,
        )
    ],
    "RESUME": [
        (
            {"resume": [{"sequence": 0, "generated": types.TokenIds(ids=[300, 301, 302])}]},
            lambda r: len(r.ids) == 5,
        )
    ],
    "BEAM_SEARCH": [
        ({"beam_search": types.BeamSearch(length_penalty=0.5), "n": 2}, lambda r: len(r.ids) == 16)
    ],
    "TOKEN_LIMITS": [
        (
            {"sampling": Sampling(allowed_token_ids=types.TokenIds(ids=[400, 401]))},
            lambda r: {*r.ids} <= {400, 401},
        ),
        (
            {
                "sampling": Sampling(
                    logit_bias={400: 100}, bad_token_ids=[types.TokenIds(ids=[400, 400])]
                )
            },
            lambda r: 1 <= r.ids.count(400) <= 4,
        ),
    ],
    # refused here; tests/services/test_engine_images.py has a model that takes them
    "IMAGES": [({"images": [{"data": b"x"}]}, lambda r: False)],
    "PREFIX_CACHE": [({}, lambda r: True), ({}, lambda r: r.cached >= len(PROMPT) // 2)],
}


async def generate(server: Server, fields: Fields) -> Reply:
    endless: Fields = {"stopping": Stopping(max_tokens=8, ignore_eos=True)}
    request = GenerateRequest(prompts=[types.TokenIds(ids=PROMPT)], **(endless | fields))
    reply = Reply()
    async with connect(server.engine) as channel:
        async for event in EngineServiceStub(channel).Generate(request):
            reply.ids += event.delta.tokens.ids
            reply.scores += len(event.delta.tokens.logprobs)
            reply.prompt_scores += len(event.prompt_scores.tokens.logprobs)
            if event.HasField("finished"):
                reply.match = event.finished.match
            if event.HasField("completed"):
                reply.cached = event.completed.usage.cached_tokens
    return reply


def test_every_capability_is_tested() -> None:
    assert {f"CAPABILITY_{name}" for name in ("UNSPECIFIED", *USES)} == set(Capability.keys())


@pytest.mark.parametrize("name", USES)
async def test_engine_has_advertised_capabilities_and_refuses_others(
    server: Server, name: str
) -> None:
    async with connect(server.engine) as channel:
        model = await EngineControlServiceStub(channel).GetModel(GetModelRequest())
    is_advertised = engine_pb2.Capability.Value(f"CAPABILITY_{name}") in model.capabilities
    for fields, has_worked in USES[name]:
        if is_advertised:
            assert has_worked(await generate(server, fields))
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(server, fields)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert ServiceError.from_rpc_error(refused.value).field == name.lower()


async def test_bare_server_lacks_the_grammar_capability(stack: Stack, bare: Server) -> None:
    """Otherwise the test above would try no missing capability."""
    found = []
    for target in (stack.engine, bare.engine):
        async with connect(target) as channel:
            model = await EngineControlServiceStub(channel).GetModel(GetModelRequest())
        found.append(set(model.capabilities))
    assert found[0] - found[1] == {Capability.CAPABILITY_GRAMMAR}


# Capabilities of the server, as advertised by /v1/models.


async def card_of(http: httpx.AsyncClient) -> Any:
    [card] = (await http.get("/v1/models")).json()["data"]
    return card


async def status(
    http: httpx.AsyncClient, path: str = "/v1/completions", **fields: object
) -> tuple[int, str | None]:
    asked: Fields = {"prompt": "def f("} if path == "/v1/completions" else {"messages": [HELLO]}
    response = await http.post(path, json=asked | {"max_tokens": 2, "seed": 1} | fields)
    refusal = response.json().get("error")
    return response.status_code, refusal and refusal["param"]


async def test_model_card_agrees_with_list_models(http: httpx.AsyncClient, server: Server) -> None:
    card = await card_of(http)
    async with connect(server.tokenizer) as channel:
        stub = CompletionServiceStub(channel)
        [model] = (await stub.ListModels(models_pb2.ListModelsRequest())).models
    same = ("id", "max_output_length", "max_logprobs", "infill", "grammar", "chat")
    for name in (*same, "max_chat_logprobs"):
        assert card[name] == getattr(model, name)
    assert card["max_model_len"] == model.context_length
    answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.json()["system_fingerprint"] == card["system_fingerprint"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("grammar", {"grammar": {"type": "regex", "value": "ab"}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        (
            "tools",
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
        ),
    ],
)
async def test_grammars_are_accepted_if_the_card_advertises_them(
    http: httpx.AsyncClient, param: str, fields: Fields
) -> None:
    has_grammar = (await card_of(http))["grammar"]
    expected = (200, None) if has_grammar else (501, param)
    assert await status(http, **fields) == expected


async def test_logprobs_are_limited_as_the_card_advertises(http: httpx.AsyncClient) -> None:
    most = (await card_of(http))["max_logprobs"]
    assert most in (5, 20)
    assert await status(http, logprobs=most) == (200, None)
    assert await status(http, logprobs=most, echo=True) == (200, None)
    assert await status(http, logprobs=most + 1) == (400, "logprobs")


async def test_chat_logprobs_and_formats_follow_the_card(http: httpx.AsyncClient) -> None:
    card = await card_of(http)
    assert card["chat"]
    most = card["max_chat_logprobs"]
    assert await status(http, CHAT, logprobs=True, top_logprobs=most) == (200, None)
    refused = await status(http, CHAT, logprobs=True, top_logprobs=most + 1)
    assert refused == (400, "top_logprobs")
    expected = (200, None) if card["grammar"] else (501, "response_format")
    assert await status(http, CHAT, response_format={"type": "json_object"}) == expected


async def test_model_without_a_chat_template_refuses_chats_and_names_the_alternative(
    server: Server, embedded_model: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(embedded_model / name)
    config = json.loads((embedded_model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    arguments = ("--model", str(tmp_path), "--engine", server.engine)
    async with (
        running_service("tokenizer", *arguments, log=tmp_path / "log") as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        assert not (await card_of(http))["chat"]
        response = await http.post(CHAT, json={"messages": [HELLO]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert "completions" in response.json()["error"]["message"]


async def test_context_length_of_the_card_is_exact_to_the_token(http: httpx.AsyncClient) -> None:
    """Longer prompts are cut, refused or scored, as each field demands."""
    length = (await card_of(http))["max_model_len"]
    strict: Fields = {"context_length_exceeded_behavior": "error"}
    fits = [300] * (length - 2)
    assert await status(http, prompt=fits, **strict) == (200, None)
    assert await status(http, prompt=[*fits, 300], **strict) == (400, "prompt")
    assert await status(http, prompt=[*fits, 300]) == (200, None)
    assert await status(http, prompt=[*fits, 300, 300]) == (400, "prompt")
    assert await status(http, prompt=[*fits, 300, 300], truncate_sequence=True) == (200, None)
    scored: Fields = {"echo": True, "max_tokens": 0, "logprobs": 0}
    assert await status(http, prompt=[*fits, 300, 300], **scored) == (200, None)
    assert await status(http, prompt=[*fits, 300, 300, 300], **scored) == (400, "prompt")


async def test_stop_strings_are_limited_by_max_stop_strings(
    stack: Stack, bare: Server, server: Server, http: httpx.AsyncClient
) -> None:
    most = 2 if server is bare else 16
    assert await status(http, stop=["a"] * most) == (200, None)
    assert await status(http, stop=["a"] * (most + 1)) == (400, "stop")


# Suffixes on a model without infill.


@pytest_asyncio.fixture
async def plain(bare: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=bare.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, ["e", " "]])
async def test_suffix_is_appended_on_a_model_without_infill(
    plain: httpx.AsyncClient, echo: bool, stop: list[str] | None
) -> None:
    """Token ids, logprobs, usage and stop matches exclude the suffix."""
    body = {"prompt": "def f(", "max_tokens": 8, "seed": 1, "logprobs": 1, "echo": echo}
    body |= {"stop": stop, "return_token_ids": True}
    without = (await plain.post("/v1/completions", json=body)).json()
    answer = (await plain.post("/v1/completions", json=body | {"suffix": SUFFIX})).json()
    assert answer["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]
    [choice], [bare_choice] = answer["choices"], without["choices"]
    assert choice["text"] == bare_choice["text"] + SUFFIX
    for name in ("token_ids", "finish_reason", "stop_reason"):
        assert choice[name] == bare_choice[name]
    for name in ("tokens", "text_offset"):
        assert choice["logprobs"][name] == bare_choice["logprobs"][name]
    streamed = await plain.post("/v1/completions", json=body | {"suffix": SUFFIX, "stream": True})
    *events, done = [line for line in streamed.text.splitlines() if line]
    assert done == "data: [DONE]"
    assert SUFFIX not in "".join(events[:-1])


async def test_suffix_fallback_error_refuses_suffixes_on_a_model_without_infill(
    bare: Server, embedded_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(embedded_model), "--engine", bare.engine, "--infill", "none")
    async with (
        running_service(
            "tokenizer", *arguments, "--suffix-fallback", "error", log=tmp_path / "log"
        ) as service,
        connect(service.target) as channel,
    ):
        request = completion.GenerateRequest(
            prompts=completion.Prompts(items=[completion.Prompt(text="a")], suffix=SUFFIX)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in CompletionServiceStub(channel).Generate(request):
                pass
        error = ServiceError.from_rpc_error(refused.value)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts.suffix")
