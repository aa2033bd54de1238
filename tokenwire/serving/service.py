"""Service: one of the processes that `tokenwire serve` runs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from services.common.network.addresses import METRICS_PORT_OFFSET

__all__ = ["Service", "tokenizer_targets"]


@dataclass(frozen=True, slots=True)
class Service:
    """One process: `python -m services.NAME ARGUMENTS`."""

    name: str
    arguments: tuple[str, ...]
    target: str
    """host:port at which the service answers"""
    model: str = ""
    """Catalog model that it serves; empty without a catalog"""
    replica: int = 1
    """Number of the service among those that do the same"""
    on_demand: bool = False
    """True if it runs only while requests use its model"""
    health_url: str = ""
    """URL that answers 200 while this process serves; empty = it has grpc.health at its target"""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the process gets besides those of `tokenwire serve`"""

    @property
    def checkpoint(self) -> str:
        """Path of the model's directory or file; empty for a service without a model."""
        return self.flag("--model")

    @property
    def ports(self) -> Iterator[tuple[str, str, int]]:
        """Purpose, host and number of each port of the service."""
        host = self.flag("--host")
        if self.name != "http_shim":
            port = int(self.flag("--port"))
            yield self.name, host, port
            yield f"{self.name} metrics", host, port + METRICS_PORT_OFFSET
        elif self.replica == 1:
            yield "HTTP", host, int(self.flag("--port"))
        if self.name == "http_shim" and (metrics := int(self.flag("--metrics-port") or 0)) > 0:
            yield "HTTP metrics", host, metrics

    def flag(self, name: str) -> str:
        """Return the last value of a flag; empty = it is not among the arguments."""
        value = ""
        for argument, following in zip_longest(self.arguments, self.arguments[1:], fillvalue=""):
            if argument == name:
                value = following
            elif argument.startswith(f"{name}="):
                value = argument.removeprefix(f"{name}=")
        return value

    @property
    def title(self) -> str:
        """Name in messages: "engine", "engine 2", or "engine of MODEL" with a catalog."""
        name = f"{self.name} {self.replica}" if self.replica > 1 else self.name
        return f"{name} of {self.model}" if self.model else name

    @property
    def log_name(self) -> str:
        """Name of its log file, without the suffix."""
        replica = str(self.replica) if self.replica > 1 else ""
        name = "-".join(part for part in (self.name, replica, self.model) if part)
        return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def tokenizer_targets(services: Iterable[Service]) -> str:
    """Return the targets of a model's tokenizer services, separated by commas."""
    return ",".join(each.target for each in services if each.name == "tokenizer")
