"""Tests of `tokenwire serve`: restarts, signals, IPv6, catalogs."""

import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.common.accounts.key_file import add_key
from services.common.network.addresses import why_unusable
from tests.stack import free_ports


def _started(ports: list[int], logs: Path, *flags: str) -> "subprocess.Popen[str]":
    """Start `tokenwire serve` and wait until it prints that it serves."""
    http, tokenizer, engine, grammar, jobs = map(str, ports)
    process = subprocess.Popen(
        [
            "prlimit", f"--nofile=1024:{resource.getrlimit(resource.RLIMIT_NOFILE)[1]}",
            sys.executable, "-m", "tokenwire", "serve", "--port", http,
            "--tokenizer-port", tokenizer, "--engine-port", engine, "--grammar-port", grammar,
            "--jobs-port", jobs, "--engine-args", "--kv-memory 64MiB", "--log-dir", str(logs),
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(logs)},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(rf"Tokenwire serves http://127\.0\.0\.1:{http} \(up in .* s\)\n", line)
    if "--model" not in flags and "--catalog" not in flags:
        assert "`tokenwire serve smollm2` serves one that can" in _said(process)
    return process


def _child(process: "subprocess.Popen[str]", name: str) -> int:
    children = _children(process.pid).items()
    (pid,) = [pid for pid, command in children if f"services.{name}" in command]
    return pid


def _said(process: "subprocess.Popen[str]") -> str:
    """Return the next line of stderr that is Tokenwire's; gRPC may write there too."""
    assert process.stderr is not None
    return next(line for line in process.stderr if line.startswith("tokenwire: "))


def test_shims_share_the_port_and_one_that_ends_loses_no_request(tmp_path: Path) -> None:
    """The kernel divides connections by their ports, so each shim gets some of many."""
    ports = free_ports(5)
    process = _started(ports, tmp_path, "--shims", "2", "--tokenizers", "2")
    url = f"http://127.0.0.1:{ports[0]}/v1/completions"
    body = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
    assert process.stdout is not None
    metrics = re.findall(r"http://\S+/metrics", process.stdout.readline())
    children = _children(process.pid)
    assert (len(metrics), len(children)) == (2, 7)

    def texts() -> set[str]:
        answers = [httpx.post(url, json=body, timeout=300) for _ in range(32)]
        assert {answer.status_code for answer in answers} == {200}
        return {answer.json()["choices"][0]["text"] for answer in answers}

    before = texts()
    assert len(before) == 1
    for each in metrics:
        assert 'route="/v1/completions",status="200"' in httpx.get(each).text
    second = str(httpx.URL(metrics[1]).port)
    os.kill(next(pid for pid, command in children.items() if second in command), signal.SIGKILL)
    assert texts() == before
    assert _said(process).startswith("tokenwire: http_shim 2 ended with signal SIGKILL")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that each test leaves running."""

    process: "subprocess.Popen[str]"
    url: str
    logs: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ports, logs = free_ports(5), tmp_path_factory.mktemp("logs")
    process = _started(ports, logs)
    yield Served(process, f"http://127.0.0.1:{ports[0]}", logs)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


def test_sighup_opens_moved_log_files_again(served: Served) -> None:
    """logrotate moves a file and sends SIGHUP; no line may be lost, and no service stop."""
    log, old = served.logs / "http_shim.log", served.logs / "http_shim.log.old"
    children = _children(served.process.pid)
    log.rename(old)
    served.process.send_signal(signal.SIGHUP)
    assert httpx.get(f"{served.url}/ready", timeout=60).status_code == 200
    assert _children(served.process.pid) == children
    os.kill(_child(served.process, "http_shim"), signal.SIGTERM)
    assert _said(served.process).startswith("tokenwire: http_shim ended with ")
    assert "listening" in old.read_text()
    assert "stopped" not in old.read_text()
    assert [line for line in log.read_text().splitlines() if '"stopped"' in line]
    assert httpx.get(f"{served.url}/ready", timeout=60).status_code == 200  # the next shim serves


def test_service_that_ends_is_started_again_and_no_request_is_refused(served: Served) -> None:
    """A restart by hand or the OOM killer must not stop the other services."""
    process = served.process
    url = f"{served.url}/v1/completions"
    body = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
    body |= {"grammar": {"type": "regex", "value": "[a-z]+"}}
    children = _children(process.pid)
    assert len(children) == 5
    for pid in children:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "the limit of open files bounds the connections"
    for name, number in (
        ("http_shim", signal.SIGKILL),
        ("http_shim", signal.SIGTERM),
        ("jobs", signal.SIGKILL),
        ("grammar", signal.SIGKILL),
        ("tokenizer", signal.SIGTERM),
        ("engine", signal.SIGTERM),
    ):
        os.kill(_child(process, name), number)
        answer = httpx.post(url, json=body, timeout=300)
        assert answer.status_code == 200, (name, number, answer.text)
        said = _said(process)
        assert said.startswith(f"tokenwire: {name} ended with "), said
        assert said.endswith("It is started again.\n")


def test_service_that_cannot_restart_stops_the_others_with_exit_code_1(
    tmp_path: Path, embedded_model: Path
) -> None:
    """A supervisor can then restart the stack, instead of an incomplete stack that fails."""
    model = tmp_path / "model"
    shutil.copytree(embedded_model, model)
    process = _started(free_ports(5), tmp_path, "--model", str(model))
    assert not list(tmp_path.glob("tokenwire-*")), "kill -9 would leave these files behind"
    children = _children(process.pid)
    slow = _child(process, "http_shim")
    os.kill(slow, signal.SIGSTOP)  # simulates requests that still run
    model.rename(tmp_path / "elsewhere")
    os.kill(_child(process, "grammar"), signal.SIGKILL)
    assert "grammar ended with signal SIGKILL" in _said(process)
    said = _said(process)
    assert said == "tokenwire: grammar has ended; the others are stopped now\n"
    os.kill(slow, signal.SIGCONT)
    rest, complaints = process.communicate(timeout=120)
    assert process.returncode == 1
    assert rest == ""
    assert "tokenwire: grammar ended with exit code 2" in complaints
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_engine_that_cannot_restart_is_tried_again_while_the_other_serves(
    tmp_path: Path, embedded_model: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model, model)
    ports = free_ports(5)
    process = _started(ports, tmp_path, "--model", str(model), "--replicas", "2")
    url = f"http://127.0.0.1:{ports[0]}"
    body = {"prompt": "def ", "max_tokens": 4}
    engines = [pid for pid, line in _children(process.pid).items() if "services.engine" in line]
    assert len(engines) == 2
    model.rename(tmp_path / "elsewhere")
    os.kill(engines[1], signal.SIGKILL)
    assert _said(process).endswith("It is started again.\n")
    assert re.search(r"engine( 2)? ended with .*It is started again in 1 s\.", _said(process))
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    (tmp_path / "elsewhere").rename(model)
    states: set[str] = set()
    while states != {"serving"}:
        [status] = httpx.get(f"{url}/status.json", timeout=60).json()["models"]
        states = {engine["state"] for engine in status["engines"]}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_services_and_files_of_a_killed_supervisor_do_not_outlive_the_next_start(
    tmp_path: Path,
) -> None:
    """Else that would find the ports taken, and tokens of services would stay on the disk."""
    add_key(tmp_path / "keys.json", "default")
    flags = ("--keys", str(tmp_path / "keys.json"))
    ports = free_ports(5)
    process = _started(ports, tmp_path, *flags)
    [left] = tmp_path.glob("tokenwire-*")
    assert (left / "peer-token").exists()
    ends = [os.pidfd_open(pid) for pid in _children(process.pid)]
    assert len(ends) == 5
    process.kill()
    for end in ends:
        assert select.select([end], [], [], 120)[0], "a service outlived its supervisor"
        os.close(end)
    assert not [port for port in ports if why_unusable("127.0.0.1", port)]
    process = _started(ports, tmp_path, *flags)
    assert not left.exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert not list(tmp_path.glob("tokenwire-*"))
    process.communicate(timeout=60)


def test_no_restart_stops_the_others_with_the_first_that_ends(tmp_path: Path) -> None:
    process = _started(free_ports(5), tmp_path, "--no-restart")
    os.kill(_child(process, "grammar"), signal.SIGKILL)
    assert _said(process) == "tokenwire: grammar has ended; the others are stopped now\n"
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "grammar ended with signal SIGKILL" in complaints


def test_server_under_nohup_outlives_sighup() -> None:
    """A closed terminal sends SIGHUP."""
    ports, nohup = free_ports(5), ("env", "--ignore-signal=HUP")
    with _stack_of(ports, subprocess.DEVNULL, launcher=nohup) as process:
        children = _children(process.pid)
        process.send_signal(signal.SIGHUP)
        assert httpx.get(f"http://127.0.0.1:{ports[0]}/ready", timeout=60).status_code == 200
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_start_says_what_matters_and_nothing_twice_until_a_closed_terminal_ends_it() -> None:
    """A user must find the one warning among the lines of a start."""
    with _stack_of(free_ports(5), subprocess.PIPE) as process:
        children = _children(process.pid)
        process.send_signal(signal.SIGHUP)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    first_end = next(i for i, line in enumerate(lines) if line["message"] == "draining")
    messages = [line["message"] for line in lines[:first_end]]
    assert len(messages) <= 12, messages
    said_once = [message for message in messages if not message.endswith(" OK")]
    assert len(set(said_once)) == len(said_once)  # two services ask for the models
    assert not [message for message in messages if "UNAVAILABLE" in message]


@pytest.mark.parametrize("standstill", ["unread pipe", "stopped supervisor"])
def test_requests_are_answered_while_nobody_reads_the_logs(standstill: str, tmp_path: Path) -> None:
    """A log that stands still costs lines. It must not cost requests, or the end of the server."""
    ports = free_ports(5)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    is_stopped = standstill == "stopped supervisor"
    flags = ("--log-dir", str(tmp_path)) if is_stopped else ()
    long_path = "/" + "x" * 3_500  # which a line at level debug repeats
    with _stack_of(ports, writer, "--log-level", "debug", *flags) as process:
        os.close(writer)
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        body = {"prompt": "x" * 40, "max_tokens": 1}
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=120) as client:
            for _ in range(600):  # 2 MB of lines: more than pipes and queues hold
                assert client.get(long_path).status_code == 404
            for _ in range(100):
                assert client.post("/v1/completions", json=body).status_code == 200
            assert client.get("/health").status_code == 200
            metrics = client.get("/metrics").text
        if is_stopped:  # else the supervisor reads on, and loses the lines
            process.send_signal(signal.SIGCONT)
            lost = re.search(r"^tokenwire_lost_log_lines_total (\S+)$", metrics, re.MULTILINE)
            assert lost is not None
            assert float(lost[1]) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    os.close(reader)


@contextmanager
def _stack_of(
    ports: list[int], stderr: int, *flags: str, launcher: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """Run `tokenwire serve` without a log directory, and kill it at the end of a failed test.

    launcher: command that is inserted before it.
    """
    names = ("--port", "--tokenizer-port", "--engine-port", "--grammar-port", "--jobs-port")
    places = [word for pair in zip(names, map(str, ports), strict=True) for word in pair]
    command = [*launcher, sys.executable, "-m", "tokenwire", "serve", *places]
    command += ["--kv-memory", "64MiB", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Tokenwire serves")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.skipif(why_unusable("::1", 0) is not None, reason="no IPv6 here")
def test_http_and_metrics_are_served_over_ipv6(tmp_path: Path) -> None:
    http, tokenizer, engine, grammar, jobs = free_ports(5)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve", "--host", "::", "--open",
            "--model-id", "acme/small", "--port", str(http), "--tokenizer-port", str(tokenizer),
            "--engine-port", str(engine), "--grammar-port", str(grammar),
            "--jobs-port", str(jobs), "--engine-args", "--kv-memory 64MiB",
            "--log-dir", str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"Tokenwire serves http://[::1]:{http} "), process.communicate()
    answer = httpx.post(
        f"http://[::1]:{http}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60
    )
    assert answer.json()["model"] == "acme/small"
    for port in (tokenizer, engine, jobs):
        assert httpx.get(f"http://[::1]:{port + 1000}/metrics", timeout=60).status_code == 200
    # every address, of IPv4 too
    assert httpx.get(f"http://127.0.0.1:{http}/health", timeout=60).status_code == 200
    process.send_signal(signal.SIGTERM)
    printed, said = process.communicate(timeout=60)
    assert printed == ""
    (line,) = said.splitlines()
    assert "this is the embedded model" in line
    assert process.returncode == 0


def test_sighup_exchanges_the_models_of_a_catalog(tmp_path: Path, embedded_model: Path) -> None:
    """A stream on a model that leaves the catalog continues to its end."""
    http, first, jobs = map(str, free_ports(3))
    catalog = tmp_path / "catalog.toml"

    def write(name: str, threads: int) -> None:
        catalog.write_text(
            f'[[models]]\nid = "{name}"\npath = "{embedded_model}"\n'
            f'engine_args = "--kv-memory 64MiB --threads {threads}"\n'
            '[[models]]\nid = "soon"\nplaceholder = true\n'
        )

    write("old", 1)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve", "--port", http,
            "--catalog", str(catalog), "--tokenizer-port", first, "--jobs-port", jobs,
            "--log-dir", str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0].startswith("Tokenwire serves"), process.communicate()
    assert re.fullmatch(r"  old: tokenizer .*, engine .*, grammar .*\n", lines[1])
    assert lines[2] == "  soon: not served\n"
    old = _children(process.pid)
    body = {"prompt": "x = ", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        events = response.iter_lines()
        next(events)
        write("new", 2)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline().startswith("  new: tokenizer ")
        assert list(filter(None, events))[-1] == "data: [DONE]"
        assert response.status_code == 200
    assert process.stdout.readline() == "  soon: not served\n"
    assert process.stderr.readline() == "tokenwire: old has stopped\n"
    assert len(set(old) & set(_children(process.pid))) == 2, "shim and jobs alone must remain"

    catalog.write_text("models = 5")
    process.send_signal(signal.SIGHUP)
    assert "The previous models stay." in process.stderr.readline()
    answer = httpx.post(
        f"http://127.0.0.1:{http}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60
    )
    assert answer.json()["model"] == "new"
    assert len(set(old) & set(_children(process.pid))) == 2, "shim and jobs alone must remain"
    process.send_signal(signal.SIGTERM)
    rest, complaints = process.communicate(timeout=60)
    assert (process.returncode, rest, complaints) == (0, "", "")


def _children(parent: int) -> dict[int, str]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
