"""Runs the services of one machine as processes: starts, watches and stops them together."""

import asyncio
import contextlib
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenwire.serving.catalog import write_catalog
from tokenwire.serving.health import is_ready, is_serving, until_idle
from tokenwire.serving.ports import address, listen
from tokenwire.serving.process import Process, say
from tokenwire.serving.stack_layout import (
    CatalogPlan,
    Layout,
    ServeError,
    Service,
    plan,
    plan_catalog,
    require_free_ports,
    shim_of_catalog,
)

__all__ = ["supervise"]

_POLL_SECONDS = 0.1
_CUT_SECONDS = 5.0  # what a service gets beyond its grace before it is killed
Result = TypeVar("Result")


async def supervise(layout: Layout) -> None:
    """Start the stack, say where it is, and keep it until SIGINT or SIGTERM; a second one kills.

    A service that ends is started again, once for each time that it had come to serve. With a
    catalog, SIGHUP reads it again. Raises ServeError when it can't start, when a service ends
    before it serves, or when one had to be killed at the end.
    """
    stack = _Stack(layout)
    try:
        with contextlib.suppress(_Stopped):
            if layout.catalog is None:
                await stack.run_model()
            else:
                with tempfile.TemporaryDirectory(prefix="tokenwire-") as folder:
                    await stack.run_catalog(Path(folder) / "catalog.toml")
    finally:
        clean = await stack.stop()
    if not clean:
        raise ServeError("Not every service stopped by itself.", exit_code=1)


class _Stopped(Exception):  # noqa: N818 - it is no error
    """SIGINT or SIGTERM came."""


class _Signals:
    """SIGINT and SIGTERM: the first asks to stop, the second to hurry. SIGHUP: read the catalog
    again, or without one, as when a terminal closes, stop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = self._loop.create_future()
        self.hurry: asyncio.Future[None] = self._loop.create_future()
        self.reload = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal)

    def expect_reload(self) -> None:
        """From now on SIGHUP sets `reload`."""
        self._loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _on_signal(self) -> None:
        for future in (self.stop, self.hurry):
            if not future.done():
                future.set_result(None)
                return


class _Stack:
    """The processes that run."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._signals = _Signals()
        self._began = time.monotonic()
        self._is_up = False
        self._processes: list[Process] = []
        """Those that must run; the shim first"""
        self._coming: list[Process] = []
        self._going: list[Process] = []
        """Those that a change of the catalog adds and takes away"""
        self._serving: set[Process] = set()
        """Those that have come to serve"""
        self._listener: socket.socket | None = None
        """The shim's: connections wait there while it is started again"""
        self._death: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        """The first of those that must run to end, before it served"""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run_model(self) -> None:
        """The four services of one model, until one ends. Raises _Stopped or ServeError."""
        shim, *backend = plan(self._layout)
        require_free_ports(self._layout)
        self._listener = _listen(self._layout)
        await self._start(self._processes, [shim, *backend])
        await self._while_alive(_until_ready(backend, f"http://{shim.target}/ready"))
        self._announce(shim)
        await self._while_alive(asyncio.Event().wait())

    async def run_catalog(self, resolved: Path) -> None:
        """All that a catalog names, until one ends. Raises _Stopped or ServeError."""
        self._signals.expect_reload()
        current = plan_catalog(self._layout)
        require_free_ports(self._layout)
        self._listener = _listen(self._layout)
        write_catalog(resolved, current.models)
        shim, backend = shim_of_catalog(self._layout, resolved), _flat(current)
        await self._start(self._processes, [shim, *backend])
        probe = "ready" if backend else "health"  # what others run need not run yet
        await self._while_alive(_until_ready(backend, f"http://{shim.target}/{probe}"))
        self._announce(shim)
        _list(current)
        while True:
            await self._while_alive(self._signals.reload.wait())
            self._signals.reload.clear()
            current = await self._while_alive(self._reload(current, resolved))

    async def stop(self) -> bool:
        """Stop all, left to right. Whether each of them ended by itself."""
        for task in self._tasks:
            task.cancel()
        processes = [*self._processes, *self._coming, *self._going]
        clean = all([await self._stop(process) for process in processes])
        if self._listener is not None:
            self._listener.close()
        return clean

    async def _start(self, among: list[Process], services: Sequence[Service]) -> None:
        for service in services:
            process = await self._start_one(service)
            among.append(process)  # at once, so that it is stopped whatever happens
            self._spawn(self._watch(process))

    async def _start_one(self, service: Service) -> Process:
        listener = self._listener if service.name == "http_shim" else None
        return await Process.start(service, self._layout.log_dir, listener)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, process: Process) -> None:
        await process.wait()
        if process in self._serving:
            await self._start_again(process)
        elif process in self._processes and not self._death.done():
            self._death.set_result(process)

    async def _start_again(self, process: Process) -> None:
        """Put a new process in the place of one that has ended."""
        self._serving.remove(process)
        error = await process.death(was_up=True)
        if process not in self._processes:
            return  # the catalog names it no longer
        say(f"{error} It is started again.")
        try:
            again = await self._start_one(process.service)
        except ServeError as failure:
            say(str(failure))
            self._death.set_result(process)
            return
        if process not in self._processes:
            await self._stop(again)
            return
        self._processes[self._processes.index(process)] = again
        self._spawn(self._watch(again))
        self._spawn(self._note_serving(again))

    async def _note_serving(self, process: Process) -> None:
        target = process.service.target
        if process.service.name == "http_shim":
            await _until(is_ready, f"http://{target}/health")
        else:
            await _until(is_serving, target)
        self._serving.add(process)

    async def _stop(self, process: Process) -> bool:
        return await process.stop(self._layout.grace + _CUT_SECONDS, self._signals.hurry)

    async def _while_alive(self, work: Awaitable[Result]) -> Result:
        """What the work gives, unless a signal (_Stopped) or a death (ServeError) comes first."""
        task = asyncio.ensure_future(work)
        try:
            ends: list[asyncio.Future[Any]] = [task, self._signals.stop, self._death]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._signals.stop.done():
                raise _Stopped
            dead = self._death.result()
            if self._is_up:  # what still runs may take the whole grace
                say(f"{dead.service.title} has ended; the others are stopped now")
            raise await dead.death(self._is_up)
        finally:
            task.cancel()

    def _announce(self, shim: Service) -> None:
        self._is_up = True
        self._serving.update(self._processes)
        seconds = time.monotonic() - self._began
        print(f"Tokenwire serves http://{shim.target} (up in {seconds:.1f} s)", flush=True)

    async def _reload(self, current: CatalogPlan, resolved: Path) -> CatalogPlan:
        """Serve what the catalog says now; one that can't be served changes nothing."""
        try:
            wanted = plan_catalog(self._layout, current)
            await self._add([each for each in _flat(wanted) if each not in _flat(current)])
        except ServeError as error:
            say(f"{error} The models from before stay.")
            return current
        write_catalog(resolved, wanted.models)
        self._processes[0].signal(signal.SIGHUP)
        _list(wanted)
        for key in current.services.keys() - wanted.services.keys():
            self._spawn(self._remove(current.services[key]))
        return wanted

    async def _add(self, services: Sequence[Service]) -> None:
        """Start more, and let them be; ServeError if one of them can't start."""
        await self._start(self._coming, services)
        ready = asyncio.ensure_future(_until_serving(services))
        deaths = [asyncio.ensure_future(process.wait()) for process in self._coming]
        try:
            await asyncio.wait([ready, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                dead = next(each for each in self._coming if each.returncode is not None)
                error = await dead.death(was_up=False)
                while self._coming:
                    await self._stop(self._coming[0])
                    del self._coming[0]
                raise error
        finally:
            for each in (ready, *deaths):
                each.cancel()
        self._processes += self._coming
        self._serving.update(self._coming)
        self._coming.clear()

    async def _remove(self, services: Sequence[Service]) -> None:
        """Stop some, once what they answer has ended."""
        going = [each for each in self._processes if each.service in services]
        self._processes = [each for each in self._processes if each not in going]
        self._going += going
        (engine,) = [each for each in services if each.name == "engine"]
        await until_idle(engine.target)
        for process in going:
            await self._stop(process)
            self._going.remove(process)
        say(f"{engine.model} has stopped")


def _listen(layout: Layout) -> socket.socket:
    try:
        return listen(layout.host, layout.port)
    except OSError as error:
        place = address(layout.host, layout.port)
        raise ServeError(f"Can't use the HTTP port {place}: {error.strerror}.") from None


def _flat(plan: CatalogPlan) -> list[Service]:
    return [service for services in plan.services.values() for service in services]


def _list(plan: CatalogPlan) -> None:
    """Says where each model is."""
    backends = {services[0].target: services for services in plan.services.values()}
    for model in plan.models:
        services = backends.get(model.target or "")
        if services is not None:
            where = ", ".join(f"{each.name} {each.target}" for each in services)
        else:
            where = f"tokenizer {model.target}" if model.target else "nothing serves it"
        print(f"  {model.full_name}: {where}", flush=True)


async def _until_ready(services: Sequence[Service], url: str) -> None:
    """Until every gRPC service is SERVING and the shim answers 200."""
    await _until_serving(services)
    await _until(is_ready, url)


async def _until_serving(services: Sequence[Service]) -> None:
    for service in reversed(services):
        await _until(is_serving, service.target)


async def _until(probe: Callable[[str], Awaitable[bool]], where: str) -> None:
    while not await probe(where):  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(_POLL_SECONDS)
