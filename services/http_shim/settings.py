"""What the shim can be told."""

import dataclasses

from services.common.settings import StartupError, setting
from tokenwire.exposure import why_closed

__all__ = ["HttpShimSettings", "check"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpShimSettings:
    """Serves the OpenAI API over HTTP, in front of the tokenizer service."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; beyond loopback only with --keys or --open."
    )
    port: int = setting(8000, "Port of the HTTP server; 0 = any free one.")
    open: bool = setting(False, "Without keys, let everyone in who reaches the port.")
    keys: str = setting("", "File of API keys (`tokenwire keys`); empty = none are asked for.")
    tokenizer: str = setting(
        "127.0.0.1:50051", "host:port of the tokenizer service, where there is no --catalog."
    )
    catalog: str = setting("", "TOML file that names the models; read again on SIGHUP.")
    max_body_bytes: int = setting(8 * 1024 * 1024, "Largest request body, in bytes.")
    stall_seconds: float = setting(
        30.0, "Seconds after which a client is cut that sends or reads nothing while it should."
    )
    grace: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )


def check(settings: HttpShimSettings) -> None:
    """Raise StartupError for settings that can't be served."""
    if not 0 <= settings.port <= 65535:
        raise StartupError(f"--port must be between 0 and 65535, not {settings.port}.")
    if settings.max_body_bytes < 1:
        raise StartupError(f"--max-body-bytes must be positive, not {settings.max_body_bytes}.")
    if not settings.stall_seconds > 0:
        raise StartupError(f"--stall-seconds must be above 0, not {settings.stall_seconds:g}.")
    closed = why_closed(settings.host, has_keys=bool(settings.keys), is_open=settings.open)
    if closed is not None:
        raise StartupError(closed)
