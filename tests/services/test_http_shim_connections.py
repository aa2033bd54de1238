"""HTTP shim over plain sockets: limits, stalls, malformed HTTP, disconnects and shutdown."""

import asyncio
import base64
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.pdfs import pdf
from tests.services.shim import Shim, assert_documented, running_shim, shim_with_jobs
from tests.stack import Stack, is_busy, is_idle, left_early, watch_load
from tokenwire.pb.engine.v1.engine_pb2 import Load

STALL = 1.5
UNREAD = f"read nothing for {STALL:g} s"
HANG_SECONDS = 200
MANY_MODELS = 4_000
"""Number of models whose list exceeds the socket buffers of a `Client`"""
MIB = 1 << 20
LINE = b"a: b\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LONG = {"model": "default", "prompt": "x = ", "max_tokens": 2000, "ignore_eos": True, "n": 16}


class Answer(NamedTuple):
    """One HTTP response read from a socket."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A connection to a shim."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """Read the next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:-1])
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split()[1]), headers, body)

    async def last_answer(self) -> Answer:
        """Read the next response, which the end of the connection must follow."""
        answer = await self.answer()
        assert await self.reader.read() == b""
        return answer


@asynccontextmanager
async def connected(shim: Shim) -> AsyncIterator[Client]:
    """Open a connection with small buffers: without reads, it takes about 200 KB."""
    url = urlsplit(shim.url)
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # else the sender takes megabytes
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (url.hostname, url.port))
    reader, writer = await asyncio.open_connection(sock=narrow, limit=4096)
    try:
        async with asyncio.timeout(HANG_SECONDS):
            yield Client(reader, writer)
    finally:
        writer.transport.abort()


def body_of(fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


def error_of(answer: Answer) -> dict[str, str | None]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.headers["connection"] == "close"
    document = json.loads(answer.body)
    assert_documented(document, "ErrorBody")
    error: dict[str, str | None] = document["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.fixture(scope="module")
async def shim(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shim]:
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.toml"
    catalog.write_text(f'[[models]]\nid = "m"\ntarget = "{stack.tokenizer}"')
    async with running_shim("--catalog", str(catalog), "--stall-seconds", str(STALL)) as running:
        yield running


@pytest.fixture(scope="module")
async def long_lists(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shim]:
    """Yield a shim whose /v1/models exceeds the socket buffers."""
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.toml"
    models = [f'[[models]]\nid = "m{i}"\nplaceholder = true\n' for i in range(MANY_MODELS)]
    catalog.write_text("".join(models))
    async with running_shim("--catalog", str(catalog), "--stall-seconds", str(STALL)) as running:
        yield running


def many(data: bytes) -> Iterator[bytes]:
    """Yield `data` repeated to 256 MiB: a shim that keeps it shows in its memory."""
    piece = data * (MIB // len(data))
    return (piece for _ in range(256))


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"", b"\r\n"),
        (b"GET /", b"a"),
        (GET, LINE),
        (GET + b"a: ", b"b"),
        (CHUNKED + b"1;", b"a"),
        (CHUNKED + b"1\r\n{\r\n0\r\n", LINE),
    ],
)
async def test_endless_head_is_refused_and_not_kept(shim: Shim, start: bytes, more: bytes) -> None:
    """Without a limit on heads, chunk extensions and trailers, a client could use all memory."""
    process = psutil.Process(shim.process.pid)
    before = process.memory_info().rss
    async with connected(shim) as client:
        await client.send(start)
        reading = asyncio.ensure_future(client.answer())
        for piece in many(more):
            await client.send(piece)
            if reading.done():
                break
        answer = await reading
        assert answer.status == 431
        assert error_of(answer)["code"] == "head_too_large"
        assert process.memory_info().rss - before < 16 * MIB


@pytest.mark.parametrize(("lines", "status"), [(10_000, 200), (11_000, 431)])
async def test_head_up_to_64_kib_is_accepted(shim: Shim, lines: int, status: int) -> None:
    async with connected(shim) as client:
        await client.send(GET + LINE * lines + b"\r\n")
        assert (await client.answer()).status == status


async def test_large_body_does_not_count_towards_the_head_limit(shim: Shim) -> None:
    async with connected(shim) as client:
        await client.send(body_of({"model": "none", "prompt": "x" * 200_000}))
        answer = await client.answer()
        assert answer.status == 404
        await client.send(GET + b"\r\n")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("start", [b"", b"GE", GET + LINE])
async def test_incomplete_head_closes_its_connection_in_time(shim: Shim, start: bytes) -> None:
    """Without the timeout, unused connections accumulate."""
    async with connected(shim) as client:
        await client.send(start)
        assert await client.reader.read() == b""
    async with connected(shim) as client:
        await client.send(GET + b"\r\n" + start)
        assert (await client.answer()).status == 200
        if start:
            assert await client.reader.read() == b""


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.2"])
@pytest.mark.parametrize("framing", [b"content-length: 28", b"transfer-encoding: chunked"])
async def test_request_with_a_protocol_upgrade_is_answered_over_http_1_1(
    shim: Shim, framing: bytes, offer: bytes, apart: bool
) -> None:
    """Java's HTTP client offers an upgrade in its first request, even with a body."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + offer + b"\r\n"
    body = b'{"model":"none","prompt":""}'
    if framing.endswith(b"chunked"):
        body = b"1c\r\n" + body + b"\r\n0\r\n\r\n"
    head = POST + upgrade + framing + b"\r\n"
    async with connected(shim) as client:
        if apart:
            await client.send(head + b"expect: 100-continue\r\n\r\n")
            assert b" 100 " in await client.reader.readuntil(b"\r\n\r\n")
            await client.send(body)
        else:
            await client.send(head + b"\r\n" + body)
        answer = await client.answer()
        assert json.loads(answer.body)["error"]["code"] == "model_not_found"
        await client.send(GET + upgrade + b"\r\n")
        assert (await client.answer()).status == 200
        await client.send(head + b"\r\n" + body + GET + b"\r\n")
        assert (await client.last_answer()).status == 404


async def test_metrics_count_malformed_requests(shim: Shim) -> None:
    """Without the metric, an attack shows only in the log."""
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:

        async def count() -> float:
            name = 'tokenwire_http_requests_total{model="",route="unknown",status="400"} '
            lines = (await http.get("/metrics")).text.splitlines()
            return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

        before = await count()
        async with connected(shim) as client:
            await client.send(b"BREW / HTTP/1.1\r\n\r\n")
            assert (await client.last_answer()).status == 400
        assert await count() == before + 1


async def old_answer(shim: Shim, fields: dict[str, object]) -> tuple[dict[str, str], bytes]:
    """Send an HTTP/1.0 request; return the headers and the body up to the connection's end."""
    asked = body_of({"model": "m", "prompt": "x = ", "max_tokens": 8} | fields)
    async with connected(shim) as client:
        await client.send(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await client.reader.read(-1)).partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().splitlines()
    assert status.split()[1] == "200"
    return dict(line.split(": ", 1) for line in lines), body


async def test_http_1_0_client_gets_a_stream_without_chunked_encoding(shim: Shim) -> None:
    """An HTTP/1.0 client would read chunk sizes as events."""
    headers, body = await old_answer(shim, {"stream": True, "ignore_eos": True})
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    *events, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["usage"]["completion_tokens"] == 8


async def test_http_1_0_client_gets_a_content_length(shim: Shim) -> None:
    """Without the length, the client can't detect a truncated answer."""
    headers, body = await old_answer(shim, {})
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["model"] == "m"


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_ended_its_requests_gets_its_answer(
    shim: Shim, version: bytes, stream: bool
) -> None:
    """`nc -N` and other simple clients close their side of a connection behind the request."""
    asked = body_of(LONG | {"max_tokens": 64, "n": 1, "stream": stream})
    async with connected(shim) as client:
        await client.send(asked.replace(b"HTTP/1.1", version))
        client.writer.write_eof()
        answer = await client.reader.read(-1)
    assert answer.rpartition(b"HTTP/1.")[2].startswith(b"1 200 OK\r\n")
    assert b'"completion_tokens":64' in answer


def has_generated(load: Load) -> bool:
    """Return True once 16 sequences hold some blocks each: the shim has had tokens by then."""
    return load.total_blocks - load.free_blocks >= 16 * 4


async def test_client_that_leaves_a_whole_request_is_counted(shim: Shim, stack: Stack) -> None:
    """An operator would look for the load of the engine in vain among requests of 0 tokens."""
    named = body_of(LONG).replace(b"\r\n", b"\r\nx-request-id: left\r\n", 1)
    async with left_early(stack.engine, 16 * 2000), connected(shim) as client:
        await client.send(named)
        await watch_load(stack.engine, until=has_generated)
        client.writer.close()
        line = await shim.answered("left")
    assert line["status"] == 499
    assert line["prompt_tokens"] > 0
    assert line["completion_tokens"] > 0
    async with httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as http:
        metrics = (await http.get("/metrics")).text
    labels = 'model="m",route="/v1/completions",status="499"'
    assert f"tokenwire_http_requests_total{{{labels}}}" in metrics


async def test_idle_keep_alive_connection_outlives_the_stall_time(shim: Shim) -> None:
    """Clients keep connections open for their next request."""
    async with connected(shim) as idle:
        await idle.send(GET + b"\r\n")
        assert (await idle.answer()).status == 200
        for _ in range(2):
            async with connected(shim) as half:
                assert await half.reader.read() == b""
        await idle.send(GET + b"\r\n")
        assert (await idle.answer()).status == 200


async def test_body_that_stops_arriving_is_408(shim: Shim) -> None:
    """Without the timeout, the request counts as running forever."""
    async with connected(shim) as client:
        await client.send(POST + b"x-request-id: stopped\r\ncontent-length: 10\r\n\r\n{")
        answer = await client.last_answer()
        assert answer.status == 408
        assert error_of(answer)["code"] == "body_timeout"
        assert answer.headers["x-request-id"] == "stopped"
        await shim.logged("POST /v1/completions")


async def test_refused_request_does_not_wait_for_its_whole_body(shim: Shim) -> None:
    async with connected(shim) as client:
        await client.send(
            b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
        )
        assert (await client.last_answer()).status == 404


async def test_slow_body_is_accepted(shim: Shim) -> None:
    """A slow network must not end the request."""
    async with connected(shim) as client:
        whole = body_of({"model": "none", "prompt": "x" * 6_000})
        head, _, body = whole.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        for i in range(0, len(body), 200):
            await asyncio.sleep(3 * STALL / 30)  # a tenth of the stall
            await client.send(body[i : i + 200])
        assert (await client.answer()).status == 404


async def test_body_that_trickles_is_408(shim: Shim) -> None:
    """A byte now and then would hold the room of a body for ever."""
    async with connected(shim) as client:
        await client.send(POST + b"content-length: 100000\r\n\r\n{")
        answering = asyncio.ensure_future(client.last_answer())
        while not answering.done():
            await client.send(b" ")
            await asyncio.wait([answering], timeout=STALL / 10)
        answer = await answering
        assert (answer.status, error_of(answer)["code"]) == (408, "body_timeout")


async def test_unread_answer_is_dropped_after_the_stall(long_lists: Shim) -> None:
    """Without the timeout, the client decides how long the answer occupies memory."""
    async with connected(long_lists) as client:
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await long_lists.logged(UNREAD)
        with pytest.raises(asyncio.IncompleteReadError):
            await client.answer()


async def test_slowly_read_answer_arrives_complete(long_lists: Shim) -> None:
    """A slow network must not end the request."""
    async with httpx.AsyncClient(base_url=long_lists.url, timeout=60) as http:
        expected = (await http.get("/v1/models")).content
    async with connected(long_lists) as client:
        await client.send(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        await client.reader.readuntil(b"\r\n\r\n")
        read = bytearray()
        steps = 60
        for _ in range(steps):
            await asyncio.sleep(3 * STALL / steps)
            for _ in range(len(expected) // steps // 4096):
                read += await client.reader.read(4096)
        read += await client.reader.read()
        assert bytes(read) == expected


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",  # TLS
        b"BREW / HTTP/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        GET + b"content-length: x\r\n\r\n",
        GET + b"no colon\r\n\r\n",
        POST + b"content-length: 18446744073709551617\r\n\r\n{}",
        CHUNKED + b"x\r\n",
    ],
)
async def test_malformed_http_gets_a_json_error_with_request_id(shim: Shim, sent: bytes) -> None:
    """Clients can parse the error, and the operator finds it in the log by its id."""
    async with connected(shim) as client:
        await client.send(sent)
        answer = await client.last_answer()
        assert answer.status == 400
        assert error_of(answer)["code"] == "invalid_http"
        logged = await shim.answered(answer.headers["x-request-id"])
        assert logged["status"] in (400, 499)


_BODY = b"14\r\n" + b" " * 20 + b"\r\n0\r\n\r\n"
_TE = b"transfer-encoding: "


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"content-length: 4\r\n" + _TE + b"chunked\r\n\r\n" + _BODY,
        POST + _TE + b"chunked\r\ncontent-length: 4\r\n\r\n" + _BODY,
        POST + b"content-length: 20\r\ncontent-length: 0\r\n\r\n" + b" " * 20,
        POST + b"content-length: 20, 20\r\n\r\n" + b" " * 20,
        POST + b"content-length: +20\r\n\r\n" + b" " * 20,
        POST + _TE + b"gzip, chunked\r\n\r\n" + _BODY,
        POST + _TE + b"chunked, identity\r\n\r\n" + _BODY,
        POST + _TE + b"chunked\r\n" + _TE + b"chunked\r\n\r\n" + _BODY,
        POST + _TE + b"\x0bchunked\r\n\r\n" + _BODY,
        POST + b"transfer-encoding : chunked\r\n\r\n" + _BODY,
        POST + _TE + b"\r\n chunked\r\n\r\n" + _BODY,
        POST.replace(b"1.1", b"1.0") + _TE + b"chunked\r\n\r\n" + _BODY,
        GET.replace(b"1.1", b"2.0") + b"\r\n",
        GET + b"x-a: b\r\n content-length: 20\r\n\r\n" + b" " * 20,
        GET + b"x-a: b\ncontent-length: 20\r\n\r\n" + b" " * 20,
        GET + b"x-a: b\rcontent-length: 20\r\n\r\n" + b" " * 20,
        GET.replace(b"\r\n", b"\n") + b"\n",
        CHUNKED + b"14;a\n" + b" " * 20 + b"\r\n0\r\n\r\n",
        CHUNKED + b"0x14\r\n" + b" " * 20 + b"\r\n0\r\n\r\n",
        CHUNKED + b"14\n" + b" " * 20 + b"\n0\n\n",
        CHUNKED + b"14\r\n" + b" " * 20 + b"0\r\n\r\n",
        CHUNKED + b"10000000000000014\r\n" + b" " * 20 + b"\r\n0\r\n\r\n",
    ],
)
async def test_request_that_a_proxy_may_read_otherwise_is_refused_and_ends_the_connection(
    shim: Shim, sent: bytes
) -> None:
    """Bytes behind the body would become the request of another client, with that client's key."""
    async with connected(shim) as client:
        await client.send(sent + GET + b"\r\n")
        received = await client.reader.read()
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 400 ")


async def test_malformed_request_keeps_its_request_id(shim: Shim) -> None:
    async with connected(shim) as client:
        await client.send(GET + b"x-request-id: mine\r\ncontent-length: x\r\n\r\n")
        assert (await client.last_answer()).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("second", [GET + b"\r\n", b"nonsense", body_of(LONG)])
@pytest.mark.parametrize("apart", [False, True])
async def test_disconnect_after_a_pipelined_request_stops_generation(
    shim: Shim, stack: Stack, second: bytes, apart: bool
) -> None:
    async with left_early(stack.engine, 16 * 2000), connected(shim) as client:
        await client.send(body_of(LONG) + (b"" if apart else second))
        await watch_load(stack.engine, until=is_busy)
        if apart:
            await client.send(second)


async def test_pipelined_request_is_dropped_and_the_first_is_answered(shim: Shim) -> None:
    """The closed connection tells the client that the second request was dropped."""
    async with connected(shim) as client:
        await client.send(body_of(LONG | {"max_tokens": 8, "n": 1}) + GET + b"\r\n")
        answer = await client.last_answer()
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 8


async def test_sigterm_finishes_streams_and_refuses_new_requests(stack: Stack) -> None:
    # with logprobs, the stream exceeds the client's buffers: it can't end before SIGTERM
    asked = LONG | {"max_tokens": 1_200, "n": 1, "stream": True, "logprobs": 5}
    flags = ("--tokenizer", stack.tokenizer, "--grace", str(HANG_SECONDS))
    async with running_shim(*flags) as shim, connected(shim) as client:
        await client.send(body_of(asked))
        assert b" 200 " in await client.reader.readuntil(b"\r\n\r\n")
        shim.process.send_signal(signal.SIGTERM)
        await shim.logged("draining")
        async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        assert b"data: [DONE]" in await client.reader.read()
        assert await shim.process.wait() == 0


async def test_unread_stream_is_cut_after_the_stall(shim: Shim, stack: Stack) -> None:
    """The engine frees the KV blocks, and the connection ends."""
    before = shim.count(UNREAD)
    async with left_early(stack.engine, 16 * 2000), connected(shim) as client:
        await client.send(body_of(LONG | {"stream": True, "logprobs": 5}))
        await shim.logged(UNREAD, before + 1)
        await watch_load(stack.engine, until=is_idle)
        assert b"[DONE]" not in await client.reader.read()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_ends_with_a_trailer_of_the_tokens_used(shim: Shim, path: str) -> None:
    """The chunked encoding stays valid: the connection accepts the next request."""
    asked = {"stream": True, "max_tokens": 5, "ignore_eos": True}
    messages = [{"role": "user", "content": "x"}]
    prompt: dict[str, object] = {"messages": messages} if "chat" in path else {"prompt": [1, 2]}
    request = body_of(asked | prompt).replace(b"/v1/completions", path.encode())
    async with connected(shim) as client:
        for _ in range(2):
            await client.send(request)
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"\r\ntrailer: x-tokens-used\r\n" in head
            body = b""
            while size := int(await client.reader.readline(), 16):
                body += await client.reader.readexactly(size)
                assert await client.reader.readexactly(2) == b"\r\n"
            trailer = await client.reader.readuntil(b"\r\n\r\n")
            *_, last, done, _ = body.decode().split("\n\n")
            assert done == "data: [DONE]"
            usage = json.loads(last.removeprefix("data: "))["usage"]
            assert trailer == b"x-tokens-used: %d\r\n\r\n" % usage["total_tokens"]
            assert usage["completion_tokens"] == 5


async def test_request_that_needs_a_process_that_can_not_start_asks_for_another_try() -> None:
    """A 500 would tell the client that the server is broken, and it only lacks descriptors."""
    data = base64.b64encode(pdf("Hello")).decode()
    file = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{data}"}}
    chat = {"messages": [{"role": "user", "content": [file]}]}
    async with (
        shim_with_jobs("127.0.0.1:1") as (shim, jobs),
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        assert (await http.get("/v1/batches")).status_code == 200  # their connection is open
        with jobs.out_of_descriptors():
            reply = await http.post("/v1/chat/completions", json=chat)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "out_of_resources"
        assert int(reply.headers["retry-after"]) >= 1
