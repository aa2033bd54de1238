"""Command line `tokenwire`: a file per group of commands."""

import os

# gRPC reads the variable when it is imported; services/__init__.py sets it, too
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tokenwire.cli.command_line import main

__all__ = ["main"]
