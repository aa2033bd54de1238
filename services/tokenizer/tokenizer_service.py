"""TokenizerService: encoding and decoding of text, and prompts of chats and infills."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from services.common.accounts import identity
from services.common.accounts.metering import count_call
from services.common.bounds import check_bounds
from services.common.contract import MAX_DECODED_IDS
from services.tokenizer.chat.chat_templates import ChatPrompt, ChatTemplates
from services.tokenizer.completion.validation import check_ids, check_model, check_text_size
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage, take_message_images
from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.text.infill import InfillOrder, InfillTemplate, assemble_infill
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import check_tools, shown_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceServicer

__all__ = ["TokenizerServicer"]

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
_MAX_OPEN = 2_048  # sequences of a DecodeStream
_INLINE_SIZE = 4_096  # characters or ids; larger inputs are processed in a thread
_ORDERS = {
    InfillOrder.PREFIX_SUFFIX_MIDDLE: tokenizer_pb2.INFILL_ORDER_PREFIX_SUFFIX_MIDDLE,
    InfillOrder.SUFFIX_PREFIX: tokenizer_pb2.INFILL_ORDER_SUFFIX_PREFIX,
}


class TokenizerServicer(TokenizerServiceServicer):
    """The rpcs of TokenizerService. They work without an engine."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        infill: InfillTemplate | None,
        templates: ChatTemplates,
        images: ImageReader,
        pool: EnginePool,
        model: str,
    ) -> None:
        self._vocabulary = vocabulary
        self._infill = infill
        self._templates = templates
        self._images = images
        self._pool = pool
        self._model = model

    async def GetTokenizer(
        self, request: tokenizer_pb2.GetTokenizerRequest, context: Context
    ) -> tokenizer_pb2.GetTokenizerResponse:
        """Return the identity of the tokenizer and its special ids."""
        self._check_model(request.model)
        vocabulary = self._vocabulary
        template = vocabulary.chat_template
        return tokenizer_pb2.GetTokenizerResponse(
            fingerprint=vocabulary.fingerprint,
            vocabulary_size=vocabulary.size,
            bos_token_id=vocabulary.bos_id,
            eos_token_id=vocabulary.eos_id,
            pad_token_id=vocabulary.pad_id,
            unk_token_id=vocabulary.unk_id,
            adds_bos=vocabulary.adds_bos,
            special_tokens=[
                tokenizer_pb2.SpecialToken(id=token, text=text)
                for token, text in vocabulary.special_tokens.items()
            ],
            infill=_infill_tokens(self._infill) if self._infill is not None else None,
            chat_template=template,
            chat_template_hash=hashlib.sha256(template.encode()).hexdigest() if template else "",
            context_length=self._pool.context_length,
            model=self._model,
            tokenizer_class=vocabulary.tokenizer_class,
        )

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        """Encode texts."""
        await count_call(identity.current.get(), self._model)
        self._check_model(request.model)
        check_bounds(request)
        check_text_size("texts", *request.texts)
        special = not request.HasField("add_special_tokens") or request.add_special_tokens

        def encode() -> tokenizer_pb2.EncodeResponse:
            return tokenizer_pb2.EncodeResponse(
                encodings=[
                    self._encode(text, special, request.with_texts) for text in request.texts
                ]
            )

        return await _run(encode, sum(map(len, request.texts)))

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        """Decode sequences of ids."""
        await count_call(identity.current.get(), self._model)
        self._check_model(request.model)
        check_bounds(request)
        size = sum(len(sequence.ids) for sequence in request.sequences)
        _check_count("sequences", size)
        for index, sequence in enumerate(request.sequences):
            check_ids(f"sequences[{index}].ids", sequence.ids, self._vocabulary.size)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens

        def decode() -> tokenizer_pb2.DecodeResponse:
            response = tokenizer_pb2.DecodeResponse()
            for sequence in request.sequences:
                texts = self._vocabulary.decode(sequence.ids, skip_special_tokens=skip)
                decoding = response.decodings.add(text="".join(texts))
                if request.with_offsets:
                    decoding.byte_offsets.extend(_byte_offsets(texts))
            return response

        return await _run(decode, size)

    async def DecodeStream(
        self, request_iterator: AsyncIterator[tokenizer_pb2.DecodeStreamRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.DecodeStreamResponse]:
        """Decode ids as they arrive."""
        caller = identity.current.get()
        sequences: dict[int, Detokenizer] = {}
        is_first = True
        async for request in request_iterator:
            await count_call(caller, self._model)
            if is_first:
                self._check_model(request.model)
                is_first = False
            size = len(request.chunks) + sum(len(chunk.ids) for chunk in request.chunks)
            _check_count("chunks", size)
            yield await _run(partial(self._decode_chunks, request, sequences), size)

    async def RenderChat(
        self, request: tokenizer_pb2.RenderChatRequest, context: Context
    ) -> tokenizer_pb2.RenderChatResponse:
        """Render messages and tools by the chat template."""
        await count_call(identity.current.get(), self._model)
        self._check_model(request.model)

        def take_images() -> Sequence[RequestImage]:
            check_bounds(request)
            return take_message_images(request.conversation.messages)

        images = await _run(take_images, request.ByteSize())
        if images:
            self._images.require(images[0].field)
        tools = shown_tools(request.tools, request.tool_choice)
        prompt = ChatPrompt.of(request.conversation, tools)
        await _run(partial(self._check_chat, prompt, request), request.ByteSize())
        check_text = partial(check_text_size, "conversation.messages")
        expander = await self._images.read(images)
        rendered = await self._templates.render(prompt, check_text, expander)
        return tokenizer_pb2.RenderChatResponse(
            text=rendered.text,
            ids=rendered.ids,
            tokens=self._vocabulary.names(rendered.ids) if request.with_texts else (),
        )

    async def RenderInfill(
        self, request: tokenizer_pb2.RenderInfillRequest, context: Context
    ) -> tokenizer_pb2.RenderInfillResponse:
        """Render a prefix and a suffix as an infill prompt."""
        await count_call(identity.current.get(), self._model)
        self._check_model(request.model)
        template = self._infill
        if template is None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, "NO_INFILL", f"{self._model} can't infill."
            )
        longer = "prefix" if len(request.prefix) >= len(request.suffix) else "suffix"
        check_text_size(longer, request.prefix, request.suffix)

        def render() -> tokenizer_pb2.RenderInfillResponse:
            prefix = self._vocabulary.encode_plain(request.prefix)
            suffix = self._vocabulary.encode_continuation(request.suffix)
            return tokenizer_pb2.RenderInfillResponse(
                ids=assemble_infill(template, prefix, suffix), stop_token_ids=template.stop_ids
            )

        return await _run(render, len(request.prefix) + len(request.suffix))

    def _check_model(self, name: str) -> None:
        """Raise NOT_FOUND unless `name` is the model's or an adapter's: both have one tokenizer."""
        if name not in ("", self._model):
            check_model(name, self._model, self._pool.adapters)

    def _encode(self, text: str, special: bool, with_texts: bool) -> tokenizer_pb2.Encoding:
        if with_texts:
            encoding = self._vocabulary.encode_with_offsets(text, add_special_tokens=special)
            return tokenizer_pb2.Encoding(
                ids=encoding.ids,
                tokens=encoding.tokens,
                starts=encoding.starts,
                ends=encoding.ends,
                pieces=self._vocabulary.pieces(encoding.ids),
            )
        return tokenizer_pb2.Encoding(ids=self._vocabulary.encode(text, add_special_tokens=special))

    def _check_chat(self, prompt: ChatPrompt, request: tokenizer_pb2.RenderChatRequest) -> None:
        check_tools(request.tools, request.tool_choice)
        self._templates.check(prompt)

    def _decode_chunks(
        self, request: tokenizer_pb2.DecodeStreamRequest, sequences: dict[int, Detokenizer]
    ) -> tokenizer_pb2.DecodeStreamResponse:
        response = tokenizer_pb2.DecodeStreamResponse()
        for index, chunk in enumerate(request.chunks):
            decoded = response.chunks.add(sequence=chunk.sequence)
            try:
                self._decode_chunk(chunk, f"chunks[{index}].ids", sequences, decoded)
            except ServiceError as error:
                decoded.error.CopyFrom(error.to_status())
                sequences.pop(chunk.sequence, None)
        return response

    def _decode_chunk(
        self,
        chunk: tokenizer_pb2.DecodeChunk,
        field: str,
        sequences: dict[int, Detokenizer],
        decoded: tokenizer_pb2.DecodedChunk,
    ) -> None:
        check_ids(field, chunk.ids, self._vocabulary.size)
        detokenizer = sequences.get(chunk.sequence)
        if detokenizer is None:
            if len(sequences) >= _MAX_OPEN:
                raise invalid(field, f"A stream must have at most {_MAX_OPEN:,} open sequences.")
            keep = chunk.keep_special_tokens
            table = self._vocabulary.full_table if keep else self._vocabulary.table
            detokenizer = sequences[chunk.sequence] = Detokenizer(table)
        texts = [detokenizer.feed(token) for token in chunk.ids]
        rest = ""
        if chunk.end:
            rest = detokenizer.flush()
            del sequences[chunk.sequence]
        if rest and texts:
            texts[-1] += rest
            rest = ""
        decoded.text = "".join(texts) + rest
        decoded.token_texts.extend(texts)


def _infill_tokens(template: InfillTemplate) -> tokenizer_pb2.InfillTokens:
    return tokenizer_pb2.InfillTokens(
        order=_ORDERS[template.order],
        prefix_token_id=template.prefix_id,
        suffix_token_id=template.suffix_id,
        middle_token_id=template.middle_id,
        bos_token_id=template.bos_id,
        stop_token_ids=template.stop_ids,
    )


def _check_count(field: str, count: int) -> None:
    if count > MAX_DECODED_IDS:
        raise invalid(field, f"A message must have at most {MAX_DECODED_IDS:,} ids.")


def _byte_offsets(texts: list[str]) -> list[int]:
    offsets, offset = [], 0
    for text in texts:
        offsets.append(offset)
        offset += len(text.encode())
    return offsets


async def _run(work: Callable[[], T], size: int) -> T:
    """Run the work, in a thread if its input is large."""
    return await asyncio.to_thread(work) if size > _INLINE_SIZE else work()
