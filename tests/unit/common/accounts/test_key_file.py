"""API keys, and the file that holds them."""

import json
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.accounts.key_file import (
    KeyFileError,
    add_key,
    key_id,
    matches,
    read_keys,
    revoke_key,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_file_holds_the_hash_of_a_key_and_not_the_key(path: Path) -> None:
    secret = add_key(path, name="alice")
    (key,) = read_keys(path).keys
    assert matches(secret, key)
    assert not matches(secret[:-1] + ("A" if secret[-1] != "A" else "B"), key)
    assert not matches(secret, None)
    assert (key.id, key.name, key.tier) == (key_id(secret), "alice", "default")
    assert secret.removeprefix("tw-") not in path.read_text()
    assert len(secret) == len("tw-") + 43, "32 bytes"


def test_only_the_owner_can_read_the_file(path: Path) -> None:
    secret = add_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    revoke_key(path, key_id(secret))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no temporary file remains"


def test_revoked_key_stays_in_the_list(path: Path) -> None:
    secrets = [add_key(path) for _ in range(3)]
    revoke_key(path, key_id(secrets[1]))
    assert [key.revoked is None for key in read_keys(path).keys] == [True, False, True]
    with pytest.raises(KeyFileError, match="already"):
        revoke_key(path, key_id(secrets[1]))
    with pytest.raises(KeyFileError, match="no key"):
        revoke_key(path, "nobody00")


def test_concurrent_commands_lose_no_key(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = list(pool.map(lambda _: add_key(path), range(16)))
    assert {key.id for key in read_keys(path).keys} == {key_id(secret) for secret in secrets}


def test_key_gets_only_a_tier_that_the_operator_defined(path: Path) -> None:
    path.write_text('{"tiers": {"trial": {"max_tokens": 5, "models": ["m"]}}}')
    add_key(path, tier="trial")
    file = read_keys(path)
    assert file.tiers["trial"].max_tokens == 5
    assert file.tiers["trial"].models == ("m",)
    with pytest.raises(KeyFileError, match="trial"):
        add_key(path, tier="gold")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"tiers": 5}', '{"tiers": {"t": {"max_tokens": 0}}}',
        '{"tiers": {"t": {"colour": 1}}}', '{"tiers": {}, "keys": [{}]}', "[" * 100_000, "\udcff",
        json.dumps({"tiers": {}, "keys": [{"id": "12345678", "hash": "0" * 64, "tier": "t",
                                           "created": 0}]}),
        json.dumps({"tiers": {"t": {}}, "keys": [{"id": "12345678", "hash": "0" * 64, "tier": "t",
                                                  "created": 0}] * 2}),
        json.dumps({"tiers": {"t": {}}, "keys": [{"id": "12345678", "hash": "plain", "tier": "t",
                                                  "created": 0}]}),
    ],
)  # fmt: skip
def test_wrong_file_is_refused_in_one_sentence(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(KeyFileError) as caught:
        read_keys(path)
    assert len(str(caught.value).splitlines()) == 1


@given(content=st.binary(max_size=30))
def test_any_bytes_are_refused_with_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.raises(KeyFileError):
        read_keys(path)


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", "keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_command_shows_a_key_only_when_it_is_made(path: Path) -> None:
    file = ("--file", str(path))
    made = tokenwire("add", "--name", "alice", *file)
    assert made.returncode == 0
    (secret,) = made.stdout.splitlines()
    listed = tokenwire("list", *file).stdout
    assert listed.startswith(key_id(secret))
    assert "alice" in listed
    assert "active" in listed
    assert secret not in listed
    assert tokenwire("revoke", secret, *file).returncode == 0
    assert "revoked" in tokenwire("list", *file).stdout


def test_command_fails_with_one_sentence(path: Path) -> None:
    file = ("--file", str(path))
    for arguments in (("list",), ("revoke", "12345678"), ("add", "--tier", "gold")):
        result = tokenwire(*arguments, *file)
        assert result.returncode == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
    assert not path.exists()
