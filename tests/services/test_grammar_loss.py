"""Loss of the grammar service during requests."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from services.engine.frontend import matchers
from services.engine.frontend.matchers import Matchers
from services.engine.messages import Mask, Token
from tests.services.relay import relay
from tests.stack import RunningService, free_ports, running_service
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1.engine_pb2 import (
    GenerateRequest,
    SessionCommand,
    SessionCredit,
    SessionEvent,
    SessionRequest,
    SessionResponse,
    SessionStart,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, SamplingParams, StoppingParams, TokenIds

SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {"identifier": {"type": "integer"}, "kind": {"enum": ["red", "green"]}},
        "required": ["identifier", "kind"],
        "additionalProperties": False,
    },
}
MOST = 300


def request(seed: int, grammar: GrammarSpec | None) -> GenerateRequest:
    return GenerateRequest(
        prompts=[TokenIds(ids=[40, 41, 42])],
        n=2,
        sampling=SamplingParams(temperature=1, seed=seed),
        stopping=StoppingParams(max_tokens=MOST, ignore_eos=grammar is None),
        grammar=grammar,
    )


REQUESTS = {
    1: request(1, GrammarSpec(json_schema=json.dumps(SCHEMA))),
    2: request(2, GrammarSpec(regex="([a-z ]{4}[0-9]{2},){90}")),
    3: request(3, None),
}


class Conversation:
    """A Session; ids by (handle, sequence), and the last event of each handle."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = EngineServiceStub(channel).Session()
        self.ids: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[int, SessionEvent] = {}

    async def send(self, *commands: SessionCommand) -> None:
        await self._call.write(SessionRequest(commands=commands))

    async def take(self) -> None:
        """Read one message."""
        response = await self._call.read()
        assert isinstance(response, SessionResponse)
        for event in response.events:
            if event.HasField("delta"):
                place = (event.handle, event.delta.sequence)
                self.ids.setdefault(place, []).extend(event.delta.tokens.ids)
            elif event.WhichOneof("event") in ("completed", "error"):
                self.ends[event.handle] = event


async def generate(
    channel: grpc.aio.Channel, requests: dict[int, GenerateRequest], credit: int | None = None
) -> Conversation:
    """Generate until all requests end, or until each sequence has used up `credit`."""
    conversation = Conversation(channel)
    await conversation.send(
        *(
            SessionCommand(handle=handle, start=SessionStart(request=each, credit=credit))
            for handle, each in requests.items()
        )
    )
    wanted = 2 * len(requests)
    while len(conversation.ends) < len(requests):
        await conversation.take()
        lengths = [len(ids) for ids in conversation.ids.values()]
        if len(lengths) == wanted and min(lengths) == credit:
            break
    return conversation


@asynccontextmanager
async def grammar_service(
    model: Path, log: Path, port: int | None = None
) -> AsyncIterator[RunningService]:
    async with running_service("grammar", "--model", str(model), log=log, port=port) as service:
        yield service


async def test_output_is_unchanged_when_the_grammar_service_is_lost(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The first loss has a running replica; the second waits for a service to start."""
    ports = free_ports(3)
    target = ",".join(f"127.0.0.1:{port}" for port in ports)
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    async with AsyncExitStack() as running:
        engine = await running.enter_async_context(
            running_service("engine", *arguments, "--grammar", target, log=tmp_path / "engine.log")
        )
        first = await running.enter_async_context(
            grammar_service(embedded_model, tmp_path / "grammar-1.log", ports[0])
        )
        channel = await running.enter_async_context(connect(engine.target))
        undisturbed = await generate(channel, REQUESTS)
        assert all(end.HasField("completed") for end in undisturbed.ends.values())
        second = await running.enter_async_context(
            grammar_service(embedded_model, tmp_path / "grammar-2.log", ports[1])
        )

        # a relay makes this service reachable later, without a wait for its start
        third = await running.enter_async_context(
            grammar_service(embedded_model, tmp_path / "grammar-3.log")
        )

        disturbed = await generate(channel, REQUESTS, credit=40)
        first.process.kill()
        await first.process.wait()
        await disturbed.send(*credit(60))
        while min(len(ids) for ids in disturbed.ids.values()) < 100:
            await disturbed.take()
        second.process.kill()
        await second.process.wait()
        await disturbed.send(*credit(MOST))
        while 3 not in disturbed.ends:  # the request without a grammar continues meanwhile
            await disturbed.take()
        late = asyncio.ensure_future(generate(channel, {1: REQUESTS[1]}))
        await running.enter_async_context(relay(third.target, port=ports[2]))
        while len(disturbed.ends) < len(REQUESTS):
            await disturbed.take()
        assert all(end.HasField("completed") for end in disturbed.ends.values()), disturbed.ends
        assert disturbed.ids == undisturbed.ids
        waited = await late  # for its compilation
        assert waited.ends[1].HasField("completed"), waited.ends
        assert waited.ids == {place: undisturbed.ids[place] for place in waited.ids}


def credit(tokens: int) -> list[SessionCommand]:
    return [
        SessionCommand(handle=handle, credit=SessionCredit(tokens=tokens)) for handle in REQUESTS
    ]


def matchers_of(
    targets: Sequence[str],
    masks: asyncio.Queue[Sequence[Mask]],
    failed: asyncio.Queue[tuple[int, ServiceError]],
) -> Matchers:
    """Return the engine's client of grammar services, which reports to the queues."""
    return Matchers(
        targets,
        vocabulary_size=8192,
        eos_token_ids=[0],
        on_masks=masks.put_nowait,
        on_failed=lambda handle, error: failed.put_nowait((handle, error)),
    )


async def test_matchers_reopen_when_the_grammar_service_restarts(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The stop must not wait for open matchers: new requests would wait out its grace period."""
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).get_vocab()
    masks = asyncio.Queue[Sequence[Mask]]()
    failed = asyncio.Queue[tuple[int, ServiceError]]()
    async with grammar_service(embedded_model, tmp_path / "grammar-1.log") as service:
        ours = matchers_of([service.target], masks, failed)
        spec = GrammarSpec(regex="[ab][cd]")
        ours.open(5, 1, await ours.compile(spec), {})
        await masks.get()
        assert await service.stop() == 0
    port = int(service.target.rpartition(":")[2])
    async with grammar_service(embedded_model, tmp_path / "grammar-2.log", port):
        ours.feed([Token(5, 0, 0, ids["a"], None)])
        while (mask := (await masks.get())[0]).position == 0:
            pass  # the mask of the reopened matcher
        assert ids["c"] in allows(mask)
        assert failed.empty()
        await ours.aclose()
    assert "were aborted" not in (tmp_path / "grammar-1.log").read_text()


async def test_constrained_requests_fail_when_the_service_does_not_return_in_time(
    embedded_model: Path, tmp_path: Path
) -> None:
    masks = asyncio.Queue[Sequence[Mask]]()
    failed = asyncio.Queue[tuple[int, ServiceError]]()
    async with grammar_service(embedded_model, tmp_path / "grammar.log") as service:
        ours = matchers_of([service.target], masks, failed)
        spec = GrammarSpec(regex="[ab]+")
        ours.open(5, 1, await ours.compile(spec), {})
        [mask] = await masks.get()
        assert (mask.handle, mask.sequence, mask.position) == (5, 0, 0)
        ours._wait_seconds = 0.5  # only from now on: a busy service may take longer to start
        service.process.kill()
        handle, error = await failed.get()
        assert handle == 5
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.retry_seconds
        with pytest.raises(ServiceError) as refused:
            await ours.compile(spec)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert refused.value.retry_seconds
        await ours.aclose()


async def test_constrained_requests_fail_when_the_service_does_not_answer_in_time(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen service keeps its connections open, so the engine detects it by the timeout."""
    monkeypatch.setattr(matchers, "_ANSWER_SECONDS", 0.5)
    masks = asyncio.Queue[Sequence[Mask]]()
    failed = asyncio.Queue[tuple[int, ServiceError]]()
    async with grammar_service(embedded_model, tmp_path / "grammar.log") as service:
        ours = matchers_of([service.target], masks, failed)
        spec = GrammarSpec(regex="[ab]+")
        ours.open(5, 1, await ours.compile(spec), {})
        [mask] = await masks.get()
        token = min(allows(mask))
        ours._wait_seconds = 0.5  # only from now on: a busy service may take longer to start
        service.process.send_signal(signal.SIGSTOP)
        try:
            ours.feed([Token(5, 0, 0, token, None)])
            handle, error = await asyncio.wait_for(failed.get(), 15)
        finally:
            service.process.send_signal(signal.SIGCONT)
        assert handle == 5
        assert error.code is grpc.StatusCode.UNAVAILABLE
        await ours.aclose()


async def test_constrained_request_resumes_when_a_frozen_service_does(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reopens the matcher with the tokens that the sequence has generated."""
    monkeypatch.setattr(matchers, "_ANSWER_SECONDS", 0.4)
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).get_vocab()
    masks = asyncio.Queue[Sequence[Mask]]()
    failed = asyncio.Queue[tuple[int, ServiceError]]()
    async with grammar_service(embedded_model, tmp_path / "grammar.log") as service:
        ours = matchers_of([service.target], masks, failed)
        spec = GrammarSpec(regex="[ab][cd]")
        ours.open(5, 1, await ours.compile(spec), {})
        await masks.get()
        service.process.send_signal(signal.SIGSTOP)
        ours.feed([Token(5, 0, 0, ids["a"], None)])
        with pytest.raises(TimeoutError):  # the answer is overdue by then
            await asyncio.wait_for(failed.get(), 0.5)
        service.process.send_signal(signal.SIGCONT)
        [mask] = await masks.get()
        assert (mask.position, ids["c"] in allows(mask)) == (1, True)
        await ours.aclose()


async def test_tokens_generated_before_an_answer_are_not_fed_twice(
    embedded_model: Path, tmp_path: Path
) -> None:
    """After a reconnect, the engine may feed several tokens before the first mask arrives."""
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).get_vocab()
    masks = asyncio.Queue[Sequence[Mask]]()
    failed = asyncio.Queue[tuple[int, ServiceError]]()
    async with AsyncExitStack() as running:
        log = tmp_path / "grammar.log"
        service = await running.enter_async_context(grammar_service(embedded_model, log))
        ours = matchers_of([service.target], masks, failed)

        running.push_async_callback(ours.aclose)

        def feed(handle: int, *tokens: int) -> None:
            """Feed the tokens one by one, without waiting for answers."""
            for position, token in enumerate(tokens):
                ours.feed([Token(handle, 0, position, token, None)])

        async def open_one(handle: int, regex: str) -> None:
            spec = GrammarSpec(regex=regex)
            ours.open(handle, 1, await ours.compile(spec), {})
            [mask] = await masks.get()
            assert (mask.handle, mask.position, mask.end) == (handle, 0, 0)

        await open_one(1, "[ab][cd][ef]")
        feed(1, ids["a"], ids["c"])
        for position, allowed in ((1, "cd"), (2, "ef")):
            [mask] = await masks.get()
            assert (mask.position, mask.end) == (position, position)
            assert {ids[letter] for letter in allowed} <= allows(mask)
            assert ids["a"] not in allows(mask)

        for handle in (2, 3):
            await open_one(handle, "[ab] = 123456[ef]")
        feed(2, ids["a"])
        [alone] = await masks.get()
        assert alone.forced
        feed(3, ids["a"], alone.forced[0])
        [mask] = await masks.get()
        assert (mask.position, mask.forced) == (1, alone.forced)
        assert allows(mask) == {ids["e"], ids["f"]}
        assert failed.empty()


def allows(mask: Mask) -> set[int]:
    """Return the ids that may follow the forced ids."""
    bits = mask.bits
    assert bits is not None
    return {i for i in range(8 * len(bits)) if bits[i >> 3] >> (i & 7) & 1}
