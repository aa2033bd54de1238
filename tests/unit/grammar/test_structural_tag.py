"""Structural tags: triggers in free text start parts that follow a schema."""

import json
import re

import pytest
from google.protobuf.json_format import MessageToDict

from services.grammar import GrammarError
from tests.unit.grammar.test_specification import accepts
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, StructuralTag, TaggedStructure

INTEGER = '{"type": "integer"}'


def tag(*structures: tuple[str, str, str], triggers: tuple[str, ...] = ("<f=",)) -> StructuralTag:
    return StructuralTag(
        structures=[TaggedStructure(begin=b, schema=s, end=e) for b, s, e in structures],
        triggers=triggers,
    )


CALLS = tag(("<f=a>", INTEGER, "</f>"), ("<f=b>", '{"type": "string"}', "</f>"), ("{{", "", ""),
            triggers=("<f=", "{{"))  # fmt: skip


def test_text_is_free_until_a_trigger() -> None:
    allowed = ["", "any < text\n", "so: <f=a>12</f>", '<f=b>"x"</f> and <f=a>-1</f>.', '{{{"a":1}!',
               '{{{\n  "a": 1\n}!']  # fmt: skip
    forbidden = ["<f=a>x</f>", "<f=c>1</f>", "<f=", "<f=b>1</f>", "<f=a>1 </f>", "{{x",
                 '{{{"a":  1}']  # fmt: skip
    spec = GrammarSpec(structural_tag=CALLS)
    assert accepts(spec, *allowed) == [True] * len(allowed)
    assert accepts(spec, *forbidden) == [False] * len(forbidden)


def test_the_shorter_of_two_triggers_takes_effect() -> None:
    spec = GrammarSpec(
        structural_tag=tag(("<a", INTEGER, ""), ("<ab", INTEGER, ""), triggers=("<ab", "<a"))
    )
    assert accepts(spec, "<a1", "<ab1", "<ax") == [True, True, False]


def test_a_part_of_an_llguidance_grammar_may_be_a_structural_tag() -> None:
    """The grammar of a chat has reasoning before the content."""
    inner = {"name": "x", "structural_tag": MessageToDict(CALLS, preserving_proto_field_name=True)}
    grammars = [{"lark_grammar": 'start: "> " @x'}, inner]
    spec = GrammarSpec(llguidance=json.dumps({"grammars": grammars}))
    assert accepts(spec, "> <f=a>1</f>", "> <f=a>x</f>", "free") == [True, False, False]
    inner["structural_tag"] = {"structures": 7}
    with pytest.raises(GrammarError, match="not a structural tag"):
        accepts(GrammarSpec(llguidance=json.dumps({"grammars": grammars})))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tag(), "structures must have 1 to 128 items, got 0."),
        (tag(("<f=a", INTEGER, ""), triggers=()), "triggers must have 1 to 128 items, got 0."),
        (
            tag(("<f=a", INTEGER, ""), triggers=("",)),
            "triggers[0] must have at least 1 character, got 0.",
        ),
        (tag(("a", INTEGER, ""), ("<f=", "", "")), "structures[0].begin starts with none of the"),
        (
            tag(("<f=", "", ""), triggers=("<f=", "b")),
            "begin starts with triggers[1].",
        ),
        (tag(("<f=", '{"extends": {}}', "")), 'The keyword "extends" at structures[0]'),
        (tag(("<f=", "{", "")), "structures[0].schema: This is not JSON: "),
    ],
)
def test_faults_are_reported_with_their_place(wrong: StructuralTag, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        accepts(GrammarSpec(structural_tag=wrong))
