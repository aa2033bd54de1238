"""The argument MODEL of several commands, and the model that it names on this machine."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.model_files.hub import HubCheckpoint
from services.common.model_files.model_name import ModelNameError, NamedModel, find_model

__all__ = [
    "MODEL_HELP",
    "DownloadError",
    "ProvidedModel",
    "add_download",
    "asks",
    "in_decimal_units",
    "provide_model",
]

MODEL_HELP = (
    "directory, GGUF file, short name such as smollm2 (`tokenwire list --available`), "
    "hf:owner/name[@revision], owner/name, or owner/name:Q4_K_M"
)
_KILOBYTE, _MEGABYTE, _GIGABYTE = 1e3, 1e6, 1e9
Check = Callable[[HubCheckpoint], None]


@dataclass(frozen=True, slots=True)
class ProvidedModel:
    """A model whose files are on this machine."""

    path: Path
    """Directory or GGUF file"""
    model_id: str
    """Name under which clients find it; empty = that of the directory or file"""


class DownloadError(Exception):
    """The download did not end well; its process has written why."""


def add_download(parser: argparse.ArgumentParser) -> None:
    """Add --download."""
    parser.add_argument(
        "--download",
        action="store_true",
        help="Download the owner/name of a hub without a question.",
    )


async def provide_model(
    text: str, *, may_download: bool = False, check: Check | None = None
) -> ProvidedModel:
    """Return the model that a text names; download it if it is not on this machine.

    A plain owner/name is downloaded if a person on the terminal agrees, or with `may_download`.
    check: called in a thread before a download, which it may refuse by an error. Raises
    ModelNameError, HubError, and DownloadError.
    """
    named = find_model(text)
    path = await asyncio.to_thread(named.on_disk)
    if path is None:
        assert isinstance(named.source, HubCheckpoint)
        chosen = await asyncio.to_thread(named.source.chosen)
        if not (may_download or named.is_explicit):
            await _require_consent(named, chosen)
        if check is not None:
            await asyncio.to_thread(check, chosen)
        if await _pull(str(chosen)) != 0:
            raise DownloadError
        path = await asyncio.to_thread(chosen.cached)
    return ProvidedModel(path.resolve() if path.is_dir() else path.absolute(), named.model_id)


async def _pull(model: str) -> int:
    """Download a model in a process of its own, which Ctrl-C can end; return its exit code."""
    command = [sys.executable, "-m", "tokenwire", "pull", model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise


def asks(question: str) -> bool:
    """Return the answer of the person on the terminal; Enter means yes. Ctrl-C interrupts."""
    # asyncio's handler would only cancel the task, which has no effect while this one reads
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().lower() in ("\n", "y\n", "yes\n")  # "" is the end of stdin
    finally:
        signal.signal(signal.SIGINT, before)


async def _require_consent(named: NamedModel, chosen: HubCheckpoint) -> None:
    """Ask before a download. Raises ModelNameError without consent."""
    num_bytes = await asyncio.to_thread(chosen.missing_bytes)
    size = f" ({in_decimal_units(num_bytes)})" if num_bytes else ""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ModelNameError(
            f"There is no {named.text} on this machine; --download downloads it from the hub{size}."
        )
    if not asks(f"{named.text} is not on this machine. Download it from the hub{size}?"):
        raise ModelNameError(f"{named.text} was not downloaded.")


def in_decimal_units(num_bytes: int) -> str:
    """Return a number of bytes in the decimal units of file sizes."""
    if num_bytes >= _GIGABYTE:
        return f"{num_bytes / _GIGABYTE:.2f} GB"
    if num_bytes >= _MEGABYTE:
        return f"{num_bytes / _MEGABYTE:.0f} MB"
    return f"{num_bytes / _KILOBYTE:.0f} kB"
