"""Unigram models of sentencepiece, in the form of tokenizer.json."""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.common.json_values import Json
from services.common.tokenizer_files.definition import (
    SPACE,
    AddedToken,
    PieceKind,
    Pieces,
    TokenizerError,
    sentencepiece_decoder,
    tokenizer_definition,
)

__all__ = ["Normalization", "sentencepiece_unigram"]

_SEPARATOR = "\ufff0"
"""Unassigned character that makes `Precompiled` normalise the characters around it one by one"""
_ALONE = (
    "\t\n -~\u00a0-\u00ac\u00ae-\u02ff\u0370-\u0482\u048a-\u058f\u1e00-\u1fff"
    "\u2010-\u2027\u2030-\u205e\u20a0-\u20cf\u2100-\u2bff\u3000-\u3029\u3030-\u303e"
    "\u3041-\u3096\u309b-\u30ff\u3400-\u9fff\uac00-\ud7a3\uff01-\uff60"
    "\U0001f300-\U0001f3fa\U0001f400-\U0001faff"
)
"""Ranges of characters of which no two form one grapheme"""
_BETWEEN = rf"(?<=[^{_ALONE}])(?=[\s\S])|(?<=[{_ALONE}])(?=[^{_ALONE}])"
_FIRST_PLACEHOLDER = 0xF0000  # private use
_MOST_HELD = 256  # characters
_BONUS = 0.1  # sentencepiece's constant, which makes it prefer users' symbols to all other pieces
_FRAMED = re.compile(r"<.+>|\[.+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Changes that sentencepiece makes to a text before it cuts it into pieces."""

    charsmap: bytes
    """Compiled rules of NFKC, perhaps with case folding; empty = characters stay"""
    removes_extra_spaces: bool
    """True if spaces at both ends are removed, and runs of spaces become one"""


def sentencepiece_unigram(
    pieces: Pieces, normalization: Normalization, unknown: int
) -> dict[str, Json]:
    """Return a Unigram model of sentencepiece. unknown: id of the unknown token.

    Raises TokenizerError for a model that would give other ids than in sentencepiece.
    """
    unused = (t for t, k in zip(pieces.texts, pieces.kinds, strict=True) if k == PieceKind.UNUSED)
    if any(len(text) == 1 for text in unused):
        raise TokenizerError("it has an unused piece of one character, which is not read")
    if not 0 <= unknown < len(pieces.texts):
        raise TokenizerError("it names no unknown token")
    if len(set(pieces.texts)) < len(pieces.texts):
        raise TokenizerError("it has a token twice")
    return tokenizer_definition(
        _added(pieces),
        normalizer={"type": "Sequence", "normalizers": list(_normalizers(pieces, normalization))},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [*_spaces(pieces), _guard(pieces)],
        },
        decoder=sentencepiece_decoder(pieces.adds_space),
        model={
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [
                [text, score] for text, score in zip(pieces.texts, _scores(pieces), strict=True)
            ],
            "byte_fallback": PieceKind.BYTE in pieces.kinds,
        },
    )


def _added(pieces: Pieces) -> list[AddedToken]:
    """Return control tokens, and symbols of users that look like them.

    Other symbols stay pieces: a text that begins with one gets the space that texts begin with.
    """
    return [token for token in pieces.added if token.special or _FRAMED.fullmatch(token.content)]


def _scores(pieces: Pieces) -> Iterator[float]:
    """Yield the pieces' scores. Those that `_guard` excludes must not lower the lowest one."""
    normal = [
        score
        for score, kind in zip(pieces.scores, pieces.kinds, strict=True)
        if kind == PieceKind.NORMAL
    ]
    lowest, highest = min(normal, default=0.0), max(normal, default=0.0)
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        if kind == PieceKind.USER_DEFINED:
            yield len(text.encode()) * max(highest, 0.0) - _BONUS
        else:
            yield score if kind == PieceKind.NORMAL else lowest


def _normalizers(pieces: Pieces, normalization: Normalization) -> Iterator[Json]:
    if normalization.charsmap:
        held: dict[str, str] = {}
        yield from _held_symbols(pieces, normalization.charsmap, held)
        yield from _character_rules(normalization.charsmap)
        yield from (_replace(place, character) for character, place in held.items())
    if normalization.removes_extra_spaces:
        ends = rf"[ {SPACE}]+\z"
        yield _replace_expression(ends if pieces.adds_space else rf"\A +|{ends}", "")
        yield _replace_expression(" {2,}", " ")
    elif pieces.adds_space:
        yield _replace(" ", SPACE)


def _character_rules(charsmap: bytes) -> Iterator[Json]:
    """Yield normalizers that apply the rules of `charsmap` in the way of sentencepiece.

    `Precompiled` applies one rule to a whole grapheme, that of its shortest prefix, and drops the
    rest of the grapheme. So it gets characters one at a time, and NFC applies the rules for several
    characters.
    """
    compose: Json = {"type": "NFC"}
    encoded = base64.b64encode(charsmap).decode()
    yield from (compose, _replace_expression(_BETWEEN, _SEPARATOR))
    yield {"type": "Precompiled", "precompiled_charsmap": encoded}
    yield from (_replace(_SEPARATOR, ""), compose)


def _held_symbols(pieces: Pieces, charsmap: bytes, held: dict[str, str]) -> Iterator[Json]:
    """Yield normalizers that protect user-defined symbols from the rules, the longest first.

    held: placeholder of each of their characters, added here. Characters are replaced one at a
    time, because a text loses its start with the first of several. Raises TokenizerError if there
    are too many characters.
    """
    normalize = _normalize(charsmap)
    changed = [
        text
        for text, kind in zip(pieces.texts, pieces.kinds, strict=True)
        if kind == PieceKind.USER_DEFINED and normalize(text) != text
    ]
    if (count := sum(map(len, changed))) > _MOST_HELD:
        raise TokenizerError(
            f"its normalisation changes symbols of users of {count} characters, and at most "
            f"{_MOST_HELD} are read"
        )
    for text in sorted(changed, key=len, reverse=True):
        after = ""
        for place in reversed(range(len(text))):
            before = f"(?<={re.escape(text[:place])})" if place else ""
            expression = f"{before}{re.escape(text[place])}(?={after})"
            first = chr(_FIRST_PLACEHOLDER + len(held))
            after = held.setdefault(text[place], first) + after
            yield _replace_expression(expression, held[text[place]])


def _normalize(charsmap: bytes) -> Callable[[str], str]:
    from tokenizers.normalizers import Precompiled

    try:
        normalize: Callable[[str], str] = Precompiled(charsmap).normalize_str
    except Exception:  # tokenizers raises bare Exceptions
        raise TokenizerError("the rules of its normalisation are damaged") from None
    return normalize


def _spaces(pieces: Pieces) -> Iterator[Json]:
    """Yield normalizers that put a space before a text, but not behind an added token in it.

    A text that begins with " " gets no further space: its other leading spaces were removed before.
    In all other texts spaces are "▁" by now, so that the text gets a space in any case.
    """
    if pieces.adds_space:
        yield _metaspace(" ", "first")
    yield _metaspace(SPACE, "never")


def _guard(pieces: Pieces) -> Json:
    """Return the pre-tokenizer that cuts texts of unreachable pieces, such as "<0x0A>"."""
    whole = (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.BYTE, PieceKind.UNUSED)
    texts = [
        text
        for text, kind in zip(pieces.texts, pieces.kinds, strict=True)
        if kind in whole and len(text) > 1
    ]
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    expression = "|".join(
        f"{re.escape(first)}(?={'|'.join(rests)})" for first, rests in by_first.items()
    )
    return {
        "type": "Split",
        "pattern": {"Regex": expression or r"\A\z"},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }


def _metaspace(space: str, prepends: str) -> Json:
    return {"type": "Metaspace", "replacement": space, "prepend_scheme": prepends, "split": False}


def _replace(text: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def _replace_expression(expression: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": content}
