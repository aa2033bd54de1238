"""A request whose answer is recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `{NAME}` in its path and body stands for what an earlier call kept."""

    name: str
    method: str
    path: str
    body: Any = None
    keep: Mapping[str, str] = field(default_factory=dict)
    """Names for fields of the answer, or of a stream's first event, which later calls use"""
    until: Sequence[str] = ()
    """Values of the answer's `status`, for one of which the call is repeated"""
    form: Mapping[str, tuple[str, bytes] | str] | None = None
    """Fields of a multipart form in place of a body: texts, and files by name and content"""
    raw: bytes | None = None
    """A body that need not be JSON, in place of `body`"""
    headers: Mapping[str, str] = field(default_factory=dict)
