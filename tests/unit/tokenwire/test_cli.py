"""Command line without a server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.bounds import bounds_of
from tests.stack import free_ports
from tokenwire.pb.completion.v1.completion_pb2 import GenerateRequest

NOWHERE = "127.0.0.1:1"


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _range(path: str) -> str:
    """Return the range of a number in a request to generate, which the command line repeats."""
    bounds = bounds_of(GenerateRequest, path)
    return f"between {bounds.least:g} and {bounds.most:g}"


def assert_sentence(
    result: subprocess.CompletedProcess[str], exit_code: int, *messages: str
) -> None:
    """Require one line on stderr and nothing on stdout."""
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for message in messages:
        assert message in result.stderr


def test_missing_server_is_one_sentence_and_exit_code_1() -> None:
    for command in (["complete", "x"], ["tokenize", "x"], ["models"]):
        result = tokenwire(*command, "--target", NOWHERE)
        assert_sentence(result, 1, f"No server answers at {NOWHERE}")


def test_health_of_a_missing_server_exits_with_1() -> None:
    """Container health checks use the exit code."""
    assert tokenwire("health", NOWHERE).returncode == 1
    assert tokenwire("health", f"http://{NOWHERE}/ready").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("complete", b"caf\xe9"), "utf-8"),
        (("chat", "x", "--system", b"caf\xe9"), "utf-8"),
        (("tokenize", b"caf\xe9"), "utf-8"),
        (("complete", "x", "--image", "/no/such.png"), "/no/such.png can't be read: No such file"),
        (("chat", "x", "--image", "/"), "/ can't be read: Is a directory"),
        (("health", "http://127.0.0.1:99999"), "99999"),
        (("health", "http://[::1"), "http://[::1"),
    ],
)
def test_invalid_argument_is_refused_in_one_sentence(
    arguments: tuple[str | bytes, ...], message: str
) -> None:
    """A script must see a failure, and a user no traceback."""
    command = [sys.executable, "-m", "tokenwire", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert_sentence(result, 1, "tokenwire: ", message)


def test_standard_input_that_is_not_utf8_is_refused_in_one_sentence() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "utf8", "-m", "tokenwire", "complete", "-"],
        input=b"caf\xe9",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert b"utf-8" in result.stderr


def test_unwritable_log_folder_is_refused_in_one_sentence() -> None:
    http, tokenizer, engine, grammar, jobs = map(str, free_ports(5))
    edge = ("--port", http, "--tokenizer-port", tokenizer, "--jobs-port", jobs)
    ports = (*edge, "--engine-port", engine, "--grammar-port", grammar)
    result = tokenwire("serve", *ports, "--log-dir", "/proc/x")
    assert_sentence(result, 2, "No log", "/proc/x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("complete", "x", "--max-tokens", "-1"), "--max-tokens: must be between 1 and"),
        (("complete", "x", "--n", "0"), f"--n: must be {_range('n')}, got 0"),
        (
            ("complete", "x", "--temperature", "nan"),
            f"--temperature: must be {_range('sampling.temperature')}",
        ),
        (("complete", "x", "--top-p", "2"), f"--top-p: must be {_range('sampling.top_p')}, got 2"),
        (("chat", "x", "--seed", "99999999999999999999"), "--seed: must be between"),
        (("chat", "x", "--seed", "one"), "--seed: must be a whole number, got 'one'"),
        (("models", "--target", "http://127.0.0.1:8000"), "--target: must be host:port"),
        (("serve", "--log-size", "9XB"), "--log-size: must be a size such as 64MiB"),
    ],
)
def test_option_out_of_range_is_named_as_typed(arguments: tuple[str, ...], message: str) -> None:
    """Exit code 2 tells a script that the command is wrong, not the server."""
    result = tokenwire(*arguments)
    assert result.returncode == 2
    assert f"argument {message}" in result.stderr


def test_health_says_why_a_service_does_not_answer() -> None:
    """The sentence is all that an operator sees of a container's health check."""
    assert_sentence(tokenwire("health", NOWHERE), 1, f"{NOWHERE} is not serving", "refused")
    url = f"http://{NOWHERE}/ready"
    assert_sentence(tokenwire("health", url), 1, f"{url} is not serving", "refused")
    answer = json.loads(tokenwire("health", NOWHERE, "--json").stdout)
    assert answer == {"target": NOWHERE, "serving": False, "reason": "connection refused"}


def test_environment_variable_names_the_target() -> None:
    command = [sys.executable, "-m", "tokenwire", "models"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"TOKENWIRE_TARGET": "127.0.0.1:2"},
    )
    assert_sentence(result, 1, "No server answers at 127.0.0.1:2 (connection refused)")


def test_full_disk_is_one_sentence_and_a_left_pipe_is_silent() -> None:
    """`tokenwire … | head -1` must not end in noise, nor a full disk in success."""
    command = [sys.executable, "-m", "tokenwire", "completion", "bash"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 1
    expected = b"tokenwire: The output can't be written: No space left on device.\n"
    assert result.stderr == expected
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_help_shows_only_real_defaults_and_the_version_names_the_command() -> None:
    text = tokenwire("complete", "--help").stdout
    assert "default: None" not in text
    assert "(default: 127.0.0.1:50051)" in text
    assert "examples:" in text
    assert tokenwire("--version").stdout.startswith("tokenwire ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "tokenwire"
    script.write_text(tokenwire("completion", "bash").stdout)
    ask = """source "$0"
        complete -p tokenwire > /dev/null || exit 1
        COMP_WORDS=(tokenwire "$@"); COMP_CWORD=$#; COMPREPLY=()
        _shtab_tokenwire; printf '%s\\n' "${COMPREPLY[@]}" """
    for words, expected in ((["detok"], "detokenize"), (["complete", "--max"], "--max-tokens")):
        command = ["bash", "-c", ask, str(script), *words]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert expected in result.stdout.split(), result.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells_names_every_command(shell: str) -> None:
    script = tokenwire("completion", shell).stdout
    for command in ("serve", "complete", "chat", "tokenize", "detokenize", "models", "keys"):
        assert command in script


def test_name_of_a_key_is_no_escape_sequence(tmp_path: Path) -> None:
    """The list would change the terminal, and a name with a line end would look like a key."""
    file = ("--file", str(tmp_path / "keys.json"))
    assert tokenwire("keys", "add", *file, "--name", "a\x1b[31m\nb").returncode == 0
    listed = tokenwire("keys", "list", *file).stdout
    assert listed.endswith("\ta␛[31m b\n")
    assert len(listed.splitlines()) == 1
