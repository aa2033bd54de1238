"""Stop strings: found across tokens, and held back while they may still match."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.completion.stops import StopMatcher, StopStringMatch, compile_stops

_TEXT = st.text(alphabet="ab\né😀", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab\né😀", min_size=1, max_size=4), min_size=1, max_size=5)


def _naive(text: str, stops: list[str], armed_from: int) -> StopStringMatch | None:
    """Return the match that ends first after `armed_from` code points, then the longest."""
    for end in range(1, len(text) + 1):
        if end <= armed_from:
            continue
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return StopStringMatch(longest, end - len(longest), end)
    return None


def _naive_held(text: str, stops: list[str]) -> int:
    proper = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max((size for size in range(1, len(text) + 1) if text[-size:] in proper), default=0)


@given(_TEXT, _STOPS, st.data())
@settings(max_examples=500)
def test_matches_equal_a_search_of_the_whole_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Tokens may split the text anywhere, and min_tokens may arm the search anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    armed_from = data.draw(st.sampled_from([0, *cuts]))
    matcher = StopMatcher(compile_stops(tuple(stops)))
    found, read = None, 0
    for piece in pieces:
        found = matcher.feed(piece, armed=read >= armed_from)
        read += len(piece)
        if found is not None:
            break
        assert matcher.held == _naive_held(text[:read], stops)
    assert found == _naive(text, stops, armed_from)


def test_match_that_ends_first_wins_then_the_longest() -> None:
    matcher = StopMatcher(compile_stops(("bcd", "cd", "abcde")))
    assert matcher.feed("xabcdef", armed=True) == StopStringMatch("bcd", 2, 5)


def test_automata_of_long_stop_strings_are_not_cached() -> None:
    """An automaton is as large as its strings, so clients could fill the memory."""
    short, long = ("a" * 128, "b" * 128), ("c" * 128, "d" * 129)
    assert compile_stops(short) is compile_stops(short)
    assert compile_stops(long) is not compile_stops(long)
    assert StopMatcher(compile_stops(long)).feed("d" * 129, armed=True) == StopStringMatch(
        long[1], 0, 129
    )
