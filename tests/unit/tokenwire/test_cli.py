"""Command line without a server."""

import subprocess
import sys

import pytest

NOWHERE = "127.0.0.1:1"


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
        (("complete", "x", "--max-tokens", "-1"), "max_tokens"),
        (("complete", "x", "--n", "-1"), "n "),
        (("chat", "x", "--seed", "99999999999999999999"), "seed"),
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
    assert_sentence(tokenwire("serve", "--log-dir", "/proc/x"), 2, "No log", "/proc/x")
