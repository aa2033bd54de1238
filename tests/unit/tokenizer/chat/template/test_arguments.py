"""Arguments of calls in a conversation: broken JSON must not end the conversation."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.template.arguments import read_arguments, repaired_arguments
from tokenwire.errors import ServiceError

_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_NO_OBJECTS = [
    "{", "[]", '"a"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 70 + "1" + "}" * 70, "[" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("text", _NO_OBJECTS)
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read_arguments(text, "there")
    assert caught.value.field == "there"
    assert read_arguments("", "there") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"s":"ab', {"s": "ab"}),
        ('{"s":"ab\\', {"s": "ab"}),
        ('{"s":"ab\\u00', {"s": "ab"}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b":', {"a": 1}),
        ('{"a": 1, "b": -', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1}</tool_call>', {"a": 1}),
        ('{"a": 1, b: 2}', {"a": 1}),
        ('{"a": NaN}', {"text": '{"a": NaN}'}),
        ('{"a', {"text": '{"a'}),
        ("Paris", {"text": "Paris"}),
        ('["a"]', {"text": '["a"]'}),
        ('{"a": "\\ud800"}', {"text": '{"a": "\\ud800"}'}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_broken_object_keeps_its_complete_members(text: str, expected: dict[str, object]) -> None:
    assert repaired_arguments(text) == expected


def test_long_text_is_not_repaired() -> None:
    """The scanner would block the event loop for seconds."""
    text = '{"a": "' + "x" * 65_536
    assert repaired_arguments(text) == {"text": text}


@given(st.dictionaries(st.text(), _VALUES, max_size=3), st.integers(0, 200))
def test_cut_object_is_repaired_to_an_object(value: dict[str, Any], size: int) -> None:
    """max_tokens may cut it anywhere; no member appears that was not there."""
    text = json.dumps(value, ensure_ascii=False)
    repaired = repaired_arguments(text[:size])
    read_arguments(json.dumps(repaired), "")
    if size >= len(text) and value:
        assert repaired == value
    assert repaired.keys() <= value.keys() | {"text"}


@given(st.text())
def test_any_text_is_repaired_to_an_object(text: str) -> None:
    read_arguments(json.dumps(repaired_arguments(text)), "")
