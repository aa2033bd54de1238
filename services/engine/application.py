"""The service as a whole: what it starts and stops."""

import logging
import os
from collections.abc import Sequence

import grpc

from services.common.server import Application
from services.common.settings import require_directory
from services.engine.control_service import EngineControlServicer
from services.engine.engine_service import EngineServicer
from services.engine.frontend import Frontend
from services.engine.settings import EngineSettings
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

__all__ = ["EngineApplication"]

_LOG = logging.getLogger("engine")
_NICENESS = 5
"""Of this process, beside the loop's: what the loop reports would interrupt its next step"""


class EngineApplication(Application):
    """The engine service: its servicers and the loop behind them."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        require_directory(settings.model, "--model")
        self._frontend = Frontend(settings, self._on_failure)
        self._sessions = EngineServicer(self._frontend, settings)
        self._control = EngineControlServicer(self._frontend, settings, self.set_serving)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._sessions, server)
        engine_pb2_grpc.add_EngineControlServiceServicer_to_server(self._control, server)
        services = engine_pb2.DESCRIPTOR.services_by_name
        return [service.full_name for service in services.values()]

    async def start(self) -> None:
        await self._frontend.start()
        os.nice(_NICENESS)
        model = self._frontend.model
        _LOG.info(
            "serving %s: %s in %s, %.2f GiB of weights, KV cache for %d tokens (%.2f GiB)",
            self._frontend.model_id,
            model.architecture,
            model.dtype,
            model.weight_bytes / 2**30,
            model.total_blocks * model.block_size,
            model.kv_bytes / 2**30,
        )
        self.set_serving(True)

    async def drain(self) -> None:
        self._frontend.draining = True
        await self._frontend.drained()

    async def stop(self) -> None:
        await self._frontend.stop()

    def _on_failure(self, why: str) -> None:
        self.set_serving(False)
        self.fail(why)
