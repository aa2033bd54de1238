"""Secrets that callers show to servers: API keys and tokens of services, also from files."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenwire.tls import stamp

__all__ = ["TokenError", "TokenFile", "require_token", "shown"]

_LOG = logging.getLogger("token")
_LOOK_SECONDS = 0.5


class TokenError(Exception):
    """The key or token can't be used. The message is one sentence."""


class TokenFile:
    """Tokens in a file, one a line, which may be replaced. Callers send the first token."""

    def __init__(self, path: Path, least: int = 1) -> None:
        """Read the file. least: fewest characters of a token. Raises TokenError."""
        self.path = path
        self._least = least
        self._stamp = stamp([path])
        self._looked = time.monotonic()
        self._tokens = _read(path, least)

    @property
    def tokens(self) -> Sequence[str]:
        """Tokens of the file, at least one. A new content that can't be used changes nothing."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if (found := stamp([self.path])) != self._stamp:
                self._stamp = found
                self._reload()
        return self._tokens

    @property
    def first(self) -> str:
        """The token that callers send."""
        return self.tokens[0]

    def _reload(self) -> None:
        try:
            self._tokens = _read(self.path, self._least)
        except TokenError as error:
            _LOG.error("%s The previous token stays.", error)
        else:
            _LOG.info("the token of %s is in use", self.path)


def shown(file: TokenFile | None) -> Callable[[], str] | None:
    """Return the function that gives a channel its token; None without a file."""
    return None if file is None else lambda: file.first


def require_token(text: str, what: str, least: int = 1) -> str:
    """Return a token that a header can carry. Raises TokenError that names `what`."""
    if not (text.isascii() and text.isprintable() and " " not in text and len(text) >= least):
        size = f"at least {least} " if least > 1 else ""
        raise TokenError(f"{what} must have {size}visible ASCII characters without spaces.")
    return text


def _read(path: Path, least: int) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise TokenError(f"{path} can't be read: {error.strerror}.") from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise TokenError(f"{path} has no token.")
    return tuple(require_token(token, f"A token in {path}", least) for token in tokens)
