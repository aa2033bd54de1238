"""A flood of commands does not delay the next step."""

import itertools
import socket
from types import SimpleNamespace

import pytest

from services.engine.framing import pack
from services.engine.loop import loop_process
from services.engine.messages import CancelRequest


def test_commands_past_the_time_limit_wait_for_the_next_step_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a fake clock, each command takes a millisecond."""
    clock = itertools.count()
    instant = SimpleNamespace(monotonic=lambda: next(clock) * 0.001)
    monkeypatch.setattr(loop_process, "time", instant)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(pack(CancelRequest(handle)) for handle in range(1_000)))
        link = loop_process._MessageSocket(theirs)
        received: list[object] = []
        steps = 0
        while len(received) < 1_000:
            link.wait(None)
            some = list(link.receive())
            assert 0 < len(some) <= 6
            received += some
            steps += 1
    assert steps >= 150
    assert received == [CancelRequest(handle) for handle in range(1_000)]
