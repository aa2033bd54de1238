"""Control tokens of a rendered conversation: the template's, and those that a request spells."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

__all__ = ["ControlTokens"]


class ControlTokens:
    """The control tokens of one vocabulary."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first))
        first = "".join(re.escape(character) for character in {token[0] for token in longest_first})
        # a lookahead spares most places the trial of many alternatives
        self._pattern = re.compile(f"(?=[{first}])(?:{alternatives})" if first else "(?!)")

    def split(self, text: str, template_spans: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether it is a token that the request spells.

        The template has a token if it wrote all characters of it. template_spans: begin and end
        of each run of such characters, in one list.
        """
        runs = [*zip(template_spans[::2], template_spans[1::2], strict=True)]
        own = [span for begin, end in runs for span in self._spans(text, begin, end)]
        found = [*self._spans(text, 0, len(text))]
        if found == own:
            return [(text, False)]
        edges = [0, *(place for span in own for place in span), len(text)]
        # between two tokens of the template, every other one is the request's
        gaps = zip(edges[::2], edges[1::2], strict=True)
        spelled = [span for begin, end in gaps for span in self._spans(text, begin, end)]
        parts: list[tuple[str, bool]] = []
        at = 0
        for begin, end in [*spelled, (len(text), len(text))]:
            parts += self._own_parts(text, at, begin, own)
            parts.append((text[begin:end], True))
            at = end
        return [(part, is_spelled) for part, is_spelled in parts if part]

    def _own_parts(
        self, text: str, begin: int, end: int, own: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, bool]]:
        """Yield a stretch that spells no token of the request, so that it can't join one either."""
        inside = own[bisect_left(own, (begin, 0)) : bisect_left(own, (end, 0))]
        cuts = [begin, end]
        if [*self._spans(text, begin, end)] != inside:
            cuts = [begin, *(place for span in inside for place in span), end]
        yield from ((text[left:right], False) for left, right in pairwise(cuts))

    def _spans(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
        return (found.span() for found in self._pattern.finditer(text, begin, end))
