"""The command `pull`."""

import argparse
import json
import signal
from pathlib import Path

from tokenwire.cli.arguments import Commands, add_command
from tokenwire.cli.model_argument import MODEL_HELP
from tokenwire.cli.output import print_error

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the command."""
    pull = add_command(
        commands,
        "pull",
        _pull,
        "Download a model from the Hugging Face hub, and print its directory.",
        "pull smollm2",
        "pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        "pull Qwen/Qwen2.5-Coder-0.5B@main --to ./qwen",
    )
    pull.add_argument("model", metavar="MODEL", help=f"Model of the hub: {MODEL_HELP}.")
    pull.add_argument(
        "--to", type=Path, metavar="DIR", help="Directory to use; by default the hub's cache."
    )

    pull.add_argument(
        "--json",
        action="store_true",
        help="Print lines of JSON: completed and total bytes of the download, at last the path.",
    )


async def _pull(options: argparse.Namespace) -> int:
    from services.common.model_files.hub import HubCheckpoint
    from services.common.model_files.model_name import find_model

    # asyncio's handler would only cancel this task, which has no effect during a download
    signal.signal(signal.SIGINT, signal.default_int_handler)
    source = find_model(options.model).source
    if isinstance(source, HubCheckpoint):
        chosen = source.chosen()
        if not options.json:
            print(chosen.download(options.to))
            return 0
        path = chosen.download(options.to, report=_print_progress)
        print(json.dumps({"path": str(path)}), flush=True)
        return 0
    print_error(f"{source} is on this machine already.")
    return 2


def _print_progress(completed: int, total: int) -> None:
    print(json.dumps({"completed": completed, "total": total}), flush=True)
