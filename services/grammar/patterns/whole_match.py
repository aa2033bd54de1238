"""From a pattern, which may match anywhere in a text, to an expression of the whole text.

The compiler takes `^` and `$` at the edges of an expression only, and spells some classes wrongly
in JSON. What comes out here has no other edges, and classes of what it spells rightly alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from services.grammar.error import GrammarError
from services.grammar.patterns.characters import (
    SPELLABLE,
    Ranges,
    as_class,
    as_literal,
    complement,
    intersection,
)
from services.grammar.patterns.pattern import (
    Ahead,
    Characters,
    Choice,
    Edge,
    Node,
    Repeat,
    Sequenced,
    parse,
)

__all__ = ["rewrite"]

_ANY = "(?s:.)"
_MAX_LENGTH = 200_000  # characters; edges in the midst of a pattern multiply what is around them
_SPELLABLE_CLASS = f"[{as_class(SPELLABLE)}]"


@dataclass(frozen=True, slots=True)
class _Piece:
    """An expression without edges."""

    text: str
    may_be_empty: bool
    """Whether it matches the empty text"""
    is_atom: bool = False
    """Whether a quantifier behind it is about all of it"""


_EMPTY = _Piece("", may_be_empty=True)
_Edges: TypeAlias = tuple[bool, bool]
_FREE: _Edges = (False, False)
_Language: TypeAlias = Mapping[_Edges, _Piece]
"""What a tree matches, by whether that lies at the start of the text, and at its end, of necessity.
Empty: it matches nothing that can be written."""


def rewrite(pattern: str) -> list[str] | None:
    """Expressions in the compiler's syntax, `^(?:…)$`, all of which match exactly the texts that
    the pattern matches, of those that can be written; None: there are none. One, unless the pattern
    begins with what must be ahead.

    Raises GrammarError as `parse` does, and for what can't be taken apart.
    """
    wholes: list[str] = []
    for node in _conjunction(parse(pattern)):
        whole = _whole(_language(node))
        if whole is None:
            return None
        wholes.append(whole)
    return wholes


def _conjunction(node: Node) -> list[Node]:
    """`^(?=a)b` is `^a` and `^b`, each by itself."""
    if not isinstance(node, Sequenced) or node.parts[:1] != [Edge(is_start=True)]:
        return [node]
    rest = list(node.parts[1:])
    nodes: list[Node] = []
    while rest and isinstance(ahead := rest[0], Ahead):
        nodes.append(Sequenced([Edge(is_start=True), ahead.body]))
        del rest[0]
    return [*nodes, Sequenced([Edge(is_start=True), *rest])]


def _whole(language: _Language) -> str | None:
    """The expression of the texts in which there is a match."""
    options: list[str] = []
    for (at_start, at_end), piece in language.items():
        before, behind = "" if at_start else f"{_ANY}*", "" if at_end else f"{_ANY}*"
        options.append(f"{before}{piece.text}{behind}")
    return f"^(?:{'|'.join(options)})$" if options else None


def _language(node: Node) -> _Language:
    match node:
        case Characters():
            text = _characters(node)
            return {} if text is None else {_FREE: _Piece(text, False, is_atom=True)}
        case Edge():
            return {(node.is_start, not node.is_start): _EMPTY}
        case Ahead():
            raise GrammarError(
                f"(?=…) is supported at the start of a pattern alone, behind ^ (character "
                f"{node.place})"
            )
        case Sequenced():
            return _in_sequence([_language(part) for part in node.parts])
        case Choice():
            return _united([_language(option) for option in node.options])
        case Repeat():
            return _repeated(node)


def _in_sequence(languages: Sequence[_Language]) -> _Language:
    whole: _Language = {_FREE: _EMPTY}
    for is_plain, run in groupby(languages, key=lambda language: language.keys() == {_FREE}):
        if is_plain:  # at once: what grows piece by piece is copied as often
            whole = _followed(whole, {_FREE: _joined([language[_FREE] for language in run])})
        else:
            for language in run:
                whole = _followed(whole, language)
    return whole


def _followed(one: _Language, other: _Language) -> _Language:
    """Where the start of the text is asked for in the midst, nothing is before it, and so on."""
    found: list[_Language] = []
    for (start, ends), first in one.items():
        for (begins, end), second in other.items():
            if (begins and not first.may_be_empty) or (ends and not second.may_be_empty):
                continue
            parts = [] if begins else [first], [] if ends else [second]
            edges = (start or begins, end or ends)
            found.append({edges: _joined([*parts[0], *parts[1]])})
    return _united(found)


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    pieces = [piece for piece in pieces if piece.text]
    if len(pieces) == 1:
        return pieces[0]
    text = _bounded("".join(piece.text for piece in pieces))
    return _Piece(text, all(piece.may_be_empty for piece in pieces))


def _united(languages: Iterable[_Language]) -> _Language:
    options: dict[_Edges, list[_Piece]] = {}
    for language in languages:
        for edges, piece in language.items():
            options.setdefault(edges, []).append(piece)
    return {edges: _either(pieces) for edges, pieces in options.items()}


def _either(pieces: Sequence[_Piece]) -> _Piece:
    texts = list(dict.fromkeys(piece.text for piece in pieces))
    if len(texts) == 1:
        return pieces[0]
    may_be_empty = any(piece.may_be_empty for piece in pieces)
    return _Piece(_bounded(f"(?:{'|'.join(texts)})"), may_be_empty, is_atom=True)


def _bounded(text: str) -> str:
    if len(text) > _MAX_LENGTH:
        raise GrammarError("it is too complex")
    return text


def _repeated(node: Repeat) -> _Language:
    body = _language(node.body)
    if node.most == 0:
        return {_FREE: _EMPTY}
    if body.keys() - {_FREE}:
        if (node.least, node.most) == (1, 1):
            return body
        if (node.least, node.most) == (0, 1):
            return _united([{_FREE: _EMPTY}, body])
        raise GrammarError(
            f"^ or $ within what is repeated is not supported (character {node.place})"
        )
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


def _characters(node: Characters) -> str | None:
    """The class, of the characters that can be written; None where there are none."""
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
