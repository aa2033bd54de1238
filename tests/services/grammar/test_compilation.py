"""Compilation of grammars: refusals, limits, the cache and the compile process."""

import asyncio
import hashlib
import json
from pathlib import Path

import grpc
import psutil
import pytest
from tokenizers import Tokenizer

from services.common.interceptor import RpcInterceptor
from services.engine.frontend.mask_stream import GrammarClient
from services.grammar import GrammarError
from services.grammar.application import GrammarApplication
from services.grammar.compiling.compiler import Compiler
from services.grammar.settings import GrammarSettings
from tests.services.grammar.mask_client import PERSON, Decoder
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

BAD = {
    "syntax": (GrammarSpec(json_schema='{"type":'), "line 1, column 9"),
    "keyword": (GrammarSpec(json_schema='{"properties":{"a":{"extends":{}}}}'), "$.properties.a"),
    "logic": (
        GrammarSpec(json_schema='{"items":{"type":"string","not":{"format":"date"}}}'),
        "$.items",
    ),
    "pattern": (GrammarSpec(json_schema='{"items":{"pattern":"(a"}}'), "$.items.pattern"),
    "draft": (
        GrammarSpec(
            json_schema='{"$schema":"http://json-schema.org/draft-04/schema#","items":{"const":1}}'
        ),
        "$.items",
    ),
    "options": (GrammarSpec(json_schema='{"x-guidance":{"lenient":true}}'), "x-guidance"),
    "unsatisfiable": (GrammarSpec(json_schema='{"minimum":5,"maximum":3,"type":"integer"}'), "5"),
    "long": (
        GrammarSpec(json_schema=json.dumps({"properties": {"é" * 5000: {"extends": 1}}})),
        "not",
    ),
    "regex": (GrammarSpec(regex="a(b"), "unclosed group"),
    "long regex": (GrammarSpec(regex="\x01" * 9000 + "("), "unclosed group"),
    "lark": (GrammarSpec(lark='start: "a" foo'), "foo"),
    "llguidance": (GrammarSpec(llguidance='{"grammars":[]}'), "grammars"),
}


@pytest.mark.parametrize("case", BAD)
async def test_invalid_grammar_is_refused_with_field_and_position(
    case: str, channel: grpc.aio.Channel
) -> None:
    spec, place = BAD[case]
    with pytest.raises(ServiceError) as caught:
        await GrammarClient(channel).compile(spec)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == f"grammar.{spec.WhichOneof('spec')}"
    assert place in caught.value.message


def _chained_references(count: int) -> str:
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return json.dumps({"$defs": {**names, f"d{count}": {}}, "$ref": "#/$defs/d0"})


def _optional_properties(count: int) -> str:
    return json.dumps(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
    )


HOSTILE = {
    "overflows the stack": GrammarSpec(json_schema=_chained_references(1400)),
    "overflows the stack too": GrammarSpec(
        lark='start: r0\nr4000: "b"\n' + "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(4000))
    ),
    "never ends": GrammarSpec(json_schema=_optional_properties(9000)),
    "no finite text": GrammarSpec(
        json_schema='{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'
    ),
    "endless forced text": GrammarSpec(regex="((a{100}){100}){100}"),
    "catastrophic regex": GrammarSpec(regex=".*" * 500),
    "too large": GrammarSpec(json_schema=json.dumps({"enum": ["x" * 1_000_000]})),
    "too deep": GrammarSpec(json_schema="[" * 100_000),
    "huge product": GrammarSpec(
        json_schema=json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]}
                       for i in range(12)]}
        )
    ),
}  # fmt: skip


async def test_hostile_grammars_do_not_affect_other_requests(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    client = GrammarClient(channel)
    healthy = await client.compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    attacks = asyncio.gather(
        *(client.compile(spec) for spec in HOSTILE.values()), return_exceptions=True
    )
    decoder = Decoder.over(channel, tokenizer)
    output = await decoder.generate(healthy, range(16))
    assert all(json.loads(tokenizer.decode(ids)) for ids in output.values())
    await decoder.stream.aclose()
    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    for name, result in zip(HOSTILE, await attacks, strict=True):
        assert isinstance(result, ServiceError), name
        assert result.code in refused, (name, result)
    assert await client.compile(GrammarSpec(regex="after all that"))


async def test_quick_grammars_compile_while_slow_ones_do(channel: grpc.aio.Channel) -> None:
    client = GrammarClient(channel)
    slow = [
        asyncio.ensure_future(
            client.compile(GrammarSpec(json_schema=_optional_properties(9000 + i)))
        )
        for i in range(3)
    ]
    await asyncio.sleep(0)
    await asyncio.gather(*(client.compile(GrammarSpec(regex=f"quick{i}")) for i in range(4)))
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_grammars_of_a_tenant_do_not_delay_those_of_another(
    channel: grpc.aio.Channel,
) -> None:
    client = GrammarClient(channel)
    many = [
        asyncio.ensure_future(
            client.compile(GrammarSpec(json_schema=_optional_properties(100 + i)), None, "many")
        )
        for i in range(40)
    ]
    await asyncio.sleep(0)
    await client.compile(GrammarSpec(json_schema=_optional_properties(3)), None, "one")
    assert sum(task.done() for task in many) < len(many) // 2
    await asyncio.gather(*many)


async def test_grammar_without_a_turn_in_time_is_refused_as_such(
    channel: grpc.aio.Channel,
) -> None:
    """An engine would take a late answer for that of a service that hangs."""
    client = GrammarClient(channel)
    specs = [GrammarSpec(json_schema=_optional_properties(9000 + i)) for i in range(6)]
    results = await asyncio.gather(
        *(client.compile(spec, 1.5, "many") for spec in specs), return_exceptions=True
    )
    reasons = {result.reason for result in results if isinstance(result, ServiceError)}
    assert reasons == {"TOO_MANY_COMPILES"}


async def test_tenants_share_no_compiled_grammar(channel: grpc.aio.Channel) -> None:
    """The time would tell one tenant that another has sent the schema."""
    client, spec = GrammarClient(channel), GrammarSpec(regex="a secret of one tenant")
    ids = [await client.compile(spec, None, tenant) for tenant in ("one", "two", "one", "")]
    assert len(set(ids)) == 3
    assert ids[0] == ids[2]


async def test_grammar_that_exceeds_the_library_limits_fails_alone(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    client = GrammarClient(channel)
    # the number of continuations exceeds the library's limit, but only after the trial run
    names = [f"p{i}" for i in range(2500)]
    rules = "".join(f'{name}: "{name}"\n' for name in names)
    lark = f"start: /[a-z]{{60}}/ {' '.join(f'{name}?' for name in names)}\n{rules}"
    hopeless = await client.compile(GrammarSpec(lark=lark))
    healthy = await client.compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    decoder = Decoder.over(channel, tokenizer)
    decoder.stream.open(99, hopeless, [])
    error: ServiceError | None = None
    for _ in range(61):
        [state] = await decoder.states.get()
        error = state.error
        if error is not None:
            break
        decoder.stream.accept(99, decoder.allowed(state)[:1])
    assert error is not None
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    output = await decoder.generate(healthy, range(4))
    assert all(json.loads(tokenizer.decode(ids)) for ids in output.values())
    await decoder.stream.aclose()


async def test_concurrent_requests_for_a_grammar_get_one_answer(channel: grpc.aio.Channel) -> None:
    stub = GrammarServiceStub(channel)
    request = grammar_pb2.CompileRequest(grammar=GrammarSpec(regex="same(again)?"))
    responses = await asyncio.gather(*(stub.Compile(request) for _ in range(5)))
    assert len({response.SerializeToString() for response in responses}) == 1


def _enumeration(first: int, count: int) -> GrammarSpec:
    words = [hashlib.sha256(str(first + i).encode()).hexdigest() for i in range(count)]
    return GrammarSpec(json_schema=json.dumps({"enum": words}))


async def test_size_of_a_compiled_grammar_grows_with_the_grammar(channel: grpc.aio.Channel) -> None:
    """The limit on the cache's memory counts these sizes."""
    stub = GrammarServiceStub(channel)
    sizes = []
    for spec in (GrammarSpec(regex="[ab]{7}"), _enumeration(0, 3000)):
        request = grammar_pb2.CompileRequest(grammar=spec)
        sizes.append((await stub.Compile(request)).size_bytes)
    small, large = sizes
    assert small < 1_000_000
    assert 10 * len(_enumeration(0, 3000).json_schema) < large


async def test_cache_evicts_grammars_when_its_memory_is_used_up(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """An open matcher keeps its evicted grammar; a new one fails with GRAMMAR_NOT_FOUND."""
    application = GrammarApplication(GrammarSettings(model=checkpoint, cache_bytes=4_000_000))
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        client, decoder = GrammarClient(channel), Decoder.over(channel, tokenizer)
        first = await client.compile(GrammarSpec(regex="[ab]{3}"))
        decoder.stream.open(1, first, [])
        [state] = await decoder.states.get()
        large = await client.compile(_enumeration(0, 3000))
        await client.compile(_enumeration(3000, 3000))
        for number, gone in ((2, first), (3, large)):
            decoder.stream.open(number, gone, [])
            [missing] = await decoder.states.get()
            assert missing.error is not None
            assert missing.error.reason == "GRAMMAR_NOT_FOUND"
        for _ in range(3):
            decoder.stream.accept(1, decoder.allowed(state)[:1])
            [state] = await decoder.states.get()
        assert state.terminated
        decoder.stream.open(4, await client.compile(_enumeration(0, 3000)), [])
        assert decoder.allowed((await decoder.states.get())[0])
        await decoder.stream.aclose()
    await application.stop()
    await server.stop(None)


async def test_killed_compile_process_is_logged_and_restarted(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A regular stop of the process logs nothing."""
    application = GrammarApplication(GrammarSettings(model=checkpoint))
    compiler = application._compiler
    await application.start()
    assert compiler._process is not None
    compiler._process.kill()
    await compiler._process.wait()
    assert compiler._reader is not None
    await compiler._reader
    lost = "the process that compiles grammars ended with signal SIGKILL"
    assert lost in caplog.messages
    assert await compiler.try_out(GrammarSpec(regex="a")) > 0
    with pytest.raises(GrammarError):
        await compiler.try_out(HOSTILE["overflows the stack"])
    # services of other tests log here too: they may still compile for disconnected clients
    assert any("compilation of a grammar ended with signal SIG" in line for line in caplog.messages)
    await application.stop()
    assert sum("the process that compiles" in line for line in caplog.messages) == 1


async def test_grammar_sent_during_the_start_shares_the_compile_process(checkpoint: Path) -> None:
    """Two readers of one pipe would take each other's results."""
    compiler = Compiler(checkpoint, timeout=5, concurrency=2)
    spec = GrammarSpec(regex="a")
    others = _compile_processes()
    try:
        _, size = await asyncio.gather(compiler.start(), compiler.try_out(spec))
        assert size
        assert len(_compile_processes()) == len(others) + 1
    finally:
        await compiler.stop()


def _compile_processes() -> list[psutil.Process]:
    """Return this process's children that compile grammars."""
    return [child for child in psutil.Process().children() if _compiles(child)]


def _compiles(child: psutil.Process) -> bool:
    try:
        return "services.grammar.compiling.compile_process" in child.cmdline()
    except psutil.NoSuchProcess:  # other tests' children may end meanwhile
        return False
