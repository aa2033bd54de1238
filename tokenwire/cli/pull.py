"""The command `pull`."""

import argparse
import signal
from pathlib import Path

from tokenwire.cli.arguments import Commands, add_command
from tokenwire.cli.output import print_error

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the command."""
    pull = add_command(
        commands,
        "pull",
        _pull,
        "Download a model from the Hugging Face hub, and print its directory.",
        "pull hf:Qwen/Qwen2.5-Coder-0.5B",
        "pull hf:Qwen/Qwen2.5-Coder-0.5B@main --to ./qwen",
    )
    pull.add_argument("model", metavar="MODEL", help="hf:owner/name or hf:owner/name@revision")
    pull.add_argument(
        "--to", type=Path, metavar="DIR", help="Directory to use; by default the hub's cache."
    )


async def _pull(options: argparse.Namespace) -> int:
    from services.common.model_files.hub import HubCheckpoint, HubError

    # asyncio's handler would only cancel this task, which has no effect during a download
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(HubCheckpoint.parse(options.model).download(options.to))
    except HubError as error:
        print_error(str(error))
        return 2
    return 0
