"""What the shim can be told."""

import dataclasses

from services.common.settings import INSTANT, LAST_PORT, StartupError, setting
from tokenwire.exposure import why_closed

__all__ = ["HttpShimSettings", "check"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpShimSettings:
    """Serves the OpenAI API over HTTP, in front of the tokenizer service."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; beyond loopback only with --keys or --open."
    )
    port: int = setting(8000, "Port of the HTTP server; 0 = any free one.", most=LAST_PORT)
    open: bool = setting(False, "Without keys, let everyone in who reaches the port.")
    keys: str = setting("", "File of API keys (`tokenwire keys`); empty = none are asked for.")
    tokenizer: str = setting(
        "127.0.0.1:50051", "host:port of the tokenizer service, where there is no --catalog."
    )
    catalog: str = setting("", "TOML file that names the models; read again on SIGHUP.")
    max_body_bytes: int = setting(8 * 1024 * 1024, "Largest request body, in bytes.", least=1)
    stall_seconds: float = setting(
        30.0,
        "Seconds after which a client is cut that sends or reads nothing while it should.",
        least=INSTANT,
    )
    grace: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )


def check(settings: HttpShimSettings) -> None:
    """Raise StartupError for settings that can't be served."""
    closed = why_closed(settings.host, has_keys=bool(settings.keys), is_open=settings.open)
    if closed is not None:
        raise StartupError(closed)
