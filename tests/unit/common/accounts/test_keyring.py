"""Authentication of API keys, and reloads of the keys file."""

import errno
import logging
import os
import time
from pathlib import Path

import pytest

from services.common.accounts.identity import ANYONE, Identity
from services.common.accounts.key_file import KeyFileError, add_key, key_id, revoke_key
from services.common.accounts.keyring import Keyring
from services.http_shim.errors import to_response
from tokenwire.errors import ServiceError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def refused(keyring: Keyring, authorization: str | None) -> str:
    with pytest.raises(ServiceError) as caught:
        keyring.account(authorization)
    response = to_response(caught.value)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    return caught.value.reason


def test_only_complete_keys_authenticate(path: Path) -> None:
    secret = add_key(path)
    keyring = Keyring(path)
    for authorization in (f"Bearer {secret}", f"bearer  {secret} "):
        assert keyring.account(authorization).id == key_id(secret)
    for invalid in (None, "", "Bearer", "Bearer ", f"Basic {secret}", secret):
        assert refused(keyring, invalid) == "MISSING_API_KEY"
    for wrong in (secret[:-1], secret + "A", secret[3:], key_id(secret), "ÿ", "tw-" + "A" * 43):
        assert refused(keyring, f"Bearer {wrong}") == "INVALID_API_KEY"


def test_changes_of_the_file_apply(path: Path) -> None:
    first = add_key(path)
    keyring = Keyring(path)
    second = add_key(path)
    assert refused(keyring, f"Bearer {second}") == "INVALID_API_KEY"
    keyring.reload_if_changed()
    assert keyring.account(f"Bearer {second}")
    revoke_key(path, key_id(first))
    keyring.reload_if_changed()
    assert refused(keyring, f"Bearer {first}") == "REVOKED_API_KEY"


def test_only_an_admin_key_may_operate_the_server(path: Path) -> None:
    users, admins = add_key(path), add_key(path, admin=True)
    keyring = Keyring(path)
    user, admin = (
        Identity(is_peer=False, may_schedule=False, account=keyring.account(f"Bearer {secret}"))
        for secret in (users, admins)
    )
    admin.require_admin("Unloading a model")
    ANYONE.require_admin("Unloading a model")
    with pytest.raises(ServiceError, match=r"Unloading a model needs an admin key") as caught:
        user.require_admin("Unloading a model")
    assert to_response(caught.value).status_code == 403


def test_key_that_is_no_admin_any_more_loses_its_rights_with_the_file(path: Path) -> None:
    secret = add_key(path, admin=True)
    keyring = Keyring(path)
    account = keyring.account(f"Bearer {secret}")
    path.write_text(path.read_text().replace('"admin": true', '"admin": false'))
    keyring.reload_if_changed()
    assert not account.is_admin


def test_change_that_could_not_be_read_once_is_read_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a free file descriptor would let a revoked key in for ever."""
    secret = add_key(path)
    keyring = Keyring(path)
    revoke_key(path, key_id(secret))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", _no_descriptor)
        keyring.reload_if_changed()
    assert keyring.account(f"Bearer {secret}")
    keyring.reload_if_changed()
    assert refused(keyring, f"Bearer {secret}") == "REVOKED_API_KEY"


def _no_descriptor(path: Path) -> bytes:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_usage_survives_a_reload(path: Path) -> None:
    """Otherwise each new key would reset the limits of all keys."""
    path.write_text('{"tiers": {"default": {"requests_per_minute": 1}}}')
    secret = add_key(path)
    keyring = Keyring(path)
    account = keyring.account(f"Bearer {secret}")
    account.count_request(time.monotonic())
    add_key(path)
    keyring.reload_if_changed()
    assert keyring.account(f"Bearer {secret}") is account
    with pytest.raises(ServiceError):
        account.count_request(time.monotonic())
    path.write_text(path.read_text().replace('"requests_per_minute": 1', '"max_tokens": 7'))
    keyring.reload_if_changed()
    assert account.tier.max_tokens == 7
    account.count_request(time.monotonic())


def test_invalid_file_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = add_key(path)
    keyring = Keyring(path)
    with caplog.at_level(logging.ERROR):
        path.write_text("{")
        keyring.reload_if_changed()
        keyring.reload_if_changed()
        path.unlink()
        keyring.reload_if_changed()
    assert len(caplog.records) == 2, "each error must be logged once"
    assert keyring.account(f"Bearer {secret}")
    with pytest.raises(KeyFileError):
        Keyring(path)
