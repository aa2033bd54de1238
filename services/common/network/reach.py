"""Checks of a server's port: why no connection opens, and whether it speaks HTTP."""

import http.client
import os
import socket

__all__ = ["speaks_http", "why_unreachable"]

_SECONDS = 2.0


def why_unreachable(target: str) -> str | None:
    """Return why no TCP connection to "host:port" opens; None if one does."""
    host, port = _split(target)
    if port is None:
        return None
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except (socket.gaierror, UnicodeError):
        return f"the host {host} is unknown"
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s"
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        return os.strerror(number).lower() if number else str(error)
    return None


def speaks_http(target: str) -> bool:
    """Return whether the server at "host:port" answers a request of HTTP/1.1."""
    host, port = _split(target)
    if port is None:
        return False
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _split(target: str) -> tuple[str, int | None]:
    """Return host and port; the port is None for gRPC's other targets, such as "unix:path"."""
    host, _, port = target.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    return host.removeprefix("[").removesuffix("]"), int(port) if is_number else None
