"""Checks whether an address is reachable from this machine alone."""

import ipaddress

__all__ = ["is_local_target", "is_loopback"]

_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_target(target: str) -> bool:
    """Return whether all addresses of a gRPC target are on this machine."""
    if target.startswith("unix:"):
        return True
    scheme = next((each for each in _SCHEMES if target.startswith(each)), "")
    hosts = (each.rpartition(":")[0] for each in target.removeprefix(scheme).split(","))
    return all(is_loopback(host.strip("[]")) for host in hosts)
