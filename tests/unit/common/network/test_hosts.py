"""Accepted host names protect servers from DNS rebinding."""

import pytest

from services.common.network.hosts import AllowedHosts

LOOPBACK = [
    "localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "127.9.8.7:1", "[::1]",
    "[::1]:8000",
]  # fmt: skip
OTHERS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "10.0.0.1", "[::2]:8000", "::1", "", "localhost:evil", "[::1", "127.1", "evil:localhost:80",
    "localhost:",
]  # fmt: skip


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_a_server_on_loopback_accepts_only_loopback_names(bound: str) -> None:
    allowed = AllowedHosts(bound, [])
    assert [host for host in LOOPBACK if not allowed.allows(host)] == []
    assert [host for host in OTHERS if allowed.allows(host)] == []


def test_names_given_by_the_operator_are_accepted_too() -> None:
    allowed = AllowedHosts("127.0.0.1", ["Models.example"])
    assert allowed.allows("models.EXAMPLE:443")
    assert allowed.allows("localhost:8000")
    assert not allowed.allows("evil.example")


def test_a_server_beyond_loopback_accepts_any_name_unless_some_are_given() -> None:
    assert AllowedHosts("0.0.0.0", []).allows("http_shim:8000")
    named = AllowedHosts("0.0.0.0", ["models.example"])
    assert named.allows("127.0.0.1:8000"), "health checks on the same machine"
    assert not named.allows("evil.example")


def test_a_star_accepts_any_name() -> None:
    assert AllowedHosts("127.0.0.1", ["*"]).allows("evil.example")
