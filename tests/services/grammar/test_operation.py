"""Operation of the grammar service: its fingerprint, its loss and its failed start."""

import hashlib
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from services.common.interceptor import RpcInterceptor
from services.engine.frontend.mask_stream import GrammarClient
from services.grammar.application import GrammarApplication
from services.grammar.settings import GrammarSettings
from tests.services.grammar.mask_client import Decoder
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec


async def test_fingerprint_is_the_hash_of_the_tokenizer_file(
    channel: grpc.aio.Channel, checkpoint: Path
) -> None:
    request = grammar_pb2.CompileRequest(grammar=GrammarSpec(regex="a"))
    response = await GrammarServiceStub(channel).Compile(request)
    content = (checkpoint / "tokenizer.json").read_bytes()
    assert response.tokenizer_fingerprint == hashlib.sha256(content).hexdigest()


async def test_loss_of_the_service_is_reported_once_and_the_stream_reconnects(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    application = GrammarApplication(GrammarSettings(model=checkpoint))
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        decoder, client = Decoder.over(channel, tokenizer), GrammarClient(channel)
        grammar_id = await client.compile(GrammarSpec(regex="[ab]+"))
        decoder.stream.open(1, grammar_id, [])
        await decoder.states.get()
        await server.stop(None)
        assert (await decoder.lost.get()).code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ServiceError) as caught:
            await client.compile(GrammarSpec(regex="a"))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_seconds
        again = grpc.aio.server(interceptors=[RpcInterceptor()])
        application.register(again)
        again.add_insecure_port(f"127.0.0.1:{port}")
        await again.start()
        await channel.channel_ready()
        decoder.stream.open(2, grammar_id, [])
        [state] = await decoder.states.get()
        assert len(decoder.allowed(state)) > 1
        assert decoder.lost.empty()
        await decoder.stream.aclose()
        await again.stop(None)
    await application.stop()


def test_missing_checkpoint_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.grammar", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "tokenizer.json" in result.stderr
