"""Incremental decoding of token ids to text, as soon as the text is certain.

Every token adds fixed bytes to the decoded stream. So the state is a table of bytes by id, from the
checkpoint's decoder, and at most three pending bytes.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

__all__ = ["Detokenizer", "TokenTable", "UnsupportedDecoderError", "token_table"]

_REPLACEMENT = "\ufffd"
_PER_BYTE = "tokenwire.replace_each_byte"
_MAX_CHARACTER_BYTES = 4  # bytes of a character in UTF-8
_JOINED = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")
"""Tokens that WordPiece decoders join to the token before"""


def _replace_each_byte(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_each_byte)


class UnsupportedDecoderError(Exception):
    """The checkpoint's decoder has an unsupported kind."""


class LeadingSpace(Enum):
    """Treatment of spaces at the start of a text."""

    KEPT = "kept"
    ONE_STRIPPED = "one stripped"
    FIRST_TOKEN_STRIPPED = "first token stripped"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes and text that each token adds to the decoded stream, by id."""

    pieces: Sequence[bytes]
    texts: Sequence[str | None]
    """Texts of the pieces; None for a piece that does not consist of whole characters."""
    leading_space: LeadingSpace
    errors: str
    """Error handler of the codecs registry for bytes that are not UTF-8"""
    hidden: Mapping[int, str]
    """Texts of the special tokens that the decoded stream leaves out"""

    def without(self, hidden: Mapping[int, str]) -> "TokenTable":
        """Return the table in which these special tokens, texts by id, add nothing."""
        pieces, texts = list(self.pieces), list(self.texts)
        for token in hidden:
            pieces[token], texts[token] = b"", ""
        return replace(self, pieces=pieces, texts=texts, hidden=hidden)


class Detokenizer:
    """Decoder of one sequence of ids. It holds back the bytes of an unfinished character."""

    __slots__ = ("_at_start", "_direct", "_inherited", "_pending", "_table", "_texts")

    def __init__(
        self, table: TokenTable, prompt: Sequence[int] = (), *, begins_text: bool = True
    ) -> None:
        """prompt: ids before the text. begins_text: whether ids begin a text if it adds no text."""
        self._table = table
        self._texts = table.texts
        self._pending = b""
        self._at_start = (
            begins_text
            and table.leading_space is not LeadingSpace.KEPT
            and not any(table.pieces[token] for token in prompt)
        )
        tail = b""
        for token in reversed(prompt):
            if token in table.hidden:  # an echo contains the token's text, which ends the character
                break
            tail = table.pieces[token] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        if tail:
            self._pending = tail[codecs.utf_8_decode(tail, table.errors, False)[1] :]
        self._inherited = bool(self._pending)
        self._direct = not self._pending and not self._at_start

    @property
    def holds_back(self) -> bool:
        """True if bytes of an unfinished character are held back."""
        return bool(self._pending)

    @property
    def is_inherited(self) -> bool:
        """True if all held bytes come from the prompt."""
        return self._inherited

    def leaves_out(self, token: int) -> bool:
        """Return whether the stream leaves out the text of this special token."""
        return token in self._table.hidden

    def is_silent(self, token: int) -> bool:
        """Return whether the token adds no bytes in any context."""
        return not self._table.pieces[token]

    def feed(self, token: int) -> str:
        """Return the text that the token adds; "" if its bytes end inside a character."""
        text = self._texts[token]
        if text is not None and self._direct:
            return text
        piece, self._at_start = self._without_leading_space(self._table.pieces[token])
        if piece:
            self._inherited = False
        data = self._pending + piece
        text, consumed = codecs.utf_8_decode(data, self._table.errors, False)
        self._pending = data[consumed:]
        self._direct = not self._pending and not self._at_start
        return text

    def peek(self, token: int) -> str:
        """Return the text that the token would add; its own text if the stream leaves it out."""
        if (hidden := self._table.hidden.get(token)) is not None:
            return hidden
        text = self._texts[token]
        if text is not None and self._direct:
            return text
        piece, _ = self._without_leading_space(self._table.pieces[token])
        return codecs.utf_8_decode(self._pending + piece, self._table.errors, False)[0]

    def flush(self) -> str:
        """Return U+FFFD for the held bytes: no more ids follow."""
        text, _ = codecs.utf_8_decode(self._pending, self._table.errors, True)
        self._pending = b""
        self._inherited = False
        self._direct = not self._at_start
        return text

    def _without_leading_space(self, piece: bytes) -> tuple[bytes, bool]:
        """Return the piece as it adds to the text, and whether the text still begins after it."""
        if not self._at_start or not piece:
            return piece, self._at_start
        if self._table.leading_space is LeadingSpace.ONE_STRIPPED:
            return piece.removeprefix(b" "), False
        return piece.replace(b" ", b""), False


def token_table(
    vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None, size: int
) -> TokenTable:
    """Return the table of a tokenizer.json with this "decoder" object.

    Ids below `size` without a token add nothing. Raises UnsupportedDecoderError.
    """
    steps = _flatten(decoder)
    names = [str(step["type"]) for step in steps]
    pieces = [b""] * size
    for token, index in vocabulary.items():
        pieces[index] = _piece(token, steps)
    errors = _PER_BYTE if "ByteFallback" in names else "replace"
    texts = [_whole(piece) for piece in pieces]
    return TokenTable(pieces, texts, _leading_space(steps), errors, {})


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise UnsupportedDecoderError("it has no decoder")
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
    if decoder["type"] not in known:
        raise UnsupportedDecoderError(f"its decoder is a {decoder['type']}")
    if decoder["type"] == "Replace" and "String" not in decoder["pattern"]:
        raise UnsupportedDecoderError("its decoder replaces a regular expression")
    return [decoder]


def _leading_space(steps: Sequence[Mapping[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "WordPiece":
            return LeadingSpace.FIRST_TOKEN_STRIPPED
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return LeadingSpace.FIRST_TOKEN_STRIPPED
        if step["type"] == "Strip" and step["content"] == " " and step["start"]:
            if step["start"] != 1 or step["stop"]:
                raise UnsupportedDecoderError("its decoder strips more than one leading space")
            return LeadingSpace.ONE_STRIPPED
    return LeadingSpace.KEPT


def _piece(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes that a token adds after all steps of the decoder."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token, which stands for itself
                return token.encode()
        if kind == "WordPiece":
            token = _word_piece(token, step)
        elif kind == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace":
            token = token.replace(step.get("replacement", "▁"), " ")
        elif kind == "ByteFallback" and (byte := _fallback_byte(token)) is not None:
            return byte
    return token.encode()


def _word_piece(token: str, step: Mapping[str, Any]) -> str:
    """Return the text that a token of BERT adds behind another token."""
    prefix = str(step.get("prefix", "##"))
    text = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    for joined in _JOINED if step.get("cleanup", True) else ():
        text = text.replace(f" {joined}", joined)
    return text


def _fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token such as "<0x0A>" names; None for other tokens."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's printable alphabet (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_level_alphabet()
