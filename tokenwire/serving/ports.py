"""Ports of this machine: how they are written, and why one can't be listened on."""

import errno
import os
import socket

__all__ = ["address", "listen", "reachable", "why_unusable"]

_BACKLOG = 2048  # connections that wait to be accepted
_HELD = (
    "address already in use, though nobody listens: an outgoing connection may hold it; try again, "
    "or keep the port from them with the sysctl net.ipv4.ip_local_reserved_ports"
)


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, for HTTP. Raises OSError."""
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),  # as gRPC does
    )


def reachable(host: str) -> str:
    """An address under which a server that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def why_unusable(host: str, port: int) -> str | None:
    """Why nobody can listen there; None if one can."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return "the host is not known"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not _is_listened_on(host, port):
                return _HELD
            return os.strerror(error.errno or 0).lower()
    return None


def _is_listened_on(host: str, port: int) -> bool:
    try:
        socket.create_connection((reachable(host), port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # who can say
    return True
