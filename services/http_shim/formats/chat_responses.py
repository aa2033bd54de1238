"""JSON of chat answers, made of the events of a chat."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.formats.request_bodies import ChatBody
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    PromptLogprobs,
    finish_reason_of,
    finite,
    matched_stop_of,
    stop_reason_of,
)
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


class AnswerCall(Struct):
    """A tool call."""

    id: str
    type: str
    function: AnswerFunction


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


class CallDelta(Struct):
    """A part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


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
class ChatFormatter(ChoiceFormatter[completion_pb2.ChatDelta]):
    """Formatter of a chat's choices."""

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
        )

    def tokens_in(self, deltas: Sequence[completion_pb2.ChatDelta]) -> int:
        return sum([len(delta.token_ids) for delta in deltas])

    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChatDelta],
        finished: completion_pb2.ChoiceFinished,
        prompt: types_pb2.TokenIds,
    ) -> ChatChoice:
        content = "".join([delta.content for delta in deltas]) or None
        calls = _calls(deltas)
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
        deltas: Sequence[completion_pb2.ChatDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[ChatChunkChoice]:
        chunks = [ChatChunkChoice(index, delta) for delta in _message_deltas(deltas)]
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
        deltas: Sequence[completion_pb2.ChatDelta],
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


def _message_deltas(deltas: Sequence[completion_pb2.ChatDelta]) -> Iterator[MessageDelta]:
    """Merge the deltas of a choice; the start and the arguments of a call stay apart."""
    if reasoning := "".join([delta.reasoning for delta in deltas]):
        yield MessageDelta(reasoning=reasoning, reasoning_content=reasoning)
    if content := "".join([delta.content for delta in deltas]):
        yield MessageDelta(content=content)
    for call in _call_deltas(deltas):
        yield MessageDelta(tool_calls=[call])


def _call_deltas(deltas: Iterable[completion_pb2.ChatDelta]) -> Iterator[CallDelta]:
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.id:
            yield CallDelta(call.index, call.id, "function", FunctionDelta(call.name))
        if call.arguments_json:
            yield CallDelta(call.index, function=FunctionDelta(arguments=call.arguments_json))


def _calls(deltas: Iterable[completion_pb2.ChatDelta]) -> list[AnswerCall]:
    calls: dict[int, AnswerCall] = {}
    for part in (call for delta in deltas for call in delta.tool_calls):
        if part.index not in calls:
            calls[part.index] = AnswerCall(part.id, "function", AnswerFunction(part.name, ""))
        calls[part.index].function.arguments += part.arguments_json
    return [calls[index] for index in sorted(calls)]


def _token_ids(deltas: Iterable[completion_pb2.ChatDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def _logprobs(deltas: Iterable[completion_pb2.ChatDelta], as_ids: bool) -> ChatLogprobs:
    return ChatLogprobs(logprobs_of(deltas, as_ids=as_ids))


def logprobs_of(
    deltas: Iterable[completion_pb2.ChatDelta], *, as_ids: bool = False
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
