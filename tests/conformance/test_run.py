"""`tokenwire run`, `ps` and `stop`: one server in the background for all models of a user."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack
from tests.terminal import CTRL_D, terminal
from tokenwire.serving.running_servers import RunningServer, boot_id, process_start, register

Done = subprocess.CompletedProcess[str]


class Home:
    """A user's folder of state, with its own server in the background.

    File and variables of `tokenwire serve` are not for this server: it stays on loopback, and
    needs no key.
    """

    def __init__(self, folder: Path) -> None:
        cache = folder / "hub"
        self.variables = {"XDG_STATE_HOME": str(folder / "state"), "HF_HOME": str(cache)}
        self.variables["TOKENWIRE_SERVE_KEYS"] = "none.json"
        self.variables["XDG_CONFIG_HOME"] = str(folder / "config")
        (folder / "config" / "tokenwire").mkdir(parents=True)
        settings = 'keys = "keys.json"\nhost = "0.0.0.0"\nport = 1\n'
        (folder / "config" / "tokenwire" / "tokenwire.toml").write_text(settings)

    def call(self, *arguments: str) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "tokenwire", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, **self.variables},
        )

    def servers(self, *flags: str) -> list[dict[str, Any]]:
        listed = self.call("ps", "--json", *flags)
        found: list[dict[str, Any]] = json.loads(listed.stdout)["servers"]
        return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"))
    yield home
    home.call("stop")
    assert home.servers() == []


def test_two_runs_at_once_share_one_server(home: Home, embedded_model: Path) -> None:
    """Otherwise a model would take its memory twice."""
    asked = ("run", str(embedded_model), "Say hello.", "--max-tokens", "4", "--seed", "1")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: home.call(*asked), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout != "\n"
    [server] = home.servers()
    assert server["background"] is True
    [model] = server["models"]
    assert model["id"] == embedded_model.name
    assert model["state"] == "loaded"


def test_chat_of_a_run_continues_in_the_terminal(home: Home, embedded_model: Path) -> None:
    command = ("run", embedded_model.name, "--max-tokens", "4", "--verbose")
    with terminal(*command, variables=home.variables) as chat:
        chat.wait_for(">>> Send a message")
        chat.enter("Say hello.")
        chat.wait_for("first token after")
        chat.enter("/model")
        chat.wait_for(rf"^\* {embedded_model.name}")
        chat.press(CTRL_D)
        assert chat.wait_for_end() == 0
    assert len(home.servers()) == 1


def test_another_model_is_served_beside_the_first(
    home: Home, embedded_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "my ödd model"
    other.mkdir()
    for file in embedded_model.iterdir():
        (other / file.name).symlink_to(file)
    done = home.call("run", str(other), "Say hello.", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    [server] = home.servers()
    names = {model["id"] for model in server["models"]}
    assert names >= {embedded_model.name, "my-dd-model"}
    unloaded = home.call("stop", "my-dd-model")
    assert unloaded.returncode == 0, unloaded.stderr
    states = {model["id"]: model["state"] for model in home.servers()[0]["models"]}
    assert states["my-dd-model"] == "idle"


def test_wrong_models_and_servers_are_one_sentence(home: Home, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, problem in (
        (("run", str(tmp_path / "missing"), "x"), "does not exist"),
        (("run", str(tmp_path / "empty"), "x"), "config.json"),
        (("stop", "nobody"), "No server of yours has nobody"),
        (("stop", "--pid", "1"), "No server of yours has pid 1"),
        (("ps", "--url", "http://127.0.0.1:1"), "it does not answer"),
    ):
        done = home.call(*arguments)
        assert done.returncode in (1, 2), arguments
        assert problem in done.stderr + done.stdout, (arguments, done.stderr, done.stdout)
        assert "Traceback" not in done.stderr


def test_stop_ends_the_server(home: Home) -> None:
    pid = home.servers()[0]["pid"]
    stopped = home.call("stop")
    assert f"(pid {pid})" in stopped.stdout
    assert process_start(pid) is None
    again = home.call("stop")
    assert again.returncode == 1
    assert "No server of yours runs." in again.stderr


def test_any_server_is_listed_by_its_url(home: Home, stack: Stack) -> None:
    [server] = home.servers("--url", stack.url)
    [model] = server["models"]
    assert model["id"] == stack.model_id
    assert model["context"] > 0
    assert server["pid"] is None


def test_failed_start_is_the_sentence_of_the_server(tmp_path: Path, embedded_model: Path) -> None:
    home = Home(tmp_path)
    home.variables["TOKENWIRE_LIMITS_URL"] = "nonsense"
    done = home.call("run", str(embedded_model), "x")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert home.servers() == []


def test_lost_server_is_one_sentence(
    tmp_path: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is just stopping would be a traceback."""
    home = Home(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", home.variables["XDG_STATE_HOME"])
    waits = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); print(flush=True); input()"
    )
    command = [sys.executable, "-c", waits]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = process_start(process.pid)
        assert start is not None
        lost = RunningServer(
            pid=process.pid,
            start=start,
            boot=boot_id(),
            url="http://127.0.0.1:1",
            jobs="",
            manager="127.0.0.1:1",
            since=0.0,
            is_background=True,
            has_keys=False,
        )
        register(lost)
        done = home.call("run", str(embedded_model), "x")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
