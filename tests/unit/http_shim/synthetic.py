"""Synthetic events of completions and chats, in place of the tokenizer service's."""

import json
import math
from collections.abc import Sequence
from typing import Any

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.custom_tools import CustomInput
from services.http_shim.dialects.writer import Writer
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.http.exchange import Exchange
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

ACCEPTED = completion_pb2.Accepted(
    model="m", system_fingerprint="fp", prompts=[types_pb2.TokenIds(ids=[7, 8])], seed=1
)
USAGE = types_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)


def delta(
    text: str,
    ids: Sequence[int] = (),
    *,
    index: int = 0,
    logprobs: Sequence[float] = (),
    texts: Sequence[str] = (),
    offsets: Sequence[int] = (),
    top: Sequence[Sequence[tuple[int, str, float]]] = (),
    is_prompt: bool = False,
) -> completion_pb2.ChoiceDelta:
    """Return a delta; `top` has a row of (id, text, logprob) for each token."""
    columns = types_pb2.TokenColumns(
        ids=ids,
        logprobs=logprobs,
        top_width=len(top[0]) if top else 0,
        top_ids=[candidate[0] for row in top for candidate in row],
        top_logprobs=[candidate[2] for row in top for candidate in row],
    )
    return completion_pb2.ChoiceDelta(
        index=index,
        text=text,
        token_ids=ids,
        tokens=columns if logprobs else None,
        token_texts=texts,
        text_offsets=offsets,
        top_texts=[candidate[1] for row in top for candidate in row],
        is_prompt=is_prompt,
    )


def chat_delta(
    content: str = "",
    ids: Sequence[int] = (),
    *,
    index: int = 0,
    reasoning: str = "",
    calls: Sequence[completion_pb2.ToolCallDelta] = (),
    scored: Sequence[tuple[int, bytes, float]] = (),
    top: Sequence[Sequence[tuple[int, bytes, float]]] = (),
) -> completion_pb2.ChoiceDelta:
    """Return a delta.

    scored: (id, bytes, logprob) of each token of the content.
    top: a row of candidates in the same form for each token.
    """
    candidates = [candidate for row in top for candidate in row]
    return completion_pb2.ChoiceDelta(
        index=index,
        text=content,
        reasoning=reasoning,
        tool_calls=calls,
        tokens=types_pb2.TokenColumns(
            ids=[token for token, _, _ in scored],
            logprobs=[logprob for _, _, logprob in scored],
            top_width=len(top[0]) if top else 0,
            top_ids=[token for token, _, _ in candidates],
            top_logprobs=[logprob for _, _, logprob in candidates],
        ),
        token_bytes=[data for _, data, _ in scored],
        top_bytes=[data for _, data, _ in candidates],
        token_ids=ids,
    )


def input_of(arguments: str) -> str:
    """Return the input of a call of a custom tool with these arguments."""
    reader = CustomInput()
    return reader.feed(arguments) + reader.finish()


def call_delta(
    index: int = 0, *, identity: str = "", name: str = "", arguments: str = ""
) -> completion_pb2.ToolCallDelta:
    return completion_pb2.ToolCallDelta(
        index=index, id=identity, name=name, arguments_json=arguments
    )


def finished(
    index: int = 0,
    *,
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_LENGTH,
    tokens: int = 3,
    match: types_pb2.StopMatch | None = None,
) -> completion_pb2.ChoiceFinished:
    return completion_pb2.ChoiceFinished(
        index=index, reason=reason, completion_tokens=tokens, match=match
    )


def feed(
    collector: OutputCollector,
    *events: completion_pb2.ChoiceDelta
    | completion_pb2.ChoiceFinished
    | completion_pb2.Accepted
    | types_pb2.Usage,
) -> None:
    """Feed events as a Session does; Usage stands for the terminal event."""
    for event in events:
        response = completion_pb2.GenerateResponse()
        match event:
            case completion_pb2.ChoiceDelta():
                response.delta.CopyFrom(event)
            case completion_pb2.ChoiceFinished():
                response.finished.CopyFrom(event)
            case completion_pb2.Accepted():
                response.accepted.CopyFrom(event)
            case types_pb2.Usage():
                response.completed.usage.CopyFrom(event)
        collector.on_event(completion_pb2.SessionEvent(handle=1, response=response))


def stream_of(writer: Writer) -> tuple[OutputCollector, EventStream]:
    """Return an accepted request, and the stream of its answer."""
    collector = OutputCollector()
    feed(collector, ACCEPTED)
    events = writer.events(ACCEPTED, "req_1")
    return collector, EventStream(collector, events, exchange(), str)


def whole_of(
    writer: Writer,
    *events: completion_pb2.ChoiceDelta | completion_pb2.ChoiceFinished,
    usage: types_pb2.Usage = USAGE,
) -> Any:
    """Return the complete answer to a request with these events."""
    collector = OutputCollector()
    feed(collector, ACCEPTED, *events, usage)
    return json.loads(writer.whole(collector))


def exchange() -> Exchange:
    return Exchange(request_id="req_1", began=0.0)


NAN = math.nan
