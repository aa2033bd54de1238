"""Stop strings in a stream of text: the match that ends first wins, then the longest.

An Aho-Corasick automaton (Aho and Corasick 1975) over all strings takes one step per character. Its
depth is the length of the text that may still become a match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["StopAutomaton", "StopMatcher", "StopStringMatch", "compile_stops"]

_MAX_CACHED_LENGTH = 256  # characters of all strings; each needs a state of about 400 bytes


@dataclass(frozen=True, slots=True)
class StopStringMatch:
    """A match in the text. Places are in code points from the start of the text."""

    string: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StopAutomaton:
    """States of the automaton. All lists are by state; 0 is the root."""

    children: Sequence[dict[str, int]]
    fail: Sequence[int]
    held: Sequence[int]
    """Code points at the end of the text that are a proper prefix of a stop string"""
    matched: Sequence[str]
    """The longest stop string that ends in this state; "" for none."""


class StopMatcher:
    """Search for stop strings in one text, piece by piece."""

    __slots__ = ("_automaton", "_position", "_state")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._position = 0

    @property
    def held(self) -> int:
        """Code points at the end of the text so far that may begin a match."""
        return self._automaton.held[self._state]

    def feed(self, text: str, armed: bool) -> StopStringMatch | None:
        """Return the first match that ends within `text`; None without one, or if not `armed`."""
        children, fail = self._automaton.children, self._automaton.fail
        matched = self._automaton.matched
        state = self._state
        for offset, character in enumerate(text, self._position + 1):
            while state and character not in children[state]:
                state = fail[state]
            state = children[state].get(character, 0)
            if armed and (string := matched[state]):
                return StopStringMatch(string, offset - len(string), offset)
        self._state = state
        self._position += len(text)
        return None


def compile_stops(strings: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of stop strings, none of which is empty."""
    is_short = sum(map(len, strings)) <= _MAX_CACHED_LENGTH
    return _compile_cached(strings) if is_short else _compile(strings)


@lru_cache(maxsize=256)
def _compile_cached(strings: tuple[str, ...]) -> StopAutomaton:
    return _compile(strings)


def _compile(strings: tuple[str, ...]) -> StopAutomaton:
    children: list[dict[str, int]] = [{}]
    depth, matched = [0], [""]
    for string in strings:
        state = 0
        for character in string:
            if character not in children[state]:
                children[state][character] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                matched.append("")
            state = children[state][character]
        matched[state] = string
    fail = [0] * len(children)
    held = [length if children[state] else 0 for state, length in enumerate(depth)]
    queue = list(children[0].values())
    for state in queue:  # breadth first; the queue grows while it is read
        if not matched[state]:
            matched[state] = matched[fail[state]]
        if not children[state]:
            held[state] = held[fail[state]]
        for character, child in children[state].items():
            queue.append(child)
            back = fail[state]
            while back and character not in children[back]:
                back = fail[back]
            fail[child] = children[back].get(character, 0)
    return StopAutomaton(children, fail, held, matched)
