"""The asyncio client, at text level and at token level.

    import asyncio
    from tokenwire.client import Client

    async def main() -> None:
        async with Client("127.0.0.1:50051") as client:
            print((await client.complete("def add(a, b):", max_tokens=32)).text)
            print((await client.chat("What is a mutex?", max_tokens=64)).text)

    asyncio.run(main())

Everything that one client generates travels over one stream (a Session of the service), so that a
thousand concurrent requests cost one message per engine step and not a thousand. Requests fail with
ServiceError. Leaving `async with client.stream(...)`, or cancelling the task that waits, cancels
the request down to its KV blocks.
"""

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast

import grpc

from tokenwire.channel import connect
from tokenwire.closing import Closing
from tokenwire.conversation import ChatAnswer, ChatChoice, ChatDelta, Message
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2 import Tool, ToolChoice
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.types.v1.types_pb2 import DryParams, GrammarSpec, MirostatParams
from tokenwire.results import (
    Choice,
    Completion,
    Delta,
    Encoding,
    EngineModel,
    FinishReason,
    Generation,
    Load,
    Model,
    Output,
    Scores,
    TokenDelta,
    Usage,
)
from tokenwire.session import (
    CompletionSession,
    EngineSession,
    Session,
    completion_session,
    engine_session,
)
from tokenwire.stream import RequestStream

__all__ = [
    "ChatOptions",
    "ChatStream",
    "Client",
    "CompleteOptions",
    "CompletionStream",
    "DryParams",
    "EngineClient",
    "GenerateOptions",
    "GenerationStream",
    "GrammarSpec",
    "Message",
    "MirostatParams",
    "Tool",
    "ToolChoice",
]

Prompt = str | Sequence[int]
TextDelta = TypeVar("TextDelta", Delta, ChatDelta)
Made = TypeVar("Made")
Answer = TypeVar("Answer")
AnySession = TypeVar("AnySession", CompletionSession, EngineSession)


class RequestOptions(TypedDict, total=False):
    """What both levels take. Ranges and defaults: protos/tokenwire/types/v1/types.proto."""

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[Sequence[int]]
    dry: DryParams
    mirostat: MirostatParams
    n: int
    logprobs: int
    prompt_logprobs: int
    grammar: GrammarSpec
    request_id: str
    """Named in every service's log"""
    tenant: str
    """Salts the prefix cache"""
    priority: int
    timeout_seconds: float


class TextOptions(RequestOptions, total=False):
    """What completions and chats take: protos/tokenwire/completion/v1."""

    stop: Sequence[str]
    include_stop_string: bool
    context_overflow: completion_pb2.ContextOverflow
    dry_sequence_breakers: Sequence[str]
    no_dry_sequence_breakers: bool
    bad_words: Sequence[str]
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    user: str


class CompleteOptions(TextOptions, total=False):
    """What a completion takes besides its prompt."""

    suffix: str
    best_of: int
    echo: bool
    truncate_prompt: bool


class ChatOptions(TextOptions, total=False):
    """What a chat takes besides its messages."""

    parallel_tool_calls: bool
    template: str
    template_arguments: Mapping[str, Any]
    """Further variables of the template"""
    add_generation_prompt: bool
    continue_last_message: bool
    reasoning_effort: str
    echo: bool


class GenerateOptions(RequestOptions, total=False):
    """What a request at token level takes besides its prompts: protos/tokenwire/engine/v1."""


class _Connection(Closing, Generic[AnySession]):
    """What both clients have: a channel, and the one session on it. `async with` ends them."""

    _channel: grpc.aio.Channel
    _session: AnySession

    async def aclose(self) -> None:
        """Cancel what runs, and disconnect."""
        await self._session.close()
        await self._channel.close()


class Client(_Connection[CompletionSession]):
    """Text in, text out: talks to the tokenizer service at "host:port"."""

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self._channel = connect(target)
        self._session = completion_session(self._channel)
        self._completions = CompletionServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)

    async def complete(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[CompleteOptions]
    ) -> Completion:
        """Complete one prompt or several, each a text or token ids."""
        request = _complete_request(prompt, dict(options), completion_pb2.DELIVERY_WHOLE)
        stream = CompletionStream(self._session, request)
        choices = tuple(Choice.join(deltas) for deltas in await _by_choice(stream))
        accepted, usage = stream.ended
        return Completion(
            accepted.model,
            accepted.system_fingerprint,
            accepted.seed,
            choices,
            usage,
            tuple(accepted.ignored),
            tuple(Scores.join(stream.prompt_scores[i]) for i in range(len(accepted.prompts))),
        )

    def stream(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[CompleteOptions]
    ) -> "CompletionStream":
        """The same as it is generated.

        async with client.stream("def add(a, b):") as stream:
            async for delta in stream:
                print(delta.text, end="")
        """
        request = _complete_request(prompt, dict(options), completion_pb2.DELIVERY_DELTAS)
        return CompletionStream(self._session, request)

    async def chat(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> ChatAnswer:
        """Answer a conversation; a string stands for one message of the user."""
        request = _chat_request(messages, dict(options), completion_pb2.DELIVERY_WHOLE)
        stream = ChatStream(self._session, request)
        choices = tuple(ChatChoice.join(deltas) for deltas in await _by_choice(stream))
        accepted, usage = stream.ended
        return ChatAnswer(
            accepted.model,
            accepted.system_fingerprint,
            accepted.seed,
            choices,
            usage,
            tuple(accepted.ignored),
            Scores.join(stream.prompt_scores[0]),
        )

    def stream_chat(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> "ChatStream":
        """The same as it is generated.

        async with client.stream_chat("What is a mutex?") as stream:
            async for delta in stream:
                print(delta.content, end="")
        """
        request = _chat_request(messages, dict(options), completion_pb2.DELIVERY_DELTAS)
        return ChatStream(self._session, request)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """Token ids of a text."""
        request = _made(
            tokenizer_pb2.EncodeRequest,
            texts=[text],
            add_special_tokens=add_special_tokens,
            with_texts=True,
        )
        answer = await _answer(self._tokenizer.Encode, request)
        return Encoding.read(answer.encodings[0])

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = tokenizer_pb2.DecodeRequest(
            sequences=[_made(types_pb2.TokenIds, "sequences.", ids=ids)],
            skip_special_tokens=skip_special_tokens,
        )
        return (await _answer(self._tokenizer.Decode, request)).decodings[0].text

    async def models(self) -> tuple[Model, ...]:
        """The models that are served."""
        request = completion_pb2.ListModelsRequest()
        answer = await _answer(self._completions.ListModels, request)
        return tuple(Model.read(model) for model in answer.models)


class EngineClient(_Connection[EngineSession]):
    """Token ids in, token ids out: talks to an engine at "host:port"."""

    def __init__(self, target: str = "127.0.0.1:50052") -> None:
        self._channel = connect(target)
        self._session = engine_session(self._channel)
        self._control = EngineControlServiceStub(self._channel)

    async def generate(
        self,
        prompt_ids: Sequence[int] | Sequence[Sequence[int]],
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue one prompt or several."""
        outputs: dict[int, list[TokenDelta]] = defaultdict(list)
        scores: dict[int, list[Scores]] = defaultdict(list)
        async with self.stream(prompt_ids, **options) as stream:
            async for delta in stream:
                if not delta.is_prompt:
                    outputs[delta.sequence].append(delta)
                elif delta.scores is not None:
                    scores[delta.sequence].append(delta.scores)
        assert stream.accepted is not None
        assert stream.usage is not None
        return Generation(
            stream.accepted.sampling.seed,
            tuple(Output.join(outputs[index]) for index in sorted(outputs)),
            tuple(Scores.join(scores[index]) for index in range(stream.prompts)),
            stream.usage,
        )

    def stream(
        self,
        prompt_ids: Sequence[int] | Sequence[Sequence[int]],
        **options: Unpack[GenerateOptions],
    ) -> "GenerationStream":
        """The same as it is generated."""
        start = _generate_start(prompt_ids, dict(options))
        return GenerationStream(self._session, start)

    async def model(self) -> EngineModel:
        """The model, its limits and capabilities."""
        return EngineModel.read(await _answer(self._control.GetModel, engine_pb2.GetModelRequest()))

    async def load(self) -> Load:
        """How busy the engine is."""
        answer = await _answer(self._control.GetLoad, engine_pb2.GetLoadRequest())
        return Load.read(answer.load)


class _TextStream(RequestStream[completion_pb2.SessionEvent, TextDelta]):
    """Deltas of a completion or a chat."""

    accepted: completion_pb2.CompleteAccepted | None = None
    """What was admitted; set before the first delta"""
    prompt_scores: dict[int, list[Scores]]
    """By prompt, with prompt_logprobs: runs of its tokens, from the second one on"""
    _delta: type[TextDelta]

    def __init__(self, session: CompletionSession) -> None:
        super().__init__(session)
        self.prompt_scores = defaultdict(list)

    def _cancel_command(self) -> object:
        cancel = completion_pb2.Cancel()
        return completion_pb2.SessionCommand(handle=self._handle, cancel=cancel)

    def _read(self, event: completion_pb2.SessionEvent) -> TextDelta | None:
        response: Any = event.chat if event.HasField("chat") else event.complete
        match response.WhichOneof("event"):
            case "delta":
                return self._delta.read(response.delta)
            case "finished":
                finished = response.finished
                return self._delta(
                    index=finished.index,
                    position=finished.completion_tokens,
                    finish_reason=FinishReason.read(finished.reason),
                    stop=_matched(finished.match),
                )
            case "prompt_logprobs":
                run = response.prompt_logprobs
                scores = Scores.read(run.tokens, run.token_texts, (), run.top_texts)
                if scores is not None:
                    self.prompt_scores[run.prompt].append(scores)
            case "accepted":
                self.accepted = response.accepted
            case "completed":
                self.usage = Usage.read(response.completed.usage)
        return None

    @property
    def ended(self) -> tuple[completion_pb2.CompleteAccepted, Usage]:
        """What was admitted and what it used, once the iteration has ended."""
        assert self.accepted is not None
        assert self.usage is not None
        return self.accepted, self.usage


class CompletionStream(_TextStream[Delta]):
    """Deltas of a completion."""

    _delta = Delta

    def __init__(self, session: CompletionSession, start: completion_pb2.StartComplete) -> None:
        super().__init__(session)
        session.send(completion_pb2.SessionCommand(handle=self._handle, start_complete=start))


class ChatStream(_TextStream[ChatDelta]):
    """Deltas of a chat."""

    _delta = ChatDelta

    def __init__(self, session: CompletionSession, start: completion_pb2.StartChat) -> None:
        super().__init__(session)
        session.send(completion_pb2.SessionCommand(handle=self._handle, start_chat=start))


class GenerationStream(RequestStream[engine_pb2.SessionEvent, TokenDelta]):
    """Deltas of a request at token level."""

    accepted: engine_pb2.Accepted | None = None
    """What was admitted; set before the first delta"""

    def __init__(
        self,
        session: Session[engine_pb2.SessionCommand, engine_pb2.SessionEvent],
        start: engine_pb2.SessionStart,
    ) -> None:
        super().__init__(session)
        self.prompts = len(start.request.prompts)
        session.send(engine_pb2.SessionCommand(handle=self._handle, start=start))

    def _cancel_command(self) -> object:
        cancel = engine_pb2.SessionCancel()
        return engine_pb2.SessionCommand(handle=self._handle, cancel=cancel)

    def _read(self, event: engine_pb2.SessionEvent) -> TokenDelta | None:
        match event.WhichOneof("event"):
            case "delta":
                return TokenDelta.read(event.delta)
            case "prompt_scores":
                return TokenDelta.read_prompt(event.prompt_scores)
            case "finished":
                matched = _matched(event.finished.match)
                return TokenDelta(
                    sequence=event.finished.sequence,
                    position=event.finished.completion_tokens,
                    finish_reason=FinishReason.read(event.finished.reason),
                    stop=matched if isinstance(matched, int) else None,
                )
            case "accepted":
                self.accepted = event.accepted
            case "completed":
                self.usage = Usage.read(event.completed.usage)
        return None


async def _by_choice(stream: _TextStream[TextDelta]) -> list[list[TextDelta]]:
    """All deltas of each choice, in the order of the choices."""
    deltas: dict[int, list[TextDelta]] = defaultdict(list)
    async with stream:
        async for delta in stream:
            deltas[delta.index].append(delta)
    return [deltas[index] for index in sorted(deltas)]


def _complete_request(
    prompt: Prompt | Sequence[Prompt],
    options: dict[str, Any],
    delivery: completion_pb2.Delivery.ValueType,
) -> completion_pb2.StartComplete:
    prompts = [prompt] if _is_one(prompt) else prompt
    fields = _pop_fields(options, completion_pb2.RequestContext)
    context = _made(completion_pb2.RequestContext, "context.", **fields)
    request = _made(
        completion_pb2.CompleteRequest,
        prompts=[_prompt(one) for one in cast(Sequence[Prompt], prompts)],
        delivery=delivery,
        **_nested(options),
        **options,
    )
    return completion_pb2.StartComplete(request=request, context=context)


def _chat_request(
    messages: str | Sequence[Message],
    options: dict[str, Any],
    delivery: completion_pb2.Delivery.ValueType,
) -> completion_pb2.StartChat:
    conversation = [Message("user", messages)] if isinstance(messages, str) else messages
    fields = _pop_fields(options, completion_pb2.RequestContext)
    context = _made(completion_pb2.RequestContext, "context.", **fields)
    arguments = options.pop("template_arguments", None)
    request = _made(
        completion_pb2.ChatRequest,
        messages=[_written(message, f"messages[{i}]") for i, message in enumerate(conversation)],
        template_arguments_json="" if arguments is None else json.dumps(arguments),
        delivery=delivery,
        **_nested(options),
        **options,
    )
    return completion_pb2.StartChat(request=request, context=context)


def _generate_start(
    prompt_ids: Sequence[int] | Sequence[Sequence[int]], options: dict[str, Any]
) -> engine_pb2.SessionStart:
    prompts = cast(Sequence[Sequence[int]], [prompt_ids] if _is_one(prompt_ids) else prompt_ids)
    context = _pop_fields(options, engine_pb2.SessionStart)
    request = _made(
        engine_pb2.GenerateRequest,
        prompts=[_made(types_pb2.TokenIds, "prompts.", ids=ids) for ids in prompts],
        **_nested(options),
        **options,
    )
    return _made(engine_pb2.SessionStart, request=request, **context)


def _is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def _prompt(prompt: Prompt) -> completion_pb2.Prompt:
    if isinstance(prompt, str):
        return _made(completion_pb2.Prompt, "prompts.", text=prompt)
    return completion_pb2.Prompt(token_ids=_made(types_pb2.TokenIds, "prompts.", ids=prompt))


def _nested(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the contract keeps in messages of their own; they leave `options`."""
    sampling = _pop_fields(options, types_pb2.SamplingParams)
    path = "sampling."
    if (allowed := sampling.pop("allowed_token_ids", None)) is not None:
        made = _made(types_pb2.TokenIds, f"{path}allowed_token_ids.", ids=allowed)
        sampling["allowed_token_ids"] = made
    if (words := sampling.pop("bad_token_ids", None)) is not None:
        sampling["bad_token_ids"] = [
            _made(types_pb2.TokenIds, f"{path}bad_token_ids[{place}].", ids=ids)
            for place, ids in enumerate(words)
        ]
    stopping = _pop_fields(options, types_pb2.StoppingParams)
    return {
        "sampling": _made(types_pb2.SamplingParams, path, **sampling),
        "stopping": _made(types_pb2.StoppingParams, "stopping.", **stopping),
    }


def _pop_fields(options: dict[str, Any], message: Any) -> dict[str, Any]:
    """Take the options that are fields of a message type."""
    names = message.DESCRIPTOR.fields_by_name
    return {name: options.pop(name) for name in list(options) if name in names}


def _made(message: Callable[..., Made], path: str = "", /, **fields: Any) -> Made:
    """A message. Raises INVALID_ARGUMENT for a value that its field can't hold, and ValueError for
    a field that it does not have."""
    try:
        return message(**fields)
    except ValueError:
        known = cast(Any, message).DESCRIPTOR.fields_by_name
        for name in filter(known.__contains__, fields):
            try:
                message(**{name: fields[name]})
            except ValueError as error:
                raise _unfit(path + name, error) from None
        raise


def _written(message: Message, path: str) -> completion_pb2.Message:
    """A message of a conversation. Raises INVALID_ARGUMENT for text that is no Unicode."""
    try:
        return message.write()
    except UnicodeError as error:
        raise _unfit(path, error) from None


def _unfit(path: str, error: ValueError) -> ServiceError:
    return invalid(path, f"The value of {path} can't be sent: {error}.")


def _matched(match: types_pb2.StopMatch) -> str | int | None:
    name = match.WhichOneof("match")
    return None if name is None else cast(str | int, getattr(match, name))


async def _answer(rpc: Callable[[Any], Awaitable[Answer]], request: Any) -> Answer:
    try:
        return await rpc(request)
    except grpc.aio.AioRpcError as error:
        raise ServiceError.from_rpc_error(error) from None
    except grpc.aio.UsageError:
        code = grpc.StatusCode.UNAVAILABLE
        raise ServiceError(code, "UNREACHABLE", "The client is closed.") from None
