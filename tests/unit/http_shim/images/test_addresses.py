"""Addresses that a client must not have the server connect to."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.images.addresses import is_public

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.215.14", "223.255.255.254", "2606:4700::6810:84e5"]
INSIDE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",  # behind a provider's NAT; 100.100.100.200 is Alibaba's metadata server
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",  # Azure
    "169.254.169.254",  # metadata of most clouds
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",  # Oracle
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_hosts_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_of_inside_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",  # AWS
        "ff02::1",
        "100::1",
        "5f00::1",
        "64:ff9b:1::808:808",
        "2001::1",
        "2001:20::1",
        "2001:db8::1",
        "2606:4700::5efe:7f00:1",
        "2606:4700::200:5efe:7f00:1",
        "3fff::1",
    ],
)
def test_ipv6_addresses_of_inside_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [*INSIDE, *PUBLIC[:4]])
def test_ipv4_addresses_are_found_within_ipv6_addresses(address: str) -> None:
    """A gateway would pass the connection on to them."""
    inner = int(ipaddress.IPv4Address(address))
    six_to_four = ipaddress.IPv6Address(0x2002 << 112 | inner << 80)
    teredo = ipaddress.IPv6Address(0x20010000 << 96 | inner ^ 0xFFFF_FFFF)
    nat64 = ipaddress.IPv6Address(0x64FF9B << 96 | inner)
    mapped = ipaddress.IPv6Address(0xFFFF << 32 | inner)
    compatible = ipaddress.IPv6Address(inner)
    for embedding in (six_to_four, teredo, mapped, compatible):
        assert not is_public(str(embedding))
    assert is_public(str(nat64)) == is_public(address), "networks without IPv4 need these"


@pytest.mark.parametrize("text", ["", "localhost", "8.8.8", "0x8.8.8.8", "134744072", "8.8.8.8:80"])
def test_text_that_is_no_address_is_not_public(text: str) -> None:
    assert not is_public(text)


@given(st.ip_addresses())
def test_public_addresses_are_global_ones(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    nat64 = ipaddress.IPv6Network("64:ff9b::/96")
    if is_public(str(address)) and address not in nat64:
        assert address.is_global
        assert not address.is_multicast
