"""Channels to the services, with the options that all clients need."""

from typing import Any

import grpc

__all__ = ["MESSAGE_LIMIT", "MESSAGE_LIMITS", "QUIET", "connect"]

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
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # retries of work that was never admitted need the whole request in the buffer
    ("grpc.per_rpc_retry_buffer_size", MESSAGE_LIMIT),
]


def connect(target: str) -> grpc.aio.Channel:
    """A channel to "host:port". It connects by itself, and again after every loss."""
    return grpc.aio.insecure_channel(target, options=_OPTIONS)
