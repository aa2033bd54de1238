"""Manager of the models that are loaded on demand: who uses them, which are in memory, who waits.

The manager grants leases. A lease of a model that is not in memory starts its load, for which
unused models leave the memory, the least recently used first. If there is no room because other
models are used, the lease waits at the head of one queue: their users are asked to end their
leases, and new leases of theirs wait behind it.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.model_files.unknown_model import model_not_found
from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2 as pb
from tokenwire.serving import manager_metrics as metrics
from tokenwire.serving.load_errors import (
    in_use,
    load_failed,
    load_late,
    never_fits,
    queue_full,
    stopping,
    unloaded,
)
from tokenwire.serving.load_plan import Resident, Room, plan_load
from tokenwire.serving.managed_model import ManagedModel, ModelLease, OnDemandModel
from tokenwire.serving.model_watch import ModelWatch
from tokenwire.serving.serve_options import ServeError
from tokenwire.serving.service import Service
from tokenwire.serving.service_log import report

__all__ = ["ModelManager", "ModelProcesses"]

_MOST_WAITING = 1024
"""Most leases that wait. A service has one for each model, whatever the number of its requests"""
_LEAST_PAUSE, _MOST_PAUSE = 5.0, 300.0
"""Seconds after a failed load before a request tries again; they double with each failure"""
_RELEASE_SECONDS = 1.0
"""Time that users without requests have to end their leases when an operator unloads a model"""


class ModelProcesses(Protocol):
    """The processes of models."""

    def free_memory(self) -> int:
        """Return the bytes of memory that are free now."""

    async def needed_memory(self, services: Sequence[Service]) -> int:
        """Return the bytes that services will take. Raises ServeError if they can't start."""

    async def start(
        self, services: Sequence[Service], on_progress: Callable[[float], None]
    ) -> None:
        """Start services, and return when they serve. Raises ServeError; all are ended then."""

    async def end(self, services: Sequence[Service], *, at_once: bool) -> None:
        """End services. at_once: do not wait for their requests."""


class ModelManager:
    """The models that are loaded on demand. All calls come from one event loop."""

    def __init__(self, processes: ModelProcesses, room: Room, most_seconds: float) -> None:
        """most_seconds: longest wait of a user for a model."""
        self._processes = processes
        self._room = room
        self._most_seconds = most_seconds
        self._models: dict[str, ManagedModel] = {}
        self._by_name: dict[str, ManagedModel] = {}
        self._leaving: set[ManagedModel] = set()
        """Models that are gone from the catalog and still in memory"""
        self._queue: deque[ModelLease] = deque()
        """Leases that wait for room, or for the end of an unload"""
        self._wanted: frozenset[ManagedModel] = frozenset()
        """Used models that the head of the queue waits for"""
        self._watches: set[ModelWatch] = set()
        self._is_closed = False
        """True when the server stops: no model is loaded or unloaded from then on"""

    def replace(self, models: Sequence[OnDemandModel]) -> None:
        """Serve these models. One that is gone leaves the memory once it is unused."""
        kept = {model.name: model for model in models}
        for name, managed in list(self._models.items()):
            plan = kept.get(name)
            if plan is None or plan.services != managed.plan.services:
                managed.is_gone = True
                del self._models[name]
                if managed.work is not None or managed.in_memory:
                    self._leaving.add(managed)
                    self._after_use(managed)
            elif plan != managed.plan:
                managed.plan, managed.keep_alive = plan, plan.keep_alive
            self._note_change(managed)
        before, self._models = self._models, {}
        for plan in models:
            managed = before.get(plan.name) or ManagedModel(plan)
            self._models[plan.name] = managed
            self._note_change(managed)
        self._by_name = {
            name: each for each in self._models.values() for name in (each.name, *each.plan.aliases)
        }

    def state(self, name: str) -> pb.Model | None:
        """Return the state of a model by its full name; None if it is gone."""
        managed = self._models.get(name)
        return None if managed is None else managed.to_message()

    def states(self) -> list[pb.Model]:
        """Return the states of all models."""
        return [managed.to_message() for managed in self._models.values()]

    def watch(self) -> ModelWatch:
        """Return a watch that holds all models at first."""
        watch = ModelWatch()
        for name in self._models:
            watch.add(name)
        self._watches.add(watch)
        return watch

    def end_watch(self, watch: ModelWatch) -> None:
        self._watches.discard(watch)

    async def use(self, name: str, keep_alive: float | None) -> ModelLease:
        """Return a lease of a model, which gets its events later.

        keep_alive: seconds; None = as the catalog says. Raises NOT_FOUND, RESOURCE_EXHAUSTED if too
        many wait, and UNAVAILABLE while a failed model pauses or the server stops.
        """
        managed = self._find(name)
        if not (managed.in_memory or managed.is_leaving):  # its files may have changed
            await self._measure(managed)
        lease = ModelLease(managed)
        self.keep(lease, keep_alive)
        if managed.is_loaded and managed not in self._wanted:
            managed.leases.add(lease)
            managed.note_use()
            self._note_change(managed)
            lease.grant()
            return lease
        if self._is_closed:
            raise stopping()
        if len(self._queue) >= _MOST_WAITING:
            raise queue_full(_MOST_WAITING)
        _require_retry(managed)
        loop = asyncio.get_running_loop()
        lease.timer = loop.call_later(self._most_seconds, self._expire, lease)
        self._queue.append(lease)
        self._advance()
        return lease

    def keep(self, lease: ModelLease, keep_alive: float | None) -> None:
        """Set how long a model stays after its last use. keep_alive: as `use` takes it."""
        managed = lease.model
        managed.keep_alive = managed.plan.keep_alive if keep_alive is None else keep_alive

    def release(self, lease: ModelLease) -> None:
        """End a lease."""
        managed = lease.model
        if lease.timer is not None:
            lease.timer.cancel()
        if lease in self._queue:
            self._queue.remove(lease)
        managed.joining.discard(lease)
        if lease in managed.leases:
            managed.leases.discard(lease)
            managed.note_use()
            self._after_use(managed)
            self._note_change(managed)
        self._advance()

    async def load(self, name: str, keep_alive: float | None) -> pb.Model:
        """Load a model, and return its state. Raises ServiceError."""
        lease = await self.use(name, keep_alive)
        try:
            while True:
                event = await lease.events.get()
                if event.HasField("failed"):
                    raise ServiceError.from_status(event.failed)
                if event.HasField("ready"):
                    break
        finally:
            self.release(lease)
        return lease.model.to_message()

    async def unload(self, name: str, *, force: bool) -> pb.Model:
        """Unload a model, and return its state. Raises ABORTED while it is used, unless `force`,
        and UNAVAILABLE if the server stops."""
        managed = self._find(name)
        if self._is_closed:
            raise stopping()
        if not force:
            await self._until_unused(managed)
        if managed.in_memory:
            for lease in (*managed.leases, *managed.joining):
                lease.fail(unloaded(managed.name))
            managed.leases.clear()
            managed.joining.clear()
            self._begin_unload(managed, "operator", at_once=force)
        if managed.work is not None:
            await asyncio.shield(managed.work)
        return managed.to_message()

    async def lose(self, services: Sequence[Service], why: str) -> None:
        """Note that services of a loaded model have ended and can't be started again."""
        for managed in (*self._models.values(), *self._leaving):
            if managed.is_loaded and set(services) & set(managed.plan.services):
                self._fail(managed, why)
                self._begin_unload(managed, "lost", at_once=True)

    async def close(self) -> None:
        """End loads and unloads that run, and the leases that wait for them.

        Leases of loaded models stay: their requests may end. The processes are ended by their
        owner, once no service asks for models.
        """
        self._is_closed = True
        everyone = (*self._models.values(), *self._leaving)
        waiting = [*self._queue, *(lease for each in everyone for lease in each.joining)]
        self._queue.clear()
        self._wanted = frozenset()
        for lease in waiting:
            lease.model.joining.discard(lease)
            lease.fail(stopping())
        tasks = [each.work for each in everyone if each.work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, name: str) -> ManagedModel:
        managed = self._by_name.get(name)
        if managed is None:
            raise model_not_found(name, self._by_name)
        return managed

    async def _measure(self, managed: ManagedModel) -> None:
        """Estimate the memory of a model. Raises UNAVAILABLE for one that can't be served."""
        _require_retry(managed)
        try:
            needed = await self._processes.needed_memory(managed.plan.services)
        except ServeError as error:
            if not managed.in_memory:  # no other user has begun its load meanwhile
                self._fail(managed, str(error))
                raise load_failed(managed) from None
        else:
            if not managed.in_memory:
                managed.memory_bytes = needed

    def _advance(self) -> None:
        """Grant leases, or start loads for them, from the head of the queue on."""
        self._wanted = frozenset()
        while self._queue and self._serve(self._queue[0]):
            self._queue.popleft()
        for position, lease in enumerate(self._queue):
            lease.tell_position(position)
        self._count()

    def _serve(self, lease: ModelLease) -> bool:
        """Serve the head of the queue. Return False if it must wait."""
        managed = lease.model
        if managed.is_leaving:
            return False
        if managed.is_gone:
            lease.fail(model_not_found(managed.name, self._by_name))
        elif managed.state == pb.MODEL_STATE_LOADED:
            managed.leases.add(lease)
            managed.note_use()
            lease.grant()
        elif managed.state == pb.MODEL_STATE_LOADING:
            self._join(lease)
        else:
            return self._plan(lease)
        self._note_change(managed)
        return True

    def _plan(self, lease: ModelLease) -> bool:
        """Start the load of a model, or fail its lease. Return False if it must wait for room."""
        managed = lease.model
        needed = managed.memory_bytes or 0
        residents = self._residents()
        plan = plan_load(needed, residents, self._room)
        if plan is None:
            lease.fail(never_fits(managed, self._room, _MOST_PAUSE))
            return True
        if plan.await_unused:
            self._wanted = frozenset(plan.await_unused)
            for other in self._wanted:
                for each in (*other.leases, *other.joining):
                    each.want()
            return False
        unload = {*plan.unload, *self._short_of_memory(needed, plan.unload)}
        for other in unload:
            self._begin_unload(other, "memory", at_once=False)
        managed.state, managed.error = pb.MODEL_STATE_LOADING, ""
        self._join(lease)
        managed.work = asyncio.create_task(self._load(managed))
        self._note_change(managed)
        return True

    def _residents(self) -> list[Resident[ManagedModel]]:
        everyone = (*self._models.values(), *self._leaving)
        return [
            Resident(each, each.memory_bytes or 0, each.last_used, each.is_used)
            for each in everyone
            if each.in_memory
        ]

    def _short_of_memory(
        self, needed: int, leaving: Sequence[ManagedModel]
    ) -> Sequence[ManagedModel]:
        """Return unused models that leave too, because other programs take the machine's memory."""
        freed = sum(each.memory_bytes or 0 for each in (*leaving, *self._unloading()))
        free = self._processes.free_memory() + freed - needed
        more: list[ManagedModel] = []
        for each in sorted(self._models.values(), key=lambda each: each.last_used):
            if free >= 0:
                break
            if each.is_loaded and not each.is_used and each not in leaving:
                more.append(each)
                free += each.memory_bytes or 0
        return more

    def _join(self, lease: ModelLease) -> None:
        lease.model.joining.add(lease)
        lease.tell_progress(lease.model.progress)

    async def _load(self, managed: ManagedModel) -> None:
        """Load a model once the memory of others is free."""
        unloads = [each.work for each in self._unloading() if each.work is not None]
        try:
            if unloads:  # not gather, which cancels the unloads together with this load
                await asyncio.wait(unloads)
            began = time.monotonic()
            await self._processes.start(
                managed.plan.services, lambda share: self._note_progress(managed, share)
            )
        except ServeError as error:
            managed.work = None
            self._fail(managed, str(error))
        else:
            managed.work = None
            self._note_loaded(managed, time.monotonic() - began)
        self._drop_if_gone(managed)
        self._advance()

    def _unloading(self) -> list[ManagedModel]:
        return [each for each in (*self._models.values(), *self._leaving) if each.is_leaving]

    def _note_progress(self, managed: ManagedModel, share: float) -> None:
        managed.progress = share
        for lease in managed.joining:
            lease.tell_progress(share)
        self._note_change(managed)

    def _note_loaded(self, managed: ManagedModel, seconds: float) -> None:
        report(f"{managed.name} is loaded ({seconds:.1f} s)")
        metrics.LOADS.labels(managed.name).inc()
        metrics.LOAD_SECONDS.observe(seconds)
        managed.state, managed.progress = pb.MODEL_STATE_LOADED, None
        managed.loaded_since = time.time()
        managed.pause = 0.0
        managed.leases, managed.joining = managed.joining, set()
        managed.note_use()
        for lease in managed.leases:
            lease.grant()
        self._after_use(managed)
        self._note_change(managed)

    def _fail(self, managed: ManagedModel, why: str) -> None:
        """Note a failure, which is told to all who wait for the model or use it.

        The log alone names the model's path: any key may read the rest.
        """
        report(f"{managed.name} can't be loaded: {why}")
        metrics.FAILURES.labels(managed.name).inc()
        managed.set_failed(managed.plan.without_path(why), _LEAST_PAUSE, _MOST_PAUSE)
        waiting = [lease for lease in self._queue if lease.model is managed]
        for lease in waiting:
            self._queue.remove(lease)
        for lease in (*managed.leases, *managed.joining, *waiting):
            lease.fail(load_failed(managed))
        managed.leases.clear()
        managed.joining.clear()
        self._note_change(managed)

    def _after_use(self, managed: ManagedModel) -> None:
        """Unload a model that is unused, at once or after its time."""
        if managed.is_used or not managed.is_loaded:
            return
        seconds = 0.0 if managed.is_gone else managed.keep_alive
        if seconds <= 0:
            self._begin_unload(managed, "idle", at_once=False)
        elif not math.isinf(seconds):
            loop = asyncio.get_running_loop()
            managed.idle_until = time.time() + seconds
            managed.idle_timer = loop.call_later(seconds, self._end_idle, managed)

    def _end_idle(self, managed: ManagedModel) -> None:
        if managed.is_loaded and not managed.is_used:
            self._begin_unload(managed, "idle", at_once=False)

    def _begin_unload(self, managed: ManagedModel, cause: str, *, at_once: bool) -> None:
        if self._is_closed:
            return
        managed.note_use()  # ends the timer
        metrics.UNLOADS.labels(managed.name, cause).inc()
        loading = managed.work
        if loading is not None:  # at once: a load that ends meanwhile would count as loaded
            loading.cancel()
        managed.is_leaving = True
        managed.work = asyncio.create_task(self._unload(managed, loading, at_once=at_once))
        self._note_change(managed)

    async def _unload(
        self, managed: ManagedModel, loading: "asyncio.Task[None] | None", *, at_once: bool
    ) -> None:
        if loading is not None:
            await asyncio.gather(loading, return_exceptions=True)
        await self._processes.end(managed.plan.services, at_once=at_once)
        managed.work, managed.is_leaving = None, False
        managed.loaded_since = managed.progress = None
        managed.keep_alive = managed.plan.keep_alive
        if managed.state != pb.MODEL_STATE_FAILED:
            managed.state = pb.MODEL_STATE_IDLE
            report(f"{managed.name} is unloaded")
        self._drop_if_gone(managed)
        self._note_change(managed)
        self._advance()

    def _drop_if_gone(self, managed: ManagedModel) -> None:
        if managed.is_gone and not managed.in_memory and managed.work is None:
            self._leaving.discard(managed)

    async def _until_unused(self, managed: ManagedModel) -> None:
        """Ask users to end their leases. Raises ABORTED if some have requests."""
        if managed.state == pb.MODEL_STATE_LOADING and managed.joining:
            raise in_use(f"The model {managed.name} is being loaded for requests.")
        for lease in managed.leases:
            lease.want()
        end = time.monotonic() + _RELEASE_SECONDS
        watch = self.watch()
        try:
            while managed.is_used and (seconds := end - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(watch.take(), seconds)
                except TimeoutError:
                    break
        finally:
            self.end_watch(watch)
        if managed.is_used:
            raise in_use(f"Requests use the model {managed.name}.")

    def _expire(self, lease: ModelLease) -> None:
        """End the wait of a lease."""
        seconds = f"{self._most_seconds:g} s"
        managed = lease.model
        if lease in self._queue:
            self._queue.remove(lease)
            others = ", ".join(sorted(each.name for each in self._wanted)) or "another model"
            why = f"waited {seconds} for the memory that {others} uses"
        else:
            managed.joining.discard(lease)
            why = f"was not loaded within {seconds}; its load goes on"
        lease.fail(load_late(f"The model {managed.name} {why}."))
        self._advance()

    def _note_change(self, managed: ManagedModel) -> None:
        for watch in self._watches:
            watch.add(managed.name)

    def _count(self) -> None:
        loaded = [each for each in (*self._models.values(), *self._leaving) if each.in_memory]
        metrics.LOADED.set(len(loaded))
        metrics.MEMORY.set(sum(each.memory_bytes or 0 for each in loaded))
        joining = sum(len(each.joining) for each in loaded)
        metrics.WAITING.set(len(self._queue) + joining)


def _require_retry(managed: ManagedModel) -> None:
    """Raise UNAVAILABLE while a model whose load has failed pauses."""
    if managed.state == pb.MODEL_STATE_FAILED and managed.retry_seconds > 0:
        raise load_failed(managed)
