"""Heartbeats and stalls, at token and at text level: clients that do not read or grant credit."""

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

Call: TypeAlias = Any  # a call of grpc.aio: its stubs give each RPC another type
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Commands: TypeAlias = generation.SessionRequest | completion.SessionRequest

IMPATIENT = ("--heartbeat-seconds", "0.1", "--stall-seconds", "1.5")
HANG_SECONDS = 60
PROMPT = [5, 6, 7]
NAMED = (("x-request-id", "reads-nothing"),)
CHOICES, MANY = 64, 2_000
"""Choices of a request whose client is cut, and max_tokens of each: far more than the engine
generates before the cut"""
FEW = 40
"""max_tokens of a neighbour"""
NARROW = [
    ("grpc.http2.lookahead_bytes", 65_535),
    ("grpc.http2.bdp_probe", 0),  # BDP probes would enlarge the window
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a channel that buffers little"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    async with running_service("engine", *arguments, *IMPATIENT, log=log) as service:
        yield service
    assert_cuts_are_logged_without_traceback(log)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tokenizer(
    engine: RunningService, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "tokenizer.log"
    arguments = ("--model", str(embedded_model), "--engine", engine.target)
    async with running_service("tokenizer", *arguments, *IMPATIENT, log=log) as service:
        yield service
    assert_cuts_are_logged_without_traceback(log)


def assert_cuts_are_logged_without_traceback(log: Path) -> None:
    """Assert that a cut call logs one line: operators take tracebacks for defects."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert not any("exception" in line for line in lines)
    cut = [line for line in lines if line.get("request_id") == "reads-nothing" and "code" in line]
    assert {(line["code"], line["reason"]) for line in cut} == {("RESOURCE_EXHAUSTED", "STALLED")}


def fields(n: int, tokens: int) -> dict[str, Any]:
    """Return fields of one greedy choice, or of `n` that differ, with logprobs to fill buffers."""
    return {
        "n": n,
        "logprobs": 5 if n > 1 else None,
        "sampling": types.SamplingParams(temperature=float(n > 1), seed=1),
        "stopping": types.StoppingParams(max_tokens=tokens, ignore_eos=True),
    }


class TokenLevel:
    """Calls to EngineService."""

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
        """Return the kind of the event, and its ids."""
        return event.WhichOneof("event"), list(event.delta.tokens.ids)

    def _request(self, n: int, tokens: int) -> generation.GenerateRequest:
        prompt = types.TokenIds(ids=PROMPT)
        return generation.GenerateRequest(prompts=[prompt], **fields(n, tokens))


class TextLevel:
    """Calls to CompletionService."""

    reason = "STALLED"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = CompletionServiceStub(channel)

    def session(self, metadata: Metadata = ()) -> Call:
        return self._stub.Session(metadata=metadata)

    def call(self, n: int, metadata: Metadata = ()) -> Call:
        return self._stub.Generate(self._request(n, MANY), metadata=metadata)

    def start(
        self, handle: int, *, n: int = 1, tokens: int = MANY, credit: int | None = None
    ) -> Commands:
        start = completion.SessionStart(request=self._request(n, tokens), credit=credit)
        command = completion.SessionCommand(handle=handle, start=start)
        return completion.SessionRequest(commands=[command])

    def read(self, event: completion.SessionEvent) -> tuple[str | None, list[int]]:
        """Return the kind of the event, and its ids."""
        if not event.HasField("response"):
            return event.WhichOneof("event"), []
        return event.response.WhichOneof("event"), list(event.response.delta.token_ids)

    def _request(self, n: int, tokens: int) -> completion.GenerateRequest:
        prompt = completion.Prompt(token_ids=types.TokenIds(ids=PROMPT))
        return completion.GenerateRequest(
            prompts=completion.Prompts(items=[prompt]), **fields(n, tokens)
        )


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
    """Reader of a Session: ids and errors by handle."""

    def __init__(self, level: Level, session: Call) -> None:
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.errors: dict[int, ServiceError] = {}
        self._level = level
        self._session = session

    async def completed(self, handle: int) -> None:
        """Read events until this request has completed."""
        kinds: dict[int, str | None] = {}
        while kinds.get(handle) != "completed":
            for event in (await self._session.read()).events:
                kinds[event.handle], ids = self._level.read(event)
                self.ids[event.handle] += ids
                if event.HasField("error"):
                    self.errors[event.handle] = ServiceError.from_status(event.error)


async def neighbour(engine: RunningService) -> list[int]:
    """Return the greedy ids of a client that reads its answer."""
    async with EngineClient(engine.target) as client:
        answer = await client.generate(PROMPT, temperature=0, max_tokens=FEW, ignore_eos=True)
    return list(answer.token_ids)


async def test_silent_session_gets_heartbeats_and_accepts_requests(
    level: type[Level], target: str, engine: RunningService
) -> None:
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


async def test_first_event_is_accepted_while_the_step_loop_hangs(engine: RunningService) -> None:
    """Clients read the seed from the first event, so a heartbeat must not precede it."""
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
async def test_request_without_credit_is_cut_and_its_session_continues(
    level: type[Level], target: str, engine: RunningService, credit: int
) -> None:
    """A request without credit holds KV blocks that others need."""
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
async def test_client_that_does_not_read_is_cut_and_others_continue(
    level: type[Level],
    target: str,
    engine: RunningService,
    ask: Callable[[type[Level], grpc.aio.Channel], Awaitable[Call]],
) -> None:
    """Otherwise each client that hangs would occupy memory and KV blocks."""
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


async def test_more_choices_than_run_at_once_complete(embedded_model: Path, tmp_path: Path) -> None:
    """The third choice starts when one of the first two has ended."""
    tokens = 1_300  # more than the initial credit of a call
    engine = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    text = ("--model", str(embedded_model), "--engine")
    async with (
        running_service(
            "engine", *engine, *IMPATIENT, "--max-running", "2", log=tmp_path / "engine"
        ) as below,
        running_service("tokenizer", *text, below.target, log=tmp_path / "tokenizer") as service,
        connect(service.target) as channel,
    ):
        request = completion.GenerateRequest(
            prompts=completion.Prompts(
                items=[completion.Prompt(token_ids=types.TokenIds(ids=PROMPT))]
            ),
            **(fields(3, tokens) | {"logprobs": None}),
        )
        ends = [
            event.finished.completion_tokens
            async for event in CompletionServiceStub(channel).Generate(request)
            if event.HasField("finished")
        ]
    assert ends == [tokens] * 3
