"""Extent of a value of JSON: the place in a text where it ends."""

from dataclasses import dataclass, replace

__all__ = ["JsonExtent"]

_QUOTE, _BACKSLASH = b'"\\'
_OPENERS, _CLOSERS = b"[{", b"]}"
_SCALAR = frozenset(b"+-.0123456789Eaeflnrstu")  # bytes of numbers and literals


@dataclass(frozen=True, slots=True)
class JsonExtent:
    """The state after the beginning of a value."""

    depth: int = 0
    """Number of open objects and arrays"""
    in_string: bool = False
    is_escaped: bool = False
    in_scalar: bool = False
    """True in a number or a literal that is the whole value"""

    def after(self, text: bytes) -> tuple["JsonExtent | None", int]:
        """Return the state after a text, and the number of its bytes that belong to the value.

        The state is None once the value has ended.
        """
        state = self
        for place, byte in enumerate(text):
            if state.in_scalar and byte not in _SCALAR:
                return None, place
            state = state._after(byte)
            if not (state.depth or state.in_string or state.in_scalar):
                return None, place + 1
        return state, len(text)

    def _after(self, byte: int) -> "JsonExtent":
        if self.is_escaped:
            return replace(self, is_escaped=False)
        if self.in_string and byte == _BACKSLASH:
            return replace(self, is_escaped=True)
        if byte == _QUOTE:
            return replace(self, in_string=not self.in_string)
        if self.in_string or self.in_scalar:
            return self
        if byte in _OPENERS:
            return replace(self, depth=self.depth + 1)
        if byte in _CLOSERS:
            return replace(self, depth=self.depth - 1)
        return self if self.depth else replace(self, in_scalar=True)
