"""Unknown flags and commands: the sentence names what was meant, the usage is the command's own."""

import subprocess
import sys

import pytest

from tokenwire.flag_parser import nearest

KEY = "tw-0123456789abcdefghijklmnopqrstuvwxyz"


def refused(*command: str) -> tuple[str, str]:
    """Run a command that is refused; return the usage and the last line of its error."""
    ran = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    usage, _, sentence = ran.stderr.strip().rpartition("\n")
    return usage, sentence


@pytest.mark.parametrize(
    ("command", "usage", "sentence"),
    [
        ("tokenwire chat hi --temprature 1", "tokenwire chat [", "Did you mean --temperature?"),
        ("tokenwire chat --strem", "tokenwire chat [", "Did you mean --stream or"),
        ("tokenwire chta hi", "tokenwire [", "Did you mean chat?"),
        ("tokenwire keys ad", "tokenwire keys [", "Did you mean add?"),
        ("tokenwire keys add --nme x", "tokenwire keys add [", "Did you mean --name?"),
        ("tokenwire models extra", "tokenwire models [", "unexpected argument 'extra'."),
        ("tokenwire --json models", "tokenwire [", "Flags of a command follow its name."),
        ("tokenwire serve --replcas 2", "tokenwire serve [", "Did you mean --replicas?"),
        ("tokenwire serve --fetch-imges", "tokenwire serve [", "Did you mean --fetch-images or"),
        ("tokenwire serve --engine h:1", "tokenwire serve [", "leave it out."),
        ("services.engine --kv-memroy 1GiB", "services.engine ", "Did you mean --kv-memory?"),
        ("services.http_shim --prot 1", "services.http_shim ", "Did you mean --port?"),
        ("services.tokenizer --enginee h:1", "services.tokenizer ", "Did you mean --engine?"),
        ("services.grammar --metrics_port 1", "services.grammar ", "Did you mean --metrics-port?"),
        ("services.jobs --file-foldr x", "services.jobs ", "Did you mean --file-folder?"),
    ],
)
def test_unknown_flag_is_answered_with_the_nearest_and_the_usage_of_its_command(
    command: str, usage: str, sentence: str
) -> None:
    shown, last = refused(*command.split())
    assert shown.startswith("usage: ")
    assert usage in shown.splitlines()[0]
    assert sentence in last


@pytest.mark.parametrize("flag", ["--key", "--api-key", "--tls-key"])
def test_api_key_in_a_wrong_flag_is_answered_with_its_places_and_never_shown(flag: str) -> None:
    usage, last = refused("tokenwire", "chat", "hi", flag, KEY)
    assert "--key-file" in last
    assert "TOKENWIRE_API_KEY" in last
    assert KEY not in usage + last


def test_name_that_resembles_nothing_gets_no_suggestion() -> None:
    assert nearest("--typo", ["--port", "--model", "--temperature"]) == []


def test_begin_of_a_flag_names_it_first() -> None:
    assert nearest("--temp", ["--template", "--temperature", "--port"])[0] in (
        "--template",
        "--temperature",
    )
