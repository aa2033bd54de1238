"""Manager of the models on demand: leases, loads, the queue, failures."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2 as pb
from tokenwire.serving.load_plan import Room
from tokenwire.serving.managed_model import ModelLease, OnDemandModel
from tokenwire.serving.model_manager import ModelManager
from tokenwire.serving.serve_options import ServeError
from tokenwire.serving.service import Service

_SIZES = {"a": 4, "b": 4, "c": 6, "huge": 100}
_MEMORY = 10


class _Memory:
    """A machine's memory, on which models take their place at once, or when they are let."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.used: Callable[[str], bool] = lambda _: False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.failing = ""
        self.sizes = _SIZES

    def free_memory(self) -> int:
        return 10**9

    async def needed_memory(self, services: Sequence[Service]) -> int:
        return self.sizes[services[0].model]

    async def start(
        self, services: Sequence[Service], on_progress: Callable[[float], None]
    ) -> None:
        name = services[0].model
        on_progress(0.5)
        await self.may_start.wait()
        if self.failing == name:
            raise ServeError("the file is damaged.")
        self.loaded.add(name)
        assert sum(self.sizes[each] for each in self.loaded) <= _MEMORY, "over memory"

    async def end(self, services: Sequence[Service], *, at_once: bool) -> None:
        name = services[0].model
        assert at_once or not self.used(name), "a used model was unloaded"
        await asyncio.sleep(0)
        if name in self.loaded:
            await self.may_end.wait()
        self.loaded.discard(name)


def _models() -> list[OnDemandModel]:
    return [
        OnDemandModel(name, (f"{name}-alias",), (Service("engine", (), name, name),), math.inf)
        for name in _SIZES
    ]


def _manager(memory: _Memory, most_models: int = 9) -> ModelManager:
    manager = ModelManager(memory, Room(_MEMORY, most_models), 60.0)
    manager.replace(_models())
    return manager


def _run(work: Callable[[_Memory], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await work(_Memory())

    asyncio.run(run())


async def _until(lease: ModelLease, kind: str) -> pb.UseModelResponse:
    """Return the next event of a kind."""
    async with asyncio.timeout(5):
        while True:
            event = await lease.events.get()
            if event.WhichOneof("event") == kind:
                return event


def test_a_model_is_loaded_once_for_all_who_use_it() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        memory.may_start.clear()
        leases = [await manager.use(name, None) for name in ("a", "a-alias")]
        assert (await _until(leases[0], "loading")).loading.progress == 0
        state = manager.state("a")
        assert state is not None
        assert state.state == pb.MODEL_STATE_LOADING
        memory.may_start.set()
        for lease in leases:
            await _until(lease, "ready")
        assert memory.loaded == {"a"}

    _run(work)


def test_an_unused_model_makes_room_and_a_used_one_is_waited_for() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        first = await manager.use("a", None)
        await _until(first, "ready")
        waiting = await manager.use("c", None)
        await _until(waiting, "ready")
        assert memory.loaded == {"a", "c"}
        third = await manager.use("b", None)
        await _until(first, "wanted")
        late = await manager.use("a", None)
        assert late.events.empty() or late.events.get_nowait().HasField("queued")
        manager.release(first)
        await _until(third, "ready")
        assert memory.loaded == {"b", "c"}
        manager.release(waiting)
        await _until(late, "ready")
        assert memory.loaded == {"a", "b"}

    _run(work)


def test_users_go_on_when_the_one_who_waits_for_their_memory_leaves() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory, most_models=1)
        first = await manager.use("a", None)
        await _until(first, "ready")
        waiting = await manager.use("b", None)
        await _until(first, "wanted")
        late = await manager.use("a", None)
        manager.release(waiting)
        await _until(late, "ready")
        assert memory.loaded == {"a"}

    _run(work)


def test_a_stopping_server_loads_no_model_and_lets_running_requests_end() -> None:
    """Their users get a reason at once, and the answers of a loaded model stay complete."""

    async def work(memory: _Memory) -> None:
        manager = _manager(memory, most_models=2)
        used = await manager.use("a", 0)
        await _until(used, "ready")
        memory.may_start.clear()
        joining = await manager.use("b", None)
        queued = await manager.use("c", None)
        await manager.close()
        for lease in (joining, queued):
            assert (await _until(lease, "failed")).failed.message.startswith("The server is stop")
        another = await manager.use("a", 0)
        await _until(another, "ready")
        for refused in (manager.use("b", None), manager.load("c", None)):
            with pytest.raises(ServiceError) as caught:
                await refused
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.UNAVAILABLE,
                "STOPPING",
            )
        with pytest.raises(ServiceError, match="stopping"):
            await manager.unload("a", force=True)
        manager.release(used)
        manager.release(another)
        state = manager.state("a")
        assert state is not None
        assert state.state == pb.MODEL_STATE_LOADED, "its processes are ended by their owner"
        assert memory.loaded == {"a"}

    _run(work)


def test_a_failed_load_is_told_to_all_and_not_tried_again_at_once() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        memory.failing = "a"
        memory.may_start.clear()
        leases = [await manager.use("a", None) for _ in range(3)]
        memory.may_start.set()
        for lease in leases:
            failed = await _until(lease, "failed")
            assert "the file is damaged." in failed.failed.message
        with pytest.raises(ServiceError) as raised:
            await manager.use("a", None)
        assert raised.value.reason == "LOAD_FAILED"
        assert raised.value.retry_seconds == pytest.approx(5, abs=1)
        state = manager.state("a")
        assert state is not None
        assert (state.state, state.error) == (pb.MODEL_STATE_FAILED, "the file is damaged.")

    _run(work)


def test_a_model_that_never_fits_is_refused_with_its_numbers() -> None:
    async def work(memory: _Memory) -> None:
        lease = await _manager(memory).use("huge", None)
        failed = await _until(lease, "failed")
        assert "takes 100 bytes" in failed.failed.message
        assert "10 bytes (--memory)" in failed.failed.message

    _run(work)


def test_an_unused_model_leaves_after_its_time_and_at_once_with_zero() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        lease = await manager.use("a", 0.0)
        await _until(lease, "ready")
        watch = manager.watch()
        manager.release(lease)
        async with asyncio.timeout(5):
            while memory.loaded:
                await watch.take()

    _run(work)


def test_an_operator_unloads_a_used_model_only_by_force() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        lease = await manager.use("a", None)
        await _until(lease, "ready")
        with pytest.raises(ServiceError) as raised:
            await manager.unload("a", force=False)
        assert raised.value.code is grpc.StatusCode.ABORTED
        await manager.unload("a", force=True)
        assert not memory.loaded
        assert "An operator has unloaded" in (await _until(lease, "failed")).failed.message

    _run(work)


def test_a_load_that_ends_while_its_model_leaves_takes_no_memory() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory, most_models=1)
        memory.may_start.clear()
        first = await manager.use("a", None)
        await _until(first, "loading")
        manager.release(first)
        memory.may_start.set()  # the load ends in the step in which another one replaces it
        other = await manager.use("c", None)
        await _until(other, "ready")
        assert memory.loaded == {"c"}
        state = manager.state("a")
        assert state is not None
        assert state.state == pb.MODEL_STATE_IDLE

    _run(work)


def test_a_model_loads_again_after_the_load_that_awaited_its_unload_is_given_up() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory, most_models=1)
        first = await manager.use("a", None)
        await _until(first, "ready")
        manager.release(first)
        memory.may_end.clear()
        waiting = await manager.use("b", None)
        await _until(waiting, "loading")
        manager.release(waiting)
        async with asyncio.timeout(5):
            await manager.unload("b", force=True)
        memory.may_end.set()
        again = await manager.use("a", None)
        await _until(again, "ready")
        assert memory.loaded == {"a"}

    _run(work)


def test_a_model_that_was_replaced_by_a_larger_one_is_measured_again() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        first = await manager.use("a", None)
        await _until(first, "ready")
        await manager.unload("a", force=True)
        memory.sizes = _SIZES | {"a": 8}
        other = await manager.use("b", None)
        await _until(other, "ready")
        manager.release(other)
        again = await manager.use("a", None)
        await _until(again, "ready")
        assert memory.loaded == {"a"}, "b has left: both take more than the memory"

    _run(work)


def test_a_model_that_leaves_the_catalog_is_unloaded_once_it_is_unused() -> None:
    async def work(memory: _Memory) -> None:
        manager = _manager(memory)
        lease = await manager.use("a", None)
        await _until(lease, "ready")
        manager.replace(_models()[1:])
        with pytest.raises(ServiceError) as raised:
            await manager.use("a", None)
        assert raised.value.reason == "MODEL_NOT_FOUND"
        assert memory.loaded == {"a"}
        manager.release(lease)
        other = await manager.use("c", None)
        await _until(other, "ready")
        assert memory.loaded == {"c"}

    _run(work)


_STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(_STEPS, st.integers(1, 3))
def test_no_used_model_leaves_and_the_memory_suffices(
    steps: list[tuple[str, int]], most: int
) -> None:
    """`_Memory` checks both at each start and end. At the end, everyone has been served."""

    async def work(memory: _Memory) -> None:
        manager = _manager(memory, most)
        held: list[ModelLease] = []
        granted: set[ModelLease] = set()
        memory.used = lambda name: any(lease.model.name == name for lease in granted)

        def collect() -> None:
            for lease in held:
                while not lease.events.empty():
                    if lease.events.get_nowait().HasField("ready"):
                        granted.add(lease)

        for name, steps_between in steps:
            held.append(await manager.use(name, None))
            for _ in range(steps_between):
                await asyncio.sleep(0)
            collect()
            if steps_between == 3 and held:
                lease = held.pop(0)
                granted.discard(lease)
                manager.release(lease)
        async with asyncio.timeout(20):
            while held:
                await asyncio.sleep(0)
                collect()
                for lease in [each for each in held if each in granted]:
                    held.remove(lease)
                    granted.discard(lease)
                    manager.release(lease)

    _run(work)
