"""Who can reach a server: addresses beyond loopback are served with keys, or when told to."""

import ipaddress

__all__ = ["is_loopback", "why_closed"]


def why_closed(host: str, *, has_keys: bool, is_open: bool) -> str | None:
    """Why HTTP must not be served on an address, as a sentence; None where it may be."""
    if has_keys or is_open or is_loopback(host):
        return None
    return (
        f"Without --keys, {host} is served only with --open "
        "(anyone who reaches the port can use it)."
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
