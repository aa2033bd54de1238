"""Fetching of images from a server on loopback, which stands for one of the internet."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from services.common.contract import MAX_IMAGES_BYTES
from services.http_shim.images.addresses import is_public
from services.http_shim.images.image_fetcher import FetchLimits, ImageFetcher, fetch_remote
from services.http_shim.images.remote_urls import AllowedSources
from services.http_shim.images.request_images import RemoteImage, RequestImages
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

HOST = "images.test"
LOOPBACK = "127.0.0.1"
PIXELS = b"\x89PNG pixels"
UNREACHABLE = "The URL in images[0] has a host that can't be reached at public addresses."


def ok(body: bytes, *headers: str) -> bytes:
    return answer("200 OK", body, f"Content-Length: {len(body)}", *headers)


def moved(location: str) -> bytes:
    return answer("302 Found", b"", f"Location: {location}", "Content-Length: 0")


def answer(status: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


@dataclass
class Web:
    """A server with fixed answers; it never ends those of paths that start with /endless."""

    answers: Mapping[str, bytes]
    port: int = 0
    heads: list[str] = field(default_factory=list)

    def url(self, path: str, host: str = HOST, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def sources(self, *hosts: str) -> AllowedSources:
        return AllowedSources([f"{host}:{self.port}" for host in (HOST, *hosts)])


@asynccontextmanager
async def serving(
    answers: Mapping[str, bytes], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Web]:
    web = Web(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        web.heads.append(head)
        path = head.split(" ")[1]
        writer.write(web.answers[path])
        if path.startswith("/endless"):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, LOOPBACK, 0, ssl=tls) as server:
        web.port = server.sockets[0].getsockname()[1]
        yield web


def resolving(
    addresses: Mapping[str, Sequence[str]],
) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    async def resolve(host: str, port: int) -> Sequence[str]:
        if host not in addresses:
            raise OSError("unknown name")
        return addresses[host]

    return resolve


def fetcher_of(
    web: Web, limits: FetchLimits | None = None, *hosts: str, **addresses: Sequence[str]
) -> ImageFetcher:
    """Return a fetcher for which loopback is public, and the name `inside` is not."""
    return ImageFetcher(
        web.sources("inside", *hosts),
        limits or FetchLimits(),
        resolve=resolving({HOST: [LOOPBACK], "inside": ["10.0.0.1"], **addresses}),
        is_allowed=lambda address: address == LOOPBACK or is_public(address),
    )


async def fetched(fetcher: ImageFetcher, url: str) -> bytes:
    return await fetcher.fetch(RemoteImage(url, "images[0]"), lambda size: None)


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(ServiceError) as caught:
        await fetched(fetcher, url)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == "images[0]"
    assert url not in caught.value.message, "it may hold a signature, and the message is logged"
    return caught.value.message


async def test_image_is_fetched_with_the_name_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # of the server's operator
    async with serving({"/a.png?b=c": ok(PIXELS)}) as web:
        assert await fetched(fetcher_of(web), web.url("/a.png?b=c#d")) == PIXELS
    lines = web.heads[0].split("\r\n")
    assert lines[0] == "GET /a.png?b=c HTTP/1.1"
    assert f"Host: {HOST}:{web.port}" in lines
    assert "Accept-Encoding: identity" in lines


async def test_connection_goes_to_the_address_that_was_checked() -> None:
    """A name server may answer the second question differently (DNS rebinding)."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return [LOOPBACK] if len(asked) == 1 else ["10.0.0.1"]

    async with serving({"/": ok(PIXELS), "/moved": moved("/")}) as web:
        fetcher = ImageFetcher(
            web.sources(), resolve=rebinding, is_allowed=lambda address: address == LOOPBACK
        )
        assert await fetched(fetcher, web.url("/")) == PIXELS
        assert asked == [HOST]
        asked.clear()
        assert await refusal(fetcher, web.url("/moved")) == UNREACHABLE, (
            "redirects are checked anew"
        )


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["fe80::1%lo"],
        [],
    ],
)
async def test_host_with_an_inside_address_is_never_connected_to(addresses: list[str]) -> None:
    async with serving({"/": ok(PIXELS)}) as web:
        fetcher = ImageFetcher(web.sources(), resolve=resolving({HOST: addresses}))
        assert await refusal(fetcher, web.url("/")) == UNREACHABLE
    assert web.heads == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "0x7f000001", "2130706433"])
async def test_spellings_of_loopback_are_refused(host: str) -> None:
    async with serving({"/": ok(PIXELS)}) as web:
        fetcher = ImageFetcher(web.sources(host))
        assert await refusal(fetcher, web.url("/", host)) == UNREACHABLE
    assert web.heads == []


async def test_errors_do_not_tell_inside_hosts_apart() -> None:
    """Otherwise a client could explore the network behind the server."""
    async with serving({"/": ok(PIXELS)}) as web:
        fetcher = fetcher_of(web, None, "unknown", "closed", closed=[LOOPBACK])
    for host in ("unknown", "inside", "closed"):  # the server has ended, so its port is closed
        assert await refusal(fetcher, web.url("/", host)) == UNREACHABLE


async def test_redirects_are_followed_up_to_the_limit() -> None:
    answers = {f"/{i}": moved(f"/{i + 1}") for i in range(4)} | {"/4": ok(PIXELS)}
    async with serving(answers) as web:
        assert await fetched(fetcher_of(web), web.url("/1")) == PIXELS
        assert "redirects more than 3 times" in await refusal(fetcher_of(web), web.url("/0"))


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("http://inside:{port}/", UNREACHABLE),
        ("http://other.test:{port}/", "redirects to a URL that has a host"),
        ("http://images.test:1/", "redirects to a URL that has a host or a port"),
        ("http://user@images.test:{port}/", "redirects to a URL that contains a user name"),
        ("file:///etc/passwd", "redirects to a URL that is neither"),
        ("http://[::1", "redirects to a URL that is not valid"),
    ],
)
async def test_redirects_to_refused_urls_are_not_followed(location: str, said: str) -> None:
    async with serving({"/": b""}) as web:
        web.answers = {"/": moved(location.format(port=web.port))}
        assert said in await refusal(fetcher_of(web), web.url("/"))
    assert len(web.heads) == 1


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (ok(b"x" * 101), "more than 100 bytes"),
        (answer("200 OK", b"", "Content-Length: 101"), "more than 100 bytes"),
        (answer("200 OK", b"65\r\n" + b"x" * 101, "Transfer-Encoding: chunked"), "more than 100"),
        (answer("200 OK", b"x" * 101), "more than 100 bytes"),
        (answer("404 Not Found", PIXELS), "answered with status 404"),
        (answer("304 Not Modified", b""), "answered with status 304"),
        (answer("301 Moved Permanently", b""), "answered with status 301"),
        (ok(PIXELS, "Content-Encoding: gzip"), "content-encoding"),
        (ok(b""), "empty body"),
        (answer("200 OK", b"x", "Content-Length: 2"), "no complete HTTP answer"),
        (b"SSH-2.0-OpenSSH\r\n", "no complete HTTP answer"),
        (b"", "no complete HTTP answer"),
    ],
)
async def test_unusable_answers_are_refused_with_the_reason(sent: bytes, said: str) -> None:
    async with serving({"/": sent}) as web:
        fetcher = fetcher_of(web, FetchLimits(image_bytes=100))
        assert said in await refusal(fetcher, web.url("/"))


async def test_image_of_the_largest_size_is_fetched() -> None:
    async with serving({"/": ok(b"x" * 100)}) as web:
        assert (
            len(await fetched(fetcher_of(web, FetchLimits(image_bytes=100)), web.url("/"))) == 100
        )


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", ok(PIXELS)[:-1]])
async def test_host_that_never_completes_its_answer_is_given_up(sent: bytes) -> None:
    async with serving({"/endless": sent}) as web:
        fetcher = fetcher_of(web, FetchLimits(seconds=1.0))  # half of it for the connection
        assert "did not answer within 1 s" in await refusal(fetcher, web.url("/endless"))


async def test_fetches_beyond_the_places_are_refused_with_a_retry() -> None:
    """Slow hosts must not take all memory and connections of the server."""
    async with serving({"/endless": b""}) as web:
        fetcher = fetcher_of(web, FetchLimits(concurrent=1, seconds=0.05))
        image = RemoteImage(web.url("/endless"), "images[0]")
        tasks = [asyncio.ensure_future(fetcher.fetch(image, lambda size: None)) for _ in range(3)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, ServiceError)]
    busy = [error for error in errors if error.code is grpc.StatusCode.UNAVAILABLE]
    assert len(errors) == 3
    assert busy
    assert all(error.retry_seconds for error in busy)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a new key and of a certificate for the name."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, certificate


@pytest.mark.parametrize(("name", "is_valid"), [(HOST, True), ("other.test", False)])
async def test_certificate_must_be_for_the_name_in_the_url(
    tmp_path: Path, name: str, is_valid: bool
) -> None:
    """The connection goes to an address, but must be to the host that the client named."""
    key, certificate = make_certificate(tmp_path, name)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with serving({"/": ok(PIXELS)}, tls) as web:
        fetcher = ImageFetcher(
            web.sources(),
            resolve=resolving({HOST: [LOOPBACK]}),
            is_allowed=lambda address: address == LOOPBACK,
            tls=ssl.create_default_context(cafile=str(certificate)),
        )
        url = web.url("/", scheme="https")
        if is_valid:
            assert await fetched(fetcher, url) == PIXELS
        else:
            assert await refusal(fetcher, url) == UNREACHABLE


def images_of(*urls: str) -> RequestImages:
    images = RequestImages()
    for index, url in enumerate(urls):
        images.add(url, f"images[{index}]")
    return images


async def test_urls_of_a_request_become_images_in_its_order() -> None:
    async with serving({"/1": ok(b"one"), "/2": ok(b"two")}) as web:
        images = images_of(web.url("/2"), "data:image/png;base64,AAEC", web.url("/1"))
        sizes: list[int] = []
        await fetch_remote(fetcher_of(web), images, sizes.append)
    request = completion_pb2.GenerateRequest(prompts=completion_pb2.Prompts(images=[b""] * 3))
    images.copy_into(request)
    assert list(request.prompts.images) == [b"two", b"\0\1\2", b"one"]
    assert sizes[-1] == 9


async def test_urls_are_refused_without_the_flag_and_data_is_not() -> None:
    await fetch_remote(None, images_of("data:image/png;base64,AAEC"), lambda size: None)
    images = images_of("data:image/png;base64,AAEC", "https://example.com/a.png")
    with pytest.raises(ServiceError) as caught:
        await fetch_remote(None, images, lambda size: None)
    assert caught.value.field == "images[1]"
    assert "--fetch-images" in caught.value.message


async def test_fetched_images_count_towards_the_limits_of_request_and_server() -> None:
    async with serving({"/": ok(PIXELS)}) as web:
        images = images_of(web.url("/"))
        images.grow(MAX_IMAGES_BYTES - len(PIXELS) + 1, "images[0]")
        with pytest.raises(ServiceError, match="bytes together"):
            await fetch_remote(fetcher_of(web), images, lambda size: None)

        def refuse(size: int) -> None:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "TOO_MANY_BODIES", "full")

        with pytest.raises(ServiceError, match="full"):
            await fetch_remote(fetcher_of(web), images_of(web.url("/")), refuse)
