"""Client of the tokenizer service in tests: requests, and answers joined from their events."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.services.listener import Listener
from tests.stack import is_idle, watch_load
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.session import CompletionSession

if TYPE_CHECKING:
    from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceAsyncStub
    from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

PROMPT = 'def add(a, b):\n    """Return the sum'
GREEDY = types.SamplingParams(temperature=0)


@dataclass(slots=True)
class Answer:
    """Answer to one completion, joined from its events."""

    accepted: completion.Accepted = field(default_factory=completion.Accepted)
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    token_texts: dict[int, list[str]] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, completion.ChoiceFinished] = field(default_factory=dict)
    usage: types.Usage | None = None
    deltas: int = 0
    prompt_logprobs: list[completion.PromptLogprobs] = field(default_factory=list)

    def take(self, response: completion.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        if kind == "accepted":
            self.accepted = response.accepted
        elif kind == "delta":
            delta = response.delta
            self.deltas += 1
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.index, []).extend(delta.tokens.logprobs)
            self.token_texts.setdefault(delta.index, []).extend(delta.token_texts)
            self.offsets.setdefault(delta.index, []).extend(delta.text_offsets)
        elif kind == "prompt_logprobs":
            self.prompt_logprobs.append(response.prompt_logprobs)
        elif kind == "finished":
            self.finished[response.finished.index] = response.finished
        elif kind == "completed":
            self.usage = response.completed.usage


@dataclass(frozen=True, slots=True)
class Services:
    completions: "CompletionServiceAsyncStub"
    tokenizer: "TokenizerServiceAsyncStub"
    target: str
    """host:port of the tokenizer service"""
    engine: str
    """host:port of the engine"""
    session: CompletionSession

    async def complete(self, *prompts: str | list[int], **fields: object) -> Answer:
        answer = Answer()
        async for response in self.completions.Generate(make_request(*prompts, **fields)):
            answer.take(response)
        return answer

    def start(
        self, request: completion.GenerateRequest, **fields: object
    ) -> tuple[int, Listener[Answer]]:
        """Start a completion on the session; return its handle, and the listener to its events."""
        events = Listener(Answer())
        handle = self.session.open(events)
        begin = completion.SessionStart(request=request, **fields)  # type: ignore[arg-type]
        self.session.send(completion.SessionCommand(handle=handle, start=begin))
        return handle, events

    async def refused(self, *prompts: str | list[int], **fields: object) -> ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.complete(*prompts, **fields)
        return ServiceError.from_rpc_error(caught.value)

    async def idle(self) -> None:
        """Wait until the engine runs nothing."""
        await watch_load(self.engine, until=is_idle)


async def completed(call: AsyncIterable[completion.GenerateResponse]) -> Answer:
    answer = Answer()
    async for response in call:
        answer.take(response)
    return answer


def make_request(*prompts: str | list[int], **fields: object) -> completion.GenerateRequest:
    """Return a request; fields of the prompts, such as `suffix`, stand among the others."""
    of_prompts = {name: fields.pop(name) for name in ("suffix", "images") if name in fields}
    request = completion.GenerateRequest(
        prompts=completion.Prompts(**of_prompts),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )
    for prompt in prompts:
        if isinstance(prompt, str):
            request.prompts.items.add(text=prompt)
        else:
            request.prompts.items.add(token_ids=types.TokenIds(ids=prompt))
    return request


def tokens(count: int, **fields: object) -> types.StoppingParams:
    return types.StoppingParams(max_tokens=count, **fields)  # type: ignore[arg-type]


def endless() -> types.StoppingParams:
    return tokens(1_500, ignore_eos=True)
