"""Engine client of the tests: request builders, and a Session that sends commands one by one."""

from collections.abc import Sequence

import grpc
import pytest

from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SessionCommand,
    SessionEvent,
    SessionRequest,
    SessionStart,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import SamplingParams, StoppingParams, TokenIds


def make_request(
    *prompts: Sequence[int],
    n: int | None = None,
    max_tokens: int = 8,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    **fields: object,
) -> GenerateRequest:
    return GenerateRequest(
        prompts=[TokenIds(ids=prompt) for prompt in prompts],
        n=n,
        sampling=SamplingParams(temperature=temperature, seed=7),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        **fields,  # type: ignore[arg-type]
    )


async def generate(
    channel: grpc.aio.Channel, request: GenerateRequest, **metadata: str
) -> list[GenerateResponse]:
    call = EngineServiceStub(channel).Generate(request, metadata=tuple(metadata.items()))
    return [response async for response in call]


def ids_of(responses: Sequence[GenerateResponse | SessionEvent], sequence: int = 0) -> list[int]:
    deltas = [r.delta for r in responses if r.HasField("delta") and r.delta.sequence == sequence]
    return [token for delta in deltas for token in delta.tokens.ids]


async def refused(channel: grpc.aio.Channel, request: GenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(channel, request)
    return ServiceError.from_rpc_error(raised.value)


class SessionClient:
    """A Session on which a test sends commands and waits for events."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = EngineServiceStub(channel).Session()
        self.events: list[SessionEvent] = []
        self._awaited: dict[int, int] = {}
        """Number of events up to and including the last awaited one, by handle"""

    async def send(self, *commands: SessionCommand) -> None:
        await self.call.write(SessionRequest(commands=commands))

    async def until(self, kind: str, handle: int) -> SessionEvent:
        """Return the next event of this kind of one request, also if it was received before."""
        read = self._awaited.get(handle, 0)
        while True:
            while read < len(self.events):
                event = self.events[read]
                read += 1
                if event.handle == handle and event.WhichOneof("event") == kind:
                    self._awaited[handle] = read
                    return event
            await self._read()

    async def until_all_ended(self, *handles: int) -> None:
        """Read events until each request has completed or failed."""
        while not all(
            any(event.HasField("completed") or event.HasField("error") for event in self.of(handle))
            for handle in handles
        ):
            await self._read()

    def of(self, handle: int) -> list[SessionEvent]:
        return [event for event in self.events if event.handle == handle]

    async def _read(self) -> None:
        response = await self.call.read()
        assert isinstance(response, engine_pb2.SessionResponse), "the Session has ended"
        self.events += response.events


def start(handle: int, request: GenerateRequest, credit: int | None = None) -> SessionCommand:
    return SessionCommand(handle=handle, start=SessionStart(request=request, credit=credit))
