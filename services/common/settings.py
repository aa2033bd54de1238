"""Settings of a service: a frozen dataclass whose fields are flags and environment variables.

    @dataclass(frozen=True, kw_only=True)
    class EngineSettings(ServerSettings):
        model: Path = setting("models/x", "Directory of the checkpoint.")

`parse` turns the class into a command line: the field `kv_memory` is the flag --kv-memory and, with
the prefix TOKENWIRE_ENGINE, the variable TOKENWIRE_ENGINE_KV_MEMORY. The flag wins over the
variable.
"""

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from services.common.log_text import LOG_FORMATS
from services.common.network.addresses import LAST_PORT, METRICS_PORT_OFFSET
from tokenwire.flag_parser import FlagParser
from tokenwire.tls import ClientTls, ServerTls, TlsError
from tokenwire.token_file import TokenError, TokenFile

__all__ = [
    "INSTANT",
    "LAST_PORT",
    "CheckpointSettings",
    "LimitSettings",
    "PeerSettings",
    "PeerTokenSettings",
    "ReportSettings",
    "ServerSettings",
    "StartupError",
    "StreamSettings",
    "UsageSettings",
    "parse",
    "print_startup_error",
    "read_switch",
    "server_tls",
    "setting",
]

S = TypeVar("S")
Field: TypeAlias = "dataclasses.Field[Any]"

INSTANT = 0.001
"""Lower limit of durations that must be positive, in seconds"""


class StartupError(Exception):
    """A service can't start. The message is one sentence for the person who started it."""

    usage = ""
    """Usage of the command in one line, if its flags are at fault; else empty"""


def print_startup_error(service: str, error: Exception) -> None:
    """Print why a service can't start. The sentence comes last: `tokenwire serve` shows it."""
    usage = f"{error.usage}\n" if isinstance(error, StartupError) and error.usage else ""
    print(f"{usage}{service}: {error}", file=sys.stderr, flush=True)


_LEAST_TOKEN = 32
"""Fewest characters of a peer token, so that it can't be guessed"""
_MOST = 2**31 - 1  # seconds; 68 years, which timers still support


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] = (),
    least: float = 0,
    most: float = _MOST,
) -> Any:
    """Return a field of a settings dataclass; `least` and `most` bound a number."""
    metadata = {"help": meaning, "choices": choices, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerTokenSettings:
    """Setting of the token by which the services of an installation know each other."""

    peer_token_file: str = setting(
        "",
        "File of the token that the services of an installation show each other; servers take any "
        "of its lines, callers show the first. Empty = none.",
    )

    @property
    def peer_token(self) -> TokenFile | None:
        """The token's file; None = there is none. Raises StartupError."""
        if not self.peer_token_file:
            return None
        try:
            return TokenFile(Path(self.peer_token_file), _LEAST_TOKEN)
        except TokenError as error:
            raise StartupError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings(PeerTokenSettings):
    """Settings of all gRPC services."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on, or unix:/path. Other than loopback needs --tls-cert or --plaintext.",
    )
    port: int = setting(0, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    metrics_port: int = setting(
        0,
        f"Port of /metrics; 0 = the gRPC port + {METRICS_PORT_OFFSET}, -1 = none.",
        least=-1,
        most=LAST_PORT,
    )
    grace: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    tls_cert: str = setting("", "Certificate of the server (PEM); empty = plaintext.")
    tls_key: str = setting("", "Key of the certificate (PEM).")
    tls_client_ca: str = setting(
        "", "Authorities that must sign the clients' certificates (PEM); empty = any client."
    )
    plaintext: bool = setting(False, "Serve anyone who reaches the port, without TLS.")
    hold_on_error: float = setting(
        0.0, "Seconds to stay up after a failed start, so that health checks give its reason."
    )
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "auto", "Form of log lines; auto = text on a terminal, else JSON.", choices=LOG_FORMATS
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OTLP collector (gRPC) for traces; empty = OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
    )

    @property
    def tls(self) -> ServerTls | None:
        """The server's certificates; None = plaintext. Raises StartupError."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Settings of services that read a checkpoint."""

    model: Path = setting(
        Path(), "Directory of the checkpoint in the Hugging Face format, or GGUF file."
    )
    model_id: str = setting("", "Name of the model for clients and metrics; empty = the file's.")
    mmproj: str = setting(
        "",
        "mmproj file with the vision tower of a model in a GGUF file; empty = the one in its "
        "directory that fits, if there is one.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Settings of services that count the limits of API keys."""

    limits_url: str = setting(
        "",
        "Redis that counts the limits of keys for all processes, as redis:// or rediss://; empty = "
        "each process counts for itself. The variable keeps its password out of `ps`.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsageSettings:
    """Settings of services that count the usage of API keys."""

    metrics_by_key: int = setting(
        0,
        "Most names of keys that metrics of requests and tokens have as a label; further keys "
        'count as "other". 0 = no such metrics.',
        most=10_000,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings(UsageSettings):
    """Settings of services that report the usage of API keys."""

    jobs: str = setting(
        "",
        "Jobs service, as host:port, which keeps the usage of keys. Empty = none: budgets then "
        "count from the start of this process.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerSettings(PeerTokenSettings):
    """Settings of services that call others."""

    peer_ca: str = setting(
        "", "Authorities that must sign the certificates of called services; empty = plaintext."
    )
    peer_cert: str = setting("", "Certificate that called services are shown (PEM).")
    peer_key: str = setting("", "Key of that certificate (PEM).")

    @property
    def peer_tls(self) -> ClientTls | None:
        """Certificates for calls of other services; None = plaintext. Raises StartupError."""
        if bool(self.peer_cert) != bool(self.peer_key):
            raise StartupError("--peer-cert and --peer-key need each other.")
        if not self.peer_ca:
            if self.peer_cert:
                raise StartupError("--peer-cert needs --peer-ca.")
            return None
        own = (Path(self.peer_cert), Path(self.peer_key)) if self.peer_cert else (None, None)
        tls = ClientTls(Path(self.peer_ca), *own)
        try:
            tls.credentials()
        except TlsError as error:
            raise StartupError(str(error)) from None
        return tls


def server_tls(certificate: str, key: str, client_ca: str) -> ServerTls | None:
    """Return the files of --tls-cert, --tls-key and --tls-client-ca. Raises StartupError."""
    if bool(certificate) != bool(key):
        raise StartupError("--tls-cert and --tls-key need each other.")
    if not certificate:
        if client_ca:
            raise StartupError("--tls-client-ca needs --tls-cert.")
        return None
    tls = ServerTls(Path(certificate), Path(key), Path(client_ca) if client_ca else None)
    try:
        tls.require()
    except TlsError as error:
        raise StartupError(str(error)) from None
    return tls


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings(ServerSettings):
    """Further settings of services that stream to clients."""

    keys: str = setting("", "File of API keys (`tokenwire keys`); empty = callers need no key.")
    trust_scheduling_headers: str = setting(
        "auto",
        "Accept x-priority and x-tenant from callers; auto = from those with the peer token, and "
        "from all if there are neither keys nor a peer token.",
        choices=("auto", "always", "never"),
    )
    heartbeat_seconds: float = setting(
        10.0, "Seconds of silence after which a stream sends a heartbeat.", least=INSTANT
    )
    stall_seconds: float = setting(
        30.0,
        "Seconds without reading, or without credit, after which a client is disconnected.",
        least=INSTANT,
    )


def parse(settings: type[S], prog: str, prefix: str, arguments: Sequence[str] | None = None) -> S:
    """Read flags and environment. Raises StartupError on bad input; --help ends the process.

    arguments: flags; None = those of the process.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--FLAG VALUE] ...; {prog} --help lists the flags",
        description=(settings.__doc__ or "").strip(),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fields = dataclasses.fields(typing.cast(Any, settings))
    for field in fields:
        variable, choices = f"{prefix}_{field.name.upper()}", field.metadata["choices"]
        kind, default = type(field.default), field.default
        # argparse formats help texts with %
        meaning = f"{field.metadata['help']} [{variable}]".replace("%", "%%")
        if kind is bool:
            if variable in os.environ:
                default = read_switch(variable, os.environ[variable])
            parser.add_argument(
                _flag(field), action=argparse.BooleanOptionalAction, default=default, help=meaning
            )
            continue
        # argparse converts string defaults like arguments
        parser.add_argument(
            _flag(field),
            type=kind,
            default=os.environ.get(variable, default),
            help=meaning,
            metavar=f"{{{','.join(choices)}}}" if choices else None,
        )
    values = vars(parser.parse_args(arguments))
    for field in fields:
        complaint = _complaint(field, values[field.name])
        if complaint is not None:
            raise StartupError(f"{complaint}.")
    return settings(**values)


class _Parser(FlagParser):
    def error(self, message: str) -> NoReturn:
        """Raise StartupError, where argparse would end the process."""
        complaint = StartupError(message if message.endswith(("?", ".")) else f"{message}.")
        complaint.usage = self.format_usage().strip()
        raise complaint


def _flag(field: Field) -> str:
    return "--" + field.name.replace("_", "-")


def _complaint(field: Field, value: Any) -> str | None:
    """Return why the field can't have the value, or None if it can."""
    choices, least, most = (field.metadata[name] for name in ("choices", "least", "most"))
    if choices and value not in choices:
        return f"{_flag(field)} must be one of {', '.join(choices)}, not {value!r}"
    if isinstance(value, int | float) and not least <= value <= most:  # true for NaN, too
        return f"{_flag(field)} must be between {least} and {most}, not {value}"
    return None


def read_switch(variable: str, text: str) -> bool:
    """Return the value of a variable that is true or false. Raises StartupError for another."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise StartupError(f"{variable} must be true or false, not {text!r}.")
