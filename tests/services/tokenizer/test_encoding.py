"""Encoding and decoding by the tokenizer service: offsets, and incomplete characters."""

from tests.services.tokenizer.completion_client import Services
from tokenwire.errors import ServiceError
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2 as types


async def test_decode_stream_holds_back_incomplete_characters(services: Services) -> None:
    encoded = await services.tokenizer.Encode(
        tokenizer_pb2.EncodeRequest(texts=["x😀y"], with_texts=True)
    )
    ids = list(encoded.encodings[0].ids)
    stream = services.tokenizer.DecodeStream()
    texts = []
    for place, token in enumerate(ids):
        chunk = tokenizer_pb2.DecodeChunk(sequence=9, ids=[token], end=place == len(ids) - 1)
        await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[chunk]))
        answer = await stream.read()
        assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
        texts.append(answer.chunks[0].text)
    assert "".join(texts) == "x😀y"
    assert "😀" in texts
    bad = tokenizer_pb2.DecodeChunk(sequence=1, ids=[10**6])
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[bad]))
    answer = await stream.read()
    assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
    assert ServiceError.from_status(answer.chunks[0].error).field == "chunks[0].ids[0]"
    many = [tokenizer_pb2.DecodeChunk(sequence=place, ids=ids[:1]) for place in range(2_049)]
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=many))
    answer = await stream.read()
    assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
    refused = [place for place, chunk in enumerate(answer.chunks) if chunk.HasField("error")]
    assert refused == [2_048]
    await stream.done_writing()


async def test_offsets_map_tokens_to_text_and_bytes(services: Services) -> None:
    text = "é<|endoftext|>x"
    encoded = await services.tokenizer.Encode(
        tokenizer_pb2.EncodeRequest(texts=[text], with_texts=True)
    )
    encoding = encoded.encodings[0]
    spans = zip(encoding.starts, encoding.ends, strict=True)
    assert "".join(text[start:end] for start, end in spans) == text
    decoded = await services.tokenizer.Decode(
        tokenizer_pb2.DecodeRequest(
            sequences=[types.TokenIds(ids=encoding.ids)],
            skip_special_tokens=False,
            with_offsets=True,
        )
    )
    assert decoded.decodings[0].text == text
    assert list(decoded.decodings[0].byte_offsets) == [0, 2, 15]
