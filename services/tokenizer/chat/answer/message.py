"""The message that one choice of a chat becomes: generated text in, its parts out."""

import secrets
import string
from collections.abc import Callable, Collection, Iterable

from services.tokenizer.chat.answer.content_tokens import ContentTokens
from services.tokenizer.chat.answer.message_parser import MessageParser, Segment, SegmentKind
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatMessage"]

AddResponse = Callable[[], completion_pb2.ChatResponse]
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


class ChatMessage:
    """Turns the events of a choice into those of a message."""

    def __init__(
        self,
        parser: MessageParser,
        tokens: ContentTokens | None,
        *,
        turn_ends: Collection[int],
        single_call: bool,
        is_forced: bool,
        echo: str = "",
    ) -> None:
        """`tokens` where logprobs are wanted; `turn_ends` are ids that end a choice though the
        request named none of them; `single_call` drops the calls after the first; `is_forced` says
        that the request named the tool to call; `echo` stands in front of the content."""
        self._turn_ends = turn_ends
        self._parser = parser
        self._tokens = tokens
        self._single_call = single_call
        self._is_forced = is_forced
        self._echo = echo
        self._calls = 0

    def write(
        self,
        delta: completion_pb2.ChoiceDelta | None,
        finished: completion_pb2.ChoiceFinished | None,
        add: AddResponse,
    ) -> None:
        """Further text of the choice, or its end, or both."""
        if self._echo and (event := delta or finished) is not None:
            add().delta.CopyFrom(completion_pb2.ChatDelta(index=event.index, content=self._echo))
            self._echo = ""
        segments: list[Segment] = []
        answer = completion_pb2.ChatDelta() if delta is None else add().delta
        if delta is not None:
            answer.index, answer.position = delta.index, delta.position
            answer.token_ids.extend(delta.tokens.ids)
            segments.extend(self._parser.feed(delta.text))
            if self._tokens is not None:
                self._tokens.extend(delta)
        if finished is not None:
            is_cut = finished.reason != types_pb2.FINISH_REASON_STOP
            is_stopped = finished.match.HasField("stop_string")
            segments.extend(self._parser.finish(is_cut=is_cut, is_stopped=is_stopped))
            if delta is None:
                answer.index, answer.position = finished.index, finished.completion_tokens
        self._write(answer, segments)
        if self._tokens is not None:
            self._tokens.write(answer)
        if delta is None and any(segment.text for segment in segments):
            add().delta.CopyFrom(answer)
        if finished is not None:
            self._write_end(add().finished, finished)

    def _write_end(
        self, event: completion_pb2.ChoiceFinished, finished: completion_pb2.ChoiceFinished
    ) -> None:
        event.CopyFrom(finished)
        if finished.reason == types_pb2.FINISH_REASON_STOP and self._calls and not self._is_forced:
            event.reason = types_pb2.FINISH_REASON_TOOL_CALLS
        if event.match.WhichOneof("match") == "stop_token_id" and (
            event.match.stop_token_id in self._turn_ends
        ):
            event.match.eos_token_id = event.match.stop_token_id

    def _write(self, answer: completion_pb2.ChatDelta, segments: Iterable[Segment]) -> None:
        for segment in segments:
            kind = segment.kind
            if self._tokens is not None:
                self._tokens.settle(segment.source, is_content=kind is SegmentKind.CONTENT)
            if kind is SegmentKind.CONTENT:
                answer.content += segment.text
            elif kind is SegmentKind.REASONING:
                answer.reasoning += segment.text
            elif kind is SegmentKind.CALL:
                self._calls += 1
                if not self._drops_call:
                    call = answer.tool_calls.add(index=self._calls - 1)
                    call.id, call.name = _new_id(), segment.text
            elif kind is SegmentKind.ARGUMENTS and not self._drops_call:
                self._write_arguments(answer, segment.text)

    @property
    def _drops_call(self) -> bool:
        return self._single_call and self._calls > 1

    def _write_arguments(self, answer: completion_pb2.ChatDelta, text: str) -> None:
        index = self._calls - 1
        if not answer.tool_calls or answer.tool_calls[-1].index != index:
            answer.tool_calls.add(index=index)
        answer.tool_calls[-1].arguments_json += text


def _new_id() -> str:
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
