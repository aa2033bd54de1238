"""Adapters of an engine: requests name one as their model; operators load and unload them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from tests.services.engine_client import SessionClient, generate, ids_of, make_request, start
from tests.stack import RunningService, running_service
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

PROMPT = list(range(3, 70))
TOKENS = 12


@dataclass(frozen=True)
class Adapted:
    """An engine with the adapter `first`, and the folders and merged models of others."""

    service: RunningService
    folder: Path
    models: dict[str, PreTrainedModel]

    def greedy(self, name: str) -> list[int]:
        """Return the tokens that the merged model generates."""
        ids = list(PROMPT)
        for _ in range(TOKENS):
            logits = reference_logits(self.models[name], torch.tensor(ids))
            ids.append(int(logits[-1].argmax()))
        return ids[len(PROMPT) :]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "model", CONFIGS["llama"])
    models = {"": base}
    for seed, name in enumerate(("first", "second", "third")):
        models[name] = make_adapter(base, folder / name, seed)
    arguments = ("--model", str(folder / "model"), "--dtype", "float32", "--kv-memory", "64MiB")
    adapters = ("--adapters", f"first={folder / 'first'}", "--max-adapters", "2")
    async with running_service("engine", *arguments, *adapters, log=folder / "log") as service:
        yield Adapted(service, folder, models)


@pytest_asyncio.fixture(loop_scope="session")
async def channel(adapted: Adapted) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(adapted.service.target) as channel:
        yield channel


async def load(channel: grpc.aio.Channel, name: str, path: Path) -> engine_pb2.Adapter:
    request = engine_pb2.LoadAdapterRequest(name=name, path=str(path))
    return (await EngineControlServiceStub(channel).LoadAdapter(request)).adapter


async def unload(channel: grpc.aio.Channel, name: str) -> None:
    control = EngineControlServiceStub(channel)
    await control.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name=name))


async def names(channel: grpc.aio.Channel) -> list[str]:
    model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
    return [adapter.name for adapter in model.adapters]


async def tokens(channel: grpc.aio.Channel, model: str) -> list[int]:
    return ids_of(await generate(channel, make_request(PROMPT, max_tokens=TOKENS, model=model)))


async def refusal(call: "grpc.aio.UnaryUnaryCall[Any, Any]") -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return ServiceError.from_rpc_error(raised.value)


async def test_requests_of_adapters_and_of_none_run_together(
    adapted: Adapted, channel: grpc.aio.Channel
) -> None:
    """They share no cached prefix: the keys of the same prompt differ."""
    await load(channel, "second", adapted.folder / "second")
    wanted = ["", "first", "second"] * 4
    made = await asyncio.gather(*(tokens(channel, name) for name in wanted))
    expected = {name: adapted.greedy(name) for name in ("", "first", "second")}
    assert len(set(map(tuple, expected.values()))) == 3
    assert made == [expected[name] for name in wanted]
    again = [await tokens(channel, name) for name in wanted[:3]]
    assert again == made[:3], "from the cache"
    await unload(channel, "second")


async def test_adapters_are_listed_with_fingerprints_that_others_can_compare(
    adapted: Adapted, channel: grpc.aio.Channel
) -> None:
    assert await names(channel) == ["first"]
    second = await load(channel, "second", adapted.folder / "second")
    assert await load(channel, "second", adapted.folder / "second") == second
    assert await names(channel) == ["first", "second"]
    await unload(channel, "second")
    same = await load(channel, "same as second", adapted.folder / "second")
    assert same.fingerprint == second.fingerprint
    await unload(channel, "same as second")


async def test_unloaded_adapter_finishes_its_streams_and_takes_no_new_ones(
    adapted: Adapted, channel: grpc.aio.Channel
) -> None:
    """Its memory is free after that: of two places both can be filled again."""
    await load(channel, "second", adapted.folder / "second")
    session = SessionClient(channel)
    request = make_request(PROMPT, max_tokens=TOKENS, model="second")
    await session.send(start(1, request, credit=2))
    await session.until("delta", 1)
    await unload(channel, "second")
    error = ServiceError.from_status((await _error_of(session, 2, request)).error)
    assert (error.reason, error.field) == ("MODEL_NOT_FOUND", "model")
    credit = engine_pb2.SessionCredit(tokens=TOKENS)
    await session.send(engine_pb2.SessionCommand(handle=1, credit=credit))
    await session.until("completed", 1)
    made = [event for event in session.events if event.handle == 1]
    assert ids_of(made) == adapted.greedy("second")
    await load(channel, "third", adapted.folder / "third")
    assert await tokens(channel, "third") == adapted.greedy("third")
    await unload(channel, "third")
    session.call.cancel()


async def _error_of(
    session: SessionClient, handle: int, request: engine_pb2.GenerateRequest
) -> engine_pb2.SessionEvent:
    await session.send(start(handle, request))
    return await session.until("error", handle)


async def test_same_name_with_other_weights_has_another_cache(
    adapted: Adapted, channel: grpc.aio.Channel
) -> None:
    for folder in ("second", "third"):
        await load(channel, "changing", adapted.folder / folder)
        assert await tokens(channel, "changing") == adapted.greedy(folder)
        await unload(channel, "changing")


def _with_config(folder: Path, to: Path, **changes: object) -> Path:
    """Copy an adapter with changes of its configuration."""
    to.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (to / "adapter_config.json").write_text(json.dumps(config))
    (to / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
    return to


def _truncated(folder: Path, to: Path) -> Path:
    _with_config(folder, to)
    data = (folder / "adapter_model.safetensors").read_bytes()
    (to / "adapter_model.safetensors").unlink()
    (to / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    return to


def _of_embeddings(folder: Path, to: Path) -> Path:
    make_adapter(make_checkpoint(to / "m", CONFIGS["llama"]), to, 9, target_modules=["lm_head"])
    return to


def _of_another_shape(folder: Path, to: Path) -> Path:
    make_adapter(make_checkpoint(to / "m", CONFIGS["qwen3"]), to, 9)
    return to


BAD: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "missing": (lambda _, to: to, "No such file"),
    "DoRA": (lambda old, to: _with_config(old, to, use_dora=True), "DoRA"),
    "another method": (lambda old, to: _with_config(old, to, peft_type="IA3"), "IA3"),
    "bias": (lambda old, to: _with_config(old, to, bias="all"), "bias must be none"),
    "whole modules": (lambda old, to: _with_config(old, to, modules_to_save=["x"]), "modules"),
    "PiSSA": (lambda old, to: _with_config(old, to, init_lora_weights="pissa"), "pissa"),
    "no alpha": (lambda old, to: _with_config(old, to, lora_alpha="much"), "lora_alpha"),
    "truncated": (_truncated, "damaged or truncated"),
    "output projection": (_of_embeddings, "lm_head"),
    "other shape": (_of_another_shape, "outputs"),
}


async def test_streams_keep_their_tokens_while_adapters_are_loaded_and_refused(
    adapted: Adapted, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    """Adapters are read beside the steps; a broken one reaches no stream either."""

    async def stream(model: str) -> list[int]:
        return ids_of(await generate(channel, make_request(PROMPT, max_tokens=60, model=model)))

    alone = [await stream(name) for name in ("", "first")]
    streams = [asyncio.create_task(stream(name)) for name in ("", "first")]
    broken = _truncated(adapted.folder / "first", tmp_path / "broken")
    while not all(each.done() for each in streams):
        await load(channel, "second", adapted.folder / "second")
        assert await tokens(channel, "second") == adapted.greedy("second")
        await unload(channel, "second")
        request = engine_pb2.LoadAdapterRequest(name="broken", path=str(broken))
        error = await refusal(EngineControlServiceStub(channel).LoadAdapter(request))
        assert "damaged or truncated" in error.message
    assert [await each for each in streams] == alone
    assert await names(channel) == ["first"]


@pytest.mark.parametrize("case", BAD)
async def test_adapter_that_does_not_fit_is_refused_with_its_reason(
    case: str, adapted: Adapted, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    make, words = BAD[case]
    path = make(adapted.folder / "first", tmp_path / "bad")
    request = engine_pb2.LoadAdapterRequest(name="bad", path=str(path))
    error = await refusal(EngineControlServiceStub(channel).LoadAdapter(request))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "path")
    assert words in error.message
    assert await names(channel) == ["first"]
    assert await tokens(channel, "first") == adapted.greedy("first")


async def test_names_and_numbers_have_limits(adapted: Adapted, channel: grpc.aio.Channel) -> None:
    control, path = EngineControlServiceStub(channel), str(adapted.folder / "second")

    def loading(name: str, path: str = path) -> "grpc.aio.UnaryUnaryCall[Any, Any]":
        return control.LoadAdapter(engine_pb2.LoadAdapterRequest(name=name, path=path))

    for name in ("", "a" * 201, "a\nb", "default", "model"):
        assert (await refusal(loading(name))).field == "name"
    other = str(adapted.folder / "third")
    assert (await refusal(loading("first", other))).code is grpc.StatusCode.ALREADY_EXISTS
    await loading("second")
    full = await refusal(loading("third", other))
    assert (full.code, full.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_ADAPTERS",
    )
    await unload(channel, "second")
    gone = await refusal(control.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name="second")))
    assert (gone.code, gone.field) == (grpc.StatusCode.NOT_FOUND, "name")


async def test_wrong_adapter_stops_the_start_in_one_sentence(
    adapted: Adapted, tmp_path: Path
) -> None:
    model = ("--model", str(adapted.folder / "model"), "--kv-memory", "64MiB")
    with pytest.raises(AssertionError, match=r"--adapters x=.*No such file"):
        async with running_service(
            "engine", *model, "--adapters", f"x={tmp_path / 'none'}", log=tmp_path / "log"
        ):
            pass
