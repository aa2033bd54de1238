"""Endpoints of the tokenizer: /tokenize, /detokenize, /apply-template, /tokenizer_info."""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.backend import Backend
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.endpoints.documents import Documents
from services.http_shim.errors import client_field_names
from services.http_shim.formats.chat_messages import take_message_documents, take_message_images
from services.http_shim.formats.chat_requests import rendered_param_of, to_render_request
from services.http_shim.formats.request_bodies import (
    Body,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
    parse,
)
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import BodyReader, HeldBytes, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["AppliedTemplate", "Detokenized", "Tokenization", "Tokenized", "TokenizerInfo"]

Rendered = TypeVar("Rendered", bound=TemplateBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_TEMPLATE = msgspec.json.Decoder(TemplateBody)
_MESSAGE_FIELDS = (
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
)


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

    def __init__(
        self,
        models: ModelSource,
        bodies: BodyReader,
        fetcher: ImageFetcher | None,
        documents: Documents,
    ) -> None:
        self._models = models
        self._bodies = bodies
        self._fetcher = fetcher
        self._documents = documents

    async def tokenize(self, request: Request) -> Response:
        """Encode a text as a completion's prompt, or the prompt of messages."""
        with self._bodies.held() as held:
            asked = await self._read_with_images(request, _TOKENIZE, held)
            body = asked.body
            served = await authorized_model(exchange_of(request.scope), self._models, body.model)
            await fetch_remote(self._fetcher, asked.images, held.resize)
            with served.connection.used() as backend:
                read = _encode if body.messages is None else _render
                (ids, texts), tokenizer = await asyncio.gather(
                    read(backend, served.backend_name, asked),
                    backend.tokenizer(served.backend_name),
                )
        return json_response(
            Tokenized(
                count=len(ids),
                max_model_len=_context_length(served, tokenizer),
                tokens=ids,
                token_strs=texts if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Decode ids to text, with special tokens."""
        body = await self._read(request, _DETOKENIZE)
        if body.tokens is None:
            raise invalid("tokens", "tokens is required: a list of token ids.")
        served = await authorized_model(exchange_of(request.scope), self._models, body.model)
        asked = tokenizer_pb2.DecodeRequest(
            model=served.backend_name,
            sequences=[types_pb2.TokenIds(ids=body.tokens)],
            skip_special_tokens=False,
        )
        with _field_is("tokens"), served.connection.used() as backend:
            answer = await backend.decode(asked)
        return json_response(Detokenized(answer.decodings[0].text))

    async def apply_template(self, request: Request) -> Response:
        """Render messages to the text of their prompt."""
        with self._bodies.held() as held:
            asked = await self._read_with_images(request, _TEMPLATE, held)
            exchange, name = exchange_of(request.scope), asked.body.model
            served = await authorized_model(exchange, self._models, name)
            await fetch_remote(self._fetcher, asked.images, held.resize)
            with served.connection.used() as backend:
                answer = await _rendered(backend, served.backend_name, asked)
        return json_response(AppliedTemplate(answer.text))

    async def info(self, request: Request) -> Response:
        """Describe the tokenizer."""
        name = request.query_params.get("model")
        served = await authorized_model(exchange_of(request.scope), self._models, name)
        with served.connection.used() as backend:
            tokenizer = await backend.tokenizer(served.backend_name)
        return json_response(_info(served, tokenizer))

    async def _read(self, request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Return the body, and note its ignored fields for the header."""
        read = self._bodies.read(request.scope, request.receive, partial(parse, decoder))
        body, exchange_of(request.scope).ignored = await read
        return body

    async def _read_with_images(
        self, request: Request, decoder: msgspec.json.Decoder[Rendered], held: HeldBytes
    ) -> "_Asked[Rendered]":
        """Return the body apart from its images, and note its ignored fields for the header."""
        parse_body = partial(_parse_with_images, decoder)
        asked = await self._bodies.read_with_images(
            request.scope, request.receive, parse_body, held
        )
        exchange = exchange_of(request.scope)
        exchange.ignored = asked.ignored
        await self._documents.read(asked.documents, exchange, held, asked.images.size)
        return asked


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Rendered]):
    """A parsed request to render messages. Its images are apart."""

    body: Rendered
    ignored: list[str]
    """Paths of fields that are ignored"""
    images: RequestImages
    documents: list[RequestDocument]


def _parse_with_images(decoder: msgspec.json.Decoder[Rendered], encoded: bytes) -> _Asked[Rendered]:
    body, ignored = parse(decoder, encoded)
    images, documents = take_message_images(body.messages), take_message_documents(body.messages)
    return _Asked(body, ignored, images, documents)


async def _encode(
    backend: Backend, model: str, asked: _Asked[TokenizeBody]
) -> tuple[list[int], list[str]]:
    body = asked.body
    if body.prompt is None:
        raise invalid("prompt", "prompt or messages is required: a string, or a list of messages.")
    for name in _MESSAGE_FIELDS:
        if getattr(body, name) is not None:
            raise invalid(name, f"{name} needs messages.")
    request = tokenizer_pb2.EncodeRequest(
        model=model,
        texts=[body.prompt],
        add_special_tokens=body.add_special_tokens,
        with_texts=bool(body.return_token_strs),
    )
    with _field_is("prompt"):
        [encoding] = (await backend.encode(request)).encodings
    return list(encoding.ids), list(encoding.tokens)


async def _render(
    backend: Backend, model: str, asked: _Asked[TokenizeBody]
) -> tuple[list[int], list[str]]:
    if asked.body.prompt is not None:
        raise invalid("prompt", "prompt and messages exclude each other; give one of them.")
    with_texts = bool(asked.body.return_token_strs)
    answer = await _rendered(backend, model, asked, with_texts=with_texts)
    return list(answer.ids), list(answer.tokens)


async def _rendered(
    backend: Backend, model: str, asked: _Asked[Rendered], *, with_texts: bool = False
) -> tokenizer_pb2.RenderChatResponse:
    request = to_render_request(asked.body, with_texts=with_texts)
    request.model = model
    asked.images.copy_into(request)
    with client_field_names(lambda path: rendered_param_of(path, asked.body)):
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
