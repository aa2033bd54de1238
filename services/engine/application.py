"""Engine service as a whole: start, health, drain and stop."""

import asyncio
import logging
import os
from collections.abc import Sequence

import grpc
from prometheus_client import REGISTRY

from services.common.background import keep_running
from services.common.server import Application
from services.common.telemetry import describe_build
from services.engine.frontend import metrics
from services.engine.frontend.child_process import Child
from services.engine.frontend.control_service import EngineControlServicer
from services.engine.frontend.engine_service import EngineServicer
from services.engine.frontend.frontend import Frontend
from services.engine.frontend.vllm_metrics import VllmMetrics
from services.engine.settings import EngineSettings
from services.engine.start_check import check_start
from tokenwire.pb.engine.v1 import engine_pb2, engine_pb2_grpc

__all__ = ["EngineApplication"]

_LOG = logging.getLogger("engine")
_WITHOUT_KERNELS = (
    "The CPU kernels are missing, so torch computes, several times slower. Install Tokenwire's "
    "wheel, which has them. Or install g++, then Tokenwire again (in a checkout: make clean serve)."
)
_CONTROL = engine_pb2.DESCRIPTOR.services_by_name["EngineControlService"].full_name
_NICENESS = 5
"""Niceness of the gRPC process: handling outputs must not delay the loop's next step"""


_PEER_METHODS = ("Abort", "Drain", "FlushCache", "LoadAdapter", "UnloadAdapter", "WatchCache")


class EngineApplication(Application):
    """Lifecycle of the engine service: its servicers, and the frontend behind them."""

    peer_methods = frozenset(f"/{_CONTROL}/{method}" for method in _PEER_METHODS)

    def __init__(self, loop: Child, settings: EngineSettings) -> None:
        """Check the model and the memory. Raises StartupError. loop: the loop process."""
        check_start(settings)
        super().__init__()
        self._frontend = Frontend(settings, loop, self._on_failure)
        self._engine = EngineServicer(self._frontend, settings)
        self._control = EngineControlServicer(self._frontend, settings, self.set_serving)
        self._has_vllm_metrics = settings.vllm_metrics
        self._silence_seconds = settings.silence_seconds
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self._frontend.model_id

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._engine, server)
        engine_pb2_grpc.add_EngineControlServiceServicer_to_server(self._control, server)
        services = engine_pb2.DESCRIPTOR.services_by_name
        return [service.full_name for service in services.values()]

    async def start(self) -> None:
        await self._frontend.start()
        os.nice(_NICENESS)
        model = self._frontend.model
        _LOG.info(
            "serving %s: %s in %s, %s code, %.2f GiB of weights, KV cache for %d tokens (%.2f GiB)",
            self._frontend.model_id,
            model.architecture,
            model.dtype,
            model.model_code,
            model.weight_bytes / 2**30,
            model.total_blocks * model.block_size,
            model.kv_bytes / 2**30,
        )
        describe_build("engine", model.kernels)
        metrics.KV_BLOCK_SIZE.set(model.block_size)
        if self._has_vllm_metrics:
            REGISTRY.register(VllmMetrics(self.model, model.block_size, model.total_blocks))
        if model.kernels == "none":
            _LOG.warning(_WITHOUT_KERNELS)
        self.set_serving(True)
        self._watchdog = keep_running("loop_watchdog", self._watch_loop)

    async def drain(self) -> None:
        self._frontend.drain()
        await self._frontend.drained()

    async def stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._frontend.stop()

    async def _watch_loop(self) -> None:
        """Report the service as not serving while the loop is silent.

        New requests then go elsewhere. Running requests go on: the step may only be slow.
        """
        while True:
            await self._until_silent(True)
            _LOG.error("the step loop has sent no output for %g s", self._silence_seconds)
            self.set_serving(False)
            await self._until_silent(False)
            _LOG.info("the step loop sends outputs again")
            self.set_serving(not self._frontend.draining)

    async def _until_silent(self, is_silent: bool) -> None:
        limit = self._silence_seconds
        while (self._frontend.silent_seconds > limit) is not is_silent:  # noqa: ASYNC110 - no event
            await asyncio.sleep(min(limit / 4, 1.0))

    def _on_failure(self, why: str) -> None:
        self.set_serving(False)
        self.fail(why)
