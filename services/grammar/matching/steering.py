"""What no grammar holds: that no object repeats a key and that no item of some arrays comes twice.

A state follows the text, of compact JSON, byte by byte. It knows the keys and items that there
are, and so which tokens would repeat one. Where every continuation would, the beginning that leads
there is avoided (`word_sets`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Optional

from services.grammar.matching.token_index import TokenIndex, ids_of
from services.grammar.schemas.json_positions import JsonPositions, Position
from services.grammar.schemas.word_sets import meaning_of

__all__ = ["Steering"]

_QUOTE, _BACKSLASH, _COMMA, _OPEN_ARRAY, _OPEN_OBJECT = b'"\\,[{'
_CLOSERS = b"]}"


class _Mode(Enum):
    VALUE = "a value, or the end of an empty array"
    KEY = "a key, or the end of an empty object"
    IN_KEY = "the rest of a key"
    COLON = "what follows a key"
    IN_STRING = "the rest of a string"
    IN_SCALAR = "the rest of a number or a name, or what follows it"
    AFTER = "what follows a value"


class _RepeatError(Exception):
    """A key or an item comes twice."""


@dataclass(frozen=True, slots=True)
class _Container:
    """An object or an array that is open."""

    outer: Optional["_Container"]
    position: Position
    is_object: bool
    is_unique: bool = False
    count: int = 0
    start: int = 0
    """Where its item begins in the state's text, if it is unique"""
    taken: frozenset[str] = frozenset()
    """The meanings of items, or the keys"""
    words: frozenset[bytes] = frozenset()
    """The items as they are spelt"""
    spent: frozenset[bytes] = frozenset()
    """Beginnings of items or, with their quotes, of keys that lead only to those taken"""
    key: bytes = b""
    within_unique: bool = False


class Steering:
    """The state behind some text. States never change: each token makes another."""

    __slots__ = ("_container", "_index", "_is_escaped", "_mode", "_part", "_positions", "_text",
                 "previous")  # fmt: skip

    def __init__(self, positions: JsonPositions, index: TokenIndex) -> None:
        self._positions = positions
        self._index = index
        self._container: _Container | None = None
        self._mode = _Mode.VALUE
        self._is_escaped = False
        self._part = b""  # of a key
        self._text = b""  # since the outermost array began that may repeat nothing
        self.previous: Steering | None = None

    def after(self, token: int) -> "Steering | None":
        """The state behind a token; None where it repeats something."""
        state = Steering(self._positions, self._index)
        state._container, state._mode = self._container, self._mode
        state._is_escaped, state._part, state._text = self._is_escaped, self._part, self._text
        state.previous = self
        try:
            for byte in self._index.spellings[token]:
                state._take(byte)
        except _RepeatError:
            return None
        return state

    def forbidden(self, mask: int) -> int:
        """The tokens of a mask that would repeat something, as bits."""
        suspects = 0
        for bits in self._suspects():
            suspects |= bits
        bits = 0
        for token in ids_of(suspects & mask):
            if self.after(token) is None:
                bits |= 1 << token
        return bits

    def _suspects(self) -> Iterator[int]:
        """Tokens among which are all that would repeat something."""
        index, container = self._index, self._container
        yield index.repeats_keys
        if self._mode is _Mode.IN_KEY and container is not None:
            beginning = b'"' + self._part
            words = frozenset(b'"%s"' % key.encode() for key in container.taken)
            yield from self._continuing(beginning, words | container.spent)
        while container is not None:
            if container.is_object:
                for key in container.taken:
                    yield index.holding(key.encode())
                if container.spent:
                    yield index.ends_items  # a comma must not follow the last key
                    yield index.led_by(b'"')
            elif container.is_unique:
                words = container.words | container.spent
                yield from self._continuing(self._text[container.start :], words)
                yield index.hold_items
                is_text = container is self._container and self._mode is _Mode.IN_STRING
                if words and (container.spent - container.words or not is_text):
                    yield index.ends_items  # what is no string may be spelt in several ways
            container = container.outer

    def _continuing(self, beginning: bytes, words: Iterable[bytes]) -> Iterator[int]:
        for word in words:
            if len(word) > len(beginning) and word.startswith(beginning):
                yield self._index.led_by(word[len(beginning) :])

    def _take(self, byte: int) -> None:
        if self._mode is _Mode.IN_SCALAR and byte in b",]}":
            self._end_value(b"")
        match self._mode:
            case _Mode.IN_STRING | _Mode.IN_KEY:
                self._take_in_string(byte)
            case _Mode.COLON:
                self._mode = _Mode.VALUE
            case _Mode.KEY if byte == _QUOTE:
                self._mode, self._part = _Mode.IN_KEY, b""
            case _Mode.AFTER if byte == _COMMA:
                self._next()
            case _Mode.VALUE | _Mode.KEY | _Mode.AFTER if byte in _CLOSERS:
                self._close(bytes([byte]))
            case _Mode.VALUE:
                self._begin(byte)
        self._add(byte)

    def _add(self, byte: int) -> None:
        """Note a byte where items may have to differ, and avoid the beginnings that are spent."""
        container = self._container
        if container is None or not container.within_unique:
            self._text = b""
            return
        self._text += bytes([byte])
        if byte in b"[," and container.is_unique and self._mode is _Mode.VALUE:
            self._container = replace(container, start=len(self._text))
            container = self._container.outer
        elif container.is_unique and self._mode is _Mode.AFTER:
            container = container.outer  # an item has ended, and was found to be new
        while container is not None:
            if container.is_unique and self._text[container.start :] in container.spent:
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
            self._part += bytes([byte])
            if self._container.spent and b'"' + self._part in self._container.spent:
                raise _RepeatError

    def _end_key(self) -> None:
        container = self._container
        assert container is not None
        name = self._part.decode(errors="surrogateescape")
        if name in container.taken:
            raise _RepeatError
        taken, spent = container.taken | {name}, container.spent
        if (keys := self._positions.keys_of(container.position)) is not None:
            meanings = {f'"{key}"' for key in taken}
            spent = keys.spent(spent, meanings, b'"%s"' % self._part)
        self._container = replace(container, taken=taken, spent=spent, key=self._part)
        self._mode = _Mode.COLON

    def _end_value(self, last: bytes) -> None:
        """A value ends with these bytes, or ended before."""
        self._mode = _Mode.AFTER
        container = self._container
        if container is None or not container.is_unique:
            return
        word = self._text[container.start :] + last
        meaning = meaning_of(word)
        if meaning in container.taken:
            raise _RepeatError
        taken, spent = container.taken | {meaning}, container.spent
        if (items := self._positions.items_of(container.position)) is not None:
            spent = items.spent(spent, taken, word)
            if meaning == _ZERO:
                spent = items.spent(spent, taken, b"-0" if word == b"0" else b"0")
        words = container.words | {word}
        self._container = replace(container, taken=taken, spent=spent, words=words)

    def _next(self) -> None:
        container = self._container
        assert container is not None
        if b"" in container.spent:
            raise _RepeatError  # all that there are have come
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
        """The position of the value that begins."""
        container = self._container
        if container is None:
            return self._positions.start
        if container.is_object:
            return self._positions.member(container.position, container.key)
        return self._positions.item(container.position, container.count)


_ZERO = meaning_of(b"0")
