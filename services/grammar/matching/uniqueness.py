"""Duplicate detection: no object repeats a key, and no array under "uniqueItems" repeats an item.

No context-free grammar can express this. A state follows JSON byte by byte, without the white space
between its tokens. It has the keys and items so far, and so knows the tokens that would repeat one.
Where every word with some prefix is used, the prefix itself is forbidden (`word_sets`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Optional

from services.grammar.matching.token_index import TokenIndex, ids_of
from services.grammar.schemas.json_positions import JsonPositions, Position
from services.grammar.schemas.word_sets import canonical

__all__ = ["UniquenessState"]

_QUOTE, _BACKSLASH, _COMMA, _OPEN_ARRAY, _OPEN_OBJECT = b'"\\,[{'
_CLOSERS = b"]}"
_SPACES = b" \t\n\r"


class _Mode(Enum):
    """The expected next part of the text."""

    VALUE = "a value, or the end of an empty array"
    KEY = "a key, or the end of an empty object"
    IN_KEY = "the rest of a key"
    COLON = "the colon after a key"
    IN_STRING = "the rest of a string"
    IN_SCALAR = "the rest of a number or a literal, or the end of it"
    AFTER = "a comma or a bracket after a value"


class _RepeatError(Exception):
    """A key or an item is repeated."""


@dataclass(frozen=True, slots=True)
class _Container:
    """An open object or array."""

    outer: Optional["_Container"]
    position: Position
    is_object: bool
    is_unique: bool = False
    count: int = 0
    start: int = 0
    """Offset of the current item in the state's text, if the array is unique"""
    seen: frozenset[str] = frozenset()
    """Keys of the object so far, or canonical forms of the array's items so far"""
    words: frozenset[bytes] = frozenset()
    """Items of the array so far as written, without white space between tokens"""
    exhausted: frozenset[bytes] = frozenset()
    """Prefixes of items or of quoted keys, all completions of which are used"""
    key: bytes = b""
    within_unique: bool = False
    """True if the container or one around it is a unique array"""


class UniquenessState:
    """The state after a text. It is immutable: each token leads to a new state."""

    __slots__ = ("_container", "_index", "_is_escaped", "_key", "_mode", "_positions", "_text")

    def __init__(self, positions: JsonPositions, index: TokenIndex) -> None:
        self._positions = positions
        self._index = index
        self._container: _Container | None = None
        self._mode = _Mode.VALUE
        self._is_escaped = False
        self._key = b""  # beginning of the current key
        self._text = b""  # text since the start of the outermost unique array

    def after(self, token: int) -> "UniquenessState | None":
        """Return the state after a token, or None if the token repeats a key or an item."""
        return self.after_text(self._index.spellings[token])

    def after_text(self, text: bytes) -> "UniquenessState | None":
        """Return the state after a text, or None if the text repeats a key or an item.

        The text may go on behind the end of the JSON; that part has no effect.
        """
        state = UniquenessState(self._positions, self._index)
        state._container, state._mode = self._container, self._mode
        state._is_escaped, state._key, state._text = self._is_escaped, self._key, self._text
        try:
            for byte in text:
                state._take(byte)
                if state._container is None and state._mode is _Mode.AFTER:
                    break
        except _RepeatError:
            return None
        return state

    def forbidden(self, mask: int) -> int:
        """Return the tokens of a mask that would repeat a key or an item, as bits."""
        suspects = 0
        for bits in self._suspects():
            suspects |= bits
        bits = 0
        for token in ids_of(suspects & mask):
            if self.after(token) is None:
                bits |= 1 << token
        return bits

    def _suspects(self) -> Iterator[int]:
        """Yield token sets whose union includes all tokens that would repeat a key or an item."""
        index, container = self._index, self._container
        yield index.repeating_keys
        if self._mode is _Mode.IN_KEY and container is not None:
            words = frozenset(b'"%s"' % key.encode() for key in container.seen)
            yield from self._completing(b'"' + self._key, words | container.exhausted)
        while container is not None:
            if container.is_object:
                for key in container.seen:
                    yield index.containing_string(key.encode())
                if container.exhausted:
                    yield index.ending_items  # no comma may follow the last possible key
                    yield index.starting_with(b'"')
            elif container.is_unique:
                words = container.words | container.exhausted
                yield from self._completing(self._text[container.start :], words)
                yield index.containing_items
                is_text = container is self._container and self._mode is _Mode.IN_STRING
                if words and (container.exhausted - container.words or not is_text):
                    yield index.ending_items  # equal values other than strings may differ in text
            container = container.outer

    def _completing(self, prefix: bytes, words: Iterable[bytes]) -> Iterator[int]:
        for word in words:
            if len(word) > len(prefix) and word.startswith(prefix):
                yield self._index.starting_with(word[len(prefix) :])

    def _take(self, byte: int) -> None:
        if self._mode is _Mode.IN_SCALAR and byte in b",]} \t\n\r":
            self._end_value(b"")
            if self._container is None:
                return
        if byte in _SPACES and self._mode not in (_Mode.IN_STRING, _Mode.IN_KEY):
            return
        match self._mode:
            case _Mode.IN_STRING | _Mode.IN_KEY:
                self._take_in_string(byte)
            case _Mode.COLON:
                self._mode = _Mode.VALUE
            case _Mode.KEY if byte == _QUOTE:
                self._mode, self._key = _Mode.IN_KEY, b""
            case _Mode.AFTER if byte == _COMMA:
                self._next()
            case _Mode.VALUE | _Mode.KEY | _Mode.AFTER if byte in _CLOSERS:
                self._close(bytes([byte]))
            case _Mode.VALUE:
                self._begin(byte)
        self._add(byte)

    def _add(self, byte: int) -> None:
        """Append a byte to the text of a unique array; raise _RepeatError at exhausted prefixes."""
        container = self._container
        if container is None or not container.within_unique:
            self._text = b""
            return
        self._text += bytes([byte])
        if byte in b"[," and container.is_unique and self._mode is _Mode.VALUE:
            self._container = replace(container, start=len(self._text))
            container = self._container.outer
        elif container.is_unique and self._mode is _Mode.AFTER:
            container = container.outer  # `_end_value` has checked the ended item
        while container is not None:
            if container.is_unique and self._text[container.start :] in container.exhausted:
                raise _RepeatError
            container = container.outer

    def _take_in_string(self, byte: int) -> None:
        is_key = self._mode is _Mode.IN_KEY
        if byte == _QUOTE and not self._is_escaped:
            if is_key:
                self._end_key()
            else:
                self._end_value(b'"')
            return
        self._is_escaped = byte == _BACKSLASH and not self._is_escaped
        if is_key:
            assert self._container is not None
            self._key += bytes([byte])
            exhausted = self._container.exhausted
            if exhausted and b'"' + self._key in exhausted:
                raise _RepeatError

    def _end_key(self) -> None:
        container = self._container
        assert container is not None
        name = self._key.decode(errors="surrogateescape")
        if name in container.seen:
            raise _RepeatError
        seen, exhausted = container.seen | {name}, container.exhausted
        if (keys := self._positions.keys_of(container.position)) is not None:
            quoted = {f'"{key}"' for key in seen}
            exhausted = keys.exhausted(exhausted, quoted, b'"%s"' % self._key)
        self._container = replace(container, seen=seen, exhausted=exhausted, key=self._key)
        self._mode = _Mode.COLON

    def _end_value(self, last: bytes) -> None:
        """End a value with `last`, or with the text so far."""
        self._mode = _Mode.AFTER
        container = self._container
        if container is None or not container.is_unique:
            return
        word = self._text[container.start :] + last
        value = canonical(word)
        if value in container.seen:
            raise _RepeatError
        seen, exhausted = container.seen | {value}, container.exhausted
        if (items := self._positions.items_of(container.position)) is not None:
            exhausted = items.exhausted(exhausted, seen, word)
            if value == _ZERO:
                exhausted = items.exhausted(exhausted, seen, b"-0" if word == b"0" else b"0")
        words = container.words | {word}
        self._container = replace(container, seen=seen, exhausted=exhausted, words=words)

    def _next(self) -> None:
        container = self._container
        assert container is not None
        if b"" in container.exhausted:
            raise _RepeatError  # every possible key or item is used
        self._mode = _Mode.KEY if container.is_object else _Mode.VALUE
        self._container = replace(container, count=container.count + 1)

    def _close(self, last: bytes) -> None:
        assert self._container is not None
        self._container = self._container.outer
        self._end_value(last)

    def _begin(self, byte: int) -> None:
        if byte in (_OPEN_ARRAY, _OPEN_OBJECT):
            is_object = byte == _OPEN_OBJECT
            position = self._inner()
            is_unique = not is_object and self._positions.is_unique(position)
            outer = self._container
            within = is_unique or (outer is not None and outer.within_unique)
            self._container = _Container(
                outer, position, is_object, is_unique, within_unique=within
            )
            self._mode = _Mode.KEY if is_object else _Mode.VALUE
        else:
            self._mode = _Mode.IN_STRING if byte == _QUOTE else _Mode.IN_SCALAR

    def _inner(self) -> Position:
        """Return the position of the value that begins."""
        container = self._container
        if container is None:
            return self._positions.start
        if container.is_object:
            return self._positions.member(container.position, container.key)
        return self._positions.item(container.position, container.count)


_ZERO = canonical(b"0")
