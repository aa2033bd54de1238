"""Several grammar services of one engine: they share its sequences, and take over each other's."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.peers.targets import parse_targets
from services.engine.frontend import matchers as matchers_module
from services.engine.frontend.matchers import Matchers
from services.engine.messages import Mask, Token
from services.engine.model.checkpoint.fingerprint import tokenizer_fingerprint
from tests.stack import RunningService, free_ports, metrics_of, running_service
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

HANG_SECONDS = 60
COMPILED = 'tokenwire_grammar_compiles_total{kind="regex",outcome="compiled"}'
MATCHERS = "tokenwire_grammar_matchers"


class Engine:
    """An engine's side: constrained sequences, each a request of its own."""

    def __init__(self, targets: str, fingerprint: str = "") -> None:
        self._masks = asyncio.Queue[Sequence[Mask]]()
        self.failed = asyncio.Queue[tuple[int, ServiceError]]()
        self.matchers = Matchers(
            parse_targets(targets, "--grammar"),
            vocabulary_size=8192,
            eos_token_ids=[0],
            on_masks=self._masks.put_nowait,
            on_failed=lambda handle, error: self.failed.put_nowait((handle, error)),
            fingerprint=fingerprint,
        )

    async def until_usable(self, count: int) -> None:
        """Wait until this many services can be used."""
        pool = self.matchers._pool._peers
        async with asyncio.timeout(HANG_SECONDS):
            while len(pool.serving) != count:
                await pool._changed.wait()

    async def open(self, regexes: Sequence[str], first: int) -> None:
        """Open a sequence for each regular expression, with handles from `first` on."""
        specs = [GrammarSpec(regex=regex) for regex in regexes]
        compiled = await asyncio.gather(*map(self.matchers.compile, specs))
        for handle, grammar in enumerate(compiled, first):
            self.matchers.open(handle, 1, grammar, {})
        await self.until(range(first, first + len(regexes)), 0)

    async def until(self, handles: Collection[int], position: int) -> None:
        """Wait for a mask of each of these sequences at this position."""
        found: set[int] = set()
        async with asyncio.timeout(HANG_SECONDS):
            while len(found) < len(handles):
                masks = await self._masks.get()
                found |= {each.handle for each in masks if each.position == position}
                found &= set(handles)
        assert self.failed.empty(), self.failed


@asynccontextmanager
async def engine(targets: str, fingerprint: str = "") -> AsyncIterator[Engine]:
    made = Engine(targets, fingerprint)
    try:
        yield made
    finally:
        await made.matchers.aclose()


@asynccontextmanager
async def grammar_services(
    model: Path, logs: Path, ports: Sequence[int]
) -> AsyncIterator[list[RunningService]]:
    async with AsyncExitStack() as running:
        yield [
            await running.enter_async_context(
                running_service(
                    "grammar", "--model", str(model), log=logs / f"{port}.log", port=port
                )
            )
            for port in ports
        ]


def addresses(ports: Sequence[int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)


async def counts(running: Sequence[RunningService], name: str) -> list[float]:
    return [(await metrics_of(each.target)).get(name, 0) for each in running]


async def test_services_share_sequences_and_each_grammar_keeps_its_service(
    embedded_model: Path, tmp_path: Path
) -> None:
    ports = free_ports(2)
    async with (
        grammar_services(embedded_model, tmp_path, ports) as running,
        engine(addresses(ports)) as ours,
    ):
        await ours.until_usable(2)
        places: dict[str, list[str]] = {running[0].target: [], running[1].target: []}
        for number in range(200):
            spec = GrammarSpec(regex=f"[ab]{number}")
            places[(await ours.matchers.compile(spec)).link.peer.target].append(spec.regex)
        compiled = await counts(running, COMPILED)
        assert compiled == [len(regexes) for regexes in places.values()]
        mixed = [regex for pair in zip(*places.values(), strict=False) for regex in pair][:16]
        for turn in range(4):
            await ours.open(mixed, 1 + 100 * turn)
        assert await counts(running, MATCHERS) == [32, 32]
        assert await counts(running, COMPILED) == compiled


async def test_sequences_of_one_grammar_are_shared_too(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Many applications have one schema; one service must not compute all masks of it."""
    ports = free_ports(2)
    async with (
        grammar_services(embedded_model, tmp_path, ports) as running,
        engine(addresses(ports)) as ours,
    ):
        await ours.until_usable(2)
        await ours.open(["[ab]+"] * 40, 1)
        assert max(await counts(running, MATCHERS)) <= 25


async def test_sequences_leave_a_service_that_drains_and_return_with_it(
    embedded_model: Path, tmp_path: Path
) -> None:
    ports = free_ports(2)
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).get_vocab()
    handles = range(1, 9)
    async with (
        engine(addresses(ports)) as ours,
        grammar_services(embedded_model, tmp_path, ports) as [first, second],
    ):
        await ours.until_usable(2)
        await ours.open([f"[ab]{{{number}}}[cd]" for number in handles], 1)
        assert min(await counts([first, second], MATCHERS)) > 0
        assert await first.stop() == 0
        ours.matchers.feed([Token(handle, 0, 0, ids["a"], None) for handle in handles])
        await ours.until(handles, 1)
        assert await counts([second], MATCHERS) == [8]
        async with grammar_services(embedded_model, tmp_path, ports[:1]) as [again]:
            await ours.until_usable(2)
            await ours.open(["[ef]"] * 8, 101)
            assert (await counts([again], MATCHERS))[0] >= 6


async def test_sequences_leave_a_service_that_hangs(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen service keeps its connections, so its silence alone tells."""
    ports = free_ports(2)
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).get_vocab()
    handles = range(1, 9)
    monkeypatch.setattr(matchers_module, "_ANSWER_SECONDS", 3.0)
    async with (
        grammar_services(embedded_model, tmp_path, ports) as [first, second],
        engine(addresses(ports)) as ours,
    ):
        await ours.until_usable(2)
        await ours.open([f"[ab]{{{number}}}[cd]" for number in handles], 1)
        first.process.send_signal(signal.SIGSTOP)
        try:
            ours.matchers.feed([Token(handle, 0, 0, ids["a"], None) for handle in handles])
            await ours.until(handles, 1)
            await ours.open(["[ef]"] * 8, 101)
        finally:
            first.process.send_signal(signal.SIGCONT)
        assert await counts([second], MATCHERS) == [16]
        await ours.until_usable(2)


async def test_sequences_leave_a_service_that_is_gone_from_dns(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(2)
    records = list(ports)

    async def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        assert host == "grammars"
        return [(0, 0, 0, "", ("127.0.0.1", port)) for port in records]

    monkeypatch.setattr("services.common.peers.targets._RESOLVE_SECONDS", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with (
        grammar_services(embedded_model, tmp_path, ports) as running,
        engine("dns:///grammars:1") as ours,
    ):
        await ours.until_usable(2)
        await ours.open([f"[ab]{number}" for number in range(8)], 1)
        assert min(await counts(running, MATCHERS)) > 0
        records.pop(0)
        await ours.until(await handles_of(ours, ports[0]), 0)
        assert await counts(running, MATCHERS) == [0, 8]
        records.insert(0, ports[0])
        await ours.until_usable(2)
        await ours.open(["[cd]"] * 8, 101)
        assert (await counts(running, MATCHERS))[0] >= 6


async def handles_of(ours: Engine, port: int) -> set[int]:
    """Return the sequences at a service."""
    return {
        matcher.handle
        for matcher in ours.matchers._matchers.values()
        if matcher.link is not None and matcher.link.peer.target.endswith(f":{port}")
    }


async def test_service_of_another_model_and_a_silent_server_get_no_sequences(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, byte_level())
    ports = free_ports(2)
    [third] = free_ports(1)
    async with (
        grammar_services(other, tmp_path, ports[:1]),
        grammar_services(embedded_model, tmp_path, ports[1:]) as right,
        silent_server(third),
        engine(addresses([*ports, third]), tokenizer_fingerprint(embedded_model)) as ours,
    ):
        await ours.until_usable(2)
        await ours.open([f"[ab]{number}" for number in range(12)], 1)
        await ours.until_usable(1)
        assert await counts(right, MATCHERS) == [12]
    assert f"127.0.0.1:{ports[0]} can't be used: The grammar service has another" in caplog.text


@asynccontextmanager
async def silent_server(port: int) -> AsyncIterator[None]:
    """Listen, and accept nothing."""
    with socket.create_server(("127.0.0.1", port)):
        yield
