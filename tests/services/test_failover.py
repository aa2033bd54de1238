"""Failover: clients do not notice when one service is lost or restarted."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from tests.services.shim import running_shim
from tests.stack import MortalEngine, free_ports, mortal_engine, running_service
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tests.unit.engine.vision_checkpoints import png
from tests.vision import write_whole
from tokenwire.channel import connect
from tokenwire.client import AnswerStream, Client
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1.types_pb2 import BeamSearch
from tokenwire.requests import text_start
from tokenwire.session import completion_session

# With this seed, no draw lies within 1e-4 of the boundary between two tokens. A resumed stream
# computes its context anew, in steps of other sizes, and other rounding could flip a closer draw.
ASKED: dict[str, Any] = {"temperature": 1.0, "seed": 231, "ignore_eos": True}
TOKENS = 240


@asynccontextmanager
async def tokenizer_of(model: Path, engine: MortalEngine, log: Path) -> AsyncIterator[Client]:
    arguments = ("--model", str(model), "--engine", engine.target, "--engine-wait", "120")
    async with (
        running_service("tokenizer", *arguments, log=log) as service,
        Client(service.target) as client,
    ):
        yield client


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine of the embedded model that each test leaves running, and its tokenizer service."""

    engine: MortalEngine
    tokenizer: str
    """host:port"""
    log: Path
    """File of the tokenizer service's stderr"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replica(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Replica]:
    arguments = ("--model", str(embedded_model), "--engine-wait", "120", "--engine")
    log = tmp_path_factory.mktemp("log") / "tokenizer"
    async with (
        mortal_engine(embedded_model) as engine,
        running_service("tokenizer", *arguments, engine.target, log=log) as service,
    ):
        yield Replica(engine, service.target, log)


async def test_stream_survives_repeated_losses_of_the_engine(replica: Replica) -> None:
    """The test kills the whole engine or only the step loop, which the OOM killer picks first.

    Credit bounds what an engine sends before it is lost. Later tokens show that the next one runs.
    """
    engine = replica.engine
    async with Client(replica.tokenizer) as client, connect(replica.tokenizer) as channel:
        calm = await client.generate("import", max_tokens=TOKENS, **ASKED)
        losses = [engine.kill, engine.kill_loop, engine.kill]
        asked = {"max_tokens": TOKENS, **ASKED}
        start = text_start("import", asked, completion.DELIVERY_DELTAS)
        granted = start.credit = share = TOKENS // (len(losses) + 1)
        more = completion.SessionCommand(handle=1, credit=completion.SessionCredit(tokens=share))
        text, received, next_loss = "", 0, 10
        session = completion_session(channel)
        async with AnswerStream(session, start) as stream:
            async for delta in stream:
                text += delta.text
                received += len(delta.token_ids)
                if losses and received >= next_loss:
                    await losses.pop()()
                    await engine.start()
                    next_loss = granted + 10
                    granted += share
                    session.send(more)
        await session.close()
        assert not losses
        assert text == calm.text


async def test_stream_of_an_adapter_survives_the_loss_of_the_engine(
    embedded_model: Path, tmp_path: Path
) -> None:
    base = LlamaForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    make_adapter(base, tmp_path / "one", 0, rank=8, lora_alpha=32.0)
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with (
        mortal_engine(embedded_model, "--adapters", f"one={tmp_path / 'one'}") as engine,
        tokenizer_of(embedded_model, engine, tmp_path / "log") as client,
    ):
        calm = await client.generate("import", model="one", **asked)
        assert calm.text != (await client.generate("import", **asked)).text
        async with client.stream("import", model="one", **asked) as stream:
            text = (await anext(aiter(stream))).text
            await engine.kill()
            await engine.start()
            text += "".join([delta.text async for delta in stream])
        assert text == calm.text


async def test_beam_search_survives_the_loss_of_the_engine(replica: Replica) -> None:
    """The search begins anew, also after a part of its result has arrived."""
    asked: dict[str, Any] = {
        "max_tokens": TOKENS, "n": 2, "ignore_eos": True, "beam_search": BeamSearch(),
    }  # fmt: skip
    async with Client(replica.tokenizer) as client, connect(replica.tokenizer) as channel:
        calm = await client.generate("import", **asked)
        start = text_start("import", dict(asked), completion.DELIVERY_DELTAS)
        start.credit = 10
        texts = ["", ""]
        session = completion_session(channel)
        async with AnswerStream(session, start) as stream:
            async for delta in stream:
                is_first = not any(texts)
                texts[delta.index] += delta.text
                if is_first:
                    await replica.engine.kill()
                    await replica.engine.start()
                    credit = completion.SessionCredit(tokens=TOKENS)
                    session.send(completion.SessionCommand(handle=1, credit=credit))
        await session.close()
    assert texts == [choice.text for choice in calm.choices]


async def test_requests_wait_while_the_engine_serves_another_checkpoint(
    replica: Replica, tmp_path: Path
) -> None:
    """Ids of another vocabulary would continue the text with nonsense."""
    other, engine, log = tmp_path / "other", replica.engine, replica.log
    make_checkpoint(other, CONFIGS["llama"])
    async with Client(replica.tokenizer) as client:
        calm = await client.generate("import", max_tokens=TOKENS, **ASKED)
        async with client.stream("import", max_tokens=TOKENS, **ASKED) as stream:
            text = (await anext(aiter(stream))).text
            await engine.kill()
            await engine.start(other)
            while "serves another checkpoint" not in log.read_text():  # noqa: ASYNC110 (a file)
                await asyncio.sleep(0.05)
            late = asyncio.ensure_future(client.generate("import", max_tokens=TOKENS, **ASKED))
            with pytest.raises(ServiceError) as refused:  # this engine would refuse its ids
                await client.generate("import", timeout_seconds=1.0)
            assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(ServiceError) as refused:  # an invalid request does not wait
                await client.generate("import", max_tokens=-1)
            assert refused.value.field == "stopping.max_tokens"
            await engine.kill()
            await engine.start()
            text += "".join([delta.text async for delta in stream])
        assert text == calm.text
        assert (await late).text == calm.text
    assert log.read_text().count("serves another checkpoint") == 1


async def test_new_request_waits_while_the_engine_is_restarted(replica: Replica) -> None:
    engine = replica.engine
    async with Client(replica.tokenizer) as client:
        calm = await client.generate("import", max_tokens=TOKENS, **ASKED)
        async with client.stream("import", max_tokens=TOKENS, **ASKED) as stream:
            text = (await anext(aiter(stream))).text
            engine.terminate()
            late = asyncio.ensure_future(client.generate("import", max_tokens=TOKENS, **ASKED))
            text += "".join([delta.text async for delta in stream])
        assert text == calm.text
        await engine.wait()
        await engine.start()
        assert (await late).text == calm.text


async def test_new_request_waits_while_the_tokenizer_is_restarted(
    replica: Replica, embedded_model: Path, tmp_path: Path
) -> None:
    """A running stream reaches its end meanwhile, and a tokenize request waits too."""
    [port] = free_ports(1)
    body = {"model": "default", "prompt": "import", "max_tokens": TOKENS, **ASKED}
    target = f"127.0.0.1:{port}"
    arguments = ("--model", str(embedded_model), "--engine", replica.engine.target)
    flags = ("--tokenizer", target, "--tokenizer-wait", "120")
    async with running_shim(*flags) as shim, httpx.AsyncClient(timeout=300) as http:
        url = f"{shim.url}/v1/completions"
        early = asyncio.ensure_future(http.post(url, json=body))  # no tokenizer runs yet
        log = tmp_path / "tokenizer"
        async with running_service("tokenizer", *arguments, log=log, port=port) as first:
            calm = (await early).json()["choices"]
            async with http.stream("POST", url, json=body | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                first.process.send_signal(signal.SIGTERM)
                late = asyncio.ensure_future(http.post(url, json=body))
                assert [line async for line in lines][-2] == "data: [DONE]"
            await first.process.wait()
            ids = asyncio.ensure_future(
                http.post(f"{shim.url}/tokenize", json={"prompt": "import"})
            )
        async with running_service("tokenizer", *arguments, log=log, port=port):
            assert (await late).json()["choices"] == calm
            assert (await ids).status_code == 200


async def test_stream_about_an_image_survives_the_loss_of_the_engine(tmp_path: Path) -> None:
    """The new engine has never seen the image: the tokenizer service sends it again."""
    model = write_whole(tmp_path / "tiny-llava", "llava")
    asked: Any = {"images": [png(40, 40)], "temperature": 0, "ignore_eos": True}
    asked["max_tokens"] = 1_500
    async with (
        mortal_engine(model) as engine,
        tokenizer_of(model, engine, tmp_path / "log") as client,
    ):
        calm = await client.generate("<image>def", **asked)
        text, count = "", 0
        async with client.stream("<image>def", **asked) as stream:
            async for delta in stream:
                text += delta.text
                count += 1
                if count == 1:
                    await engine.kill()
                    await engine.start()
        assert count > 1
        assert text == calm.text
