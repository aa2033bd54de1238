"""Network addresses that a client may have the server connect to."""

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

__all__ = ["is_public"]

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")  # how networks without IPv4 reach IPv4 hosts (RFC 6052)
_REFUSED_V4: Sequence[IPv4Network] = [
    IPv4Network("168.63.129.16/32"),  # Azure's metadata server: a public address, inside only
    IPv4Network("192.0.0.0/24"),  # protocol assignments; Oracle's metadata server
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
]
_REFUSED_V6: Sequence[IPv6Network] = [
    IPv6Network("2001::/23"),  # protocol assignments, such as Teredo, which embeds IPv4 addresses
    IPv6Network("2001:db8::/32"),  # documentation
    IPv6Network("2002::/16"),  # 6to4, which embeds IPv4 addresses
    IPv6Network("3fff::/20"),  # documentation
]
_ISATAP = (0x00005EFE, 0x02005EFE)  # bits 64 to 95 of an address that embeds an IPv4 address


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to a host of the public internet.

    Addresses of this machine, of private networks, of cloud metadata servers, of several hosts
    (multicast), and IPv6 addresses that embed such IPv4 addresses are not public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return _is_public_v4(parsed) if isinstance(parsed, IPv4Address) else _is_public_v6(parsed)


def _is_public_v4(address: IPv4Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in network for network in _REFUSED_V4)
    )


def _is_public_v6(address: IPv6Address) -> bool:
    """Only global unicast can be public: neither ::1, fc00::/7, fe80::/10, nor ::ffff:0:0/96."""
    number = int(address)
    if address in _NAT64:
        return _is_public_v4(IPv4Address(number & 0xFFFF_FFFF))
    return (
        address in _GLOBAL_UNICAST
        and address.is_global
        and address.scope_id is None
        and not any(address in network for network in _REFUSED_V6)
        and number >> 32 & 0xFFFF_FFFF not in _ISATAP
    )
