"""A load of an adapter ends as it would have, when its caller leaves before."""

import asyncio
import logging
from pathlib import Path

import pytest

from services.common.settings import StartupError
from services.engine.frontend.adapter_registry import AdapterRegistry
from services.engine.messages import AdapterLoaded, Command, LoadAdapter, UnloadAdapter
from tokenwire.errors import ServiceError


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    return str(tmp_path)


async def left_load(
    registry: AdapterRegistry, folder: str, commands: asyncio.Queue[Command]
) -> int:
    """Leave while the loop reads an adapter; return its number."""
    caller = asyncio.create_task(registry.load("sql", folder))
    command = await commands.get()
    assert isinstance(command, LoadAdapter)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    return command.number


async def names_once(registry: AdapterRegistry, wanted: int) -> list[str]:
    async for adapters in registry.changes():
        if len(adapters) == wanted:
            return [adapter.name for adapter in adapters]
    raise AssertionError


async def refusal(registry: AdapterRegistry, name: str, folder: str) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        await registry.load(name, folder)
    return raised.value


async def test_adapter_is_loaded_under_its_name_though_the_caller_left(folder: str) -> None:
    """Else its memory and its number are taken until the engine ends."""
    commands = asyncio.Queue[Command]()
    registry = AdapterRegistry("model", 1, commands.put_nowait)
    number = await left_load(registry, folder, commands)
    assert (await refusal(registry, "sql", folder)).reason == "ADAPTER_EXISTS", "no second copy"
    assert (await refusal(registry, "java", folder)).reason == "TOO_MANY_ADAPTERS"
    registry.on_loaded(AdapterLoaded(number, 100))
    assert await names_once(registry, 1) == ["sql"]
    assert (await registry.load("sql", folder)).num_bytes == 100
    registry.unload("sql")
    assert await commands.get() == UnloadAdapter(number)


async def test_caller_that_leaves_before_the_loop_reads_loads_the_adapter_too(folder: str) -> None:
    commands = asyncio.Queue[Command]()
    registry = AdapterRegistry("model", 1, commands.put_nowait)
    caller = asyncio.create_task(registry.load("sql", folder))
    await asyncio.sleep(0)  # the hash of the files has begun
    caller.cancel()
    assert isinstance(await commands.get(), LoadAdapter)
    registry.on_loaded(AdapterLoaded(1, 100))
    assert await names_once(registry, 1) == ["sql"]


async def test_failure_after_the_caller_left_frees_name_and_number(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator reads the reason in the log."""
    commands = asyncio.Queue[Command]()
    registry = AdapterRegistry("model", 1, commands.put_nowait)
    number = await left_load(registry, folder, commands)
    logged = asyncio.Event()

    def see(_: logging.LogRecord) -> bool:
        logged.set()
        return True

    caplog.handler.addFilter(see)
    registry.on_loaded(AdapterLoaded(number, 0, "It is damaged."))
    await logged.wait()
    assert "It is damaged." in caplog.text
    again = asyncio.create_task(registry.load("sql", folder))
    assert await commands.get() == LoadAdapter(number, folder)
    registry.on_loaded(AdapterLoaded(number, 100))
    assert (await again).name == "sql"


@pytest.mark.parametrize("task", ["default", "model", "a\nb", ""])
def test_task_that_no_request_could_name_stops_the_start(task: str) -> None:
    """A request for it would get the model without the adapter."""
    registry = AdapterRegistry("model", 1, asyncio.Queue[Command]().put_nowait)
    with pytest.raises(StartupError, match="/checkpoint has a task"):
        registry.add_tasks(["retrieval", task], "/checkpoint", "0")
