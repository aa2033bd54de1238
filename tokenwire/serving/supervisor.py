"""Supervisor of the services of one machine: starts, watches and stops their processes."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.common.host_memory import free_host_memory
from services.common.model_files.catalog_file import write_catalog
from services.common.network.health import until_idle
from services.common.temporary_folder import TemporaryFolder, remove_abandoned
from tokenwire.errors import ServiceError
from tokenwire.serving.announcements import (
    note_server,
    note_uses,
    print_models,
    print_shims,
    report_next_command,
)
from tokenwire.serving.load_plan import Room
from tokenwire.serving.managed_model import has_on_demand, on_demand_models
from tokenwire.serving.packed_folder import packed_folder, trim
from tokenwire.serving.running_servers import unregister
from tokenwire.serving.serve_options import ServeError, ServeOptions
from tokenwire.serving.served_catalog import ServedCatalog
from tokenwire.serving.service import Service
from tokenwire.serving.service_log import StderrLog, flush_logs, report
from tokenwire.serving.service_probes import POLL_SECONDS, serves, until_ready, until_up
from tokenwire.serving.service_process import ServiceProcess
from tokenwire.serving.spare_processes import SpareProcesses
from tokenwire.serving.stack_layout import (
    CatalogPlan,
    edge_of_catalog,
    plan,
    plan_catalog,
)
from tokenwire.serving.stack_ports import (
    listen_for_shims,
    manager_ports,
    require_free_ports,
)
from tokenwire.serving.start_check import check_services, needed_memory
from tokenwire.serving.stop_signals import StopSignals

if TYPE_CHECKING:
    import grpc

    from tokenwire.serving.model_manager import ModelManager
    from tokenwire.serving.model_manager_service import ModelManagerServicer

__all__ = ["supervise"]

_FLUSH_SECONDS = 1.0
_HELD_SECONDS = 30.0
"""Seconds after which the output of a start that shows no progress is written all the same"""
_KILL_SECONDS = 5.0
"""Seconds beyond a service's own grace after which it is killed"""
_MEMORY_SHARE = 0.8
"""Share of the free memory that models on demand may take by default"""
_READERS_OF_CATALOG = ("http_shim", "jobs")
_SPARE_SECONDS = 1.0
"""Time after a load before processes for the next one are prepared"""
_AT_ONCE_SECONDS = 2.0
"""Seconds after which a service is killed whose requests are not waited for"""
_LONGEST_PAUSE = 30.0
"""Seconds between two starts of a service that ends before it serves"""
Result = TypeVar("Result")


async def supervise(options: ServeOptions) -> None:
    """Start the stack, print its URL, and keep it until SIGINT or SIGTERM; a second signal kills.

    A service that ends after it has served is restarted, unless `no_restart` says otherwise; one
    that ends before it serves again, as long as a replica of it serves. SIGHUP opens log files
    again and reloads a catalog. Raises ServeError if the stack can't start, if a service ends
    before it serves, or if one had to be killed at the end.
    """
    remove_abandoned()
    with contextlib.ExitStack() as cleanup:
        folder = None
        makes_token = options.keys is not None and options.peer_token_file is None
        if makes_token or options.serves_catalog:
            folder = cleanup.enter_context(TemporaryFolder())
        if makes_token and folder is not None:
            options = replace(options, peer_token_file=_new_token(folder))
        if options.serves_catalog and not options.memory:
            options = replace(options, memory=int(free_host_memory() * _MEMORY_SHARE))
        if options.serves_catalog and options.packed_size:
            options = replace(options, packed_cache=packed_folder())
        stack = _Stack(options)
        try:
            with contextlib.suppress(_Stopped):
                if not options.serves_catalog or folder is None:
                    await stack.run_model()
                else:
                    await stack.run_catalog(folder / "catalog.toml")
        finally:
            clean = await stack.stop()
            flush_logs(_FLUSH_SECONDS)
    if not clean:
        raise ServeError("Not every service stopped by itself.", exit_code=1)


def _new_token(folder: Path) -> Path:
    """Make a token by which the services of this stack know each other; return its file."""
    path = folder / "peer-token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(32))
    return path


class _Stopped(Exception):  # noqa: N818 - not an error
    """Arrival of SIGINT or SIGTERM."""


class _Stack:
    """Processes of the services, and their life cycle."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._signals = StopSignals()
        self._reload_wanted = asyncio.Event()
        if options.log_dir is not None or options.serves_catalog:
            self._signals.on_hangup(self._on_hangup)
        self._began = time.monotonic()
        self._is_up = False
        self._stderr_log = StderrLog(options.log_format, holds=True)
        """Output of the services, held back until they serve: a wrong setting is then one sentence
        and nothing else. A slow start shows its progress"""
        asyncio.get_running_loop().call_later(_HELD_SECONDS, self._stderr_log.release)
        self._processes: list[ServiceProcess] = []
        """Processes that must run, shim first"""
        self._starting: list[ServiceProcess] = []
        self._retiring: list[ServiceProcess] = []
        """Processes that a changed catalog no longer needs; `_starting` has those that it adds"""
        self._serving: set[ServiceProcess] = set()
        """Processes that have served, and are therefore restarted when they end"""
        self._pauses: dict[Service, float] = {}
        """Pause in seconds before the last restart of each service that has not served since"""
        self._listeners: Sequence[socket.socket] = ()
        """The shims' sockets: connections wait there while the shim restarts"""
        self._fatal_end: asyncio.Future[ServiceProcess] = asyncio.get_running_loop().create_future()
        """First required process that ended before it served"""
        self._tasks: set[asyncio.Task[None]] = set()
        self._spares = SpareProcesses(is_seen=options.logs is None and sys.stderr.isatty())
        """Processes for the next model on demand"""
        self._catalog: ServedCatalog | None = None
        self._manager: ModelManager | None = None
        self._manager_service: ModelManagerServicer | None = None
        self._manager_server: grpc.aio.Server | None = None

    async def run_model(self) -> None:
        """Run the services of one model. Raises _Stopped or ServeError."""
        services = plan(self._options)
        self._require_free_ports(services)
        check_services(services)
        self._listeners = listen_for_shims(self._options, services)
        await self._start(self._processes, services)
        await self._while_alive(until_ready(services, f"{self._options.url}/ready"))
        self._announce()
        if self._options.model is None:
            report_next_command()
        await self._while_alive(asyncio.Event().wait())

    async def run_catalog(self, resolved: Path) -> None:
        """Run the services of a catalog. Raises _Stopped or ServeError."""
        current = await asyncio.to_thread(plan_catalog, self._options)
        has_demand = self._options.models is not None or has_on_demand(current)
        edge = edge_of_catalog(self._options, resolved, has_manager=has_demand)
        self._require_free_ports(edge)
        self._listeners = listen_for_shims(self._options, edge)
        write_catalog(resolved, current.models)
        backend = current.lasting_services
        check_services([*edge, *backend])
        self._catalog = ServedCatalog(resolved, current)
        if has_demand:
            await self._start_manager(current)
        await self._start(self._processes, [*edge, *backend])
        probe = "ready" if backend else "health"  # remote backends may start later
        await self._while_alive(until_ready([*edge, *backend], f"{self._options.url}/{probe}"))
        self._serving.update(self._processes)
        if current.first and self._manager is not None:
            await self._while_alive(self._load_first(self._manager, current.first))
        self._announce()
        if has_demand:
            self._spawn(self._prepare_spares())
        print_models(current)
        while True:
            await self._while_alive(self._reload_wanted.wait())
            self._reload_wanted.clear()
            await self._while_alive(self._reload())

    def _require_free_ports(self, services: Iterable[Service]) -> None:
        """Raise ServeError for a port of the services or the manager that is in use."""
        ports = [port for service in services for port in service.ports]
        if self._options.models is not None:
            ports += manager_ports(self._options)
        require_free_ports(ports)

    async def _start_manager(self, plan: CatalogPlan) -> None:
        """Start the manager of the models on demand, and its gRPC service. Raises ServeError."""
        # imported here, because most servers have no models on demand
        from tokenwire.serving.cached_models import CachedModels
        from tokenwire.serving.model_manager import ModelManager
        from tokenwire.serving.model_manager_service import ModelManagerServicer, serve_manager

        options = self._options
        room = Room(options.memory, options.max_loaded)
        self._manager = ModelManager(self, room, options.load_timeout)
        self._manager.replace(on_demand_models(plan, options.keep_alive))
        cache = CachedModels(options.models or (), partial(self._rescan, at_once=True))
        self._manager_service = ModelManagerServicer(self._manager, self._rescan, cache)
        self._manager_server = await serve_manager(
            self._manager_service, options.manager_port, options.peer_token_file
        )

    async def _load_first(self, manager: "ModelManager", name: str) -> None:
        try:
            await manager.load(name, None)
        except ServiceError as error:
            raise ServeError(error.message) from None

    def _on_hangup(self) -> None:
        for process in self._all_processes():
            process.reopen_log()
        self._reload_wanted.set()

    def _all_processes(self) -> list[ServiceProcess]:
        return [*self._processes, *self._starting, *self._retiring]

    async def stop(self) -> bool:
        """Stop all processes in pipeline order. Return whether none had to be killed."""
        with contextlib.suppress(OSError, RuntimeError):
            unregister(os.getpid())
        if self._manager_service is not None:
            await self._manager_service.end_work()
        for task in self._tasks:
            task.cancel()
        await self._spares.stop()
        processes = self._all_processes()
        clean = all([await self._stop(process) for process in processes])
        if self._manager_server is not None:  # after the services that follow its states
            await self._manager_server.stop(None)
        for listener in self._listeners:
            listener.close()
        return clean

    async def _start(self, among: list[ServiceProcess], services: Sequence[Service]) -> None:
        for service in services:
            process = await self._start_one(service)
            among.append(process)  # before anything can fail, so that `stop` reaches it
            self._spawn(self._watch(process))

    async def _start_one(self, service: Service) -> ServiceProcess:
        if service.on_demand and not service.environment:
            spare = self._spares.take(service.name, service.arguments)
            if spare is not None:
                return ServiceProcess.adopt(service, spare, self._options.logs, self._stderr_log)
        is_shim = service.name == "http_shim"
        listener = self._listeners[service.replica - 1] if is_shim else None
        return await ServiceProcess.start(service, self._options.logs, self._stderr_log, listener)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, process: ServiceProcess) -> None:
        await process.wait()
        has_served = process in self._serving
        self._serving.discard(process)
        if process not in self._processes:
            return  # removed from the catalog
        restarts = has_served or (self._is_up and self._has_replica(process))
        if restarts and not self._options.no_restart:
            await self._restart(process, 0.0 if has_served else self._next_pause(process))
        else:
            await self._give_up(process)

    async def _give_up(self, process: ServiceProcess) -> None:
        """Note a process that can't be started again: its model is lost, or all services."""
        if process.service.on_demand and self._manager is not None:
            error = await process.failure(was_up=True)
            await self._manager.lose([process.service], str(error))
        elif not self._fatal_end.done():
            self._fatal_end.set_result(process)

    def _has_replica(self, process: ServiceProcess) -> bool:
        """Return whether another process serves the same as this one."""
        name, model = process.service.name, process.service.model
        return any(
            (each.service.name, each.service.model) == (name, model) for each in self._serving
        )

    def _next_pause(self, process: ServiceProcess) -> float:
        """Return the seconds before the next start of a service that ends before it serves."""
        pause = min(2 * self._pauses.get(process.service, 0.5), _LONGEST_PAUSE)
        self._pauses[process.service] = pause
        return pause

    async def _restart(self, process: ServiceProcess, pause: float) -> None:
        """Replace a process that has ended by a new one, after some seconds."""
        error = await process.failure(was_up=True)
        when = f"again in {pause:g} s" if pause else "again"
        report(f"{error} It is started {when}.")
        await asyncio.sleep(pause)
        if process not in self._processes:
            return
        try:
            again = await self._start_one(process.service)
        except ServeError as failure:
            report(str(failure))
            await self._give_up(process)
            return
        if process not in self._processes:
            await self._stop(again)
            return
        self._processes[self._processes.index(process)] = again
        self._spawn(self._watch(again))
        self._spawn(self._mark_serving(again))

    async def _mark_serving(self, process: ServiceProcess) -> None:
        service = process.service
        while process.returncode is None and not await serves(service):  # noqa: ASYNC110 - as _until
            await asyncio.sleep(POLL_SECONDS)
        if process not in self._processes or process.returncode is not None:
            return  # the one that serves is its successor
        self._serving.add(process)
        self._pauses.pop(process.service, None)

    async def _stop(self, process: ServiceProcess, seconds: float | None = None) -> bool:
        """Stop a process, and kill it after some seconds; None = its grace, and some more."""
        seconds = self._options.grace + _KILL_SECONDS if seconds is None else seconds
        return await process.stop(seconds, self._signals.kill)

    async def _while_alive(self, work: Awaitable[Result]) -> Result:
        """Return the result of `work`.

        Raises _Stopped on a signal, and ServeError when a process ends before it serves.
        """
        task = asyncio.ensure_future(work)
        try:
            ends: list[asyncio.Future[Any]] = [task, self._signals.stop, self._fatal_end]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._signals.stop.done():
                raise _Stopped
            ended = self._fatal_end.result()
            if self._is_up:  # the others may take their whole grace, so report first
                report(f"{ended.service.title} has ended; the others are stopped now")
            error = await ended.failure(self._is_up)
            if error.exit_code != 2:
                self._stderr_log.release()
            raise error
        finally:
            task.cancel()

    def _announce(self) -> None:
        self._is_up = True
        self._stderr_log.release()
        self._serving.update(self._processes)
        seconds = time.monotonic() - self._began
        services = [process.service for process in self._processes]
        plan = None if self._catalog is None else self._catalog.plan
        note_server(self._options, services, plan, has_manager=self._manager is not None)
        print(f"Tokenwire serves {self._options.url} (up in {seconds:.1f} s)", flush=True)
        print_shims(services)
        note_uses(services)

    async def _reload(self) -> None:
        """Serve the catalog as it is now; one that can't be served changes nothing."""
        assert self._catalog is not None
        current = self._catalog.plan
        try:
            wanted = await asyncio.to_thread(plan_catalog, self._options, current)
            if has_on_demand(wanted) and self._manager is None:
                raise ServeError("The catalog had no model on demand at the start: start again.")
            lasting = current.lasting_services
            added = [each for each in wanted.lasting_services if each not in lasting]
            check_services(added)
            await self._add(added)
        except ServeError as error:
            report(f"{error} The previous models stay.")
            return
        self._publish(wanted)
        print_models(wanted)
        for key in current.services.keys() - wanted.services.keys():
            if not current.services[key][0].on_demand:
                self._spawn(self._remove(current.services[key]))

    def _publish(self, plan: CatalogPlan) -> None:
        """Let the services that read the catalog read it again."""
        assert self._catalog is not None
        self._catalog.publish(plan)
        if self._manager is not None:
            self._manager.replace(on_demand_models(plan, self._options.keep_alive))
        for process in self._processes:
            if process.service.name in _READERS_OF_CATALOG:
                process.signal(signal.SIGHUP)

    async def _rescan(self, *, at_once: bool = False) -> bool:
        """Look for new models in the folders. Return whether there are other ones than before.

        at_once: although the last scan is not old.
        """
        assert self._catalog is not None
        if self._options.models is None:
            return False
        async with self._catalog.scanning:
            if not (at_once or self._catalog.is_old()):
                return self._catalog.has_changed
            try:
                plan = await asyncio.to_thread(plan_catalog, self._options, self._catalog.plan)
            except ServeError as error:
                report(f"{error} The previous models stay.")
                return False
            has_changed = plan.models != self._catalog.plan.models
            if has_changed:
                self._publish(plan)
            self._catalog.note_scan(has_changed=has_changed)
            return has_changed

    async def _add(
        self, services: Sequence[Service], on_progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """Start additional services. Raises ServeError, and stops them all, if one can't start."""
        started: list[ServiceProcess] = []
        try:
            for service in services:
                process = await self._start_one(service)
                process.on_progress = on_progress
                started.append(process)
                self._starting.append(process)
                self._spawn(self._watch(process))
            await until_up(services, started)
        except BaseException:
            await asyncio.gather(*map(self._stop, started))  # cancelled: `stop` ends them
            self._starting = [each for each in self._starting if each not in started]
            raise
        self._starting = [each for each in self._starting if each not in started]
        note_uses(services)
        self._processes += started
        self._serving.update(started)

    async def _remove(self, services: Sequence[Service], *, at_once: bool = False) -> None:
        """Stop services once their engines are idle, or at once."""
        retiring = [each for each in self._processes if each.service in services]
        self._processes = [each for each in self._processes if each not in retiring]
        self._retiring += retiring
        if not at_once:
            for engine in [each for each in services if each.name == "engine"]:
                await until_idle(engine.target, self._options.peer_token_file)
        seconds = _AT_ONCE_SECONDS if at_once else None
        await asyncio.gather(*(self._stop(process, seconds) for process in retiring))
        self._retiring = [each for each in self._retiring if each not in retiring]
        if not services[0].on_demand:
            report(f"{services[0].model} has stopped")

    # ModelProcesses

    def free_memory(self) -> int:
        return free_host_memory()

    async def needed_memory(self, services: Sequence[Service]) -> int:
        return await asyncio.to_thread(needed_memory, services)

    async def start(
        self, services: Sequence[Service], on_progress: Callable[[float], None]
    ) -> None:
        if self._options.packed_cache is not None:
            size = self._options.packed_size
            await asyncio.to_thread(trim, self._options.packed_cache, size)
        await asyncio.to_thread(check_services, services)
        await self._add(services, on_progress)
        self._spawn(self._prepare_spares())

    async def _prepare_spares(self) -> None:
        """Prepare processes for the next model on demand, after what the last one has to do."""
        await asyncio.sleep(_SPARE_SECONDS)
        if not self._options.no_spare:
            await self._spares.prepare()

    async def end(self, services: Sequence[Service], *, at_once: bool) -> None:
        await self._remove(services, at_once=at_once)
