"""Message of one choice of a chat: parts of a message from generated text."""

import secrets
import string
from collections.abc import Callable, Collection, Iterable

from services.tokenizer.chat.answer.content_tokens import ContentTokens
from services.tokenizer.chat.answer.message_parser import MessageParser, Segment, SegmentKind
from services.tokenizer.chat.answer.reasoning_tokens import ReasoningTokens
from services.tokenizer.completion.choice import ChoiceOutput, Outcome, SkippedOutput
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatMessage"]

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


class ChatMessage:
    """Writer of a choice's output as parts of a message."""

    def __init__(
        self,
        parser: MessageParser,
        tokens: ContentTokens | None,
        reasoning: ReasoningTokens,
        *,
        turn_ends: Collection[int],
        single_call: bool,
        is_forced: bool,
        echo: str = "",
    ) -> None:
        """parser: parser of the generated text.

        tokens: scored tokens of the content; None unless the client wants logprobs.
        reasoning: counter of the tokens of reasoning.
        turn_ends: ids that end a turn, reported as EOS unless the request named them.
        single_call: whether calls after the first are dropped.
        is_forced: whether the request named the tool to call.
        echo: text in front of the content.
        """
        self._turn_ends = turn_ends
        self._parser = parser
        self._tokens = tokens
        self._reasoning = reasoning
        self._single_call = single_call
        self._is_forced = is_forced
        self._echo = echo
        self._calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._reasoning.count

    def write(
        self, output: ChoiceOutput, add: Callable[[], completion_pb2.GenerateResponse]
    ) -> None:
        """Write new tokens of the choice, or its end, or both, as responses from `add`."""
        self._skip(output.skipped)
        if self._echo:
            delta = completion_pb2.ChoiceDelta(index=output.index, text=self._echo)
            add().delta.CopyFrom(delta)
            self._echo = ""
        segments: list[Segment] = []
        answer = add().delta if output.has_tokens else completion_pb2.ChoiceDelta()
        answer.index, answer.position = output.index, output.position
        if output.has_tokens:
            answer.token_ids.extend(output.columns.ids)
            segments.extend(self._parser.feed(output.text))
            self._reasoning.extend(output.text, output.columns.ids)
            if self._tokens is not None:
                self._tokens.extend(output.text, output.columns)
        outcome = output.outcome
        if outcome is not None:
            is_stopped = outcome.match is not None and outcome.match.HasField("stop_string")
            is_cut = outcome.reason != types_pb2.FINISH_REASON_STOP
            segments.extend(self._parser.finish(is_cut=is_cut, is_stopped=is_stopped))
            if not output.has_tokens:
                answer.position = outcome.completion_tokens
        self._write(answer, segments)
        if self._tokens is not None:
            self._tokens.write(answer)
        if not output.has_tokens and any(segment.text for segment in segments):
            add().delta.CopyFrom(answer)
        if outcome is not None:
            self._write_end(output.index, outcome, add().finished)

    def _skip(self, skipped: SkippedOutput) -> None:
        """Parse output that the client has received before, and write nothing."""
        if not skipped.text and not skipped.columns.ids:
            return
        segments = self._parser.feed(skipped.text)
        self._reasoning.extend(skipped.text, skipped.columns.ids)
        if self._tokens is not None:
            self._tokens.extend(skipped.text, skipped.columns)
        unsent = completion_pb2.ChoiceDelta()
        self._write(unsent, segments)
        if self._tokens is not None:
            self._tokens.write(unsent)

    def _write_end(
        self, index: int, outcome: Outcome, event: completion_pb2.ChoiceFinished
    ) -> None:
        outcome.write(index, event)
        if outcome.reason == types_pb2.FINISH_REASON_STOP and self._calls and not self._is_forced:
            event.reason = types_pb2.FINISH_REASON_TOOL_CALLS
        if event.match.WhichOneof("match") == "stop_token_id" and (
            event.match.stop_token_id in self._turn_ends
        ):
            event.match.eos_token_id = event.match.stop_token_id

    def _write(self, answer: completion_pb2.ChoiceDelta, segments: Iterable[Segment]) -> None:
        for segment in segments:
            kind = segment.kind
            self._reasoning.settle(segment.source, is_reasoning=kind is SegmentKind.REASONING)
            if self._tokens is not None:
                self._tokens.settle(segment.source, is_content=kind is SegmentKind.CONTENT)
            if kind is SegmentKind.CONTENT:
                answer.text += segment.text
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

    def _write_arguments(self, answer: completion_pb2.ChoiceDelta, text: str) -> None:
        index = self._calls - 1
        if not answer.tool_calls or answer.tool_calls[-1].index != index:
            answer.tool_calls.add(index=index)
        answer.tool_calls[-1].arguments_json += text


def _new_id() -> str:
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
