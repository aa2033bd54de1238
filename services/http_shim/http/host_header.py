"""Check of the Host header, against DNS rebinding (`services.common.network.hosts`)."""

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.network.hosts import AllowedHosts
from services.http_shim.http.failures import error_response
from tokenwire.errors import ServiceError

__all__ = ["HostMiddleware"]


class HostMiddleware:
    """Refuses requests whose Host header names another server or is missing."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            error = _refusal("INVALID_HOST", "A request needs exactly one Host header.")
        elif hosts and not self._allowed.allows(hosts[0]):
            error = _refusal(
                "HOST_NOT_ALLOWED",
                "The Host header names another server; the operator can allow further names "
                "with --allowed-hosts.",
            )
        else:
            await self._app(scope, receive, send)
            return
        await error_response(scope, error)(scope, receive, send)


def _refusal(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, reason, message)
