"""Marks around control tokens that users write, for the way through a chat template.

A rendered conversation is one text, in which a template's own control tokens and a user's look
alike. So the user's are wrapped in two private-use characters before, as transformers'
`sanitize_control_tokens` does, and encoded as plain text afterwards. A conversation without any is
rendered unchanged.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from services.common.json_values import Json

__all__ = ["MarkedText", "Marker", "unused_character"]

_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD  # private use plane


class MarkedText:
    """Reader of the text that a template rendered from marked strings."""

    def __init__(self, marks: str, tokens: str) -> None:
        """`marks` are the two marks, or ""; `tokens` is a pattern of all control tokens."""
        self._marks = marks
        self._pattern = re.compile(f"{marks[0]}({tokens}){marks[1]}|[{marks}]") if marks else None

    def plain(self, text: str) -> str:
        """Return the text without marks."""
        return text.translate(dict.fromkeys(map(ord, self._marks))) if self._marks else text

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """Return the text split at marks, each part with whether it is a user's control token."""
        if self._pattern is None:
            return [(text, False)]
        # text between matches at even places, matches of the group at odd ones
        pieces = self._pattern.split(text)
        return [(piece, place % 2 == 1) for place, piece in enumerate(pieces) if piece]


class Marker:
    """Finder of the control tokens of one vocabulary."""

    def __init__(self, control_tokens: Collection[str]) -> None:
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._tokens = "|".join(map(re.escape, longest_first)) or "(?!)"
        first = "".join(re.escape(character) for character in {token[0] for token in longest_first})
        # a lookahead spares most places the trial of many alternatives
        self._pattern = re.compile(f"(?=[{first}])(?:{self._tokens})" if first else "(?!)")
        self._beginnings = frozenset(
            token[:size] for token in control_tokens for size in range(1, len(token))
        )
        self._longest = max(map(len, self._beginnings), default=0)

    def mark(self, value: Json) -> tuple[Json, MarkedText]:
        """Return the value with marks around control tokens, and the reader of its rendering."""
        if not any(map(self._needs_mark, _strings(value))):
            return value, MarkedText("", self._tokens)
        free = _unused_characters(_strings(value))
        begin, end = next(free), next(free)

        def mark(text: str) -> str:
            torn = end if self._begins_token(text) else ""
            return self._pattern.sub(f"{begin}\\g<0>{end}", text) + torn

        return _replaced(value, mark), MarkedText(begin + end, self._tokens)

    def _needs_mark(self, text: str) -> bool:
        return self._pattern.search(text) is not None or self._begins_token(text)

    def _begins_token(self, text: str) -> bool:
        """Return whether the text ends with the beginning of a control token."""
        sizes = range(1, min(self._longest, len(text)) + 1)
        return any(text[-size:] in self._beginnings for size in sizes)


def unused_character(texts: Iterable[str]) -> str:
    """Return a private-use character that no text contains."""
    return next(_unused_characters(texts))


def _unused_characters(texts: Iterable[str]) -> Iterator[str]:
    used = frozenset().union(*texts)
    return (chr(mark) for mark in range(_FIRST_MARK, _LAST_MARK) if chr(mark) not in used)


def _strings(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        yield from value
        for part in value.values():
            yield from _strings(part)


def _replaced(value: Json, replace: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [_replaced(part, replace) for part in value]
    if isinstance(value, dict):
        return {replace(key): _replaced(part, replace) for key, part in value.items()}
    return value
