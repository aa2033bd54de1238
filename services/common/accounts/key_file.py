"""API keys and their tiers, in a JSON file that holds hashes only.

    {"tiers": {"default": {}, "trial": {"max_tokens": 256, "requests_per_minute": 60,
                                        "tokens_per_minute": 20000, "concurrent_streams": 4}},
     "keys": [{"id": "q7Xk2mPd", "name": "alice", "tier": "trial", "hash": "…", …}]}

A key is "tw-" and 32 random bytes; the file holds its SHA-256. Passwords need a slow, salted hash
because they can be guessed; 256 random bits can't be guessed at any speed.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "Key",
    "KeyFileError",
    "Tier",
    "add_key",
    "key_id",
    "matches",
    "read_keys",
    "revoke_key",
]

_PREFIX = "tw-"
_SECRET_BYTES = 32
_ID_LENGTH = 8
"""Characters of a key that identify it; 208 random bits stay secret"""
_NOBODY = hashlib.sha256(b"").hexdigest()
_Limit: TypeAlias = Annotated[int, Meta(ge=1, le=2**53)]


class KeyFileError(Exception):
    """The keys file can't be used. The message is one sentence."""


class Tier(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of each key of a tier; None = no limit."""

    max_tokens: _Limit | None = None
    """Most tokens of a choice; a higher max_tokens is silently lowered"""
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Tokens of prompts and output together"""
    concurrent_streams: _Limit | None = None
    """Most choices under way at a time, streamed or not"""
    models: tuple[str, ...] | None = None
    """Canonical ids of the permitted models"""
    monthly_tokens: _Limit | None = None
    """Tokens of prompts and output together in a calendar month (UTC)"""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Priority of the tier's requests; higher is served first"""

    @property
    def is_limited(self) -> bool:
        """True if the tier limits the requests of its keys, in kind or in amount."""
        return msgspec.structs.replace(self, priority=0) != Tier()


class Key(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Public part of a key."""

    id: Annotated[str, Meta(min_length=_ID_LENGTH, max_length=_ID_LENGTH)]
    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the whole key, in hexadecimal"""
    tier: str
    created: int
    """Time of creation, in Unix seconds"""
    name: str = ""
    revoked: int | None = None
    """Time of revocation, in Unix seconds; None = the key is valid"""
    admin: bool = False
    """True if the holder may operate the server"""
    monthly_tokens: _Limit | None = None
    """Tokens of a calendar month (UTC), in place of the tier's; None = the tier's"""


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the keys file."""

    tiers: dict[str, Tier]
    keys: tuple[Key, ...] = ()


_EMPTY = KeyFile({"default": Tier()})


def key_id(secret: str) -> str:
    """Return the id of a key: a part of it that is not secret."""
    return secret.removeprefix(_PREFIX)[:_ID_LENGTH]


def matches(secret: str, key: Key | None) -> bool:
    """Return in constant time whether `secret` is that key; False if `key` is None."""
    digest = hashlib.sha256(secret.encode()).hexdigest()
    is_same = hmac.compare_digest(digest, _NOBODY if key is None else key.hash)
    return is_same and key is not None


def read_keys(path: Path) -> KeyFile:
    """Read and check the file. Raises KeyFileError."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeyFile)
        _require_consistent(file)
    except OSError as error:
        raise KeyFileError(f"The keys file {path} can't be read: {error.strerror}.") from None
    except RecursionError:
        raise KeyFileError(f"The keys file {path} is nested too deeply.") from None
    except ValueError as error:  # raised by the JSON decoder, by UTF-8, by a type, or below
        why = " ".join(str(error).split()).rstrip(".")
        raise KeyFileError(f"The keys file {path} is wrong: {why}.") from None
    return file


def add_key(
    path: Path,
    tier: str = "default",
    name: str = "",
    *,
    admin: bool = False,
    monthly_tokens: int | None = None,
) -> str:
    """Make a key, store its hash, and return the key. Creates a missing file."""
    with _locked(path):
        file = read_keys(path) if path.exists() else _EMPTY
        if tier not in file.tiers:
            known = ", ".join(sorted(file.tiers)) or "none"
            raise KeyFileError(f"There is no tier {tier} in {path}; there are: {known}.")
        secret = _new_secret({key.id for key in file.keys})
        digest = hashlib.sha256(secret.encode()).hexdigest()
        key = Key(
            key_id(secret),
            digest,
            tier,
            int(time.time()),
            name,
            admin=admin,
            monthly_tokens=monthly_tokens,
        )
        _write(path, KeyFile(file.tiers, (*file.keys, key)))
    return secret


def revoke_key(path: Path, identity: str) -> Key:
    """Revoke the key with an id permanently, and return its public part."""
    with _locked(path):
        file = read_keys(path)
        found = next((key for key in file.keys if key.id == identity), None)
        if found is None:
            raise KeyFileError(f"There is no key {identity} in {path}.")
        if found.revoked is not None:
            raise KeyFileError(f"The key {identity} is already revoked.")
        revoked = msgspec.structs.replace(found, revoked=int(time.time()))
        keys = tuple(revoked if key is found else key for key in file.keys)
        _write(path, KeyFile(file.tiers, keys))
    return revoked


def _new_secret(taken: Collection[str]) -> str:
    """Return a key whose id is free and doesn't look like a flag."""
    while True:
        secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        identity = key_id(secret)
        if identity[0].isalnum() and identity not in taken:
            return secret


def _require_consistent(file: KeyFile) -> None:
    seen: set[str] = set()
    for key in file.keys:
        if key.tier not in file.tiers:
            raise ValueError(f"the key {key.id} has the tier {key.tier}, which does not exist")
        if key.id in seen:
            raise ValueError(f"the key {key.id} occurs twice")
        seen.add(key.id)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock that keeps other commands from changing the file."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise KeyFileError(f"The folder {path.parent} can't be used: {error.strerror}.") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, file: KeyFile) -> None:
    """Write the file atomically, readable by its owner only (mode 0600)."""
    text = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise KeyFileError(f"The keys file {path} can't be written: {error.strerror}.") from None
