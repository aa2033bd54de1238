"""Identity of callers, and their choice of tenant and priority."""

import os
from pathlib import Path

import pytest

from services.common.accounts.authenticator import Authenticator
from services.common.accounts.key_file import add_key, key_id
from services.common.accounts.keyring import Keyring
from tokenwire.errors import ServiceError
from tokenwire.token_file import TokenError, TokenFile

TOKEN, NEXT = "a" * 32, "b" * 32


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n\n  {NEXT}  \n")
    return path


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Keyring, str]:
    secret = add_key(tmp_path / "keys.json")
    return Keyring(tmp_path / "keys.json"), secret


def reason(authenticator: Authenticator, authorization: str | None) -> str:
    with pytest.raises(ServiceError) as refused:
        authenticator.identify(authorization)
    return refused.value.reason


@pytest.mark.parametrize(
    ("trust", "open_schedules", "holder_schedules"),
    [("auto", True, False), ("always", True, True), ("never", False, False)],
)
def test_server_says_who_may_schedule(
    token: Path, keys: tuple[Keyring, str], trust: str, open_schedules: bool, holder_schedules: bool
) -> None:
    keyring, secret = keys
    anyone = Authenticator(None, None, trust).identify(None)
    assert (anyone.is_peer, anyone.may_schedule) == (True, open_schedules)
    closed = Authenticator(keyring, TokenFile(token), trust)
    holder, peer = closed.identify(f"Bearer {secret}"), closed.identify(f"Bearer {TOKEN}")
    assert (holder.is_peer, holder.may_schedule) == (False, holder_schedules)
    assert (peer.is_peer, peer.may_schedule, peer.key_id) == (True, True, "")
    assert holder.tenant("", "x-tenant") == key_id(secret)
    if holder_schedules:
        assert (holder.tenant("bob", "x-tenant"), holder.priority(5, "x-priority")) == ("bob", 5)
    else:
        assert holder.priority(-5, "x-priority") == -5
        for refused in (lambda: holder.tenant("bob", "f"), lambda: holder.priority(5, "f")):
            with pytest.raises(ServiceError):
                refused()


def test_every_line_is_accepted_and_the_first_is_shown(token: Path) -> None:
    file = TokenFile(token, 32)
    authenticator = Authenticator(None, file)
    assert file.first == TOKEN
    for secret in (TOKEN, NEXT):
        assert authenticator.identify(f"bearer {secret}").is_peer
    for given in (None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN):
        assert reason(authenticator, given) == "MISSING_TOKEN"
    for given in (f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}{NEXT}", "Bearer é"):
        assert reason(authenticator, given) == "INVALID_TOKEN"


def test_replaced_token_is_used_and_an_unusable_one_changes_nothing(token: Path) -> None:
    file = TokenFile(token, 32)

    def replaced(text: str) -> str:
        token.with_suffix(".new").write_text(text)
        token.with_suffix(".new").replace(token)
        file._looked = 0.0  # as if it was long ago
        return file.first

    assert replaced("short") == TOKEN
    assert replaced("") == TOKEN
    assert replaced(NEXT) == NEXT
    os.remove(token)
    file._looked = 0.0
    assert file.first == NEXT


@pytest.mark.parametrize("text", ["", "\n \n", "short", "with a space and thirty-two characters"])
def test_unusable_token_is_refused(token: Path, text: str) -> None:
    token.write_text(text)
    with pytest.raises(TokenError):
        TokenFile(token, 32)
