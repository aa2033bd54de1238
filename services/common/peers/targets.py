"""Targets of a service's peers: addresses, and DNS names that stand for several."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.common.background import keep_running
from services.common.network.addresses import DNS_SCHEME, split_targets
from services.common.settings import PeerSettings, StartupError
from tokenwire.loopback import is_local_target

__all__ = ["Discovery", "parse_targets", "warn_of_clear_text"]

_LOG = logging.getLogger("targets")
_RESOLVE_SECONDS = 5.0


def parse_targets(text: str, flag: str) -> tuple[str, ...]:
    """Split "host:port,dns:///name:port,…". Raises StartupError, which names `flag`."""
    try:
        return split_targets(text)
    except ValueError as error:
        raise StartupError(f"{flag} must have {error}.") from None


def warn_of_clear_text(targets: Iterable[str], settings: PeerSettings) -> None:
    """Log a warning for each target that gets the services' token in clear text."""
    for target in targets:
        if settings.peer_token_file and not settings.peer_ca and not is_local_target(target):
            _LOG.warning("the peer token goes to %s in clear text: there is no --peer-ca", target)


class Discovery:
    """Addresses of some targets. The addresses of a DNS name change with its records."""

    def __init__(
        self, targets: Sequence[str], on_addresses: Callable[[Mapping[str, str]], None]
    ) -> None:
        """on_addresses: called with all addresses, at first and whenever they change.

        The value of each address is its DNS name; empty for an address that was given as such.
        """
        self._static = [target for target in targets if not target.startswith(DNS_SCHEME)]
        self._names = [target for target in targets if target.startswith(DNS_SCHEME)]
        self._on_addresses = on_addresses
        self._resolved: dict[str, Sequence[str]] = dict.fromkeys(self._names, ())
        self._unresolved: set[str] = set()
        """Names whose failed resolution has been logged"""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_static(self) -> bool:
        """True if the addresses never change."""
        return not self._names

    def start(self) -> None:
        """Report the addresses; begin to resolve the names."""
        self._report()
        if self._names:
            self._task = keep_running("discovery", self._run)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            before = dict(self._resolved)
            await asyncio.gather(*(self._resolve(name) for name in self._names))
            if self._resolved != before:
                self._report()
            await asyncio.sleep(_RESOLVE_SECONDS)

    async def _resolve(self, target: str) -> None:
        """Look a name up. A failure keeps the last addresses: DNS may be down, not the peers."""
        host, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            if target not in self._unresolved:
                _LOG.warning("%s has no addresses: %s", target, error.strerror)
                self._unresolved.add(target)
            return
        self._unresolved.discard(target)
        self._resolved[target] = sorted({_address(*where[:2]) for *_, where in found})

    def _report(self) -> None:
        addresses = dict.fromkeys(self._static, "")
        for target in self._names:
            name = target.removeprefix(DNS_SCHEME).rpartition(":")[0]
            for address in self._resolved[target]:
                addresses.setdefault(address, name)
        self._on_addresses(addresses)


def _address(host: str | int, port: str | int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
