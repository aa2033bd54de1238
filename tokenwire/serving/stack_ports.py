"""Ports of the services that `tokenwire serve` runs."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.network.addresses import (
    LAST_PORT,
    METRICS_PORT_OFFSET,
    address,
    listen,
    why_unusable,
)
from tokenwire.serving.serve_options import ServeError, ServeOptions, require_port
from tokenwire.serving.service import Service

__all__ = [
    "ModelPorts",
    "fixed_ports",
    "free_ports",
    "listen_for_shims",
    "manager_ports",
    "require_free_ports",
    "shim_metrics_port",
    "taken_ports",
]

_REPLICA_PORTS = 10
"""Distance between the ports of services that do the same"""


@dataclass(frozen=True, slots=True)
class ModelPorts:
    """gRPC ports of a model's services."""

    tokenizers: Sequence[int]
    engines: Sequence[int]
    grammar: int


def fixed_ports(options: ServeOptions, num_tokenizers: int) -> ModelPorts:
    """Return the ports of the only model, as the options name them."""
    return ModelPorts(
        _replicas(options.tokenizer_port, num_tokenizers),
        _replicas(options.engine_port, options.replicas),
        options.grammar_port,
    )


def free_ports(
    options: ServeOptions, taken: set[int], num_tokenizers: int, num_engines: int
) -> ModelPorts:
    """Take loopback ports that are free together with their metrics ports. Raises ServeError.

    taken: ports that the server has, to which these are added.
    """
    found: list[int] = []
    for port in range(options.tokenizer_port, LAST_PORT - METRICS_PORT_OFFSET):
        both = {port, port + METRICS_PORT_OFFSET}
        if not both & taken and not any(why_unusable("127.0.0.1", each) for each in both):
            taken |= both
            found.append(port)
            if len(found) == num_tokenizers + num_engines + 1:
                return ModelPorts(found[:num_tokenizers], found[num_tokenizers:-1], found[-1])
    raise ServeError(f"There are no free ports from {options.tokenizer_port} upwards.")


def taken_ports(options: ServeOptions, targets: Iterable[str]) -> set[int]:
    """Return the ports that services of the server have, or get when they are loaded.

    targets: those of all models, as host:port.
    """
    ports = {options.port, options.jobs_port, options.manager_port}
    ports |= {int(target.rpartition(":")[2]) for target in targets}
    return ports | {port + METRICS_PORT_OFFSET for port in ports}


def manager_ports(options: ServeOptions) -> Sequence[tuple[str, str, int]]:
    """Return purpose, host and number of the ports of the manager of models on demand."""
    port = options.manager_port
    return (
        ("manager", "127.0.0.1", port),
        ("manager metrics", "127.0.0.1", port + METRICS_PORT_OFFSET),
    )


def shim_metrics_port(options: ServeOptions, stated: int, number: int) -> int:
    """Return the metrics port of one of several shims. number: from 0.

    stated: --metrics-port of the first one; 0 = the default.
    """
    return (stated or options.port + METRICS_PORT_OFFSET) + _REPLICA_PORTS * number


def require_free_ports(ports: Iterable[tuple[str, str, int]]) -> None:
    """Raise ServeError for the first port that is in use or named twice.

    ports: purpose, host and number of each.
    """
    taken: dict[int, str] = {}
    for name, host, port in ports:
        require_port(f"The {name} port", port)
        if port in taken:
            raise ServeError(f"The {taken[port]} port and the {name} port are both {port}.")
        taken[port] = name
        why = why_unusable(host, port)
        if why is not None:
            raise ServeError(f"Can't use the {name} port {address(host, port)}: {why}.")


def _replicas(first: int, count: int) -> Sequence[int]:
    return [first + _REPLICA_PORTS * number for number in range(count)]


def listen_for_shims(options: ServeOptions, services: Iterable[Service]) -> list[socket.socket]:
    """Return a socket for each shim, among which the kernel divides the connections.

    Raises ServeError.
    """
    shims = [service for service in services if service.name == "http_shim"]
    try:
        return [listen(options.host, options.port, is_shared=len(shims) > 1) for _ in shims]
    except OSError as error:
        place = address(options.host, options.port)
        raise ServeError(f"Can't use the HTTP port {place}: {error.strerror}.") from None
