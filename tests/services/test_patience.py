"""Silence, clients that do not read, and clients that grant no credit, at both levels.

The intervals are so short that a test can await what they bring.
"""

import asyncio
import itertools
import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio

from tests.stack import RunningService, is_idle, loop_process, running_service, watch_load
from tokenwire.channel import connect
from tokenwire.client import EngineClient
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2 as generation
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1 import types_pb2 as types

Call: TypeAlias = Any  # of grpc.aio; its stubs give each rpc another type
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Commands: TypeAlias = generation.SessionRequest | completion.SessionRequest

IMPATIENT = ("--heartbeat-seconds", "0.1", "--stall-seconds", "1.5")
HANG_SECONDS = 60
PROMPT = [5, 6, 7]
NAMED = (("x-request-id", "reads-nothing"),)
CHOICES, MANY = 64, 2_000
"""Of a request whose client is cut, and tokens of each: it never comes so far, however fast the
engine is"""
FEW = 40
"""Tokens of a neighbour"""
NARROW = [
    ("grpc.http2.lookahead_bytes", 65_535),
    ("grpc.http2.bdp_probe", 0),  # which would widen it
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a channel that takes little unless it is read from"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    async with running_service("engine", *arguments, *IMPATIENT, log=log) as service:
        yield service
    assert_tells_cuts_in_a_line(log)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tokenizer(
    engine: RunningService, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "tokenizer.log"
    arguments = ("--model", str(embedded_model), "--engine", engine.target)
    async with running_service("tokenizer", *arguments, *IMPATIENT, log=log) as service:
        yield service
    assert_tells_cuts_in_a_line(log)


def assert_tells_cuts_in_a_line(log: Path) -> None:
    """For each call that was cut: an operator who finds tracebacks looks for a defect."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert not any("exception" in line for line in lines)
    cut = [line for line in lines if line.get("request_id") == "reads-nothing" and "code" in line]
    assert {(line["code"], line["reason"]) for line in cut} == {("RESOURCE_EXHAUSTED", "STALLED")}


def fields(n: int, tokens: int) -> dict[str, Any]:
    """One greedy choice, or many of different texts, with scores: so much that it fills buffers."""
    return {
        "n": n,
        "logprobs": 5 if n > 1 else None,
        "sampling": types.SamplingParams(temperature=float(n > 1), seed=1),
        "stopping": types.StoppingParams(max_tokens=tokens, ignore_eos=True),
    }


class TokenLevel:
    """EngineService."""

    reason = "STALLED"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = EngineServiceStub(channel)

    def session(self, metadata: Metadata = ()) -> Call:
        return self._stub.Session(metadata=metadata)

    def call(self, n: int, metadata: Metadata = ()) -> Call:
        return self._stub.Generate(self._request(n, MANY), metadata=metadata)

    def start(
        self, handle: int, *, n: int = 1, tokens: int = MANY, credit: int | None = None
    ) -> Commands:
        start = generation.SessionStart(request=self._request(n, tokens), credit=credit)
        command = generation.SessionCommand(handle=handle, start=start)
        return generation.SessionRequest(commands=[command])

    def read(self, event: generation.SessionEvent) -> tuple[str | None, list[int]]:
        """What it is, and its ids."""
        return event.WhichOneof("event"), list(event.delta.tokens.ids)

    def _request(self, n: int, tokens: int) -> generation.GenerateRequest:
        prompt = types.TokenIds(ids=PROMPT)
        return generation.GenerateRequest(prompts=[prompt], **fields(n, tokens))


class TextLevel:
    """CompletionService."""

    reason = "STALLED"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = CompletionServiceStub(channel)

    def session(self, metadata: Metadata = ()) -> Call:
        return self._stub.Session(metadata=metadata)

    def call(self, n: int, metadata: Metadata = ()) -> Call:
        return self._stub.Complete(self._request(n, MANY), metadata=metadata)

    def start(
        self, handle: int, *, n: int = 1, tokens: int = MANY, credit: int | None = None
    ) -> Commands:
        start = completion.StartComplete(request=self._request(n, tokens), credit=credit)
        command = completion.SessionCommand(handle=handle, start_complete=start)
        return completion.SessionRequest(commands=[command])

    def read(self, event: completion.SessionEvent) -> tuple[str | None, list[int]]:
        """What it is, and its ids."""
        if not event.HasField("complete"):
            return event.WhichOneof("event"), []
        return event.complete.WhichOneof("event"), list(event.complete.delta.tokens.ids)

    def _request(self, n: int, tokens: int) -> completion.CompleteRequest:
        prompt = completion.Prompt(token_ids=types.TokenIds(ids=PROMPT))
        return completion.CompleteRequest(prompts=[prompt], **fields(n, tokens))


Level: TypeAlias = TokenLevel | TextLevel


@pytest.fixture(params=[TokenLevel, TextLevel])
def level(request: pytest.FixtureRequest) -> type[Level]:
    kind: type[Level] = request.param
    return kind


@pytest.fixture
def target(level: type[Level], engine: RunningService, tokenizer: RunningService) -> str:
    return engine.target if level is TokenLevel else tokenizer.target


async def in_session(level: type[Level], channel: grpc.aio.Channel) -> Call:
    call = level(channel).session(metadata=NAMED)
    await call.write(level(channel).start(1, n=CHOICES))
    return call


async def in_a_call_of_its_own(level: type[Level], channel: grpc.aio.Channel) -> Call:
    return level(channel).call(CHOICES, metadata=NAMED)


class Listener:
    """Reads a Session."""

    def __init__(self, level: Level, session: Call) -> None:
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.errors: dict[int, ServiceError] = {}
        self._level = level
        self._session = session

    async def completed(self, handle: int) -> None:
        """Reads on until this request is."""
        kinds: dict[int, str | None] = {}
        while kinds.get(handle) != "completed":
            for event in (await self._session.read()).events:
                kinds[event.handle], ids = self._level.read(event)
                self.ids[event.handle] += ids
                if event.HasField("error"):
                    self.errors[event.handle] = ServiceError.from_status(event.error)


async def neighbour(engine: RunningService) -> list[int]:
    """What a client that behaves is told."""
    async with EngineClient(engine.target) as client:
        answer = await client.generate(PROMPT, temperature=0, max_tokens=FEW, ignore_eos=True)
    return list(answer.token_ids)


async def test_a_silent_session_hears_heartbeats(
    level: type[Level], target: str, engine: RunningService
) -> None:
    """And is there when it is needed."""
    async with connect(target) as channel, asyncio.timeout(HANG_SECONDS):
        session = level(channel).session()
        for _ in range(3):
            [event] = (await session.read()).events
            assert level(channel).read(event) == ("heartbeat", [])
        listener = Listener(level(channel), session)
        await session.write(level(channel).start(1, tokens=FEW))
        await listener.completed(1)
        assert listener.ids[1] == await neighbour(engine)
        session.cancel()


async def test_what_a_call_hears_first_is_that_it_was_accepted(engine: RunningService) -> None:
    """However long the step takes that it waits for: its client reads the seed there."""
    loop = loop_process(engine.process.pid)
    async with connect(engine.target) as channel, asyncio.timeout(HANG_SECONDS):
        os.kill(loop, signal.SIGSTOP)
        try:
            call = TokenLevel(channel).call(1)
            first = asyncio.ensure_future(call.read())
            session = TokenLevel(channel).session()
            for _ in range(3):
                [event] = (await session.read()).events
                assert event.HasField("heartbeat")
            session.cancel()
        finally:
            os.kill(loop, signal.SIGCONT)
        assert (await first).HasField("accepted")
        call.cancel()


@pytest.mark.parametrize("credit", [0, 5])
async def test_without_credit_a_request_is_cut_and_the_rest_of_its_session_goes_on(
    level: type[Level], target: str, engine: RunningService, credit: int
) -> None:
    """It holds blocks that others need."""
    alone = await neighbour(engine)
    async with connect(target) as channel, asyncio.timeout(HANG_SECONDS):
        session = level(channel).session()
        listener = Listener(level(channel), session)
        await session.write(level(channel).start(1, credit=credit))
        for handle in itertools.count(2):
            await session.write(level(channel).start(handle, tokens=FEW))
            await listener.completed(handle)
            assert listener.ids[handle] == alone
            if 1 in listener.errors:
                break
        assert listener.ids[1] == alone[:credit]
        assert listener.errors.keys() == {1}
        assert listener.errors[1].code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert listener.errors[1].reason == "STALLED"
        await watch_load(engine.target, until=is_idle)
        session.cancel()


@pytest.mark.parametrize("ask", [in_session, in_a_call_of_its_own])
async def test_who_does_not_read_is_cut_and_a_neighbour_goes_on(
    level: type[Level],
    target: str,
    engine: RunningService,
    ask: Callable[[type[Level], grpc.aio.Channel], Awaitable[Call]],
) -> None:
    """Else every client that hangs would keep its memory here, and its blocks."""
    alone = await neighbour(engine)
    async with (
        asyncio.timeout(HANG_SECONDS),
        grpc.aio.insecure_channel(target, options=NARROW) as channel,
    ):
        call = await ask(level, channel)
        await watch_load(engine.target, until=lambda load: load.running_sequences >= CHOICES)
        cut = asyncio.create_task(
            watch_load(engine.target, until=lambda load: load.running_sequences < CHOICES)
        )
        while not cut.done():
            assert await neighbour(engine) == alone
        await watch_load(engine.target, until=is_idle)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    error = ServiceError.from_rpc_error(raised.value)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.reason == level.reason
    trailers = raised.value.trailing_metadata()
    assert trailers["x-request-id"] == "reads-nothing", "its log lines can't be found"


async def test_choices_that_wait_for_others_to_end_starve_nobody(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Whoever reads all that comes gets all: two run on, so that the third can start."""
    tokens = 1_300  # more than a call is granted at once
    engine = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    text = ("--model", str(embedded_model), "--engine")
    async with (
        running_service(
            "engine", *engine, *IMPATIENT, "--max-running", "2", log=tmp_path / "engine"
        ) as below,
        running_service("tokenizer", *text, below.target, log=tmp_path / "tokenizer") as service,
        connect(service.target) as channel,
    ):
        request = completion.CompleteRequest(
            prompts=[completion.Prompt(token_ids=types.TokenIds(ids=PROMPT))],
            **(fields(3, tokens) | {"logprobs": None}),
        )
        ends = [
            event.finished.completion_tokens
            async for event in CompletionServiceStub(channel).Complete(request)
            if event.HasField("finished")
        ]
    assert ends == [tokens] * 3
