"""Bad guesses cost time, and guesses from the wrong place cost it for nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.engine.speculation import DraftWidth, propose


def array(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(tokens, dtype=np.int32)


def test_what_followed_before_is_guessed() -> None:
    assert propose(array(1, 2, 3, 4, 5, 6, 9, 1, 2, 3), 3) == [4, 5, 6]


def test_the_longest_run_decides_then_the_latest_place() -> None:
    assert propose(array(1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [7]
    assert propose(array(2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [8]


def test_without_a_precedent_nothing_is_guessed() -> None:
    assert propose(array(1, 2, 3, 4), 4) == []
    assert propose(array(1), 4) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 12))
def test_guesses_are_what_followed_some_earlier_run(tokens: list[int], width: int) -> None:
    guess = propose(array(*tokens), width)
    assert len(guess) <= width
    if guess:
        text, run = tokens, tokens[-2:]
        places = [i for i in range(len(text) - 2) if text[i : i + 2] == run]
        assert any(text[i + 2 : i + 2 + len(guess)] == guess for i in places)


def test_width_grows_with_success_and_rests_after_failure() -> None:
    width = DraftWidth()
    first = width.next()
    width.learn(first, first)
    assert width.next() > first
    for _ in range(2):
        width.learn(width.next(), 0)
    assert width.next() == 0
    assert any(width.next() for _ in range(50))
