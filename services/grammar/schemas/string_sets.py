"""Sets of strings: lengths, patterns, formats and excluded strings."""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from services.common.json_values import Json
from services.grammar.patterns.character_sets import (
    SPELLABLE,
    Ranges,
    as_class,
    as_literal,
    complement,
    intersection,
    union,
)

__all__ = ["EVERY_STRING", "StringSet", "are_disjoint", "matches"]

# Expressions of `full_match`: a text, a prefix, a repeated class
_ESCAPE = re.compile(r"\\x\{([0-9a-f]+)\}")
_TEXT = r"((?:[^\\.\[\](){}|?*+^$]|\\x\{[0-9a-f]+\})+)"
_WHOLE = re.compile(rf"\^\(\?:{_TEXT}\)\$")
_PREFIX = re.compile(rf"\^\(\?:{_TEXT}\(\?s:\.\)\*\)\$")
_RANGE = re.compile(r"(\\x\{[0-9a-f]+\}|[^-])(?:-(\\x\{[0-9a-f]+\}|[^-]))?")
_SOME = re.compile(r"\^\(\?:\[([^\]]+)\]([+*])\)\$")


@dataclass(frozen=True, slots=True)
class StringSet:
    """The strings that satisfy all constraints. None: no constraint."""

    values: frozenset[str] | None = None
    low: int = 0
    high: int | None = None
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    not_values: frozenset[str] = frozenset()
    not_patterns: frozenset[str] = frozenset()
    not_formats: frozenset[str] = frozenset()

    def intersection(self, other: "StringSet") -> "StringSet | None":
        """Return the strings in both sets, or None if llguidance can tell that there are none."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        highs = [high for high in (self.high, other.high) if high is not None]
        both = StringSet(
            values,
            max(self.low, other.low),
            min(highs, default=None),
            self.patterns | other.patterns,
            self.formats | other.formats,
            self.not_values | other.not_values,
            self.not_patterns | other.not_patterns,
            self.not_formats | other.not_formats,
        )
        return both._normalized()

    def _normalized(self) -> "StringSet | None":
        if self.high is not None and self.low > self.high:
            return None
        if self.patterns & self.not_patterns or self.formats & self.not_formats:
            return None
        if self.values is None and self.high == 0:
            return replace(self, values=frozenset([""]))._normalized()
        if self.values is not None:
            kept = frozenset(value for value in self.values if self._may_hold(value))
            rest = frozenset(p for p in self.patterns if any(matches(p, v) is None for v in kept))
            gone = frozenset(
                p for p in self.not_patterns if any(matches(p, v) is None for v in kept)
            )
            normalized = replace(
                EVERY_STRING,
                values=kept,
                patterns=rest,
                formats=self.formats,
                not_patterns=gone,
                not_formats=self.not_formats,
            )
            return normalized if kept and normalized._is_satisfiable() else None
        return self if self._is_satisfiable() else None

    def _may_hold(self, value: str) -> bool:
        return (
            self.low <= len(value)
            and (self.high is None or len(value) <= self.high)
            and value not in self.not_values
            and all(matches(pattern, value) is not False for pattern in self.patterns)
            and not any(matches(pattern, value) for pattern in self.not_patterns)
        )

    def _is_satisfiable(self) -> bool:
        constraints = len(self.patterns) + len(self.formats)
        if not constraints or (constraints == 1 and self.values is None and not self.low
                               and self.high is None):  # fmt: skip
            return True
        # ignoring the excluded strings makes the set larger, never smaller
        return _is_satisfiable(json.dumps(replace(self, not_values=frozenset()).schema()))

    def pattern(self) -> str | None:
        """Return one expression for the whole set, or None if it takes more."""
        if self.values is not None or self.formats or self.not_formats:
            return None
        patterns = [*self.patterns]
        if self.low or self.high is not None:
            patterns.append(f"^(?s:.{{{self.low},{'' if self.high is None else self.high}}})$")
        if self.not_values:
            patterns.append(_none_of(self.not_values))
        negated = [_without(pattern) for pattern in self.not_patterns]
        patterns += [pattern for pattern in negated if pattern]
        return patterns[0] if len(patterns) == 1 and None not in negated else None

    def obstacle(self) -> str | None:
        """Return the keyword that no grammar can enforce, or None."""
        if self.not_formats:
            return f'"not" over the format "{min(self.not_formats)}"'
        for pattern in self.not_patterns:
            if _without(pattern) is None:
                return f'"not" over the pattern "{pattern}"'
        return None

    def schema(self) -> dict[str, Json]:
        """Return a native schema of the set."""
        schema: dict[str, Json] = {"type": "string"}
        if self.values is not None:
            schema["enum"] = sorted(self.values)
        if self.low:
            schema["minLength"] = self.low
        if self.high is not None:
            schema["maxLength"] = self.high
        patterns = sorted(self.patterns)
        patterns += [without for p in sorted(self.not_patterns) if (without := _without(p))]
        if self.values is None and self.not_values:
            patterns.append(_none_of(self.not_values))
        further: list[dict[str, Json]] = [{"type": "string", "pattern": p} for p in patterns[1:]]
        further += [{"type": "string", "format": name} for name in sorted(self.formats)[1:]]
        if patterns:
            schema["pattern"] = patterns[0]
        if self.formats:
            schema["format"] = min(self.formats)
        if further:
            schema["allOf"] = further
        return schema


EVERY_STRING = StringSet()


@functools.lru_cache(maxsize=4096)
def matches(pattern: str, text: str) -> bool | None:
    """Return whether an expression of `full_match` matches a text; None if Python can't tell."""
    if not text.isascii() or not text.isprintable():
        return None
    escaped = _ESCAPE.sub(lambda code: f"\\U{int(code[1], 16):08x}", pattern)
    try:
        return re.search(re.sub(r"(?<!\\)\$$", r"\\Z", escaped), text, re.ASCII) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def are_disjoint(first: str, second: str) -> bool:
    """Return whether llguidance can tell that no string matches both expressions."""
    return EVERY_STRING.intersection(StringSet(patterns=frozenset([first, second]))) is None


@functools.lru_cache(maxsize=4096)
def _is_satisfiable(schema: str) -> bool:
    """Return False only if llguidance proves that the schema is unsatisfiable."""
    return "nsatisfiable" not in str(
        LLMatcher.validate_grammar(f'{{"grammars":[{{"json_schema":{schema}}}]}}')
    )


def _none_of(values: Iterable[str]) -> str:
    """Return an expression of all strings but the given ones."""
    return f"^(?:{_other_than(sorted(set(values)))})$"


def _other_than(values: list[str]) -> str:
    by_first: dict[str, list[str]] = {}
    for value in values:
        if value:
            by_first.setdefault(value[0], []).append(value[1:])
    options = [] if "" in values else [""]
    options += [
        f"{as_literal(ord(first))}(?:{_other_than(rest)})"
        for first, rest in sorted(by_first.items())
    ]
    options.append(f"{_none_in(map(ord, by_first))}(?s:.*)" if by_first else "(?s:.+)")
    return "|".join(options)


def _none_in(codes: Iterable[int]) -> str:
    """Return the class of all other SPELLABLE characters."""
    return _outside(union((code, code) for code in codes))


def _outside(ranges: Ranges) -> str:
    return f"[{as_class(intersection(complement(ranges), SPELLABLE))}]"


def _without(pattern: str) -> str | None:
    """Return an expression of all strings that `pattern` does not match, None if unknown."""
    if whole := _WHOLE.fullmatch(pattern):
        return _none_of([_text_of(whole[1])])
    if prefix := _PREFIX.fullmatch(pattern):
        return f"^(?:{_without_prefix(_text_of(prefix[1]))})$"
    if some := _SOME.fullmatch(pattern):
        ranges = [
            (ord(_text_of(first)), ord(_text_of(last or first)))
            for first, last in _RANGE.findall(some[1])
        ]
        other = f"(?s:.*){_outside(union(ranges))}(?s:.*)"
        return f"^(?:{other})$" if some[2] == "*" else f"^(?:|{other})$"
    return None


def _text_of(literal: str) -> str:
    return _ESCAPE.sub(lambda code: chr(int(code[1], 16)), literal)


def _without_prefix(prefix: str) -> str:
    options = f"|{_none_in([ord(prefix[0])])}(?s:.*)"
    rest = prefix[1:]
    return f"{options}|{as_literal(ord(prefix[0]))}(?:{_without_prefix(rest)})" if rest else options
