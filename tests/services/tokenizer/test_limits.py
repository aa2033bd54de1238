"""Limits and validation of requests to the tokenizer service."""

from collections.abc import Awaitable

import grpc
import pytest

from services.common.contract import MAX_IMAGES_BYTES
from tests.services.tokenizer.completion_client import Services, tokens
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2 as types


async def test_prompt_over_the_context_is_refused_or_truncated(services: Services) -> None:
    error = await services.refused("x = 1\n" * 5_000)
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_LENGTH_EXCEEDED")
    cut = await services.complete("x = 1\n" * 5_000, truncate_prompt=True, stopping=tokens(9))
    models = await services.completions.ListModels(models_pb2.ListModelsRequest())
    context = models.models[0].context_length
    assert len(cut.accepted.prompts[0].ids) == context - 9
    error = await services.refused(
        "x", stopping=tokens(context), context_overflow=completion.CONTEXT_OVERFLOW_ERROR
    )
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_very_long_prompt_is_refused_before_it_is_fully_encoded(services: Services) -> None:
    """This holds for echo, infill and ids; truncation keeps the same end as a full encoding."""
    models = await services.completions.ListModels(models_pb2.ListModelsRequest())
    context = models.models[0].context_length
    text = "x = 1\n" * 500_000
    for fields in ({}, {"echo": True}, {"suffix": "y"}, {"stop": ["a" * 1_000] * 16}):
        error = await services.refused(text, **fields)
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert error.field == "prompts.items[0].text"
        assert "The prompt has at least " in error.message
    error = await services.refused("x", suffix=text)
    assert "The prompt has at least " in error.message
    error = await services.refused([300] * 1_000_000)
    assert f"The prompt has 1,000,000 tokens; the context length is {context:,}" in error.message
    cut = await services.complete(text, truncate_prompt=True, stopping=tokens(9))
    shorter = await services.complete(text[:60_000], truncate_prompt=True, stopping=tokens(9))
    assert cut.accepted.prompts == shorter.accepted.prompts
    ids = await services.complete([300] * 1_000_000, truncate_prompt=True, stopping=tokens(9))
    assert len(ids.accepted.prompts[0].ids) == context - 9


async def test_tokenizer_rpcs_limit_the_size_of_a_request(services: Services) -> None:
    """The context length does not limit these RPCs."""
    stub = services.tokenizer
    half, over = "é" * 2**18, "é" * 2**18 + "x"
    most = await stub.Encode(tokenizer_pb2.EncodeRequest(texts=[half, half]))
    assert len(most.encodings) == 2
    ids = types.TokenIds(ids=[300] * 2**17)
    decoded = await stub.Decode(tokenizer_pb2.DecodeRequest(sequences=[ids, ids]))
    assert decoded.decodings[0].text == decoded.decodings[1].text != ""
    one = types.TokenIds(ids=[300])
    message = completion.Message(
        role=completion.ROLE_USER, parts=[completion.ContentPart(text=half + over)]
    )
    refused: dict[str, Awaitable[object]] = {
        "texts": stub.Encode(tokenizer_pb2.EncodeRequest(texts=[half, over])),
        "sequences": stub.Decode(tokenizer_pb2.DecodeRequest(sequences=[ids, ids, one])),
        "prefix": stub.RenderInfill(
            tokenizer_pb2.RenderInfillRequest(prefix=half + over, suffix="x")
        ),
        "suffix": stub.RenderInfill(
            tokenizer_pb2.RenderInfillRequest(prefix="x", suffix=half + over)
        ),
        "conversation.messages": stub.RenderChat(
            tokenizer_pb2.RenderChatRequest(
                conversation=completion.Conversation(messages=[message])
            )
        ),
    }
    for path, call in refused.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = ServiceError.from_rpc_error(caught.value)
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    chunk = tokenizer_pb2.DecodeChunk(sequence=1, ids=[300] * 2**18)
    stream = stub.DecodeStream()
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[chunk]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert ServiceError.from_rpc_error(caught.value).field == "chunks"


async def test_large_request_is_validated_like_a_small_one(services: Services) -> None:
    """Another code path validates large requests."""
    stops = ["a" * 1_000] * 16
    error = await services.refused("x" * 20_000, sampling=types.SamplingParams(top_p=2))
    assert error.field == "sampling.top_p"
    error = await services.refused("x", stop=[*stops, "a"])
    assert error.field == "stop"
    sampling = types.SamplingParams(dry=types.DryParams(multiplier=1))
    error = await services.refused("x", sampling=sampling, dry_sequence_breakers=[""])
    assert error.field == "dry_sequence_breakers[0]"
    answer = await services.complete(
        "x" * 20_000, truncate_prompt=True, sampling=sampling, stopping=tokens(1),
        dry_sequence_breakers=["x"], stop=stops,
    )  # fmt: skip
    assert answer.usage is not None


async def test_service_works_after_invalid_requests(services: Services) -> None:
    bad: list[tuple[grpc.StatusCode, str, dict[str, object]]] = [
        (grpc.StatusCode.NOT_FOUND, "model", {"model": "nope"}),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.top_p",
            {"sampling": types.SamplingParams(top_p=2)},
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "stop[0]", {"stop": [""]}),
    ]
    for code, path, fields in bad:
        error = await services.refused("a", **fields)
        assert (error.code, error.field) == (code, path)
    error = await services.refused([1, 10**6])
    assert error.field == "prompts.items[0].token_ids.ids[1]"
    decode = tokenizer_pb2.DecodeRequest(sequences=[types.TokenIds(ids=[1, 10**6])])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await services.tokenizer.Decode(decode)
    assert ServiceError.from_rpc_error(caught.value).field == "sequences[0].ids[1]"
    assert (await services.complete("a", stopping=tokens(1))).usage is not None


async def test_request_with_the_most_bytes_of_images_arrives(services: Services) -> None:
    """gRPC's own limits would end it, and with it the Session that other requests are on."""
    images = [b"\0" * (MAX_IMAGES_BYTES // 3)] * 3
    error = await services.refused("<image>" * 3, images=images)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts.images")
    assert "takes text alone" in error.message
    message = completion.Message(
        role=completion.ROLE_USER, parts=[completion.ContentPart(image=data) for data in images]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await services.tokenizer.RenderChat(
            tokenizer_pb2.RenderChatRequest(
                conversation=completion.Conversation(messages=[message])
            )
        )
    assert (
        ServiceError.from_rpc_error(caught.value).field == "conversation.messages[0].parts[0].image"
    )
