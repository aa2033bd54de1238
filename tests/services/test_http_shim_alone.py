"""HTTP shim process without a backend: start, refusals, pages and shutdown."""

import contextlib
import gzip
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.stack import free_ports

_JSON = {"content-type": "application/json"}
_LIMIT = 10_000


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "services.http_shim", *flags]


@pytest.fixture(scope="module")
def process() -> Iterator["subprocess.Popen[str]"]:
    (nobody,) = free_ports(1)
    started = subprocess.Popen(
        command(
            "--port", "0", "--tokenizer", f"127.0.0.1:{nobody}", "--tokenizer-wait", "0",
            "--max-body-bytes", str(_LIMIT),
        ),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    yield started
    started.kill()
    started.wait()


@pytest.fixture(scope="module")
def http(process: "subprocess.Popen[str]") -> Iterator[httpx.Client]:
    assert process.stderr is not None
    for line in process.stderr:
        if "port" in (entry := json.loads(line)):
            break
    with httpx.Client(base_url=f"http://127.0.0.1:{entry['port']}", timeout=60) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def test_health_is_ok_while_ready_is_503_without_a_backend(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    response = http.get("/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    error_of(response)


@pytest.mark.parametrize("streams", [False, True])
def test_request_without_a_backend_is_503(http: httpx.Client, streams: bool) -> None:
    """Clients retry a 503; the response must not show addresses of internal services."""
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        response = http.post(path, json=asked | {"stream": streams})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "127.0.0.1" not in response.text
        error_of(response)


def test_body_over_the_limit_is_413(http: httpx.Client) -> None:
    big = b'{"prompt": "' + b"x" * _LIMIT + b'"}'
    announced = http.post("/v1/completions", content=big, headers=_JSON)
    chunked = http.post("/v1/completions", content=iter([big[:6000], big[6000:]]), headers=_JSON)
    for response in (announced, chunked):
        assert response.status_code == 413
        error_of(response)


def test_images_do_not_count_towards_the_limit_of_a_body(http: httpx.Client) -> None:
    image = f"data:image/png;base64,{'A' * 200_000}"
    prompt = {"prompt": "<image>", "images": [image]}
    assert http.post("/v1/completions", json=prompt).status_code == 503  # no backend
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template"):
        assert http.post(path, json={"messages": [message]}).status_code == 503
    response = http.post("/v1/completions", json=prompt | {"user": "x" * _LIMIT})
    assert response.status_code == 413
    assert "without its images" in str(error_of(response)["message"])
    assert http.post("/detokenize", json={"tokens": [1], "x": image}).status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "--fetch-images"),
        ("aW1hZ2U=", "must be a data URL"),
        ("data:image/png;base64,?", "not valid base64"),
    ],
)
def test_image_that_is_no_data_url_is_400_with_its_path(
    http: httpx.Client, path: str, url: str, said: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    param = "images[0]"
    body: dict[str, object] = {"prompt": "<image>", "images": [url]}
    if path != "/v1/completions":
        param = "messages[0].content[0].image_url.url"
        body = {"messages": [{"role": "user", "content": [part]}]}
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert said in str(error["message"])


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_body_of_another_type_is_refused(http: httpx.Client, content_type: str | None) -> None:
    """Browsers let any web page post text to localhost, but not JSON."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 400
    assert "application/json" in str(error_of(response)["message"])


def test_compressed_body_is_refused_as_unsupported_encoding(http: httpx.Client) -> None:
    headers = _JSON | {"content-encoding": "gzip"}
    response = http.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert error_of(response)["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/completion", "/tokenize", "/detokenize"],
)
@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'{"model": 5}', b"{}"])
def test_malformed_body_is_400(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers=_JSON)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/completion", 405),
    ],
)
def test_unknown_route_is_404_and_wrong_method_is_405(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path, json={})
    assert response.status_code == status
    error_of(response)


def test_valid_request_id_is_returned_and_invalid_one_is_replaced(http: httpx.Client) -> None:
    kept = http.get("/nowhere", headers={"x-request-id": "trace-7"})
    assert kept.headers["x-request-id"] == "trace-7"
    insane = http.get("/nowhere", headers={"x-request-id": "a b<script>"})
    assert insane.headers["x-request-id"].startswith("req_")


def test_ignored_field_name_can_not_inject_a_header(http: httpx.Client) -> None:
    body = {"prompt": "x", "temprature": 1, "é\r\nset-cookie: a": 2}
    response = http.post("/v1/completions", json=body)
    assert response.headers["x-tokenwire-ignored"].startswith("temprature, ")
    assert "set-cookie" not in response.headers


def test_ignored_nested_field_is_named_by_its_path(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x", "contnet": "y"}]}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["x-tokenwire-ignored"] == "messages[0].contnet"


def test_metrics_are_in_prometheus_text_format(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'tokenwire_http_requests_total{model="",route="/health",status="200"}' in response.text


@pytest.mark.parametrize(
    "flags",
    [
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--port", "70000"],
        ["--port", "http"],
        ["--host", "192.0.2.1", "--open"],
        ["--max-body-bytes", "0"],
        ["--stall-seconds", "0"],
        ["--max-held-bytes", "1000"],
        ["--fetch-images-from", "example.com"],
        ["--fetch-images", "--fetch-images-from", "https://example.com"],
    ],
)
def test_invalid_flag_ends_the_start_without_traceback(flags: list[str]) -> None:
    ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_fetching_does_not_reach_this_machine_and_logs_show_no_images() -> None:
    """Logs are kept longer than the pictures that users send."""
    picture = "U2VjcmV0IHBpY3R1cmU"
    started = subprocess.Popen(
        command(
            "--port", "0", "--tokenizer", "127.0.0.1:1", "--tokenizer-wait", "0",
            "--fetch-images", "--log-level", "debug",
        ),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert started.stderr is not None
    lines = []
    for line in started.stderr:
        lines.append(line)
        if "port" in (entry := json.loads(line)):
            break
    port = entry["port"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for url, status in (
            (f"data:image/png;base64,{picture}", 503),
            (f"data:image/png;base64,{picture}!", 400),
            (f"data:{picture}", 400),
            (f"http://localhost:80/{picture}", 400),
            (f"http://127.0.0.1:{port}/{picture}", 400),
        ):
            body = {"prompt": "<image>", "images": [url], "echo": True}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            assert picture not in response.text
    started.terminate()
    lines += started.stderr.readlines()
    assert started.wait() == 0
    assert any("images[0]" in line for line in lines)
    assert not any(picture in line for line in lines)


@pytest.mark.parametrize(
    ("content", "flag", "said"),
    [
        (None, "--catalog", "can't be read"),
        ("x = [", "--catalog", "is wrong"),
        ('[[models]]\nid = "m"\npath = "here"', "--catalog", "only `tokenwire serve` starts"),
        (None, "--keys", "can't be read"),
        ("{", "--keys", "is wrong"),
    ],
)
def test_unusable_file_ends_the_start_with_one_sentence(
    tmp_path: Path, content: str | None, flag: str, said: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    ended = subprocess.run(
        command("--port", "0", flag, str(path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr


def test_connections_may_exceed_the_soft_limit_of_open_files() -> None:
    """Shells set a soft limit of 1024; connections beyond it would be reset."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = ("prlimit", f"--nofile=64:{hard}")
    shim = subprocess.Popen([*few, *command("--port", "0")], stderr=subprocess.PIPE, text=True)
    assert shim.stderr is not None
    port = next(entry["port"] for entry in map(json.loads, shim.stderr) if "port" in entry)
    try:
        with contextlib.ExitStack() as open_connections:
            for _ in range(100):
                connection = HTTPConnection("127.0.0.1", port, timeout=60)
                open_connections.callback(connection.close)
                connection.request("GET", "/health")
                assert connection.getresponse().read()
    finally:
        shim.kill()
        shim.wait()


def test_listening_beyond_loopback_needs_keys_or_open() -> None:
    refused = subprocess.run(
        command("--host", "0.0.0.0"), capture_output=True, text=True, timeout=60, check=False
    )
    (sentence,) = refused.stderr.splitlines()
    assert "--keys" in sentence
    assert "--open" in sentence


def test_pages_load_their_resources_only_from_the_shim(http: httpx.Client) -> None:
    own = {f"{kind}-src 'self'" for kind in ("script", "style", "font", "connect")}
    for path in ("/", "/docs", "/status"):
        page = http.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = set(page.headers["content-security-policy"].split("; "))
        assert policy >= own | {"default-src 'none'", "img-src data:"}
        named = set(re.findall(r'(?:src|href)="([^#"][^"]*)"', page.text)) - {"data:,"}
        assert "style.css" in named
        for name in named:
            assert http.get(f"/{name}".replace("/.", "/")).status_code == 200, name


def test_playground_uses_documented_routes(http: httpx.Client) -> None:
    asked: set[str] = set()
    for name in ("requests", "chat", "completion", "models", "conversation_head", "gauge"):
        script = http.get(f"/playground/{name}.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        asked |= set(re.findall(r'"(v1/[\w/]+|tokenize)"', script.text))
    on_demand = {"v1/models/load"}  # asked only of servers that load models
    asked -= on_demand
    assert asked == {"v1/models", "v1/completions", "v1/chat/completions", "tokenize"}
    assert {f"/{path}" for path in asked} <= set(http.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_load_without_models_on_demand_says_how_to_have_them(http: httpx.Client, verb: str) -> None:
    answer = http.post(f"/v1/models/{verb}", json={"model": "default"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "`tokenwire serve --models`" in answer.json()["error"]["message"]


def test_sigterm_exits_with_status_0(http: httpx.Client, process: "subprocess.Popen[str]") -> None:
    """Runs last: it stops the process that the other tests use."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
