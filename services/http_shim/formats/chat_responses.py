"""JSON of chat answers, made of the events of a chat."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.formats.custom_tools import CustomInput, input_of
from services.http_shim.formats.request_bodies import ChatBody
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    PromptLogprobs,
    finish_reason_of,
    finite,
    matched_stop_of,
    stop_reason_of,
)
from services.http_shim.formats.tools import custom_names
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatChoice", "ChatChunkChoice", "ChatFormatter", "ContentLogprob", "logprobs_of"]


class TokenLogprob(Struct):
    """A token and its bytes; `token` escapes bytes that are not a whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of the content, and the likeliest candidates in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """Log probabilities, one entry for each token of the content."""

    content: list[ContentLogprob]
    refusal: None = None


class AnswerFunction(Struct):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerCustomTool(Struct):
    """The called custom tool."""

    name: str
    input: str


class AnswerCall(Struct):
    """A tool call, with the field that its type names."""

    id: str
    type: str
    function: AnswerFunction | UnsetType = UNSET
    custom: AnswerCustomTool | UnsetType = UNSET


class AnswerMessage(Struct):
    """The assistant's message. `reasoning` and `reasoning_content` are the same text."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """The start of a call, with its name, or a further part of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(Struct):
    """The start of a call of a custom tool, with its name, or a further part of its input."""

    name: str | UnsetType = UNSET
    input: str = ""


class CallDelta(Struct):
    """A part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class MessageDelta(Struct):
    """A part of a message; the first part has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A part of a choice in a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatPromptLogprobs(Struct):
    """Scores of the prompt, beside the choices."""

    prompt_logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class ChatFormatter(ChoiceFormatter):
    """Formatter of a chat's choices."""

    custom_tools: Collection[str] = ()
    """Names of the tools whose input is text"""
    _readers: dict[int, "_CallReader"] = field(default_factory=dict)
    """Reader of each choice in a stream"""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    @classmethod
    def of(cls, body: ChatBody) -> Self:
        """Return the formatter that a request asks for."""
        return cls(
            choices_per_prompt=1 if body.n is None else body.n,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
            custom_tools=custom_names(body.tools),
        )

    def tokens_in(self, deltas: Sequence[completion_pb2.ChoiceDelta]) -> int:
        return sum([len(delta.token_ids) for delta in deltas])

    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished,
        prompt: types_pb2.TokenIds,
    ) -> ChatChoice:
        content = "".join([delta.text for delta in deltas]) or None
        calls = _calls(deltas, self.custom_tools)
        choice = ChatChoice(
            index=index,
            message=AnswerMessage("assistant", content),
            logprobs=_logprobs(deltas, self.tokens_as_ids) if self.logprobs else None,
            finish_reason=finish_reason_of(finished),
            stop_reason=stop_reason_of(finished),
            matched_stop=matched_stop_of(finished),
        )
        if reasoning := "".join([delta.reasoning for delta in deltas]):
            choice.message.reasoning = choice.message.reasoning_content = reasoning
        if calls:
            choice.message.tool_calls = calls
        if self.token_ids:
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
        reader = self._readers.setdefault(index, _CallReader(self.custom_tools))
        parts = _message_deltas(deltas, reader, is_last=finished is not None)
        chunks = [ChatChunkChoice(index, delta) for delta in parts]
        self._add_tokens(index, chunks, deltas)
        if prompt is not None and (chunks or finished is not None):
            has_content = bool(chunks) and chunks[0].delta.content is not UNSET
            first = ChatChunkChoice(index, MessageDelta("assistant", "" if has_content else None))
            if self.token_ids:
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
        """Add ids and scores to the first chunk, which is created if necessary."""
        logprobs = _logprobs(deltas, self.tokens_as_ids) if self.logprobs else None
        has_scores = logprobs is not None and bool(logprobs.content)
        token_ids = _token_ids(deltas) if self.token_ids else []
        if not has_scores and not token_ids:
            return
        if not chunks:
            chunks.append(ChatChunkChoice(index, MessageDelta()))
        if has_scores:
            chunks[0].logprobs = logprobs
        if token_ids:
            chunks[0].token_ids = token_ids


class _CallReader:
    """Converts the tool calls of one choice in a stream."""

    def __init__(self, custom_tools: Collection[str]) -> None:
        self._custom_tools = custom_tools
        self._input: CustomInput | None = None
        """Input of the last call, if its tool is custom"""
        self._index = 0
        """Index of the last call"""

    def parts(
        self, deltas: Iterable[completion_pb2.ChoiceDelta], *, is_last: bool
    ) -> Iterator[CallDelta]:
        """Yield the parts of calls; the start of a call, and its arguments, stay apart."""
        for call in (call for delta in deltas for call in delta.tool_calls):
            if call.id:
                yield from self._rest()
                yield self._start(call)
            if call.arguments_json:
                yield from self._arguments(call)
        if is_last:
            yield from self._rest()

    def _start(self, call: completion_pb2.ToolCallDelta) -> CallDelta:
        self._index = call.index
        if call.name in self._custom_tools:
            self._input = CustomInput()
            return CallDelta(call.index, call.id, "custom", custom=CustomDelta(call.name))
        return CallDelta(call.index, call.id, "function", FunctionDelta(call.name))

    def _arguments(self, call: completion_pb2.ToolCallDelta) -> Iterator[CallDelta]:
        if self._input is None:
            yield CallDelta(call.index, function=FunctionDelta(arguments=call.arguments_json))
        elif text := self._input.feed(call.arguments_json):
            yield CallDelta(call.index, custom=CustomDelta(input=text))

    def _rest(self) -> Iterator[CallDelta]:
        """End the last call."""
        if self._input is not None and (text := self._input.finish()):
            yield CallDelta(self._index, custom=CustomDelta(input=text))
        self._input = None


def _message_deltas(
    deltas: Sequence[completion_pb2.ChoiceDelta], reader: _CallReader, *, is_last: bool
) -> Iterator[MessageDelta]:
    """Merge the deltas of a choice, apart from those of calls."""
    if reasoning := "".join([delta.reasoning for delta in deltas]):
        yield MessageDelta(reasoning=reasoning, reasoning_content=reasoning)
    if content := "".join([delta.text for delta in deltas]):
        yield MessageDelta(content=content)
    for call in reader.parts(deltas, is_last=is_last):
        yield MessageDelta(tool_calls=[call])


def _calls(
    deltas: Iterable[completion_pb2.ChoiceDelta], custom_tools: Collection[str]
) -> list[AnswerCall]:
    starts: dict[int, completion_pb2.ToolCallDelta] = {}
    arguments: dict[int, str] = {}
    for part in (call for delta in deltas for call in delta.tool_calls):
        starts.setdefault(part.index, part)
        arguments[part.index] = arguments.get(part.index, "") + part.arguments_json
    return [_call(starts[index], arguments[index], custom_tools) for index in sorted(starts)]


def _call(
    start: completion_pb2.ToolCallDelta, arguments: str, custom_tools: Collection[str]
) -> AnswerCall:
    if start.name in custom_tools:
        tool = AnswerCustomTool(start.name, input_of(arguments))
        return AnswerCall(start.id, "custom", custom=tool)
    return AnswerCall(start.id, "function", AnswerFunction(start.name, arguments))


def _token_ids(deltas: Iterable[completion_pb2.ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def _logprobs(deltas: Iterable[completion_pb2.ChoiceDelta], as_ids: bool) -> ChatLogprobs:
    return ChatLogprobs(logprobs_of(deltas, as_ids=as_ids))


def logprobs_of(
    deltas: Iterable[completion_pb2.ChoiceDelta], *, as_ids: bool = False
) -> list[ContentLogprob]:
    """Return an entry for each token of the content. as_ids: show ids in place of texts."""
    content: list[ContentLogprob] = []
    for delta in deltas:
        columns, width = delta.tokens, delta.tokens.top_width
        tops = [
            _token(token, logprob, data, as_ids)
            for token, logprob, data in zip(
                columns.top_ids, columns.top_logprobs, delta.top_bytes, strict=True
            )
        ]
        for i, (token, logprob, data) in enumerate(
            zip(columns.ids, columns.logprobs, delta.token_bytes, strict=True)
        ):
            entry = _token(token, logprob, data, as_ids)
            top = tops[i * width : (i + 1) * width]
            content.append(ContentLogprob(entry.token, entry.logprob, entry.bytes, top))
    return content


def _token(token: int, logprob: float, data: bytes, as_ids: bool) -> TokenLogprob:
    text = f"token_id:{token}" if as_ids else data.decode("utf-8", "backslashreplace")
    return TokenLogprob(text, finite(logprob), list(data))
