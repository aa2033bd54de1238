"""API keys and their tiers: a JSON file that holds hashes only.

    {"tiers": {"default": {}, "trial": {"max_tokens": 256, "requests_per_minute": 60,
                                        "tokens_per_minute": 20000, "concurrent_streams": 4}},
     "keys": [{"id": "q7Xk2mPd", "name": "alice", "tier": "trial", "hash": "…", …}]}

A key is "tw-" and 32 random bytes. What guards it is SHA-256: a slow hash with salt is for
passwords, which can be guessed; 256 random bits can't, at any speed.
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
    "KeyFile",
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
_ID_LENGTH = 8  # characters of the key that name it; 208 random bits remain
_NOBODY = hashlib.sha256(b"").hexdigest()
_Limit: TypeAlias = Annotated[int, Meta(ge=1, le=2**53)]


class KeyFileError(Exception):
    """The keys file can't be used. The message is one sentence."""


class Tier(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the keys of a tier may do, each of them; None = no limit."""

    max_tokens: _Limit | None = None
    """Tokens that a choice may have; more asked for is silently lowered"""
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Of prompts and output together"""
    concurrent_streams: _Limit | None = None
    """Completions under way at a time, streamed or not"""
    models: tuple[str, ...] | None = None
    """Canonical ids of the models that may be used"""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Higher is served first"""


class Key(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key, without what is secret of it."""

    id: Annotated[str, Meta(min_length=_ID_LENGTH, max_length=_ID_LENGTH)]
    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the whole key, in hexadecimal"""
    tier: str
    created: int
    """Unix seconds"""
    name: str = ""
    revoked: int | None = None
    """Unix seconds"""


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    tiers: dict[str, Tier]
    keys: tuple[Key, ...] = ()


_EMPTY = KeyFile({"default": Tier()})


def key_id(secret: str) -> str:
    """What names a key: part of it, and no secret."""
    return secret.removeprefix(_PREFIX)[:_ID_LENGTH]


def matches(secret: str, key: Key | None) -> bool:
    """Whether the text is that key. It takes as long whatever the answer, and without a key too."""
    digest = hashlib.sha256(secret.encode()).hexdigest()
    is_same = hmac.compare_digest(digest, _NOBODY if key is None else key.hash)
    return is_same and key is not None


def read_keys(path: Path) -> KeyFile:
    """The file. Raises KeyFileError."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeyFile)
        _require_consistent(file)
    except OSError as error:
        raise KeyFileError(f"The keys file {path} can't be read: {error.strerror}.") from None
    except RecursionError:
        raise KeyFileError(f"The keys file {path} is nested too deeply.") from None
    except ValueError as error:  # of JSON, of UTF-8, of a type, or raised below
        why = " ".join(str(error).split()).rstrip(".")
        raise KeyFileError(f"The keys file {path} is wrong: {why}.") from None
    return file


def add_key(path: Path, tier: str = "default", name: str = "") -> str:
    """Makes a key and returns it; nothing else ever knows it. A missing file is made."""
    with _locked(path):
        file = read_keys(path) if path.exists() else _EMPTY
        if tier not in file.tiers:
            known = ", ".join(sorted(file.tiers)) or "none"
            raise KeyFileError(f"There is no tier {tier} in {path}; there are: {known}.")
        secret = _new_secret({key.id for key in file.keys})
        digest = hashlib.sha256(secret.encode()).hexdigest()
        key = Key(key_id(secret), digest, tier, int(time.time()), name)
        _write(path, KeyFile(file.tiers, (*file.keys, key)))
    return secret


def revoke_key(path: Path, identity: str) -> Key:
    """Revokes the key of an id, for ever, and returns it."""
    with _locked(path):
        file = read_keys(path)
        found = next((key for key in file.keys if key.id == identity), None)
        if found is None:
            raise KeyFileError(f"There is no key {identity} in {path}.")
        if found.revoked is not None:
            raise KeyFileError(f"The key {identity} is revoked already.")
        revoked = msgspec.structs.replace(found, revoked=int(time.time()))
        keys = tuple(revoked if key is found else key for key in file.keys)
        _write(path, KeyFile(file.tiers, keys))
    return revoked


def _new_secret(taken: Collection[str]) -> str:
    """A key whose id is free and can't be taken for a flag."""
    while True:
        secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        identity = key_id(secret)
        if identity[0].isalnum() and identity not in taken:
            return secret


def _require_consistent(file: KeyFile) -> None:
    seen: set[str] = set()
    for key in file.keys:
        if key.tier not in file.tiers:
            raise ValueError(f"the key {key.id} is of tier {key.tier}, which there is not")
        if key.id in seen:
            raise ValueError(f"the key {key.id} occurs twice")
        seen.add(key.id)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other commands from changing the file meanwhile."""
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
    """All or nothing, and for the owner's eyes only (mode 0600)."""
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
