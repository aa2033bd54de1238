"""Caller of an rpc: a service of the installation, the holder of an API key, or anyone."""

from contextvars import ContextVar
from dataclasses import dataclass

import grpc

from services.common.accounts.account import Account
from services.common.accounts.keyring import Keyring
from services.common.priority import PRIORITY_LIMIT
from tokenwire.errors import ServiceError

__all__ = ["ANYONE", "Identity", "admin_key_required", "current"]


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller and its permissions."""

    is_peer: bool
    """True for a service of the installation, and for anyone on a server that checks no caller"""
    may_schedule: bool
    """True if the caller may choose the tenant and the priority of its requests"""
    account: Account | None = None
    """Account of the API key; None for a peer"""
    keyring: Keyring | None = None
    """Keyring that holds the account; None for a peer"""

    @property
    def key_id(self) -> str:
        """Id of the API key, for logs; empty = none."""
        return self.account.id if self.account is not None else ""

    @property
    def is_admin(self) -> bool:
        """True if the caller may operate the server."""
        return self.is_peer or (self.account is not None and self.account.is_admin)

    def require_admin(self, action: str) -> None:
        """Raise PERMISSION_DENIED unless the caller may operate the server.

        action: what the caller asks for, as the subject of a sentence.
        """
        if not self.is_admin:
            raise admin_key_required(action)

    def require_valid(self) -> None:
        """Raise UNAUTHENTICATED if the key was revoked since the call began."""
        if self.keyring is not None and self.account is not None:
            self.keyring.require_valid(self.account)

    def require_peer(self, method: str) -> None:
        """Raise PERMISSION_DENIED for the holder of an API key."""
        if not self.is_peer:
            raise _denied(
                "NOT_A_SERVICE",
                f"{method} is for the services of this installation: it needs their token, not an "
                "API key.",
            )

    def require_unlimited(self) -> None:
        """Raise PERMISSION_DENIED for a key whose tier has limits.

        Only the tokenizer service counts the usage of keys.
        """
        if self.account is not None and self.account.is_limited:
            raise _denied(
                "TIER_HAS_LIMITS",
                "This API key has limits, which the engine does not count: send the "
                "request to the tokenizer service.",
            )

    def tenant(self, asked: str, field: str) -> str:
        """Return the tenant of a request. Raises PERMISSION_DENIED if the caller may not choose it.

        asked: the caller's choice; empty = none. field: its name in the error.
        """
        if self.may_schedule:
            return asked or self.key_id
        if asked not in ("", self.key_id):
            raise _denied(
                "TENANT_NOT_ALLOWED",
                f"{field} can't be set on this server: the tenant is the id of the API key.",
                field,
            )
        return self.key_id

    def paying_tenant(self, asked: str) -> str:
        """Return the tenant to charge: that of the key, or the one that a trusted caller asks for.

        asked: empty = none.
        """
        return (asked if self.may_schedule else "") or self.key_id

    def priority(self, asked: int, field: str) -> int:
        """Return the allowed priority of a request. Raises PERMISSION_DENIED for a higher one.

        asked: the caller's choice; 0 = none. field: its name in the error.
        """
        own = self.account.tier.priority if self.account is not None else 0
        if self.may_schedule:
            return asked or own
        if asked > 0:
            raise _denied(
                "PRIORITY_NOT_ALLOWED",
                f"{field} must be at most 0 on this server, got {asked}: a caller may only lower "
                "the priority of its requests.",
                field,
            )
        return max(own + asked, -PRIORITY_LIMIT)


ANYONE = Identity(is_peer=True, may_schedule=True)
"""Caller as a server sees it that checks no caller"""
current: ContextVar[Identity] = ContextVar("identity", default=ANYONE)
"""Caller of the rpc that the task answers"""


def admin_key_required(action: str) -> ServiceError:
    """Return the error of an operator's action by a key that is no admin key."""
    return _denied(
        "ADMIN_KEY_REQUIRED",
        f"{action} needs an admin key (`tokenwire keys add --admin`).",
    )


def _denied(reason: str, message: str, field: str = "") -> ServiceError:
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, reason, message, field=field)
