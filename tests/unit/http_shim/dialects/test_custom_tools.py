"""Custom tools: their schema, and their input out of the arguments that a model writes."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.dialects.custom_tools import (
    CustomInput,
    InputGrammar,
    arguments_of,
    custom_tool,
)
from tests.unit.http_shim.synthetic import input_of

TEXTS = st.text(max_size=30) | st.text(alphabet='"\\\n\u00e9😀\ufffd{}: input')


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    places = [0, *cuts, len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join([*map(reader.feed, pieces), reader.finish()])


@given(TEXTS, st.booleans(), st.sampled_from(["", " ", "\n  "]), st.data())
def test_input_is_read_from_json_in_any_pieces(
    text: str, is_ascii: bool, space: str, data: st.DataObject
) -> None:
    encoded = json.dumps(text, ensure_ascii=is_ascii)
    arguments = f'{space}{{{space}"input"{space}:{space}{encoded}{space}}}{space}'
    assert read(pieces_of(data, arguments)) == text


@given(TEXTS)
def test_input_becomes_arguments_and_returns(text: str) -> None:
    assert json.loads(arguments_of(text)) == {"input": text}
    assert input_of(arguments_of(text)) == text


@given(st.text(max_size=40), st.data())
def test_arguments_of_another_form_are_the_input(text: str, data: st.DataObject) -> None:
    whole = read([text])
    assert read(pieces_of(data, text)) == whole
    whole.encode()  # no half of a surrogate pair, which JSON can't carry
    if not re.match(r"\s*(\{|$)", text):
        assert whole == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx\\ude00"}', "\ufffdx\ufffd"),
        ('{"input": "\\ud83d', "\ufffd"),
        ('{"inp', ""),
        ("", ""),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ("ls -l", "ls -l"),
    ],
)
def test_cut_and_odd_arguments_have_an_input(arguments: str, expected: str) -> None:
    assert read([arguments]) == expected
    assert read(list(arguments)) == expected


def test_regular_expression_constrains_the_input() -> None:
    tool = custom_tool("f", "Does.", InputGrammar("regex", "a|b"))
    assert tool.strict
    assert json.loads(tool.parameters_json)["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert tool.description.startswith("Does.\n\n")


def test_lark_grammar_is_shown_to_the_model() -> None:
    tool = custom_tool("f", None, InputGrammar("lark", 'start: "a"'))
    assert not tool.strict
    assert 'start: "a"' in tool.description
