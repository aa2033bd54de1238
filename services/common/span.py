"""Interface of a request's span."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Attributes", "Span"]

Attributes: TypeAlias = Mapping[str, str | int | float | Sequence[str]]


class Span:
    """Span of one request. This class records nothing; tracing replaces it by an exported span."""

    __slots__ = ("traceparent",)
    is_recording = False
    """True if the span will be exported; otherwise its attributes need not be computed"""

    def __init__(self, traceparent: str) -> None:
        """traceparent: trace context for the next service and the log; "" = none."""
        self.traceparent = traceparent

    def set(self, attributes: Attributes) -> None:
        """Add attributes; empty strings are left out."""

    def rename(self, name: str) -> None:
        """Replace the name."""

    def fail(self, reason: str, error: str = "", field: str = "") -> None:
        """Set the status to error. The parameters are those of `ServiceError`."""

    def end(self) -> None:
        """End the span. Nothing may be called after it."""
