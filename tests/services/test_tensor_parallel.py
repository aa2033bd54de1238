"""Tensor-parallel engine of two ranks: torchrun, gRPC, gloo."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from services.engine.checked_request import BeamSettings
from tests.services import engine_client
from tests.stack import RunningService, loop_process, running_service
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import (
    GenerateRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import (
    BeamSearch,
    SamplingParams,
    StoppingParams,
    TokenIds,
)

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_PROMPTS = ([1, 2, 3], [4, 5], list(range(1, 41)))
_MAX_TOKENS = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@asynccontextmanager
async def engine_of_two(model: Path, log: Path) -> AsyncIterator[RunningService]:
    """Run an engine of two ranks; assert that all its processes end with it."""
    arguments = ("--model", str(model), "--dtype", "float32", "--kv-memory", "16MiB")
    async with running_service("engine", *arguments, log=log, launcher=_TORCHRUN) as service:
        everyone = psutil.Process(service.process.pid).children(recursive=True)
        yield service
    _, alive = await asyncio.to_thread(psutil.wait_procs, everyone, timeout=30)
    assert not alive


def rank(launcher: RunningService, number: int) -> psutil.Process:
    ranks = psutil.Process(launcher.process.pid).children()
    [found] = [each for each in ranks if each.environ().get("RANK") == str(number)]
    return found


def make_request(n: int, max_tokens: int, beams: BeamSearch | None = None) -> GenerateRequest:
    return GenerateRequest(
        prompts=[TokenIds(ids=prompt) for prompt in _PROMPTS],
        n=n,
        sampling=SamplingParams(temperature=0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        beam_search=beams,
    )


async def test_two_ranks_generate_the_tokens_of_one_and_stop_together(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with engine_of_two(checkpoint, tmp_path / "log") as service:
        generated: dict[tuple[int, int], list[int]] = {}
        async with connect(service.target) as channel:
            for handle, beams in ((1, None), (2, BeamSearch())):
                request = make_request(handle, _MAX_TOKENS, beams)
                async for response in EngineServiceStub(channel).Generate(request):
                    if response.HasField("delta"):
                        ids = generated.setdefault((handle, response.delta.sequence), [])
                        ids += response.delta.tokens.ids
        await service.stop()  # SIGTERM, which torchrun forwards to both
    loop = tiny.make_loop(tiny.load_tiny(checkpoint))
    search = tiny.make_request(2, _PROMPTS, n=2, max_tokens=_MAX_TOKENS)
    search = replace(search, checked=replace(search.checked, beams=BeamSettings()))
    alone = tiny.run(loop, [tiny.make_request(1, _PROMPTS, max_tokens=_MAX_TOKENS), search])
    assert generated == tiny.tokens_of(alone)
    log = (tmp_path / "log").read_text()
    assert '"stopped"' in log
    assert "has ended" not in log


async def test_two_ranks_load_adapters_while_they_generate(tmp_path: Path) -> None:
    """Each rank keeps its part. An adapter that can't be read is refused, and all go on."""
    model = make_checkpoint(tmp_path / "model", CONFIGS["llama"])
    merged = make_adapter(model, tmp_path / "adapter", seed=1)
    prompt = list(range(3, 40))

    def greedy(of: PreTrainedModel, count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(reference_logits(of, torch.tensor(ids))[-1].argmax()))
        return ids[len(prompt) :]

    async with (
        engine_of_two(tmp_path / "model", tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        control = EngineControlServiceStub(channel)

        async def tokens(name: str, count: int) -> list[int]:
            request = engine_client.make_request(prompt, max_tokens=count, model=name)
            return engine_client.ids_of(await engine_client.generate(channel, request))

        stream = asyncio.create_task(tokens("", 60))
        loading = LoadAdapterRequest(name="one", path=str(tmp_path / "adapter"))
        assert (await control.LoadAdapter(loading)).adapter.name == "one"
        broken = LoadAdapterRequest(name="broken", path=str(tmp_path / "broken"))
        shutil.copytree(tmp_path / "adapter", broken.path)
        os.truncate(tmp_path / "broken" / "adapter_model.safetensors", 1000)
        with pytest.raises(grpc.aio.AioRpcError, match="damaged or truncated"):
            await control.LoadAdapter(broken)
        assert await tokens("one", 12) == greedy(merged, 12)
        assert await stream == greedy(model, 60)
        await control.UnloadAdapter(UnloadAdapterRequest(name="one"))
        assert await tokens("", 12) == greedy(model, 12)
        await service.stop()


async def test_loss_of_a_rank_ends_the_engine_and_is_logged(
    embedded_model: Path, tmp_path: Path
) -> None:
    async with engine_of_two(embedded_model, tmp_path / "log") as service:
        async with connect(service.target) as channel:
            worker = rank(service, 1)
            call = EngineServiceStub(channel).Generate(make_request(40, 1_900))
            await anext(aiter(call))
            worker.kill()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await service.process.wait() != 0
    assert "rank 1 has ended" in (tmp_path / "log").read_text()


async def test_idle_rank_ends_when_rank_0_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    async with engine_of_two(checkpoint, tmp_path / "log") as service:
        async with connect(service.target) as channel:
            async for _ in EngineServiceStub(channel).Generate(make_request(1, 1)):
                pass  # rank 1 then waits for a plan
        worker = rank(service, 1)
        psutil.Process(loop_process(rank(service, 0).pid)).kill()
        await asyncio.to_thread(psutil.wait_procs, [worker], timeout=30)
        assert not worker.is_running()
        assert await service.process.wait() != 0
