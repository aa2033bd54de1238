"""White space between the tokens of JSON."""

from services.grammar import GrammarError
from services.grammar.patterns.character_sets import (
    SPACES,
    Ranges,
    as_class,
    complement,
    intersection,
)
from services.grammar.patterns.pattern import (
    Alternation,
    CharacterClass,
    Concatenation,
    Node,
    Repetition,
    parse,
)

__all__ = ["DEFAULT", "as_expression"]

DEFAULT = r"\x20|\x0a[\x20\x09]{0,32}"
"""White space that models write: a space, or a line break with an indentation.

A model that meets only compact JSON leaves the texts that it was trained on, and errs. Without a
bound, a model may write white space without end.
"""

_JSON_SPACES: Ranges = ((0x9, 0xA), (0xD, 0xD), (0x20, 0x20))
_LONGEST = 64
"""Repetitions where the pattern sets no limit"""
_MAX_LENGTH = 1000  # characters of a pattern


def as_expression(pattern: str) -> str:
    """Return a pattern of white space as an expression of llguidance; "" for compact JSON.

    Characters that JSON does not count as white space, such as those that \\s also matches, are
    left out. Raises GrammarError for syntax errors, and for patterns that match other texts.
    """
    if len(pattern) > _MAX_LENGTH:
        raise GrammarError(f"it has more than {_MAX_LENGTH} characters")
    return _expression(parse(pattern)) if pattern else ""


def _expression(node: Node) -> str:
    match node:
        case CharacterClass():
            return _characters(node)
        case Concatenation():
            return "".join(map(_grouped, node.parts))
        case Alternation():
            return "|".join(map(_grouped, node.options))
        case Repetition():
            most = max(node.least, _LONGEST) if node.most is None else node.most
            return f"{_grouped(node.body)}{{{node.least},{most}}}"
    raise GrammarError("it has anchors or lookaheads")


def _grouped(node: Node) -> str:
    return f"(?:{_expression(node)})"


def _characters(node: CharacterClass) -> str:
    ranges = complement(node.ranges) if node.is_negated else node.ranges
    if node.properties or intersection(ranges, complement(SPACES)):
        raise GrammarError("it matches more than white space")
    spaces = intersection(ranges, _JSON_SPACES)
    if not spaces:
        raise GrammarError("JSON has no other white space than space, tab, line feed and return")
    return f"[{as_class(spaces)}]"
