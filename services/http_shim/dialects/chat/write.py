"""Writing of chats: choices of the events of a request."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import UNSET, Struct

from services.http_shim.dialects.chat.types import (
    AnswerCall,
    AnswerCustomTool,
    AnswerFunction,
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatPromptLogprobs,
    CustomDelta,
    FunctionDelta,
    MessageDelta,
)
from services.http_shim.dialects.choices import (
    AnswerOptions,
    ChoicesWriter,
    PromptLogprobs,
    finish_reason_of,
    matched_stop_of,
    stop_reason_of,
)
from services.http_shim.dialects.content_logprobs import logprobs_of
from services.http_shim.dialects.parts import (
    Change,
    Part,
    PartAssembler,
    PartKind,
    Step,
    parts_of,
)
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatWriter"]


class ChatWriter(ChoicesWriter):
    """Writer of a chat's choices."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    def __init__(self, options: AnswerOptions, custom_tools: Collection[str] = ()) -> None:
        """custom_tools: names of the tools whose input is text."""
        super().__init__(options)
        self._custom_tools = custom_tools
        self._assemblers: dict[int, PartAssembler] = {}
        """Assembler of each choice of a stream"""

    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished,
        prompt: types_pb2.TokenIds,
    ) -> ChatChoice:
        parts = parts_of(deltas, self._custom_tools)
        choice = ChatChoice(
            index=index,
            message=AnswerMessage("assistant", _text(parts, PartKind.TEXT) or None),
            logprobs=self._logprobs(deltas) if self.options.logprobs else None,
            finish_reason=finish_reason_of(finished),
            stop_reason=stop_reason_of(finished),
            matched_stop=matched_stop_of(finished),
        )
        if reasoning := _text(parts, PartKind.REASONING):
            choice.message.reasoning = choice.message.reasoning_content = reasoning
        if calls := [_call(part) for part in parts if _is_call(part)]:
            choice.message.tool_calls = calls
        if self.options.token_ids:
            choice.prompt_token_ids = list(prompt.ids)
            choice.token_ids = _token_ids(deltas)
        return choice

    def add_prompt_logprobs(
        self, choices: Sequence[Struct], prompts: Sequence[PromptLogprobs]
    ) -> ChatPromptLogprobs:
        [prompt] = prompts
        return ChatPromptLogprobs(prompt)

    def chunks(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[ChatChunkChoice]:
        assembler = self._assemblers.get(index)
        if assembler is None:
            assembler = PartAssembler(self._custom_tools, keeps_text=False)
            self._assemblers[index] = assembler
        changes = assembler.add(deltas)
        if finished is not None:
            changes += assembler.close()
        chunks = [ChatChunkChoice(index, delta) for delta in _message_deltas(changes)]
        self._add_tokens(index, chunks, deltas)
        if prompt is not None and (chunks or finished is not None):
            has_content = bool(chunks) and chunks[0].delta.content is not UNSET
            first = ChatChunkChoice(index, MessageDelta("assistant", "" if has_content else None))
            if self.options.token_ids:
                first.prompt_token_ids = list(prompt.ids)
            chunks.insert(0, first)
        if finished is not None:
            last = ChatChunkChoice(index, MessageDelta())
            last.finish_reason = finish_reason_of(finished)
            last.stop_reason = stop_reason_of(finished)
            last.matched_stop = matched_stop_of(finished)
            chunks.append(last)
        return chunks

    def _add_tokens(
        self,
        index: int,
        chunks: list[ChatChunkChoice],
        deltas: Sequence[completion_pb2.ChoiceDelta],
    ) -> None:
        """Add ids to the first chunk, and scores to the first one with content.

        A chunk is created if there is none.
        """
        logprobs = self._logprobs(deltas) if self.options.logprobs else None
        has_scores = logprobs is not None and bool(logprobs.content)
        token_ids = _token_ids(deltas) if self.options.token_ids else []
        if not has_scores and not token_ids:
            return
        if not chunks:
            chunks.append(ChatChunkChoice(index, MessageDelta()))
        if has_scores:
            has_content = (each for each in chunks if each.delta.content is not UNSET)
            next(has_content, chunks[0]).logprobs = logprobs
        if token_ids:
            chunks[0].token_ids = token_ids

    def _logprobs(self, deltas: Iterable[completion_pb2.ChoiceDelta]) -> ChatLogprobs:
        return ChatLogprobs(logprobs_of(deltas, as_ids=self.options.tokens_as_ids))


def _message_deltas(changes: Iterable[Change]) -> Iterator[MessageDelta]:
    """Yield the parts of a message; the start of a call and its arguments stay apart."""
    for change in changes:
        part = change.part
        if change.step is Step.OPENED and _is_call(part):
            yield MessageDelta(tool_calls=[_call_start(part)])
        elif change.step is Step.GROWN:
            text = change.text
            if part.kind is PartKind.TEXT:
                yield MessageDelta(content=text)
            elif part.kind is PartKind.REASONING:
                yield MessageDelta(reasoning=text, reasoning_content=text)
            elif part.kind is PartKind.CALL:
                call = CallDelta(part.index, function=FunctionDelta(arguments=text))
                yield MessageDelta(tool_calls=[call])
            else:
                call = CallDelta(part.index, custom=CustomDelta(input=text))
                yield MessageDelta(tool_calls=[call])


def _call_start(part: Part) -> CallDelta:
    if part.kind is PartKind.CUSTOM_CALL:
        return CallDelta(part.index, part.call_id, "custom", custom=CustomDelta(part.name))
    return CallDelta(part.index, part.call_id, "function", FunctionDelta(part.name))


def _text(parts: Iterable[Part], kind: PartKind) -> str:
    return "".join([part.text for part in parts if part.kind is kind])


def _is_call(part: Part) -> bool:
    return part.kind in (PartKind.CALL, PartKind.CUSTOM_CALL)


def _call(part: Part) -> AnswerCall:
    if part.kind is PartKind.CUSTOM_CALL:
        return AnswerCall(part.call_id, "custom", custom=AnswerCustomTool(part.name, part.text))
    return AnswerCall(part.call_id, "function", AnswerFunction(part.name, part.text))


def _token_ids(deltas: Iterable[completion_pb2.ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
