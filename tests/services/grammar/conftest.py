"""Fixtures of a grammar service with a small tokenizer."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.common.interceptor import RpcInterceptor
from services.grammar.application import GrammarApplication
from services.grammar.settings import GrammarSettings
from tests.services.grammar.mask_client import PERSON
from tokenwire.channel import connect
from tokenwire.channel_options import MESSAGE_LIMITS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [Path(json.__file__).read_text(), json.dumps(PERSON), Path(re.__file__).read_text()]
    tokenizer.train_from_iterator(text, trainer)
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest_asyncio.fixture(scope="session")
async def address(checkpoint: Path) -> AsyncIterator[str]:
    """Yield the host:port of a grammar service."""
    application = GrammarApplication(
        GrammarSettings(model=checkpoint, compile_timeout=3.0, max_grammar_bytes=300_000)
    )
    server = grpc.aio.server(options=MESSAGE_LIMITS, interceptors=[RpcInterceptor()])
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await application.start()
    yield f"127.0.0.1:{port}"
    await application.stop()
    await server.stop(None)


@pytest_asyncio.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(address) as channel:
        yield channel
