"""The host names that a server accepts in the Host header.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). Browsers then let it read the
answers of a server on loopback, but still send that name in the header.
"""

from collections.abc import Collection

from services.common.network.addresses import is_loopback

__all__ = ["AllowedHosts"]


class AllowedHosts:
    """Host names that one server accepts: those of loopback, and those that the operator gives.

    A server that listens beyond loopback accepts any name unless the operator gives some, because
    it does not know its own names.
    """

    def __init__(self, bound: str, names: Collection[str]) -> None:
        """bound: address that the server listens on. names: host names without ports; "*" = any."""
        self._names = {name.lower() for name in names}
        self._accepts_any = "*" in self._names or not (names or is_loopback(bound))

    def allows(self, host: str) -> bool:
        """Return whether a Host header, with or without a port, has an accepted name."""
        if self._accepts_any:
            return True
        name = _name_of(host.lower())
        return name in self._names or is_loopback(name.strip("[]"))


def _name_of(host: str) -> str:
    """Return the name without its port, "" for a malformed header."""
    if host.startswith("["):
        end = host.find("]") + 1
        name, port = host[:end], host[end:]
    else:
        name, colon, number = host.partition(":")
        port = colon + number
    return name if not port or (port[0] == ":" and port[1:].isdecimal()) else ""
