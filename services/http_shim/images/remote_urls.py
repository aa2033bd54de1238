"""URLs of images to fetch: their syntax, and the hosts that the operator allows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

__all__ = ["AllowedSources", "RemoteUrl", "RemoteUrlError", "parse_remote_url"]

_PORTS = {"http": 80, "https": 443}
_MAX_LENGTH = 8_192  # characters
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")  # parsers disagree about these
_PRINTABLE = bytes(range(0x21, 0x7F)).decode()
_SOURCE = re.compile(r"(?P<host>(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:(?P<port>\d{1,5}))?")


class RemoteUrlError(Exception):
    """A URL that is not fetched. The message continues the sentence "The image's URL …"."""


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """An http: or https: URL in its parts, in ASCII."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query"""

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def join(self, location: str) -> "RemoteUrl":
        """Return the URL that a redirect from here leads to. Raises RemoteUrlError."""
        base = f"{self.scheme}://{self.host_header}{self.target}"
        try:
            return parse_remote_url(urljoin(base, location))
        except ValueError:
            raise RemoteUrlError("is not valid") from None


def parse_remote_url(url: str) -> RemoteUrl:
    """Parse a URL. Raises RemoteUrlError."""
    if len(url) > _MAX_LENGTH:
        raise RemoteUrlError(f"is longer than {_MAX_LENGTH:,} characters")
    if _UNSAFE.search(url):
        raise RemoteUrlError("contains a space, a control character or a backslash")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
        if ":" not in host:
            host = host.encode("idna").decode("ascii")
    except ValueError:  # UnicodeError of a name that can't be encoded, too
        raise RemoteUrlError("is not valid") from None
    if parts.scheme not in _PORTS:
        raise RemoteUrlError("is neither an http: nor an https: URL")
    if "@" in parts.netloc:
        raise RemoteUrlError("contains a user name or a password")
    if not host or "%" in host or not host.isascii():
        raise RemoteUrlError("has no valid host")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = _PORTS[parts.scheme]
    return RemoteUrl(
        parts.scheme, host, default if port is None else port, quote(target, safe=_PRINTABLE)
    )


class AllowedSources:
    """The hosts and ports that images may come from."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Allow the hosts of `entries`; without any, all hosts.

        An entry is a host, or `*.host` for all names below it, with a port if it is not 80 or 443.
        Raises ValueError with a sentence for the operator.
        """
        self._ports: dict[str, set[int]] = {}
        for entry in entries:
            found = _SOURCE.fullmatch(entry.lower())
            if found is None or int(found["port"] or 1) not in range(1, 1 << 16):
                raise ValueError(
                    f"{entry} is not a source of images; write host, host:port or *.host."
                )
            ports = {int(found["port"])} if found["port"] else set(_PORTS.values())
            self._ports.setdefault(found["host"], set()).update(ports)

    def require(self, url: RemoteUrl) -> None:
        """Raise RemoteUrlError for a URL of another host or port."""
        if not self._ports:
            if url.port not in _PORTS.values():
                raise RemoteUrlError(f"has the port {url.port}; images come from 80 and 443 only")
            return
        below = url.host.split(".")
        names = [url.host, *(f"*.{'.'.join(below[i:])}" for i in range(1, len(below)))]
        if not any(url.port in self._ports.get(name, ()) for name in names):
            raise RemoteUrlError("has a host or a port that this server does not fetch images from")
