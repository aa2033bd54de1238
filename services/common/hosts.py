"""Names under which a server may be asked, by the Host header of requests.

A page of another site can make its own name lead to 127.0.0.1 (DNS rebinding), and browsers then
let it read what a server on loopback answers. The header still says that name.
"""

import ipaddress
from collections.abc import Collection

from tokenwire.serving.addresses import is_loopback

__all__ = ["AllowedHosts"]


class AllowedHosts:
    """The names for a server: those of loopback, and what the operator names.

    A server that listens beyond loopback is asked under names that nobody here knows: it takes any,
    unless some are named.
    """

    def __init__(self, bound: str, names: Collection[str]) -> None:
        """bound: the address that it listens on. names: without ports; "*" stands for any."""
        self._names = {name.lower() for name in names}
        self._takes_any = "*" in self._names or not (names or is_loopback(bound))

    def allows(self, host: str) -> bool:
        """Whether a Host header, with or without a port, is one of them."""
        if self._takes_any:
            return True
        name = _name_of(host.lower())
        return name in self._names or name == "localhost" or _is_loopback_address(name)


def _name_of(host: str) -> str:
    """The name without its port; "" where it is no Host header."""
    if host.startswith("["):
        end = host.find("]") + 1
        name, port = host[:end], host[end:]
    else:
        name, colon, number = host.partition(":")
        port = colon + number
    return name if not port or (port[0] == ":" and port[1:].isdecimal()) else ""


def _is_loopback_address(name: str) -> bool:
    """127.0.0.0/8, or ::1 in brackets."""
    try:
        if name.startswith("["):
            return ipaddress.IPv6Address(name[1:-1]).is_loopback
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False
