"""TLS between services and at the edge: who is not known gets nothing, and certificates change."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from services.common.network.health import is_ready, is_serving, why_not_serving
from tests.services.shim import running_shim
from tests.stack import RunningService, free_ports, running_service
from tokenwire.client import Client, ClientTls
from tokenwire.errors import ServiceError

FEW = ("--dtype", "float32", "--kv-memory", "64MiB")
BODY = {"model": "default", "prompt": "import", "max_tokens": 4, "ignore_eos": True}


@dataclass(frozen=True)
class Authority:
    """An authority and one certificate of it, for this machine, as files."""

    folder: Path

    def issue(self) -> None:
        """Make a new authority, and replace the files."""
        authority = trustme.CA()
        made = authority.issue_cert("localhost", "127.0.0.1", "engines")
        self._replace("ca.pem", authority.cert_pem.bytes())
        self._replace("key.pem", made.private_key_pem.bytes())
        chain = b"".join(each.bytes() for each in made.cert_chain_pems)
        self._replace("cert.pem", chain)

    def _replace(self, name: str, content: bytes) -> None:
        (self.folder / "new").write_bytes(content)
        (self.folder / "new").replace(self.folder / name)

    @property
    def server(self) -> tuple[str, ...]:
        """Flags of a server that knows its clients."""
        return (
            *("--tls-cert", str(self.folder / "cert.pem")),
            *("--tls-key", str(self.folder / "key.pem")),
            *("--tls-client-ca", str(self.folder / "ca.pem")),
        )

    @property
    def peer(self) -> tuple[str, ...]:
        """Flags of a service that calls such servers."""
        return (
            *("--peer-ca", str(self.folder / "ca.pem")),
            *("--peer-cert", str(self.folder / "cert.pem")),
            *("--peer-key", str(self.folder / "key.pem")),
        )

    @property
    def client(self) -> ClientTls:
        return ClientTls(self.anyone.ca, self.folder / "cert.pem", self.folder / "key.pem")

    @property
    def anyone(self) -> ClientTls:
        """A client without a certificate."""
        return ClientTls(self.folder / "ca.pem")


def authority(folder: Path) -> Authority:
    folder.mkdir()
    made = Authority(folder)
    made.issue()
    return made


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return authority(tmp_path / "ours")


@asynccontextmanager
async def tokenizer(
    model: Path, logs: Path, known: Authority, *flags: str
) -> AsyncIterator[RunningService]:
    """Run an engine and a tokenizer service that know each other, by a name of DNS."""
    checkpoint = ("--model", str(model))
    async with running_service(
        *("engine", *checkpoint, *FEW, *known.server), log=logs / "engine", tls=known.client
    ) as engine:
        port = engine.target.rpartition(":")[2]
        target = ("--engine", f"dns:///localhost:{port}", *known.peer, *flags)
        async with running_service(
            *("tokenizer", *checkpoint, *target), log=logs / "tokenizer", tls=known.client
        ) as service:
            yield service


async def test_only_known_clients_are_served_from_the_edge_to_the_engine(
    embedded_model: Path, tmp_path: Path, ours: Authority
) -> None:
    theirs = authority(tmp_path / "theirs")
    flags = ("--tls-cert", f"{ours.folder}/cert.pem", "--tls-key", f"{ours.folder}/key.pem")
    async with (
        tokenizer(embedded_model, tmp_path, ours, *ours.server) as service,
        running_shim("--tokenizer", service.target, *ours.peer, *flags) as shim,
        httpx.AsyncClient(verify=ours.anyone.context(), timeout=60) as http,
    ):
        url = shim.url.replace("http://", "https://")
        answer = await http.post(f"{url}/v1/completions", json=BODY)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (await http.get(f"{shim.url}/health")).status_code == 400
        for stranger in (None, ours.anyone, theirs.client):
            async with Client(service.target, stranger) as client:
                with pytest.raises(ServiceError) as refused:
                    await client.generate("import", max_tokens=1)
                assert refused.value.reason == "SESSION_LOST"
        command = [sys.executable, "-m", "tokenwire", "complete", "import", "--max-tokens", "4"]
        command += ["--target", service.target, "--tls-ca", f"{ours.folder}/ca.pem"]
        command += ["--tls-cert", f"{ours.folder}/cert.pem"]
        known = os.environ | {"TOKENWIRE_TLS_KEY": f"{ours.folder}/key.pem"}
        run = await asyncio.to_thread(subprocess.run, command, env=known, capture_output=True)
        assert run.returncode == 0, run.stderr
        health = [sys.executable, "-m", "tokenwire", "health", f"{url}/ready"]
        ca = ["--tls-ca", f"{ours.folder}/ca.pem"]
        run = await asyncio.to_thread(subprocess.run, [*health, *ca], capture_output=True)
        assert run.returncode == 0, run.stderr
        run = await asyncio.to_thread(subprocess.run, health, capture_output=True)
        assert run.returncode == 1
        assert b"TLS fails" in run.stderr


async def test_certificates_that_do_not_match_are_told(
    embedded_model: Path, tmp_path: Path, ours: Authority
) -> None:
    """The tokenizer service waits for an engine; its operator must learn for what."""
    theirs = authority(tmp_path / "theirs")
    model = ("--model", str(embedded_model))
    async with running_service(
        "engine", *model, *FEW, *theirs.server, log=tmp_path / "engine", tls=theirs.client
    ) as engine:
        command = ("-m", "services.tokenizer", "--port", "0", "--metrics-port", "-1", *model)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--engine", engine.target, *ours.peer),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        async for line in process.stderr:
            if f"the engine at {engine.target} is not reachable".encode() in line:
                break
        else:
            raise AssertionError("the log says nothing")
        process.kill()
        await process.communicate()


async def test_replaced_certificate_is_used_without_a_restart(
    embedded_model: Path, tmp_path: Path, ours: Authority
) -> None:
    before = authority(tmp_path / "before")
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (before.folder / name).write_bytes((ours.folder / name).read_bytes())
    log = tmp_path / "log"
    arguments = ("--model", str(embedded_model), *FEW, *ours.server)
    async with running_service("engine", *arguments, log=log, tls=before.client) as engine:
        (ours.folder / "cert.pem").write_text("no certificate")
        assert await is_serving(engine.target, before.client)
        assert "The previous certificate stays" in log.read_text()
        ours.issue()
        assert await is_serving(engine.target, ours.client)
        assert not await is_serving(engine.target, before.client)


async def test_callers_use_their_replaced_certificates_without_a_restart(
    embedded_model: Path, tmp_path: Path, ours: Authority
) -> None:
    """A stream that runs goes on; the next connection shows the new certificate."""
    caller = authority(tmp_path / "caller")

    def copy(name: str) -> None:
        (caller.folder / "copy").write_bytes((ours.folder / name).read_bytes())
        (caller.folder / "copy").replace(caller.folder / name)

    for name in ("ca.pem", "cert.pem", "key.pem"):
        copy(name)
    model, [port] = ("--model", str(embedded_model)), free_ports(1)
    command = ("engine", *model, *FEW, *ours.server)
    tls = caller.client
    async with running_service(*command, port=port, log=tmp_path / "engine", tls=tls) as engine:
        arguments = (*model, "--engine", engine.target, *caller.peer)
        async with (
            running_service("tokenizer", *arguments, log=tmp_path / "tokenizer") as service,
            Client(service.target) as client,
        ):
            async with client.stream("import", max_tokens=1_000, ignore_eos=True) as stream:
                await anext(stream)
                ours.issue()
                await client.generate("import", max_tokens=1)
                await anext(stream)
            await engine.stop()
            # it comes back as another one, before its caller has the new authority
            again = running_service(*command, port=port, log=tmp_path / "again", tls=ours.client)
            async with again:
                assert not await is_serving(service.target)
                for name in ("key.pem", "cert.pem", "ca.pem"):
                    copy(name)
                assert (await client.generate("import", max_tokens=4)).text
                while not await is_serving(service.target):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
                log = (tmp_path / "tokenizer").read_text()
                assert "new connections use the certificates of" in log


async def test_replaced_certificate_is_used_at_the_edge(tmp_path: Path, ours: Authority) -> None:
    flags = ("--tls-cert", f"{ours.folder}/cert.pem", "--tls-key", f"{ours.folder}/key.pem")
    async with running_shim("--tokenizer", "127.0.0.1:9", *flags) as shim:
        health = f"{shim.url.replace('http://', 'https://')}/health"
        assert await is_ready(health, ours.anyone.context())
        ours.issue()
        await shim.logged("is in use")
        assert await is_ready(health, ours.anyone.context())


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_plain_http_at_the_https_port_is_answered_with_a_sentence(
    tmp_path: Path, ours: Authority, method: str
) -> None:
    """A body larger than the kernel's buffers must not turn the answer into a reset connection."""
    flags = ("--tls-cert", f"{ours.folder}/cert.pem", "--tls-key", f"{ours.folder}/key.pem")
    async with (
        running_shim("--tokenizer", "127.0.0.1:9", *flags) as shim,
        httpx.AsyncClient(timeout=60) as http,
    ):
        body = b"x" * 3_000_000 if method == "POST" else None
        refused = await http.request(method, f"{shim.url}/v1/models", content=body)
        assert refused.status_code == 400
        assert "use https://" in refused.json()["error"]["message"]
        health = f"{shim.url.replace('http://', 'https://')}/health"
        assert await is_ready(health, ours.anyone.context())


async def test_reason_of_a_failed_start_is_told_over_tls(tmp_path: Path, ours: Authority) -> None:
    """A health check with the certificates of the service could not read it in plaintext."""
    [port] = free_ports(1)
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.grammar", "--port", str(port), *ours.server),
        *("--model", str(tmp_path / "none"), "--hold-on-error", "3600"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    target = f"127.0.0.1:{port}"
    try:
        while "does not exist" not in (await why_not_serving(target, ours.client) or ""):
            assert service.returncode is None
            await asyncio.sleep(0.1)
        assert "does not exist" not in (await why_not_serving(target) or "")
    finally:
        service.terminate()
        await service.wait()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tls-cert", "cert.pem"), "--tls-cert and --tls-key need each other"),
        (("--tls-client-ca", "ca.pem"), "--tls-client-ca needs --tls-cert"),
        (("--tls-cert", "gone.pem", "--tls-key", "key.pem"), "gone.pem can't be read: No such"),
        (("--tls-cert", "cert.pem", "--tls-key", "other.pem"), "don't belong together"),
        (("--tls-cert", "ca.txt", "--tls-key", "key.pem"), "are no certificate and key in PEM"),
        (("--peer-ca", "ca.txt"), "ca.txt has no certificates in PEM"),
        (("--peer-cert", "cert.pem"), "--peer-cert and --peer-key need each other"),
        (("--peer-cert", "cert.pem", "--peer-key", "key.pem"), "--peer-cert needs --peer-ca"),
    ],
)
async def test_unusable_files_end_the_service_with_a_sentence(
    embedded_model: Path, tmp_path: Path, ours: Authority, flags: tuple[str, ...], sentence: str
) -> None:
    other = authority(tmp_path / "other")
    (ours.folder / "other.pem").write_bytes((other.folder / "key.pem").read_bytes())
    (ours.folder / "ca.txt").write_text("no certificate")
    files = [str(ours.folder / each) if "." in each else each for each in flags]
    arguments = ("--model", str(embedded_model), "--engine", "127.0.0.1:9", *files)
    with pytest.raises(AssertionError, match=sentence):
        async with running_service("tokenizer", *arguments, log=tmp_path / "log"):
            pass


async def test_plaintext_beyond_loopback_needs_consent(
    embedded_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(embedded_model), "--host", "0.0.0.0")
    with pytest.raises(AssertionError, match="only with --tls-cert and --tls-key, or with --plain"):
        async with running_service("grammar", *arguments, log=tmp_path / "refused"):
            pass
    async with running_service("grammar", *arguments, "--plaintext", log=tmp_path / "log"):
        pass


async def test_services_of_one_machine_meet_at_a_socket(
    embedded_model: Path, tmp_path: Path
) -> None:
    checkpoint, socket = ("--model", str(embedded_model)), f"unix:{tmp_path}/engine.sock"
    command = ("-m", "services.engine", *checkpoint, *FEW, "--host", socket)
    engine = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        arguments = (*checkpoint, "--engine", socket)
        async with (
            running_service("tokenizer", *arguments, log=tmp_path / "log") as service,
            Client(service.target) as client,
        ):
            assert (await client.generate("import", max_tokens=4)).text
    finally:
        engine.terminate()
        await engine.wait()
