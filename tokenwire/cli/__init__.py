"""Command line `tokenwire`: a file per group of commands."""

import os
import sys
from collections.abc import Sequence

# gRPC reads the variable when it is imported; services/__init__.py sets it, too
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; `command_line.main` lists the exit codes."""
    try:
        # imported here, so that Ctrl-C during the imports prints no traceback
        from tokenwire.cli import command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line.main(arguments)
