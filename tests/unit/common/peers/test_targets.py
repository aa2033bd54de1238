"""Targets of peers: an operator's spelling is understood or refused, and DNS is followed."""

import asyncio
import socket
from collections.abc import Collection
from typing import Any

import pytest

from services.common.peers.targets import Discovery, parse_targets
from services.common.settings import StartupError


def test_list_keeps_its_order_and_loses_repetitions() -> None:
    text = "a:1, dns:///engines:50052 ,[::1]:3,unix:/run/engine.sock,a:1,"
    found = parse_targets(text, "--engine")
    assert found == ("a:1", "dns:///engines:50052", "[::1]:3", "unix:/run/engine.sock")


@pytest.mark.parametrize(
    "text", ["", " , ", "host", ":1", "host:", "host:0", "host:65536", "host:x", "dns:///host"]
)
def test_unusable_target_is_refused_by_the_flag_s_name(text: str) -> None:
    with pytest.raises(StartupError, match="--engine"):
        parse_targets(text, "--engine")


async def test_addresses_follow_the_records_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing DNS server does not take the peers away."""
    records: list[list[str] | OSError] = [
        socket.gaierror(-2, "Name or service not known"),
        ["10.0.0.1"],
        ["10.0.0.1", "fd00::2"],
        socket.gaierror(-3, "Temporary failure in name resolution"),
        ["fd00::2"],
    ]
    seen: asyncio.Queue[list[str]] = asyncio.Queue()

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("engines", 50052)
        answer = records.pop(0) if len(records) > 1 else records[0]
        if isinstance(answer, OSError):
            raise answer
        return [(0, 0, 0, "", (address, port)) for address in answer]

    def report(addresses: Collection[str]) -> None:
        seen.put_nowait(list(addresses))

    monkeypatch.setattr("services.common.peers.targets._RESOLVE_SECONDS", 0)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = Discovery(["one:1", "dns:///engines:50052"], report)
    discovery.start()
    try:
        answers = [await seen.get() for _ in range(4)]
    finally:
        discovery.stop()
    assert answers == [
        ["one:1"],
        ["one:1", "10.0.0.1:50052"],
        ["one:1", "10.0.0.1:50052", "[fd00::2]:50052"],
        ["one:1", "[fd00::2]:50052"],
    ]
