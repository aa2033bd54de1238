"""Endpoints of the tokenizer: /tokenize, /detokenize, /apply-template, /tokenizer_info."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.common.contract import MAX_DECODED_IDS, MAX_TEXT_BYTES
from services.http_shim.backends.backend import Backend
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.chat.read import read_template
from services.http_shim.dialects.chat.types import TemplateBody
from services.http_shim.dialects.fields import IDS, JsonObject, ModelName, Uint32, about
from services.http_shim.dialects.reading import Reading, render_request
from services.http_shim.endpoints.prompt_reader import PromptReader, always
from services.http_shim.errors import client_field_names
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import HeldBytes, json_response
from services.http_shim.http.exchange import exchange_of
from tokenwire.errors import invalid
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "AppliedTemplate",
    "DetokenizeBody",
    "Detokenized",
    "Tokenization",
    "TokenizeBody",
    "Tokenized",
    "TokenizerInfo",
]

_Encoded: TypeAlias = tokenizer_pb2.Encoding | tokenizer_pb2.RenderChatResponse
_Prompt = TypeVar("_Prompt", bound=TemplateBody)
_MESSAGE_FIELDS = (
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
)


class TokenizeBody(TemplateBody):
    """The body of POST /tokenize."""

    prompt: Annotated[
        str | None, about("Text of up to 1 MiB of UTF-8.", maxLength=MAX_TEXT_BYTES)
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about(
            "Add the BOS token to the prompt. Default: true for text; messages follow their "
            "template."
        ),
    ] = None
    return_token_strs: Annotated[bool | None, about("Return the tokens' texts.", default=False)] = (
        None
    )


class DetokenizeBody(Struct):
    """The body of POST /detokenize."""

    model: ModelName = None
    tokens: Annotated[
        Annotated[list[Uint32], IDS] | None, about("Token ids.", maxItems=MAX_DECODED_IDS)
    ] = None


class Tokenized(Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    """Answer of /detokenize."""

    prompt: str


class AppliedTemplate(Struct):
    """Answer of /apply-template."""

    prompt: str


class TokenizerInfo(Struct):
    """Answer of /tokenizer_info."""

    model: str
    tokenizer_class: str
    fingerprint: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    unk_token: str | None
    unk_token_id: int | None
    additional_special_tokens: list[str]
    infill: bool
    chat_template: str | None
    chat_template_hash: str | None


class Tokenization:
    """The tokenizer endpoints."""

    def __init__(self, models: ModelSource, prompts: PromptReader) -> None:
        self._models = models
        self._prompts = prompts

    async def tokenize(self, request: Request) -> Response:
        """Encode a text as a completion's prompt, or the prompt of messages."""
        with self._prompts.bodies.held() as held:
            body, reading = await self._read(request, TokenizeBody, held)
            served = await authorized_model(exchange_of(request.scope), self._models, body.model)
            await self._prompts.fetch_images(reading, held)
            with served.connection.lease() as backend:
                encoding: Awaitable[_Encoded]
                if body.messages is None:
                    encoding = _encoded(backend, served.backend_name, body)
                else:
                    with_texts = bool(body.return_token_strs)
                    encoding = _rendered(backend, served.backend_name, reading, with_texts)
                encoded: _Encoded
                encoded, tokenizer = await asyncio.gather(
                    encoding, backend.tokenizer(served.backend_name)
                )
        return json_response(
            Tokenized(
                count=len(encoded.ids),
                max_model_len=_context_length(served, tokenizer),
                tokens=list(encoded.ids),
                token_strs=list(encoded.tokens) if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Decode ids to text, with special tokens."""
        parse = partial(body_of, DetokenizeBody)
        read = self._prompts.bodies.read(request.scope, request.receive, parse)
        body, exchange_of(request.scope).ignored = await read
        if body.tokens is None:
            raise invalid("tokens", "tokens is required: a list of token ids.")
        served = await authorized_model(exchange_of(request.scope), self._models, body.model)
        asked = tokenizer_pb2.DecodeRequest(
            model=served.backend_name,
            sequences=[types_pb2.TokenIds(ids=body.tokens)],
            skip_special_tokens=False,
        )
        with _field_is("tokens"), served.connection.lease() as backend:
            answer = await backend.decode(asked)
        return json_response(Detokenized(answer.decodings[0].text))

    async def apply_template(self, request: Request) -> Response:
        """Render messages to the text of their prompt."""
        with self._prompts.bodies.held() as held:
            body, reading = await self._read(request, TemplateBody, held)
            served = await authorized_model(exchange_of(request.scope), self._models, body.model)
            await self._prompts.fetch_images(reading, held)
            with served.connection.lease() as backend:
                answer = await _rendered(backend, served.backend_name, reading)
        return json_response(AppliedTemplate(answer.text))

    async def info(self, request: Request) -> Response:
        """Describe the tokenizer."""
        name = request.query_params.get("model")
        served = await authorized_model(exchange_of(request.scope), self._models, name)
        with served.connection.lease() as backend:
            tokenizer = await backend.tokenizer(served.backend_name)
        return json_response(_info(served, tokenizer))

    async def _read(
        self, request: Request, kind: type[_Prompt], held: HeldBytes
    ) -> tuple[_Prompt, Reading]:
        """Return a body, and the reading of its messages, if it has some."""
        bodies: list[_Prompt] = []

        def read(fields: JsonObject) -> Reading:
            body, ignored = body_of(kind, fields)
            bodies.append(body)
            if isinstance(body, TokenizeBody) and body.messages is None:
                _check_text(body)
                return Reading(ignored, {})
            if isinstance(body, TokenizeBody) and body.prompt is not None:
                message = "prompt and messages exclude each other; give one of them."
                raise invalid("prompt", message)
            return read_template(body, ignored)

        reading = await self._prompts.read(request.scope, request.receive, held, always(read))
        return bodies[0], reading


def _check_text(body: TokenizeBody) -> None:
    if body.prompt is None:
        raise invalid("prompt", "prompt or messages is required: a string, or a list of messages.")
    for name in _MESSAGE_FIELDS:
        if getattr(body, name) is not None:
            raise invalid(name, f"{name} needs messages.")


async def _encoded(backend: Backend, model: str, body: TokenizeBody) -> tokenizer_pb2.Encoding:
    request = tokenizer_pb2.EncodeRequest(
        model=model,
        texts=[body.prompt or ""],
        add_special_tokens=body.add_special_tokens,
        with_texts=bool(body.return_token_strs),
    )
    with _field_is("prompt"):
        return (await backend.encode(request)).encodings[0]


async def _rendered(
    backend: Backend, model: str, reading: Reading, with_texts: bool = False
) -> tokenizer_pb2.RenderChatResponse:
    request = render_request(reading, model, with_texts=with_texts)
    with client_field_names(reading.field):
        return await backend.render(request)


def _field_is(param: str) -> AbstractContextManager[None]:
    """Rename the field of a service's error to `param`, unless it is `model`."""
    return client_field_names(lambda path: path if path == "model" else param)


def _context_length(served: ServedModel, tokenizer: tokenizer_pb2.GetTokenizerResponse) -> int:
    """Return the limit on the tokens of prompt and output together."""
    length = tokenizer.context_length
    return length if served.context is None else min(length, served.context)


def _info(served: ServedModel, tokenizer: tokenizer_pb2.GetTokenizerResponse) -> TokenizerInfo:
    bos = tokenizer.bos_token_id if tokenizer.HasField("bos_token_id") else None
    eos = tokenizer.eos_token_id if tokenizer.HasField("eos_token_id") else None
    pad = tokenizer.pad_token_id if tokenizer.HasField("pad_token_id") else None
    unk = tokenizer.unk_token_id if tokenizer.HasField("unk_token_id") else None
    texts = {token.id: token.text for token in tokenizer.special_tokens}
    named = {bos, eos, pad, unk}
    return TokenizerInfo(
        model=served.id or tokenizer.model,
        tokenizer_class=tokenizer.tokenizer_class,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocabulary_size,
        model_max_length=_context_length(served, tokenizer),
        add_bos_token=tokenizer.adds_bos,
        bos_token=None if bos is None else texts.get(bos),
        bos_token_id=bos,
        eos_token=None if eos is None else texts.get(eos),
        eos_token_id=eos,
        pad_token=None if pad is None else texts.get(pad),
        pad_token_id=pad,
        unk_token=None if unk is None else texts.get(unk),
        unk_token_id=unk,
        additional_special_tokens=[text for token, text in texts.items() if token not in named],
        infill=tokenizer.HasField("infill"),
        chat_template=tokenizer.chat_template or None,
        chat_template_hash=tokenizer.chat_template_hash or None,
    )
