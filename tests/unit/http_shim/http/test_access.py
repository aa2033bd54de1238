"""Access to what only operators may do."""

import time

import grpc
import pytest

from services.common.accounts.account import Account
from services.common.accounts.key_file import Tier
from services.http_shim.http.access import require_admin
from services.http_shim.http.exchange import Exchange
from tokenwire.errors import ServiceError


def admits(account: Account | None, **headers: str) -> bool:
    exchange = Exchange("a", time.monotonic(), account=account)
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    try:
        require_admin({"type": "http", "exchange": exchange, "headers": encoded}, "Unloading")
    except ServiceError as error:
        return error.code is not grpc.StatusCode.PERMISSION_DENIED
    return True


@pytest.mark.parametrize("is_admin", [False, True])
def test_key_operates_the_server_only_if_it_is_an_admin_key(is_admin: bool) -> None:
    account = Account("abcdefgh", "", Tier(), time.monotonic())
    account.is_admin = is_admin
    assert admits(account) is is_admin
    assert admits(account, origin="https://elsewhere.example", host="here") is is_admin


def test_page_of_another_origin_does_not_operate_a_server_without_keys() -> None:
    """A browser would send its request with the rights of whoever reads the page."""
    host = "127.0.0.1:8000"
    assert admits(None, host=host)
    assert admits(None, host=host, origin=f"http://{host}")
    for origin in ("https://elsewhere.example", "http://127.0.0.1:9000", "null"):
        assert not admits(None, host=host, origin=origin)
