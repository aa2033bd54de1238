"""The command line, where no server is needed."""

import subprocess
import sys

NOWHERE = "127.0.0.1:1"


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_no_server_is_one_sentence_and_exit_code_1() -> None:
    for command in (["complete", "x"], ["tokenize", "x"], ["models"]):
        result = tokenwire(*command, "--target", NOWHERE)
        assert result.returncode == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert f"No server answers at {NOWHERE}" in result.stderr


def test_health_of_nothing_is_not_serving() -> None:
    """Container health checks rest on the exit code."""
    assert tokenwire("health", NOWHERE).returncode == 1
    assert tokenwire("health", f"http://{NOWHERE}/ready").returncode == 1
