"""Command line `tokenwire`: a file per group of commands."""

import os

# as in services/__init__.py; gRPC reads it when it is imported
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tokenwire.cli.command_line import main

__all__ = ["main"]
