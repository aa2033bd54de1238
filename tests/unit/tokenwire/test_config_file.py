"""tokenwire.toml: where it is found, what it may say, and what takes precedence."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import free_ports

FILE = """
port = 9001            # a flag of serve
kv-memory = "1GiB"     # a flag that goes to the engine
no_jobs = true
limits_url = "redis://:hunter2@h"
cors_origins = ["https://a.example", "https://b.example"]

[client]
target = "127.0.0.1:3"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "tokenwire.toml").write_text(FILE)
    return tmp_path


def tokenwire(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenwire", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | variables,
    )


def shown(*arguments: str, **variables: str) -> dict[str, tuple[str, str]]:
    """Return value and source of each setting."""
    result = tokenwire("config", "--json", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    settings = json.loads(result.stdout)["settings"]
    return {name: (row["value"], row["source"]) for name, row in settings.items()}


def test_flag_comes_before_variable_before_file_before_default(folder: Path) -> None:
    file = folder / "tokenwire.toml"
    settings = shown()
    assert settings["port"] == ("9001", f"{file}:2")
    assert settings["kv_memory"] == ("1GiB", f"{file}:3")
    assert settings["no_jobs"] == ("true", f"{file}:4")
    assert settings["cors_origins"][0] == "https://a.example,https://b.example"
    assert settings["client.target"] == ("127.0.0.1:3", f"{file}:9")
    assert settings["host"] == ("127.0.0.1", "default")
    variables = {"TOKENWIRE_SERVE_PORT": "9002", "TOKENWIRE_ENGINE_KV_MEMORY": "2GiB"}
    settings = shown(**variables)
    assert settings["port"] == ("9002", "variable TOKENWIRE_SERVE_PORT")
    assert settings["kv_memory"] == ("2GiB", "variable TOKENWIRE_ENGINE_KV_MEMORY")
    settings = shown("smollm2", "--port", "9003", "--kv-memory", "3GiB", **variables)
    assert settings["port"] == ("9003", "flag --port")
    assert settings["kv_memory"] == ("3GiB", "flag --kv-memory")
    assert settings["model"] == ("smollm2", "argument MODEL")


def test_setting_that_services_have_differently_has_a_row_for_each(folder: Path) -> None:
    settings = shown(TOKENWIRE_ENGINE_LOG_LEVEL="debug")
    assert settings["log_level (engine)"] == ("debug", "variable TOKENWIRE_ENGINE_LOG_LEVEL")
    assert settings["log_level (jobs)"] == ("info", "default")


def test_secrets_are_not_printed(folder: Path) -> None:
    result = tokenwire("config", TOKENWIRE_API_KEY="tw-hunter2")
    assert "limits_url" in result.stdout
    assert "hunter2" not in result.stdout


def test_file_is_that_of_the_flag_the_variable_the_folder_or_the_user(folder: Path) -> None:
    other, user = folder / "other.toml", folder / "config" / "tokenwire" / "tokenwire.toml"
    user.parent.mkdir(parents=True)
    for number, file in enumerate((other, user, folder / "variable.toml")):
        file.write_text(f"port = {7000 + number}\n")
    variable = str(folder / "variable.toml")
    assert shown("--config", str(other), TOKENWIRE_CONFIG=variable)["port"][0] == "7000"
    assert shown(TOKENWIRE_CONFIG=variable)["port"][0] == "7002"
    assert shown()["port"][0] == "9001"
    assert shown(TOKENWIRE_CONFIG="")["port"] == ("8000", "default")
    (folder / "tokenwire.toml").unlink()
    assert shown()["port"][0] == "7001"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kv_memry = '1GiB'", "bad.toml:1: there is no setting kv_memry. Did you mean kv_memory"),
        ("\nport = 'x'", "bad.toml:2: port can't be 'x': it must be a whole number"),
        ("port = true", "bad.toml:1: port must be a text or a number"),
        ("keep_alive = 'soon'", "keep_alive can't be 'soon': it must be a number of seconds, or a"),
        ("open = 1", "bad.toml:1: open must be true or false"),
        ("log_format = 'xml'", "log_format must be one of auto, text, json, not 'xml'"),
        ("[client]\ntarge = 'x'", "bad.toml:2: there is no setting client.targe"),
        ("[server]\nport = 1", "there is no table [server]"),
        ("client = 1", "client must be a table"),
        ("a = 1\nport = \n", "bad.toml:2:8: this is no TOML: Invalid value."),
        ("a = 1\nb = [", "bad.toml:2:6: this is no TOML: Invalid value."),
        ("a = 1\nb = 'ü'".encode("latin-1"), "bad.toml:2: the text is not UTF-8."),
    ],
)
def test_wrong_file_is_refused_in_one_sentence(
    folder: Path, text: str | bytes, reason: str
) -> None:
    (folder / "bad.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = tokenwire("serve", "--config", "bad.toml")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert reason in line


@pytest.mark.parametrize("text", ["port = ", "port = 'x'", "[client]\ntarge = 'x'"])
def test_wrong_file_stops_only_commands_that_need_settings(folder: Path, text: str) -> None:
    """Help, and the list of models, must be there for those who look for the mistake."""
    (folder / "tokenwire.toml").write_text(text)
    assert tokenwire("--version").stdout.startswith("tokenwire ")
    for arguments in (("--help",), ("serve", "--help"), ("models", "--help"), ("list",)):
        result = tokenwire(*arguments, HF_HOME=str(folder))
        assert result.returncode == 0, arguments
        assert "tokenwire.toml" not in result.stderr, arguments
    result = tokenwire("serve")
    assert result.returncode == 2
    assert result.stderr.startswith(f"tokenwire: {folder / 'tokenwire.toml'}:")


def test_config_shows_the_mistake_of_a_file_beside_the_settings(folder: Path) -> None:
    (folder / "tokenwire.toml").write_text("port = 1\nhost: 'a'\n")
    result = tokenwire("config", TOKENWIRE_SERVE_PORT="9004")
    assert result.returncode == 2
    assert f"file: {folder / 'tokenwire.toml'}" in result.stdout
    assert re.search(r"^port +9004 +variable TOKENWIRE_SERVE_PORT$", result.stdout, re.MULTILINE)
    assert "tokenwire.toml:2:5: this is no TOML" in result.stderr
    as_json = json.loads(tokenwire("config", "--json").stdout)
    assert "tokenwire.toml:2:5: this is no TOML" in as_json["error"]
    assert as_json["settings"]["port"] == {"value": "8000", "source": "default"}


def test_folder_of_models_that_does_not_exist_is_refused(folder: Path) -> None:
    """After a wrong letter in its name, the server would start without any model."""
    (folder / "tokenwire.toml").write_text("models = 'modells'")
    result = tokenwire("serve")
    assert result.returncode == 2
    assert result.stderr == "tokenwire: --models: there is no directory modells.\n"


def test_missing_file_is_refused(folder: Path) -> None:
    result = tokenwire("config", "--config", "none.toml")
    assert result.returncode == 2
    assert "none.toml can't be read: No such file" in result.stderr


def test_client_commands_call_the_server_of_the_file(folder: Path) -> None:
    assert "No server answers at 127.0.0.1:3" in tokenwire("models").stderr
    flagged = tokenwire("models", "--target", "127.0.0.1:4")
    assert "No server answers at 127.0.0.1:4" in flagged.stderr


def test_wrong_setting_of_serve_does_not_stop_a_client_command(folder: Path) -> None:
    """A client needs no settings of services, and may have none of their packages."""
    (folder / "tokenwire.toml").write_text("nothing = 1\n[client]\ntarget = '127.0.0.1:3'\n")
    assert "No server answers at 127.0.0.1:3" in tokenwire("models").stderr


def test_services_get_the_values_that_serve_would_hand_on(folder: Path) -> None:
    (folder / "tokenwire.toml").write_text('kv_memory = "lots"\n')
    names = ("--port", "--tokenizer-port", "--engine-port", "--grammar-port", "--jobs-port")
    ports = zip(names, map(str, free_ports(5)), strict=True)
    result = tokenwire("serve", *(word for pair in ports for word in pair))
    assert result.returncode == 2
    assert "engine: 'lots' is not an amount of memory" in result.stderr


def test_model_on_the_command_line_replaces_all_that_the_file_says_of_models(
    folder: Path,
) -> None:
    (folder / "tokenwire.toml").write_text('model = "./one"\nchat_template = "x.jinja"\n')
    assert shown()["chat_template"][0] == "x.jinja"
    assert shown("./two")["chat_template"] == ("", "default")
    assert "'./one' does not exist" in tokenwire("serve").stderr
    assert "'./two' does not exist" in tokenwire("serve", "./two").stderr
    assert "catalog none.toml can't be read" in tokenwire("serve", "--catalog", "none.toml").stderr


@pytest.mark.parametrize(("value", "other"), [("true", "manager"), ("false", "tokenizer")])
def test_file_may_serve_the_models_of_the_hubs_cache(folder: Path, value: str, other: str) -> None:
    """It says what the flag --models says without a folder; a message tells which one started."""
    [port] = free_ports(1)
    same = f"port = {port}\ntokenizer_port = {port}\nmanager_port = {port}\n"
    (folder / "tokenwire.toml").write_text(f"models = {value}\nno_jobs = true\n{same}")
    assert shown()["models"] == (value, f"{folder / 'tokenwire.toml'}:1")
    result = tokenwire("serve", HF_HOME=str(folder))
    assert result.stderr == f"tokenwire: The HTTP port and the {other} port are both {port}.\n"
    (folder / "tokenwire.toml").write_text(f"no_jobs = true\n{same}")
    result = tokenwire("serve", HF_HOME=str(folder), TOKENWIRE_SERVE_MODELS=value)
    assert f"the {other} port are both" in result.stderr


def test_config_shows_folders_of_models_as_the_file_has_them(folder: Path) -> None:
    assert shown("--models")["models"] == ("true", "flag --models")
    folders = shown("--models", "a", "--models", "b")["models"]
    assert folders == (f"a{os.pathsep}b", "flag --models")
