"""GBNF has the meaning that llama.cpp gives it, and faults are reported with their place."""

import pytest

from services.grammar import GrammarError
from services.grammar.gbnf import to_lark
from tests.unit.grammar.test_specification import accepts
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws  # of anything
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= ([ \t\n] ws)?
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        (
            JSON,
            ["{}", '{"a": [1, -2.5e3, "x\\n", {"b": null}]}', '{"é": "\\u00e9"} '],
            ["[]", '{"a" 1}', '{"a": 01}'],
        ),
        (ARITHMETIC, ["a+(b*2)=3\n", "x=1\n\ny=2\n\n"], ["a+=3\n", "a=3"]),
        ('root ::= [a-z]* "x"', ["abx", "xx", "x"], ["ab", ""]),
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= a "bc" | "ab" a\na ::= "(" a ")" | "a"', ["abc", "(a)bc", "aba"], ["ab"]),
        ('root ::= "x" root | ""', ["", "xxx"], ["y"]),
        ('root ::= root "y" | "x"', ["x", "xyy"], ["y", ""]),
        ('root ::= "a"\n  | "b"\n\n\nrest ::= "c" root', ["a", "b"], ["c", "ca"]),
        ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"], ["11"]),
        ('root ::= "a"{2} "b"{1,2} "c"{1,} ("d"{0})', ["aabc", "aabbcc"], ["abc", "aabbb"]),
        (r'root ::= "\u00e9" [\u4e00-\u9fff]{2} . "\U0001F600"', ["é中文\n😀"], ["é中文😀"]),
        (r"root ::= [+-] [a\]-] [^] [\x41-\x43]", ["+]\nA", "--xC"], ["+b\nA", "--xD"]),
        ('root ::= "ab" root "\x7f" | "\\"\\n"', ['"\n', 'ab"\n\x7f'], ["\n"]),
    ],
)
def test_gbnf_accepts_exactly_its_texts(
    grammar: str, allowed: list[str], forbidden: list[str]
) -> None:
    """The result does not depend on a lexer's tokens, which GBNF does not have."""
    spec = GrammarSpec(gbnf=grammar)
    assert accepts(spec, *allowed) == [True] * len(allowed)
    assert accepts(spec, *forbidden) == [False] * len(forbidden)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root = "a"', "No GBNF token begins with '=' (line 1, column 6)."),
        ("root ::=\n foo", "There is no rule foo (line 2, column 2)."),
        ('x ::= "a"', "The grammar has no rule root, with which it must start."),
        ('root ::= ("a"', "This ( is not closed (line 1, column 10)."),
        ('root ::= "a")', "This ) closes nothing (line 1, column 13)."),
        ("root ::= [z-a]", "The range from 'z' to 'a' is empty (line 1, column 11)."),
        (r'root ::= "\q"', r"The escape \q is not known (line 1, column 11)."),
        (r'root ::= "\ud800"', r"\ud800 is not a character (line 1, column 11)."),
        ("root ::= []", "[] is empty (line 1, column 10)."),
        ("root ::= *", "An item is expected, not * (line 1, column 10)."),
        ('root ::= "a"{3,1}', "The limits of {3,1} are the wrong way round (line 1, column 13)."),
        ('root ::= "a"\nroot ::= "b"', "There are two rules root (line 2, column 1)."),
        ('"a"', "A rule must begin with its name and ::= (line 1, column 1)."),
        ("root ::= " + "(" * 101, "This is nested deeper than 100 levels (line 1, column 110)."),
    ],
)
def test_faults_are_reported_with_line_and_column(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        to_lark(grammar)
    assert str(caught.value) == message


def test_a_part_of_an_llguidance_grammar_may_be_gbnf() -> None:
    """The grammar of a chat has reasoning before the content."""
    parts = '[{"lark_grammar": "start: \\"<\\" @inner \\">\\""}, {"name": "inner", "gbnf": %s}]'
    spec = GrammarSpec(llguidance='{"grammars": %s}' % (parts % '"root ::= \\"a\\"+"'))
    assert accepts(spec, "<aa>", "<>") == [True, False]
    with pytest.raises(GrammarError, match=r"no rule x \(line 1, column 10\)"):
        accepts(GrammarSpec(llguidance='{"grammars": %s}' % (parts % '"root ::= x"')))
    with pytest.raises(GrammarError, match=r"\$\.grammars\[1\]\.gbnf must be a string"):
        accepts(GrammarSpec(llguidance='{"grammars": %s}' % (parts % "7")))


def test_a_grammar_that_no_text_satisfies_is_refused() -> None:
    with pytest.raises(GrammarError, match="No text satisfies"):
        accepts(GrammarSpec(gbnf="root ::= root"))
