"""A process ends with its peer, and takes no socket for standard output."""

import socket
import subprocess
import sys

_LOADS = """
import signal, socket, sys
from services.common.process import ends_with_peer
link = socket.socket(fileno=int(sys.argv[1]))
with ends_with_peer(link):
    link.send(b"begun")
    signal.pause()
"""
_CONNECTS = """
import socket, sys
from services.common.process import open_standard_files
open_standard_files()
print("nobody reads this", file=sys.stderr, flush=True)
one, other = socket.socketpair()
sys.exit(0 if min(one.fileno(), other.fileno()) > 2 else 1)
"""


def test_process_that_loads_ends_when_its_peer_is_killed() -> None:
    """It would hold the memory of a model that nobody serves until all weights are read."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    process = subprocess.Popen([sys.executable, "-c", _LOADS, str(number)], pass_fds=[number])
    theirs.close()
    assert ours.recv(5) == b"begun"
    ours.close()
    assert process.wait() == 0


def test_sockets_never_take_the_numbers_of_closed_standard_files() -> None:
    """libuv aborts the engine when it closes such a socket; a daemon may start it without files."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", _CONNECTS]
    assert subprocess.run(command, check=False).returncode == 0
