"""Check of callers: API keys, and the token that the services of an installation share."""

import hmac

import grpc

from services.common.accounts.identity import Identity
from services.common.accounts.keyring import Keyring, bearer
from tokenwire.errors import ServiceError
from tokenwire.token_file import TokenFile

__all__ = ["Authenticator"]


class Authenticator:
    """Identifies callers. Without keys and without a token, every caller counts as a peer."""

    def __init__(
        self, keyring: Keyring | None, token: TokenFile | None, trust: str = "auto"
    ) -> None:
        """trust: callers that may choose priority and tenant: "auto" = peers, "always" = all,
        "never" = peers that show the token."""
        self.keyring = keyring
        self._token = token
        is_open = keyring is None and token is None
        self._anyone = Identity(is_peer=True, may_schedule=trust != "never") if is_open else None
        self._peer = Identity(is_peer=True, may_schedule=True)
        self._holders_schedule = trust == "always"

    def identify(self, authorization: str | None) -> Identity:
        """Return the caller that sends the header "Bearer SECRET". Raises UNAUTHENTICATED."""
        if self._anyone is not None:
            return self._anyone
        secret = bearer(authorization)
        if self._token is not None and secret and self._is_token(secret):
            return self._peer
        if self.keyring is not None:
            account = self.keyring.account(authorization)
            return Identity(
                is_peer=False,
                may_schedule=self._holders_schedule,
                account=account,
                keyring=self.keyring,
            )
        raise ServiceError(
            grpc.StatusCode.UNAUTHENTICATED,
            "INVALID_TOKEN" if secret else "MISSING_TOKEN",
            "This server serves the services of its installation alone, which show the token of "
            "--peer-token-file.",
        )

    def _is_token(self, secret: str) -> bool:
        assert self._token is not None
        given = secret.encode()
        return any(hmac.compare_digest(given, each.encode()) for each in self._token.tokens)
