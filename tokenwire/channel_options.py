"""Options and limits of gRPC channels that both ends share."""

from typing import Any

__all__ = ["LOST_SECONDS", "MESSAGE_LIMIT", "MESSAGE_LIMITS", "QUIET"]

LOST_SECONDS = 20.0
"""Seconds without an answer to a ping after which a server counts as lost"""

MESSAGE_LIMIT = 64 * 1024 * 1024
"""Largest message in bytes; gRPC's default of 4 MiB is too small for long prompts"""
MESSAGE_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
]
QUIET: list[tuple[str, Any]] = [
    ("grpc.http2.bdp_probe", 0),  # our messages fit any window, so bandwidth probes gain nothing
    ("grpc.enable_channelz", 0),  # nothing reads these statistics
]
"""Options for both ends of a channel that turn off work which gRPC does for every message"""
