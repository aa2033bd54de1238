"""gRPC channels to the services."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from tokenwire.caller_channel import CallerChannel
from tokenwire.channel_options import LOST_SECONDS, MESSAGE_LIMIT, MESSAGE_LIMITS, QUIET
from tokenwire.tls import ClientTls

__all__ = ["connect", "stop_writing_at_end"]

_OPTIONS: list[tuple[str, Any]] = [
    *MESSAGE_LIMITS,
    *QUIET,
    # A client that only reads sends no data between pings; gRPC would hold back its third ping.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this bounds one connection attempt. A distant service, or one without CPU
    # time, completes its handshake late.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Retrying a request that was never admitted needs the whole request in the buffer.
    ("grpc.per_rpc_retry_buffer_size", MESSAGE_LIMIT),
]


def connect(
    target: str,
    lost_seconds: float = LOST_SECONDS,
    tls: ClientTls | None = None,
    server_name: str = "",
    token: Callable[[], str] | None = None,
) -> grpc.aio.Channel:
    """Open a channel to "host:port"; gRPC connects it, and reconnects it after every loss.

    tls: None = plaintext. server_name: name that the server's certificate must have, if it is not
    the target's host. token: returns the API key or token of a call at its start; None = no token.
    Raises TlsError if the files can't be used. New calls use files that were replaced.

    A server that answers no ping for `lost_seconds` counts as lost, and the calls to it fail. Pings
    are sent at half that interval; Tokenwire's servers refuse more than 4 pings a second.
    """
    half = int(lost_seconds * 500)
    pings = [
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        # Otherwise gRPC's own timeout of 60 s applies to every ping.
        ("grpc.http2.ping_timeout_ms", half),
    ]
    options = [*_OPTIONS, *pings]
    if tls is not None and server_name:
        options.append(("grpc.ssl_target_name_override", server_name))

    def open_channel() -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, tls.credentials(), options=options)

    if tls is None and token is None:
        return open_channel()
    return CallerChannel(open_channel, () if tls is None else tls.files, token)


def stop_writing_at_end(call: grpc.aio.Call, writer: "asyncio.Task[None]") -> None:
    """Cancel a stream's writer once the peer has ended the call, so that its status stays.

    In grpcio, a write that fails after the status has arrived replaces it by INTERNAL.
    """

    def on_end(_: object) -> None:
        writer.cancel()

    call.add_done_callback(on_end)
