"""Resumption: a request goes on behind what its client has received, on any tokenizer service."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from services.http_shim.backends.output_collector import OutputCollector
from tests.services.tokenizer.completion_client import make_request
from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.session import CompletionSession, completion_session

SAMPLED = types.SamplingParams(temperature=0.9, seed=11)
FREE = types.StoppingParams(max_tokens=24, ignore_eos=True)
JSON = types.GrammarSpec(regex="([a-z]{3}[0-9 ]{2},){20}")
TOOL = completion.Tool(
    name="add",
    parameters_json='{"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}, '
    '"b": {"type": "integer", "maximum": 999}}, "required": ["a", "b"], '
    '"additionalProperties": false}',
)
ASK = completion.Message(
    role=completion.ROLE_USER, parts=[completion.ContentPart(text="Say hello, and go on.")]
)


def complete(text: str = "def add(a, b):", **fields: Any) -> completion.GenerateRequest:
    fields = {"sampling": SAMPLED, "stopping": FREE, **fields}
    return make_request(text, **fields)


def chat(**fields: Any) -> completion.GenerateRequest:
    fields = {"sampling": SAMPLED, "stopping": FREE, **fields}
    return completion.GenerateRequest(
        conversation=completion.Conversation(messages=[ASK]), **fields
    )


MIROSTAT = types.SamplingParams(seed=5, mirostat=types.MirostatParams(target_perplexity=16))
PENALISED = types.SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.5)
REQUESTS: dict[str, completion.GenerateRequest] = {
    "text": complete(),
    "logprobs": complete(logprobs=2),
    "echo with logprobs": complete(echo=True, logprobs=1),
    "echo without": complete(echo=True),
    "prompt logprobs": complete(prompt_logprobs=1),
    "choices": complete(n=3),
    "two prompts": completion.GenerateRequest(
        prompts=completion.Prompts(
            items=[completion.Prompt(text="import"), completion.Prompt(text="class A")]
        ),
        sampling=SAMPLED,
        stopping=FREE,
        n=2,
    ),
    "whole choices": complete(n=3, delivery=completion.DELIVERY_WHOLE),
    "stop strings": complete(stop=["\n\n\n", "return None"], logprobs=0),
    "suffix": complete(suffix="\n    return c\n"),
    "mirostat": complete(sampling=MIROSTAT),
    "beams": complete(
        n=3, sampling=types.SamplingParams(seed=5), beam_search=types.BeamSearch(length_penalty=2)
    ),
    "penalties": complete(sampling=PENALISED),
    "grammar": complete(grammar=JSON, stopping=types.StoppingParams(max_tokens=24)),
    "chat": chat(),
    "chat with logprobs": chat(logprobs=2),
    "chat with tools at hand": chat(tools=[TOOL], logprobs=0),
    "required call": chat(
        tools=[TOOL],
        tool_choice=completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED),
        stopping=types.StoppingParams(max_tokens=60),
    ),
}


@dataclass(slots=True)
class Got:
    """All that a client has of an answer, by choice."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    scored: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    token_texts: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    prompt_tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)

    def take(self, event: completion.SessionEvent) -> None:
        response = event.response
        kind = response.WhichOneof("event")
        if kind == "delta":
            self._take_delta(response.delta)
        elif kind == "prompt_logprobs":
            self.prompt_tokens[response.prompt_logprobs.prompt] += (
                response.prompt_logprobs.tokens.ids
            )
        elif kind == "finished":
            end = response.finished
            assert end.index not in self.finished
            self.finished[end.index] = (end.reason, end.completion_tokens, str(end.match))
        elif kind == "completed":
            usage = response.completed.usage
            self.usage = (usage.prompt_tokens, usage.completion_tokens)

    def _take_delta(self, delta: completion.ChoiceDelta) -> None:
        self.texts[delta.index] += delta.text
        self.ids[delta.index] += delta.token_ids
        self.scored[delta.index] += delta.tokens.ids
        self.token_texts[delta.index] += delta.token_texts
        self.offsets[delta.index] += delta.text_offsets
        for call in delta.tool_calls:
            self.calls[delta.index] += call.name + call.arguments_json


class Recorder:
    """Listener that keeps the events of a request, as its client gets them."""

    def __init__(self) -> None:
        self.events: list[completion.SessionEvent] = []
        self._collector: OutputCollector = OutputCollector()

    def on_event(self, event: completion.SessionEvent) -> None:
        self.events.append(event)
        self._collector.on_event(event)

    def on_error(self, error: ServiceError) -> None:
        self._collector.on_error(error)

    async def completed(self) -> Sequence[completion.SessionEvent]:
        await self._collector.completed()
        return self.events


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def session(stack: Stack) -> AsyncIterator[CompletionSession]:
    async with connect(stack.tokenizer) as channel:
        session = completion_session(channel)
        yield session
        await session.close()


async def events_of(
    session: CompletionSession, request: completion.GenerateRequest
) -> Sequence[completion.SessionEvent]:
    recorder = Recorder()
    handle = session.open(recorder)
    command = completion.SessionCommand(handle=handle)
    command.start.request.CopyFrom(request)
    session.send(command)
    return await recorder.completed()


def ends_with_its_choice(events: Sequence[completion.SessionEvent], place: int) -> bool:
    """Return whether the event comes in one message with the end of its choice."""
    inner = [event.response for event in events[place : place + 2]]
    return len(inner) == 2 and inner[0].HasField("delta") and inner[1].HasField("finished")


@pytest.mark.parametrize("name", REQUESTS)
async def test_request_continues_behind_what_arrived(session: CompletionSession, name: str) -> None:
    """A client would get text twice, or miss some, after the loss of a tokenizer service."""
    request = REQUESTS[name]
    events = await events_of(session, request)
    whole = Got()
    for event in events:
        whole.take(event)
    places = [i for i in range(len(events) - 1) if not ends_with_its_choice(events, i)]
    for place in places[:: max(1, len(places) // 4)]:
        received: OutputCollector = OutputCollector()
        got = Got()
        for event in events[: place + 1]:
            received.on_event(event)
            got.take(event)
        resumed = completion.GenerateRequest()
        resumed.CopyFrom(request)
        resumed.resume.CopyFrom(received.received.resumption())
        for event in await events_of(session, resumed):
            got.take(event)
        assert got == whole, f"after event {place} of {len(events)}"


@pytest.mark.parametrize(
    ("field", "resume"),
    [
        ("resume.choices[0].index", [completion.ResumedChoice(index=1)]),
        ("resume.choices[1].index", [completion.ResumedChoice(), completion.ResumedChoice()]),
        (
            "resume.choices[0].generated.ids[1]",
            [completion.ResumedChoice(generated=types.TokenIds(ids=[5, 2**31]))],
        ),
        (
            "resume.choices[0].generated.ids",
            [completion.ResumedChoice(generated=types.TokenIds(ids=[5] * 100_000))],
        ),
        (
            "resume.choices[0].completion_tokens",
            [completion.ResumedChoice(completion_tokens=2**31)],
        ),
    ],
)
async def test_impossible_resumption_is_refused(
    session: CompletionSession, field: str, resume: list[completion.ResumedChoice]
) -> None:
    request = complete(resume=completion.Resumption(choices=resume))
    with pytest.raises(ServiceError) as refused:
        await events_of(session, request)
    assert refused.value.field == field


async def test_resumption_needs_the_seed_and_no_best_of(session: CompletionSession) -> None:
    """Another seed would continue with other tokens."""
    resume = completion.Resumption(choices=[completion.ResumedChoice()])
    with pytest.raises(ServiceError) as refused:
        await events_of(session, complete(sampling=types.SamplingParams(), resume=resume))
    assert refused.value.field == "sampling.seed"
    ranked = complete(best_of=3, delivery=completion.DELIVERY_WHOLE, resume=resume)
    with pytest.raises(ServiceError) as refused:
        await events_of(session, ranked)
    assert refused.value.field == "resume"


async def test_ids_that_the_model_does_not_generate_are_refused(session: CompletionSession) -> None:
    """Ids alone do not restore Mirostat, so the model generates them again."""
    choice = completion.ResumedChoice(generated=types.TokenIds(ids=[300, 300, 300]))
    resume = completion.Resumption(choices=[choice])
    with pytest.raises(ServiceError) as refused:
        await events_of(session, complete(sampling=MIROSTAT, resume=resume))
    assert (refused.value.field, refused.value.reason) == ("resume.choices", "OTHER_TOKENS")


async def test_ids_that_the_grammar_forbids_are_refused(session: CompletionSession) -> None:
    choice = completion.ResumedChoice(generated=types.TokenIds(ids=[300]))
    stopping = types.StoppingParams(max_tokens=24)
    resume = completion.Resumption(choices=[choice])
    with pytest.raises(ServiceError) as refused:
        await events_of(session, complete(grammar=JSON, stopping=stopping, resume=resume))
    assert refused.value.field == "resume.choices"
