"""JSON scanner: it refuses the first wrong character, and completes everything else."""

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.answer.json_scanner import JsonScanner

_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_DOCUMENTS = st.lists(_VALUES, max_size=3) | st.dictionaries(st.text(), _VALUES, max_size=3)


def _push(text: str) -> tuple[JsonScanner, bool]:
    scanner = JsonScanner()
    return scanner, all(scanner.push(character) for character in text)


@given(_DOCUMENTS, st.booleans(), st.sampled_from([None, 1]))
def test_every_beginning_of_a_document_is_accepted_and_completed(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for size in range(1, len(text)):
        scanner, accepted = _push(text[:size])
        assert accepted
        assert not scanner.is_complete
        json.loads(text[:size] + scanner.completion())
        assert scanner.is_complete
    scanner, accepted = _push(text)
    assert accepted
    assert scanner.is_complete
    assert scanner.completion() == ""


@given(_DOCUMENTS, st.data())
def test_accepted_text_can_be_completed_to_json(value: Any, data: st.DataObject) -> None:
    """One character of a document may be wrong."""
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text) - 1))
    text = text[:place] + data.draw(st.sampled_from(string.printable + "é")) + text[place + 1 :]
    scanner = JsonScanner()
    taken = ""
    for character in text:
        if not scanner.push(character):
            break
        taken += character
    if taken.strip():
        json.loads(taken + scanner.completion())


@pytest.mark.parametrize(
    ("taken", "wrong"),
    [
        ("", "x"), ("", '"'), ("[", ","), ("[1", "x"), ("[0", "1"), ("[-", "]"), ("[1.", "]"),
        ("[1e", "]"), ("[1e+", "]"), ("[tru", "]"), ('["\\', "x"), ('["\\u00', "g"), ('["', "\n"),
        ("{", "1"), ('{"a"', "}"), ('{"a":1,', "}"), ("[1,", "]"), ("[", "}"), ("[]", "x"),
        ("{}", ","), ("[" * 128, "["),
    ],
)  # fmt: skip
def test_first_wrong_character_is_refused(taken: str, wrong: str) -> None:
    scanner, accepted = _push(taken)
    assert accepted
    assert not scanner.push(wrong)
