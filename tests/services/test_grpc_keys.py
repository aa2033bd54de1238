"""API keys and the peer token over gRPC: who is served, as whom, and how much."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2_grpc

from services.common.accounts.key_file import add_key, key_id, revoke_key
from services.common.network.health import is_serving
from tests.services.shim import running_shim
from tests.stack import Stack, running_service, served_stack
from tokenwire.channel import connect
from tokenwire.client import Client, EngineClient, Message
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.pb.types.v1 import types_pb2

PROMPT = "def add(a, b):\n    return a +"
TOKEN = "peer-token-of-these-tests-0123456789"
TIERS = {
    "default": {},
    "few": {"requests_per_minute": 2},
    "short": {"max_tokens": 5},
    "poor": {"tokens_per_minute": 60},
    "single": {"concurrent_streams": 1},
    "elsewhere": {"models": ["other"]},
    "urgent": {"priority": 7},
}
LONG: Any = {"max_tokens": 1_900, "ignore_eos": True, "seed": 1}
"""Options of a request that still runs after every wait of its test"""


@dataclass(frozen=True)
class Keyed:
    """A stack with keys, and the files that it was started with."""

    stack: Stack
    keys: Path
    token: Path

    def key(self, tier: str = "default") -> str:
        return add_key(self.keys, tier)

    async def client(self, tier: str = "default") -> Client:
        """Return a client with a new key, once the services know it."""
        secret = self.key(tier)
        await self.knows(secret)
        return Client(self.stack.tokenizer, key=secret)

    async def knows(self, secret: str, *, reason: str = "") -> None:
        """Wait until both services answer a key, or refuse it for this reason."""
        for target, ask in (
            (self.stack.tokenizer, Client.models),
            (self.stack.engine, EngineClient.model),
        ):
            kind = Client if ask is Client.models else EngineClient
            while True:
                async with kind(target, key=secret) as client:
                    try:
                        await ask(client)  # type: ignore[arg-type]
                    except ServiceError as error:
                        if error.reason == reason:
                            break
                    else:
                        if not reason:
                            break
                await asyncio.sleep(0.05)  # the services poll the file


@pytest.fixture(scope="module")
def keyed(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    keys, token, logs = folder / "keys.json", folder / "token", folder / "logs"
    keys.write_text(json.dumps({"tiers": TIERS}))
    token.write_text(f"{TOKEN}\n")
    logs.mkdir()
    flags = ("--keys", str(keys), "--peer-token-file", str(token))
    with served_stack(embedded_model, logs, *flags) as stack:
        yield Keyed(stack, keys, token)


@pytest.fixture
async def strangers(keyed: Keyed) -> AsyncIterator[tuple[grpc.aio.Channel, ...]]:
    """Channels to the three gRPC ports, without a key."""
    stack = keyed.stack
    channels = tuple(connect(each) for each in (stack.tokenizer, stack.engine, stack.grammar))
    yield channels
    for channel in channels:
        await channel.close()


async def refusal(call: grpc.aio.Call) -> ServiceError:
    """Return the error of a call, with its details."""
    answer: Any = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await answer
    return ServiceError.from_rpc_error(failure.value)


async def test_every_rpc_but_health_needs_a_key(
    keyed: Keyed, strangers: tuple[grpc.aio.Channel, ...]
) -> None:
    text, tokens, masks = strangers
    reflect = reflection_pb2_grpc.ServerReflectionStub
    control = EngineControlServiceStub(tokens)
    completion, tokenizer = CompletionServiceStub(text), TokenizerServiceStub(text)
    engine, masks_service = EngineServiceStub(tokens), GrammarServiceStub(masks)
    rpcs: list[tuple[Any, Any]] = [
        (completion.Generate, completion_pb2.GenerateRequest()),
        (completion.Generate, completion_pb2.GenerateRequest()),
        (completion.Session, None),
        (completion.ListModels, models_pb2.ListModelsRequest()),
        (completion.GetStatus, models_pb2.GetStatusRequest()),
        (completion.LoadAdapter, models_pb2.LoadAdapterRequest()),
        (tokenizer.Encode, tokenizer_pb2.EncodeRequest(texts=["x"])),
        (tokenizer.DecodeStream, None),
        (engine.Generate, engine_pb2.GenerateRequest()),
        (engine.Session, None),
        (control.GetModel, engine_pb2.GetModelRequest()),
        (control.Drain, engine_pb2.DrainRequest()),
        (control.WatchCache, engine_pb2.WatchCacheRequest()),
        (masks_service.Masks, None),
        *((reflect(each).ServerReflectionInfo, None) for each in strangers),
    ]
    for rpc, request in rpcs:
        error = await refusal(rpc(request))
        assert error.code is grpc.StatusCode.UNAUTHENTICATED
        assert error.reason in ("MISSING_API_KEY", "MISSING_TOKEN")
    for target in (keyed.stack.tokenizer, keyed.stack.engine, keyed.stack.grammar):
        assert await is_serving(target)


async def test_only_engines_may_ask_the_grammar_service(keyed: Keyed) -> None:
    """A key is for text; grammars of strangers reach it with limits, by way of the engine."""
    secret = keyed.key()
    for token, reason in ((lambda: secret, "INVALID_TOKEN"), (lambda: TOKEN, "INVALID_FIELD")):
        async with connect(keyed.stack.grammar, token=token) as channel:
            call = GrammarServiceStub(channel).Compile(grammar_pb2.CompileRequest())
            assert (await refusal(call)).reason == reason


async def test_key_holder_completes_at_both_levels(keyed: Keyed) -> None:
    secret = keyed.key()
    await keyed.knows(secret)
    async with Client(keyed.stack.tokenizer, key=secret) as client:
        assert (await client.generate(PROMPT, max_tokens=4)).usage.completion_tokens == 4
        choice = types_pb2.GrammarSpec(choice=types_pb2.ChoiceList(choices=["yes"]))
        answer = await client.generate(PROMPT, max_tokens=8, grammar=choice)
        assert answer.choices[0].text == "yes"
        ids = (await client.encode(PROMPT)).ids
    async with EngineClient(keyed.stack.engine, key=secret) as engine:
        assert len((await engine.generate(ids, max_tokens=3)).outputs[0].token_ids) == 3


async def test_wrong_and_revoked_keys_are_refused_with_the_reason(keyed: Keyed) -> None:
    async with Client(keyed.stack.tokenizer, key="tw-" + "x" * 43) as client:
        for ask in (client.generate(PROMPT), client.models()):
            with pytest.raises(ServiceError) as refused:
                await ask
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
            assert refused.value.reason == "INVALID_API_KEY"
    secret = keyed.key()
    await keyed.knows(secret)
    async with (
        EngineClient(keyed.stack.engine, key=secret) as engine,
        Client(keyed.stack.tokenizer, key=secret) as client,
        client.stream(PROMPT, **LONG) as stream,
    ):
        await anext(stream)
        await engine.generate([1, 2], max_tokens=1)
        revoke_key(keyed.keys, key_id(secret))
        await keyed.knows(secret, reason="REVOKED_API_KEY")
        asked: list[Awaitable[Any]] = [client.generate(PROMPT), engine.generate([1, 2])]
        for asking in asked:
            with pytest.raises(ServiceError) as refused:  # on the Session that is still open
                await asking
            assert refused.value.reason == "REVOKED_API_KEY"
        await anext(stream)  # what runs may end


async def test_tier_limits_hold_for_grpc(keyed: Keyed) -> None:
    async with await keyed.client("short") as client:
        answer = await client.generate(PROMPT, max_tokens=50, ignore_eos=True)
        assert answer.usage.completion_tokens == 5
        assert (
            await client.generate(Message("user", "Hi"), ignore_eos=True)
        ).usage.completion_tokens == 5
    async with await keyed.client("few") as client:
        await client.generate(PROMPT, max_tokens=1)
        await client.encode(PROMPT)
        await client.models()  # is not counted
        for ask in (client.generate(PROMPT, max_tokens=1), client.encode(PROMPT)):
            with pytest.raises(ServiceError) as refused:
                await ask
            assert refused.value.reason == "RATE_LIMIT_EXCEEDED"
            assert 0 < (refused.value.retry_seconds or 0) <= 60
    async with await keyed.client("poor") as client:
        await client.generate(PROMPT, max_tokens=40, ignore_eos=True)
        with pytest.raises(ServiceError, match="60 tokens per minute"):
            await client.generate(PROMPT, max_tokens=40)
    async with await keyed.client("elsewhere") as client:
        with pytest.raises(ServiceError) as refused:
            await client.generate(PROMPT)
        assert refused.value.reason == "MODEL_NOT_ALLOWED"


async def test_refused_request_costs_no_tokens_and_a_cancelled_one_frees_its_place(
    keyed: Keyed,
) -> None:
    async with await keyed.client("poor") as client:
        for _ in range(3):
            with pytest.raises(ServiceError) as refused:
                await client.generate(PROMPT, max_tokens=50, temperature=-1)
            assert refused.value.reason == "INVALID_FIELD"
        await client.generate(PROMPT, max_tokens=1)
    async with await keyed.client("single") as client:
        async with client.stream(PROMPT, **LONG) as stream:
            await anext(stream)
            with pytest.raises(ServiceError, match="may have 1 choices"):
                await client.generate(PROMPT, max_tokens=1)
        while True:  # the cancellation is on its way
            try:
                await client.generate(PROMPT, max_tokens=1)
                break
            except ServiceError as error:
                if error.reason != "RATE_LIMIT_EXCEEDED":
                    raise


async def test_key_holder_has_the_tenant_and_priority_of_its_key(keyed: Keyed) -> None:
    async with await keyed.client("urgent") as client:
        own = key_id(keyed.key())
        forbidden: list[Any] = [{"tenant": own}, {"priority": 1}]
        for options in forbidden:
            with pytest.raises(ServiceError) as refused:
                await client.generate(PROMPT, max_tokens=1, **options)
            assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
            assert refused.value.field == f"context.{next(iter(options))}"
        await client.generate(PROMPT, max_tokens=1, priority=-1)
    secret = keyed.key()
    await keyed.knows(secret)
    request = completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[completion_pb2.Prompt(text="x")])
    )
    async with connect(keyed.stack.tokenizer, token=lambda: secret) as channel:
        stub = CompletionServiceStub(channel)
        for key, value in (("x-tenant", "bob"), ("x-priority", "3")):
            error = await refusal(stub.Generate(request, metadata=[(key, value)]))
            assert (error.code, error.field) == (grpc.StatusCode.PERMISSION_DENIED, key)
    async with EngineClient(keyed.stack.engine, key=secret) as engine:
        with pytest.raises(ServiceError) as refused:
            await engine.generate([1, 2], max_tokens=1, tenant="bob")
        assert refused.value.field == "start.tenant"


async def test_prefix_cache_of_a_key_is_the_same_over_grpc_and_http(keyed: Keyed) -> None:
    prompt = "".join(f"value_{i} = {i * i}\n" for i in range(40))
    secret = keyed.key()
    await keyed.knows(secret)
    async with (
        await keyed.client() as other,
        Client(keyed.stack.tokenizer, key=secret) as client,
        httpx.AsyncClient(base_url=keyed.stack.url, timeout=60) as http,
    ):
        assert (await client.generate(prompt, max_tokens=1)).usage.cached_tokens == 0
        body = {"prompt": prompt, "max_tokens": 1}
        headers = {"authorization": f"Bearer {secret}"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (await other.generate(prompt, max_tokens=1)).usage.cached_tokens == 0


async def test_engine_refuses_keys_whose_limits_it_does_not_count(keyed: Keyed) -> None:
    secret = keyed.key("few")
    await keyed.knows(secret)
    async with EngineClient(keyed.stack.engine, key=secret) as engine:
        await engine.load()
        with pytest.raises(ServiceError) as refused:
            await engine.generate([1, 2], max_tokens=1)
        assert refused.value.reason == "TIER_HAS_LIMITS"
    async with connect(keyed.stack.engine, token=lambda: secret) as channel:
        call = EngineServiceStub(channel).Generate(engine_pb2.GenerateRequest())
        assert (await refusal(call)).reason == "TIER_HAS_LIMITS"


async def test_operation_of_an_engine_is_closed_to_key_holders(keyed: Keyed) -> None:
    secret = keyed.key()
    await keyed.knows(secret)
    async with connect(keyed.stack.engine, token=lambda: secret) as channel:
        control = EngineControlServiceStub(channel)
        for call in (
            control.Drain(engine_pb2.DrainRequest()),
            control.Abort(engine_pb2.AbortRequest(all=True)),
            control.FlushCache(engine_pb2.FlushCacheRequest()),
            control.WatchCache(engine_pb2.WatchCacheRequest()),
        ):
            assert (await refusal(call)).reason == "NOT_A_SERVICE"
    async with connect(keyed.stack.engine, token=lambda: TOKEN) as channel:
        await EngineControlServiceStub(channel).FlushCache(engine_pb2.FlushCacheRequest())


async def test_adapters_are_closed_to_key_holders(keyed: Keyed) -> None:
    secret = keyed.key()
    await keyed.knows(secret)
    async with connect(keyed.stack.tokenizer, token=lambda: secret) as channel:
        service = CompletionServiceStub(channel)
        for call in (
            service.LoadAdapter(models_pb2.LoadAdapterRequest(name="a", path="/")),
            service.UnloadAdapter(models_pb2.UnloadAdapterRequest(name="a")),
        ):
            assert (await refusal(call)).reason == "NOT_A_SERVICE"


async def test_service_may_set_tenant_and_priority(keyed: Keyed) -> None:
    async with Client(keyed.stack.tokenizer, key=TOKEN) as client:
        await client.generate(PROMPT, max_tokens=1, tenant="anyone", priority=9)


async def test_shim_without_the_token_is_not_ready_and_its_clients_are_not_blamed(
    keyed: Keyed, tmp_path: Path
) -> None:
    """A 401 would send the clients to look for a fault in their own keys."""
    async with (
        running_shim("--tokenizer", keyed.stack.tokenizer) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        assert (await http.get("/ready")).status_code == 503
        await shim.logged("refuses this server: An API key is required")
        answer = await http.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_known"
        assert (await http.get("/v1/models")).status_code == 503
    catalog = tmp_path / "catalog.toml"
    row = f'[[models]]\nid = "m"\ntarget = "{keyed.stack.tokenizer}"\n'
    catalog.write_text(f'{row}peer_token_file = "{keyed.token}"\n')
    async with (
        running_shim("--catalog", str(catalog)) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        answer = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert answer.status_code == 200


async def test_replaced_token_is_used_without_a_restart(
    embedded_model: Path, keyed: Keyed, tmp_path: Path
) -> None:
    """One line more everywhere, then the new one first, then the old one gone."""
    before, after = TOKEN, TOKEN[::-1]
    token = tmp_path / "token"

    def write(*lines: str) -> None:
        token.with_suffix(".new").write_text("\n".join(lines))
        token.with_suffix(".new").replace(token)

    async def knows(secret: str, *, is_known: bool) -> None:
        async with Client(service.target, key=secret) as client:
            while True:
                try:
                    await client.models()
                except ServiceError as error:
                    if error.code is not grpc.StatusCode.UNAUTHENTICATED:
                        raise
                    if not is_known:
                        return
                else:
                    if is_known:
                        return
                await asyncio.sleep(0.05)

    write(before)
    own = ("--peer-token-file", str(token))
    model = ("--model", str(embedded_model))
    few = ("--dtype", "float32", "--kv-memory", "64MiB")
    async with (
        running_service("engine", *model, *few, *own, log=tmp_path / "engine") as engine,
        running_service(
            *("tokenizer", *model, *own, "--engine", engine.target), log=tmp_path / "tokenizer"
        ) as service,
        running_shim("--tokenizer", service.target, *own, "--tokenizer-wait", "60") as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        for lines, gone in (((before, after), ""), ((after, before), ""), ((after,), before)):
            write(*lines)
            await knows(gone or lines[-1], is_known=not gone)
            answer = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert answer.status_code == 200
            assert (await http.post("/tokenize", json={"prompt": PROMPT})).status_code == 200


def test_command_line_takes_a_key(keyed: Keyed, tmp_path: Path) -> None:
    secret = keyed.key()
    asyncio.run(keyed.knows(secret))
    command = [sys.executable, "-m", "tokenwire", "complete", "import", "--max-tokens", "4"]

    def run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"TOKENWIRE_TARGET": keyed.stack.tokenizer} | variables
        return subprocess.run(
            [*command, *flags], env=os.environ | variables, capture_output=True, text=True
        )

    file = tmp_path / "key"
    file.write_text(f"{secret}\n")
    assert run("--key-file", str(file)).returncode == 0
    assert run(TOKENWIRE_API_KEY=secret).returncode == 0
    missing = run()
    assert (missing.returncode, "requires an API key: set TOKENWIRE_API_KEY" in missing.stderr) == (
        1,
        True,
    )
    assert "is not known" in run(TOKENWIRE_API_KEY="tw-wrong").stderr
    for flags, sentence in (
        (("--key-file", str(tmp_path / "none")), "none can't be read: No such file"),
        (("--key-file", os.devnull), "has no token"),
        (("--target", "10.0.0.7:50051"), "would go to 10.0.0.7:50051 in clear text"),
    ):
        refused = run(*flags, TOKENWIRE_API_KEY=secret)
        assert refused.returncode == 2
        assert sentence in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--keys", "none.json"), "none.json can't be read: No such"),
        (("--peer-token-file", "none"), "none can't be read: No such"),
        (("--peer-token-file", "short"), "must have at least 32 visible ASCII characters"),
        (("--peer-token-file", "empty"), "empty has no token"),
    ],
)
async def test_unusable_files_end_the_service_with_a_sentence(
    embedded_model: Path, tmp_path: Path, flags: tuple[str, str], sentence: str
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "empty").write_text("\n\n")
    arguments = ("--model", str(embedded_model), "--engine", "127.0.0.1:9")
    with pytest.raises(AssertionError, match=sentence):
        async with running_service(
            *("tokenizer", *arguments, flags[0], str(tmp_path / flags[1])), log=tmp_path / "log"
        ):
            pass


async def test_keys_in_clear_text_are_told_in_the_log(embedded_model: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    flags = ("--host", "0.0.0.0", "--plaintext", "--peer-token-file", str(token))
    log = tmp_path / "log"
    async with running_service("grammar", "--model", str(embedded_model), *flags, log=log):
        assert "cross the network in clear text" in log.read_text()
