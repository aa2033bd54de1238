"""The server in the background that all `tokenwire run` of a user share."""

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.model_files.catalog_file import CatalogError, read_catalog
from services.common.network.addresses import METRICS_PORT_OFFSET, why_unusable
from tokenwire.serving.running_servers import STARTED_BY, RunningServer, running_servers
from tokenwire.serving.state_folder import state_folder

__all__ = ["BackgroundError", "Progress", "drop_model", "log_folder", "serve_in_background"]

Progress = Callable[[str], None]
"""Shows what the caller waits for"""
_POLL_SECONDS = 0.1
_START_SECONDS = 300.0
_HOST = "127.0.0.1"
_OF_SERVE = "TOKENWIRE_SERVE_"
"""Beginning of the variables of `tokenwire serve`"""
_FLAGS = (
    ("--port", 8000),
    ("--tokenizer-port", 50051),
    ("--engine-port", 50052),
    ("--grammar-port", 50053),
    ("--jobs-port", 50054),
    ("--manager-port", 50055),
)
"""Flags of ports, and the ports if these are free"""
_DISTANCE = 100
"""Distance to the next ports that are tried"""
_TRIES = 40


class BackgroundError(Exception):
    """Server that could not be started. The message is one sentence."""


async def serve_in_background(name: str, path: Path, show: Progress) -> RunningServer:
    """Return the server in the background, which has the model; start it if there is none.

    path: the model's directory or GGUF file. Several callers start one server: a file is locked.
    Raises BackgroundError.
    """
    folder = state_folder()
    try:
        log_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        async with _locked(folder / "run.lock", show):
            server = next((each for each in running_servers() if each.is_background), None)
            if server is None:
                _write_rows(folder, [(name, path)])
                return await _start(folder, show)
            if _add_row(folder, name, path):
                os.kill(server.pid, signal.SIGHUP)
            return server
    except OSError as error:
        raise BackgroundError(f"{error.filename or folder}: {error.strerror}.") from None


def drop_model(name: str) -> None:
    """Drop a model from the catalog of the server, which does not take it."""
    folder = state_folder()
    _write_rows(folder, [row for row in _rows(folder) if row[0] != name])


def log_folder() -> Path:
    """Return the folder of the logs of the server in the background."""
    return state_folder() / "logs"


@asynccontextmanager
async def _locked(path: Path, show: Progress) -> AsyncIterator[None]:
    """Hold a lock that the end of this process releases, too."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                show("another `tokenwire run` starts the server …")
                await asyncio.sleep(_POLL_SECONDS)
        yield


async def _start(folder: Path, show: Progress) -> RunningServer:
    """Start the server, and wait until it is up. Raises BackgroundError."""
    log = log_folder() / "serve.log"
    command = [sys.executable, "-m", "tokenwire", "serve", "--host", _HOST, *_ports()]
    command += ["--catalog", str(_catalog(folder)), "--models", "--log-dir", str(log_folder())]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            start_new_session=True,  # it outlives this terminal, and gets none of its signals
            env=_variables(),
        )
    try:
        for waited in range(int(_START_SECONDS / _POLL_SECONDS)):
            show(f"starting the server … {waited * _POLL_SECONDS:.0f} s")
            if server := next((s for s in running_servers() if s.pid == process.pid), None):
                return server
            if process.returncode is not None:
                raise BackgroundError(_last_sentence(log))
            await asyncio.sleep(_POLL_SECONDS)
    except asyncio.CancelledError:
        if process.returncode is None:
            process.terminate()
        raise
    process.terminate()
    raise BackgroundError(f"The server is not up after {_START_SECONDS:g} s; see {log_folder()}.")


def _variables() -> dict[str, str]:
    """Return the environment without the settings of a server for others: its keys, say."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_OF_SERVE)}
    return {**kept, STARTED_BY: "run", "TOKENWIRE_CONFIG": ""}


def _ports() -> list[str]:
    """Return the flags of the first ports that are all free. Raises BackgroundError."""
    for number in range(_TRIES):
        flags = [(flag, port + number * _DISTANCE) for flag, port in _FLAGS]
        ports = [port for _, port in flags]
        ports += [port + METRICS_PORT_OFFSET for port in ports[1:]]
        if not any(why_unusable(_HOST, port) for port in ports):
            return [part for flag, port in flags for part in (flag, str(port))]
    raise BackgroundError("No free ports were found for a server in the background.")


def _last_sentence(log: Path) -> str:
    """Return the last sentence that the server wrote."""
    lines = log.read_text("utf-8", "replace").splitlines()
    own = [line.removeprefix("tokenwire: ") for line in lines if line.startswith("tokenwire: ")]
    return own[-1] if own else f"The server ended at its start; see {log}."


def _catalog(folder: Path) -> Path:
    return folder / "run.toml"


def _add_row(folder: Path, name: str, path: Path) -> bool:
    """Add a model to the catalog; return whether it was missing."""
    rows = _rows(folder)
    if (name, path) in rows:
        return False
    _write_rows(folder, [*(row for row in rows if row[0] != name), (name, path)])
    return True


def _rows(folder: Path) -> list[tuple[str, Path]]:
    """Return the models of the catalog whose files are still there."""
    try:
        models = read_catalog(_catalog(folder))
    except CatalogError:
        return []
    return [(each.id, each.path) for each in models if each.path and each.path.exists()]


def _write_rows(folder: Path, rows: Sequence[tuple[str, Path]]) -> None:
    """Write the catalog; a reader sees the old one or the new one."""
    text = "".join(
        f"[[models]]\nid = {_quoted(name)}\npath = {_quoted(str(path))}\non_demand = true\n\n"
        for name, path in rows
    )
    fresh = folder / "run.toml.new"
    fresh.write_text(f"# The models of `tokenwire run`, which writes this file.\n\n{text}", "utf-8")
    fresh.replace(_catalog(folder))


def _quoted(text: str) -> str:
    """Return a basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
