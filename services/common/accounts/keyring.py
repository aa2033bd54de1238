"""API keys of a watched file, and the account of each."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from services.common.accounts.account import Account
from services.common.accounts.key_file import (
    Key,
    KeyFileError,
    Tier,
    key_id,
    matches,
    read_keys,
)
from services.common.accounts.ledger import UsageLedger
from services.common.background import keep_running
from services.common.settings import StartupError
from tokenwire.errors import ServiceError

if TYPE_CHECKING:
    from services.common.accounts.shared_limits import SharedLimits

__all__ = ["Keyring", "bearer", "open_keyring"]

_LOG = logging.getLogger("keys")
_POLL_SECONDS = 0.5  # a revoked key must fail within a second


class Keyring:
    """Authenticates API keys."""

    def __init__(
        self,
        path: Path,
        shared: "SharedLimits | None" = None,
        ledger: UsageLedger | None = None,
    ) -> None:
        """Read the file. shared, ledger: parameters of `Account`. Raises KeyFileError."""
        self._path = path
        self._shared = shared
        self._ledger = ledger or UsageLedger()
        self._stamp = _stamp(path)
        self._problem = ""
        """Reason why the changed file is not used, as it was logged; empty = it is used"""
        self._keys: dict[str, Key] = {}
        self._accounts: dict[str, Account] = {}
        self._read()

    def account(self, authorization: str | None) -> Account:
        """Return the account of the header `authorization: Bearer KEY`. Raises UNAUTHENTICATED."""
        secret = bearer(authorization)
        if not secret:
            raise _unauthenticated(
                "MISSING_API_KEY",
                "An API key is required: send the header authorization: Bearer KEY.",
            )
        key = self._keys.get(key_id(secret))
        if not matches(secret, key):
            key = None
        return self._accounts[_require_valid(key).id]

    @property
    def keys(self) -> Sequence[Key]:
        """The public parts of all keys, in the order of the file."""
        return [*self._keys.values()]

    def name_of(self, identity: str) -> str:
        """Return the name of a key by its id; empty = it has none, or the file lacks the key."""
        key = self._keys.get(identity)
        return "" if key is None else key.name

    def tier_of(self, key: Key) -> Tier:
        """Return the tier of a key of `keys`."""
        return self._accounts[key.id].tier

    def account_by_id(self, identity: str) -> Account:
        """Return the account of a key by its id. Raises UNAUTHENTICATED if the key is gone."""
        return self._accounts[_require_valid(self._keys.get(identity)).id]

    def require_valid(self, account: Account) -> None:
        """Raise UNAUTHENTICATED if the key of an account was revoked or removed."""
        _require_valid(self._keys.get(account.id))

    async def watch(self) -> None:
        """Reload the file whenever it changes, and run the shared limits, until cancelled."""
        tasks = [keep_running("keys", self._follow)]
        if self._shared is not None:
            tasks.append(keep_running("shared_limits", self._shared.run))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Disconnect from the shared limits."""
        if self._shared is not None:
            await self._shared.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Reload the file if it has changed.

        A file that can't be read changes nothing, and is read again the next time: the process may
        only have been out of file descriptors.
        """
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        try:
            self._read()
        except KeyFileError as error:
            if self._problem != str(error):
                _LOG.error("%s The previous keys stay.", error)
            self._problem = str(error)
        else:
            self._stamp, self._problem = stamp, ""
            _LOG.info("keys reloaded", extra={"keys": len(self._keys)})

    def _read(self) -> None:
        file = read_keys(self._path)
        now = time.monotonic()
        accounts: dict[str, Account] = {}
        for key in file.keys:
            tier = file.tiers[key.tier]
            account = self._accounts.get(key.id)
            if account is None:
                account = Account(key.id, key.name, tier, now, self._shared, self._ledger)
            else:
                account.set_tier(tier, now)
            account.is_admin = key.admin
            own = key.monthly_tokens
            account.budget.limit = tier.monthly_tokens if own is None else own
            accounts[key.id] = account
        self._accounts = accounts
        self._keys = {key.id: key for key in file.keys}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file changes."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_keyring(path: str, limits_url: str, ledger: UsageLedger) -> Keyring | None:
    """Return the keys of --keys with the limits of --limits-url. Raises StartupError.

    ledger: counts the usage of the keys. Must be called on the event loop that uses it.
    """
    if not path:
        if limits_url:
            raise StartupError("--limits-url needs --keys.")
        return None
    shared = None
    if limits_url:
        from services.common.accounts.shared_limits import SharedLimits

        shared = SharedLimits(limits_url)
    try:
        return Keyring(Path(path), shared, ledger)
    except KeyFileError as error:
        raise StartupError(str(error)) from None


def bearer(authorization: str | None) -> str:
    """Return the secret of the header `authorization: Bearer SECRET`; empty = none."""
    scheme, _, secret = (authorization or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def _require_valid(key: Key | None) -> Key:
    if key is None:
        raise _unauthenticated("INVALID_API_KEY", "The API key is not known.")
    if key.revoked is not None:
        raise _unauthenticated("REVOKED_API_KEY", f"The API key {key.id} is revoked.")
    return key


def _unauthenticated(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, message)
