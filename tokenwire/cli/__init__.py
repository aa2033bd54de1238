"""Command line `tokenwire`: a file per group of commands."""

from tokenwire.cli.command_line import main

__all__ = ["main"]
