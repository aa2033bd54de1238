"""Translation of patterns, which match anywhere in a text, to expressions that match it in full.

llguidance supports `^` and `$` only at the ends of an expression, and escapes some characters
wrongly in JSON strings. So the expressions have no inner anchors, and only SPELLABLE characters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from services.grammar import GrammarError
from services.grammar.patterns.character_sets import (
    SPELLABLE,
    Ranges,
    as_class,
    as_literal,
    complement,
    intersection,
)
from services.grammar.patterns.pattern import (
    Alternation,
    Anchor,
    CharacterClass,
    Concatenation,
    Lookahead,
    Node,
    Repetition,
    parse,
)

__all__ = ["full_match_expressions"]

_ANY = "(?s:.)"
_MAX_LENGTH = 200_000  # characters; each inner anchor duplicates the nodes around it
_SPELLABLE_CLASS = f"[{as_class(SPELLABLE)}]"


@dataclass(frozen=True, slots=True)
class _Piece:
    """An expression without anchors."""

    text: str
    may_be_empty: bool
    """True if it matches the empty text"""
    is_atom: bool = False
    """True if a quantifier after it applies to all of it"""


_EMPTY = _Piece("", may_be_empty=True)
_Anchors: TypeAlias = tuple[bool, bool]
"""True if a match must begin at the start of the text, and end at its end"""
_FREE: _Anchors = (False, False)
_Language: TypeAlias = Mapping[_Anchors, _Piece]
"""The matches of a tree by their anchors; empty if no SPELLABLE text matches."""


def full_match_expressions(pattern: str) -> list[str] | None:
    """Return expressions in llguidance's syntax that together are equivalent to a pattern.

    Each has the form `^(?:…)$`, and a text must match all of them. There are several only if the
    pattern begins with lookaheads. They consider SPELLABLE texts only; the result is None if no
    such text matches. Raises GrammarError as `parse` does, and for anchors and lookaheads that
    can't be moved to the ends.
    """
    wholes: list[str] = []
    for node in _conjunction(parse(pattern)):
        whole = _whole(_language(node))
        if whole is None:
            return None
        wholes.append(whole)
    return wholes


def _conjunction(node: Node) -> list[Node]:
    """Return the conjuncts of a tree: `^(?=a)b` means both `^a` and `^b`."""
    if not isinstance(node, Concatenation) or node.parts[:1] != [Anchor(is_start=True)]:
        return [node]
    rest = list(node.parts[1:])
    nodes: list[Node] = []
    while rest and isinstance(lookahead := rest[0], Lookahead):
        nodes.append(Concatenation([Anchor(is_start=True), lookahead.body]))
        del rest[0]
    return [*nodes, Concatenation([Anchor(is_start=True), *rest])]


def _whole(language: _Language) -> str | None:
    """Return the expression of the texts that contain a match, or None if there are none."""
    options: list[str] = []
    for (at_start, at_end), piece in language.items():
        before, behind = "" if at_start else f"{_ANY}*", "" if at_end else f"{_ANY}*"
        options.append(f"{before}{piece.text}{behind}")
    return f"^(?:{'|'.join(options)})$" if options else None


def _language(node: Node) -> _Language:
    match node:
        case CharacterClass():
            text = _characters(node)
            return {} if text is None else {_FREE: _Piece(text, False, is_atom=True)}
        case Anchor():
            return {(node.is_start, not node.is_start): _EMPTY}
        case Lookahead():
            raise GrammarError(
                "(?=…) is supported only at the start of a pattern, after ^ "
                f"(character {node.place})"
            )
        case Concatenation():
            return _concatenated([_language(part) for part in node.parts])
        case Alternation():
            return _united([_language(option) for option in node.options])
        case Repetition():
            return _repeated(node)


def _concatenated(languages: Sequence[_Language]) -> _Language:
    whole: _Language = {_FREE: _EMPTY}
    for is_free, run in groupby(languages, key=lambda language: language.keys() == {_FREE}):
        if is_free:  # join a run at once: joining piece by piece takes quadratic time
            whole = _followed(whole, {_FREE: _joined([language[_FREE] for language in run])})
        else:
            for language in run:
                whole = _followed(whole, language)
    return whole


def _followed(one: _Language, other: _Language) -> _Language:
    """Concatenate two languages. Pieces before an inner ^ and after an inner $ must be empty."""
    found: list[_Language] = []
    for (start, ends), first in one.items():
        for (begins, end), second in other.items():
            if (begins and not first.may_be_empty) or (ends and not second.may_be_empty):
                continue
            parts = [] if begins else [first], [] if ends else [second]
            anchors = (start or begins, end or ends)
            found.append({anchors: _joined([*parts[0], *parts[1]])})
    return _united(found)


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    pieces = [piece for piece in pieces if piece.text]
    if len(pieces) == 1:
        return pieces[0]
    text = _bounded("".join(piece.text for piece in pieces))
    return _Piece(text, all(piece.may_be_empty for piece in pieces))


def _united(languages: Iterable[_Language]) -> _Language:
    options: dict[_Anchors, list[_Piece]] = {}
    for language in languages:
        for anchors, piece in language.items():
            options.setdefault(anchors, []).append(piece)
    return {anchors: _either(pieces) for anchors, pieces in options.items()}


def _either(pieces: Sequence[_Piece]) -> _Piece:
    texts = list(dict.fromkeys(piece.text for piece in pieces))
    if len(texts) == 1:
        return pieces[0]
    may_be_empty = any(piece.may_be_empty for piece in pieces)
    return _Piece(_bounded(f"(?:{'|'.join(texts)})"), may_be_empty, is_atom=True)


def _bounded(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise GrammarError("the pattern is too complex")
    return text


def _repeated(node: Repetition) -> _Language:
    body = _language(node.body)
    if node.most == 0:
        return {_FREE: _EMPTY}
    if body.keys() - {_FREE}:
        if (node.least, node.most) == (1, 1):
            return body
        if (node.least, node.most) == (0, 1):
            return _united([{_FREE: _EMPTY}, body])
        raise GrammarError(f"^ or $ inside a repetition is not supported (character {node.place})")
    if not body:
        return {_FREE: _EMPTY} if node.least == 0 else {}
    piece = body[_FREE]
    if not piece.text:
        return body
    inner = piece.text if piece.is_atom else f"(?:{piece.text})"
    may_be_empty = piece.may_be_empty or node.least == 0
    return {_FREE: _Piece(inner + _quantifier(node.least, node.most), may_be_empty)}


def _quantifier(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short is not None:
        return short
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _characters(node: CharacterClass) -> str | None:
    """Return the class of the SPELLABLE characters of a set, or None if there are none."""
    if node.properties or (node.ignores_case and node.is_negated):
        negation = "^" if node.is_negated else ""
        inner = f"{negation}{as_class(node.ranges)}{''.join(node.properties)}"
        if inner == "^":
            return _ANY
        text = f"[[{inner}]&&{_SPELLABLE_CLASS}]"
    else:
        ranges = complement(node.ranges) if node.is_negated else node.ranges
        ranges = intersection(ranges, SPELLABLE)
        if not ranges:
            return None
        text = _class(ranges)
    return f"(?i:{text})" if node.ignores_case else text


def _class(ranges: Ranges) -> str:
    if ranges == SPELLABLE:
        return _ANY
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return as_literal(ranges[0][0])
    return f"[{as_class(ranges)}]"
