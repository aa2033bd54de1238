"""Asyncio clients for text and for token ids.

    import asyncio
    from tokenwire.client import Client, Message

    async def main() -> None:
        async with Client("127.0.0.1:50051") as client:
            print((await client.generate("def add(a, b):", max_tokens=32)).text)
            question = Message("user", "What is a mutex?")
            print((await client.generate(question, max_tokens=64)).text)

    asyncio.run(main())

All requests of a client share one stream (a Session of the service): a thousand concurrent requests
cost one message per engine step, not a thousand. A failed request raises ServiceError. Leaving
`async with client.stream(...)`, or cancelling the waiting task, cancels the request and frees its
KV blocks.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

import grpc

from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.loopback import is_local_target
from tokenwire.messages import Message
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2 import Tool, ToolChoice
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.types.v1.types_pb2 import BeamSearch, DryParams, GrammarSpec, MirostatParams
from tokenwire.requests import GenerateOptions, Input, TokenOptions, build, text_start, token_start
from tokenwire.results import (
    Answer,
    Encoding,
    EngineModel,
    Generation,
    Load,
    Model,
    Output,
    Scores,
    TokenDelta,
)
from tokenwire.session import (
    CompletionSession,
    EngineSession,
    completion_session,
    engine_session,
)
from tokenwire.stream import AnswerStream, AsyncResource, GenerationStream
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenError, require_token

__all__ = [
    "AnswerStream",
    "BeamSearch",
    "Client",
    "ClientTls",
    "DryParams",
    "EngineClient",
    "GenerateOptions",
    "GenerationStream",
    "GrammarSpec",
    "Message",
    "MirostatParams",
    "TokenOptions",
    "Tool",
    "ToolChoice",
]

Reply = TypeVar("Reply")
AnySession = TypeVar("AnySession", CompletionSession, EngineSession)


class _Connection(AsyncResource, Generic[AnySession]):
    """A channel and the one Session on it; `async with` closes both."""

    _channel: grpc.aio.Channel
    _session: AnySession

    async def aclose(self) -> None:
        """Cancel running requests and disconnect."""
        await self._session.close()
        await self._channel.close()


class Client(_Connection[CompletionSession]):
    """Client for text, connected to the tokenizer service at "host:port"."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        tls: ClientTls | None = None,
        key: str = "",
        *,
        plaintext: bool = False,
    ) -> None:
        """tls: None = plaintext. key: API key; empty = none.

        plaintext: send the key beyond this machine in clear text. Raises TlsError for files that
        can't be used, and TokenError for a key that is malformed or would need `plaintext`.
        """
        self._channel = _connect(target, tls, key, plaintext)
        self._session = completion_session(self._channel)
        self._completions = CompletionServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)

    async def generate(self, given: Input, **options: Unpack[GenerateOptions]) -> Answer:
        """Complete prompts, or answer a conversation.

        given: one prompt or several, each a text or token ids; or one `Message` or several.
        """
        start = text_start(given, dict(options), completion_pb2.DELIVERY_WHOLE)
        return await AnswerStream(self._session, start).answer()

    def stream(self, given: Input, **options: Unpack[GenerateOptions]) -> AnswerStream:
        """Complete prompts, or answer a conversation; return the deltas as they are generated.

        async with client.stream("def add(a, b):") as stream:
            async for delta in stream:
                print(delta.text, end="")
        """
        start = text_start(given, dict(options), completion_pb2.DELIVERY_DELTAS)
        return AnswerStream(self._session, start)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """Return the token ids of a text."""
        request = build(
            tokenizer_pb2.EncodeRequest,
            texts=[text],
            add_special_tokens=add_special_tokens,
            with_texts=True,
        )
        answer = await _answer(self._tokenizer.Encode, request)
        return Encoding.read(answer.encodings[0])

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        request = tokenizer_pb2.DecodeRequest(
            sequences=[build(types_pb2.TokenIds, "sequences.", ids=ids)],
            skip_special_tokens=skip_special_tokens,
        )
        return (await _answer(self._tokenizer.Decode, request)).decodings[0].text

    async def models(self) -> tuple[Model, ...]:
        """Return the served models."""
        request = models_pb2.ListModelsRequest()
        answer = await _answer(self._completions.ListModels, request)
        return tuple(Model.read(model) for model in answer.models)


class EngineClient(_Connection[EngineSession]):
    """Client for token ids, connected to an engine at "host:port"."""

    def __init__(
        self,
        target: str = "127.0.0.1:50052",
        tls: ClientTls | None = None,
        key: str = "",
        *,
        plaintext: bool = False,
    ) -> None:
        """The arguments are those of `Client`."""
        self._channel = _connect(target, tls, key, plaintext)
        self._session = engine_session(self._channel)
        self._control = EngineControlServiceStub(self._channel)

    async def generate(
        self,
        prompt_ids: Sequence[int] | Sequence[Sequence[int]],
        **options: Unpack[TokenOptions],
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
        **options: Unpack[TokenOptions],
    ) -> GenerationStream:
        """Continue prompts; return the deltas as they are generated."""
        return GenerationStream(self._session, token_start(prompt_ids, dict(options)))

    async def model(self) -> EngineModel:
        """Return the model, its limits and its capabilities."""
        return EngineModel.read(await _answer(self._control.GetModel, engine_pb2.GetModelRequest()))

    async def load(self) -> Load:
        """Return the engine's current load."""
        answer = await _answer(self._control.GetLoad, engine_pb2.GetLoadRequest())
        return Load.read(answer.load)


def _connect(target: str, tls: ClientTls | None, key: str, plaintext: bool) -> grpc.aio.Channel:
    if not key:
        return connect(target, tls=tls)
    require_token(key, "An API key")
    if tls is None and not plaintext and not is_local_target(target):
        raise TokenError(
            f"The API key would go to {target} in clear text; use TLS, or allow it by plaintext."
        )
    return connect(target, tls=tls, token=lambda: key)


async def _answer(rpc: Callable[[Any], Awaitable[Reply]], request: Any) -> Reply:
    try:
        return await rpc(request)
    except grpc.aio.AioRpcError as error:
        raise ServiceError.from_rpc_error(error) from None
    except grpc.aio.UsageError:
        code = grpc.StatusCode.UNAVAILABLE
        raise ServiceError(code, "UNREACHABLE", "The client is closed.") from None
