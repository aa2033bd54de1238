"""Reports of usage to the jobs service, of a service that has no other use for it."""

from services.common.peers.targets import parse_targets, warn_of_clear_text
from services.common.settings import PeerSettings, StartupError
from tokenwire.channel import connect
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import UsageServiceStub
from tokenwire.token_file import shown

__all__ = ["UsageClient"]

_SECONDS = 2.0


class UsageClient:
    """Channel to the jobs service. Create it on the event loop that uses it."""

    def __init__(self, target: str, settings: PeerSettings) -> None:
        """target: host:port. Raises StartupError if it is none, or names several."""
        targets = parse_targets(target, "--jobs")
        if len(targets) > 1:
            raise StartupError("--jobs must name one service: it owns the files of its folder.")
        warn_of_clear_text(targets, settings)
        self._channel = connect(target, tls=settings.peer_tls, token=shown(settings.peer_token))
        self._stub = UsageServiceStub(self._channel)

    async def report(self, request: jobs_pb2.RecordUsageRequest) -> jobs_pb2.RecordUsageResponse:
        """Send a report. Raises AioRpcError."""
        return await self._stub.RecordUsage(request, timeout=_SECONDS)

    async def close(self) -> None:
        await self._channel.close()
