"""Addresses of servers: their form, whether they are free, and who reaches them."""

import errno
import os
import socket

from tokenwire.loopback import is_loopback

__all__ = [
    "DNS_SCHEME",
    "LAST_PORT",
    "METRICS_PORT_OFFSET",
    "address",
    "is_loopback",
    "listen",
    "reachable",
    "split_targets",
    "why_closed",
    "why_unusable",
]

DNS_SCHEME = "dns:///"
"""Prefix of a target whose DNS name stands for several addresses"""
LAST_PORT = 65535
METRICS_PORT_OFFSET = 1000
"""Distance from the port of a gRPC server to the default port of its metrics"""
_BACKLOG = 2048
"""Most connections that wait to be accepted"""
_HELD = (
    "address already in use, though nothing listens: an outgoing connection may hold it; try "
    "again, or reserve the port with the sysctl net.ipv4.ip_local_reserved_ports"
)


def address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Return the address by which this machine reaches its own server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def why_closed(host: str, *, has_keys: bool, is_open: bool) -> str | None:
    """Return the sentence that refuses HTTP on an address beyond loopback; None if it is allowed.

    Such an address needs API keys or the operator's consent (`--open`).
    """
    if has_keys or is_open or is_loopback(host):
        return None
    return (
        f"Without --keys, {host} is served only with --open "
        "(anyone who reaches the port can use it)."
    )


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket for HTTP. Raises OSError.

    is_shared: whether further sockets of this user may listen there. The kernel divides the
    connections among them.
    """
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=_BACKLOG,
        reuse_port=is_shared,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),  # as gRPC does
    )


def why_unusable(host: str, port: int) -> str | None:
    """Return the reason why no server can listen on an address; None if one can."""
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
            if error.errno == errno.EADDRINUSE and not _accepts_connections(host, port):
                return _HELD
            return os.strerror(error.errno or 0).lower()
    return None


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((reachable(host), port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # the cause is unknown, so the plain reason is the safer one
    return True


def split_targets(text: str) -> tuple[str, ...]:
    """Split "host:port,dns:///name:port,unix:/path". Raises ValueError with the accepted forms."""
    targets = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not targets:
        raise ValueError("at least one target, as host:port")
    for target in targets:
        if target.startswith("unix:"):
            continue
        host, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and 0 < int(port) <= LAST_PORT):
            forms = "targets as host:port, dns:///name:port or unix:/path"
            raise ValueError(f"{forms}, not {target!r}")
    return targets
