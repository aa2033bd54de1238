"""Servers of this user on this machine: each `tokenwire serve` notes itself while it is up."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenwire.serving.state_folder import state_folder

__all__ = [
    "STARTED_BY",
    "RunningServer",
    "boot_id",
    "process_start",
    "register",
    "running_servers",
    "unregister",
]

STARTED_BY = "TOKENWIRE_STARTED_BY"
"""Variable that names the starter of `tokenwire serve`: "run" = `tokenwire run`, "make" = make"""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19
"""Field of /proc/PID/stat behind the command's name: the start in ticks since boot"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that is up."""

    pid: int
    start: int
    """Start of the process in ticks since boot: another process may get the same id later"""
    boot: str
    """Id of the boot, and name of the machine"""
    url: str
    """http(s)://host:port"""
    jobs: str
    """host:port of the jobs service; empty = there is none"""
    manager: str
    """host:port of the manager of the models on demand; empty = there is none"""
    targets: Mapping[str, str] = field(default_factory=dict)
    """host:port of the tokenizer service of each model that is always loaded"""
    since: float
    """Unix time at which it came up"""
    is_background: bool
    """True if `tokenwire run` has started it"""
    has_keys: bool
    """True if requests need an API key"""

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.url} (pid {self.pid})"

    def is_alive(self) -> bool:
        """Return whether the process is still the one that noted itself."""
        return self.start == process_start(self.pid)


def register(server: RunningServer) -> None:
    """Note a server, for commands of the same user. Raises OSError."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = _file(server.pid)
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(asdict(server)), "utf-8")
    fresh.replace(path)


def unregister(pid: int) -> None:
    """Drop the note of a server."""
    _file(pid).unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Return the servers of this user on this machine, the oldest first."""
    return sorted(_alive(), key=lambda server: server.since)


def boot_id() -> str:
    """Return an id of this boot of this machine; files may be shared by several."""
    try:
        boot = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        boot = ""
    return f"{boot} {socket.gethostname()}"


def process_start(pid: int) -> int | None:
    """Return the start of a process of this user, in ticks since boot; None if there is none."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return None
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[_START_FIELD])


def _alive() -> Iterator[RunningServer]:
    boot = boot_id()
    for path in _folder().glob("*.json"):
        try:
            server = RunningServer(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # it is being replaced, or another version wrote it
        if server.boot != boot:
            continue  # of another machine, or of an earlier boot
        if server.is_alive():
            yield server
        else:  # it was killed
            path.unlink(missing_ok=True)


def _folder() -> Path:
    return state_folder() / "servers"


def _file(pid: int) -> Path:
    # containers share folders, but not process ids
    return _folder() / f"{pid}-{socket.gethostname()}.json"
