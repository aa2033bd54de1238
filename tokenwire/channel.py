"""Channels to the services, with the options that all clients need."""

from typing import Any

import grpc

__all__ = ["LOST_SECONDS", "MESSAGE_LIMIT", "MESSAGE_LIMITS", "QUIET", "connect"]

LOST_SECONDS = 20.0
"""Silence after which a server is taken for lost"""

MESSAGE_LIMIT = 64 * 1024 * 1024  # bytes; gRPC's own default of 4 MiB cuts long prompts
MESSAGE_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
]
QUIET: list[tuple[str, Any]] = [
    ("grpc.http2.bdp_probe", 0),  # pings between messages that fit any window
    ("grpc.enable_channelz", 0),  # counts that nobody asks for
]
"""Leaves out work that gRPC does for every message; for both ends of a channel"""
_OPTIONS: list[tuple[str, Any]] = [
    *MESSAGE_LIMITS,
    *QUIET,
    # a client that only reads sends no data between its pings, and gRPC would hold the third back
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's name misleads: this is how long one attempt to connect may take. A service that is far
    # away or starved of its cores needs more than its address takes to answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # retries of work that was never admitted need the whole request in the buffer
    ("grpc.per_rpc_retry_buffer_size", MESSAGE_LIMIT),
]


def connect(target: str, lost_seconds: float = LOST_SECONDS) -> grpc.aio.Channel:
    """Open a channel to "host:port". It connects by itself, and again after every loss.

    lost_seconds: a server that answers no ping for so long is lost, and the calls to it fail. It is
    pinged at half of that time; Tokenwire's servers refuse more than 4 pings a second.
    """
    half = int(lost_seconds * 500)
    pings = [
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        # without this, gRPC's own timeout of 60 s for every ping decides
        ("grpc.http2.ping_timeout_ms", half),
    ]
    return grpc.aio.insecure_channel(target, options=[*_OPTIONS, *pings])
