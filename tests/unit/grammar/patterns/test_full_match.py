"""Generated strings match their pattern as ECMA-262 defines it, also where JSON escapes them."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from services.grammar import GrammarError
from services.grammar.patterns.full_match import full_match_expressions
from tests.unit.grammar.drawing import TOKENIZERS, Drawing

ALPHABET = 'aB1_"\\\n\t,-]^ \u2028é😀'
DOT = "[^\n\r\u2028\u2029]"
SPACE = r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"
Pair = tuple[str, str]  # a pattern in ECMA-262's syntax, and in Python's

SINGLES: list[Pair] = [
    ("a", "a"), ("B", "B"), ('"', '"'), (r"\\", r"\\"), (r"\n", "\n"), (r"\t", "\t"), (".", DOT),
    (r"\d", "[0-9]"), (r"\D", "[^0-9]"), (r"\w", "[0-9A-Za-z_]"), (r"\W", "[^0-9A-Za-z_]"),
    (r"\s", SPACE), (r"\S", SPACE.replace("[", "[^", 1)), ('[^"]', '[^"]'), (r"[^\\]", r"[^\\]"),
    (r"[^\n]", r"[^\n]"), (r'[^"\\\n]', r'[^"\\\n]'), (r"[\x00-\x1f]", r"[\x00-\x1f]"),
    (r"[\0-\x07a]", "[\0-\x07a]"), ("[^]", r"[\s\S]"), ("[]", r"[^\s\S]"), ("[[]", r"\["),
    ("[a&&B]", "[aB&]"), (r"[\]^-]", r"[\]^-]"), (r"[\w-,]", "[0-9A-Za-z_,-]"), (r"\-", "-"),
    (r"\u{1F600}", "😀"), (r"\ud83d\ude00", "😀"), (r"[\u0061-\u{e9}]", "[a-é]"), (r"\cJ", "\n"),
    (r"[\b\t]", r"[\b\t]"),
    ("(?i:b)", "[bB]"), ("(?s:.)", r"[\s\S]"),
    ("(?<year>1)", "1"), ("]", "]"), ("{", "{"),
]  # fmt: skip
NARROW: list[Pair] = [  # equivalent for the characters of ALPHABET
    (r"\p{L}", "[aBé]"), (r"[^\P{Lu}]", "B"), (r"[\p{Nd}_]", "[1_]"),
    (r"\P{Script=Latin}", "[^aBé]"), (r"(?i:[^\Wb])", "[0-9AC-Zac-z_]"),
    (r"(?i:\W)", "[^0-9A-Za-z_]"),
]  # fmt: skip
ANCHORS: list[Pair] = [("^", r"\A"), ("$", r"\Z")]


def joined(pairs: list[Pair], separator: str) -> Pair:
    one, other = zip(*pairs, strict=True) if pairs else ((), ())
    return f"(?:{separator.join(one)})", f"(?:{separator.join(other)})"


def repeated(pair: Pair, quantifier: str) -> Pair:
    return f"(?:{pair[0]}){quantifier}", f"(?:{pair[1]}){quantifier}"


def patterns(singles: list[Pair]) -> st.SearchStrategy[Pair]:
    """Patterns with anchors anywhere but in repetitions."""
    plain = st.recursive(
        st.sampled_from(singles),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda pairs: joined(pairs, "")),
            st.lists(inner, min_size=1, max_size=3).map(lambda pairs: joined(pairs, "|")),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0}", "*?"])).map(
                lambda drawn: repeated(*drawn)
            ),
        ),
        max_leaves=6,
    )
    return st.recursive(
        st.one_of(plain, st.sampled_from(ANCHORS)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda pairs: joined(pairs, "")),
            st.lists(inner, min_size=1, max_size=3).map(lambda pairs: joined(pairs, "|")),
            inner.map(lambda pair: (f"({pair[0]})?", f"({pair[1]})?")),
        ),
        max_leaves=8,
    )


TEXTS = st.text(st.sampled_from(ALPHABET), max_size=6)


@settings(max_examples=200)
@given(patterns(SINGLES + NARROW), st.lists(TEXTS, min_size=5, max_size=20))
def test_a_text_is_allowed_if_and_only_if_the_pattern_matches(pair: Pair, texts: list[str]) -> None:
    drawing = Drawing(
        {"anyOf": [{"type": "string", "pattern": f"(?:{pair[0]})|^!$"}, {"const": 0}]}
    )
    for text in texts:
        spelled = json.dumps(text, ensure_ascii=False)
        assert drawing.allows(spelled) == bool(re.search(pair[1], text)), text


@settings(max_examples=100)
@given(patterns(SINGLES), st.integers(0, 1000), st.integers(1, 6))
def test_drawn_texts_match_the_pattern_and_its_length(pair: Pair, seed: int, longest: int) -> None:
    try:
        drawing = Drawing({"type": "string", "pattern": pair[0], "maxLength": longest})
    except GrammarError:
        return
    for text in drawing.draw(8, seed):
        assert re.search(pair[1], text), text
        assert len(text) <= longest


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ('^[^"]{1,4}$', '[^"]{1,4}'),
        (r'^[^"\\]{2,3}$', r'[^"\\]{2,3}'),
        (r"^[\x00-\x1f]{2}$", r"[\x00-\x1f]{2}"),
        (r"^[^\x00-\x1f\x7f]{1,8}$", r"[^\x00-\x1f\x7f]{1,8}"),
        (r"^\S{1,8}$", f"(?!.*{SPACE})(?s:.){{1,8}}"),
        (r"^[^\s@]{1,5}@[\w.\-]{1,5}$", rf"(?!.*{SPACE})[^@]{{1,5}}@[0-9A-Za-z_.-]{{1,5}}"),
        ("^a.{0,3}|.{0,3}b$", r"(?s:a.*|.*b)"),
        (r"^(?=.*\d)(?=.*[a-z]).{4,8}$", f"(?=.*[0-9])(?=.*[a-z]){DOT}{{4,8}}"),
        (r"^\p{Lu}\p{Ll}{1,3}$", r"[^\W\d_]{2,4}"),
        (r"^.{3}$", f"{DOT}{{3}}"),
    ],
)
def test_drawn_texts_match_common_patterns(pattern: str, same: str, tokenizer: LLTokenizer) -> None:
    schema = {"type": "string", "pattern": pattern, "maxLength": 12}
    for text in Drawing(schema, tokenizer).draw(150):
        assert re.fullmatch(same, text), text


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_drawn_keys_match_their_pattern(tokenizer: LLTokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {'"a': {"const": 0}},
        "patternProperties": {r'^[^\\"]{1,2}$': {"const": 1}, r'^"': {"const": 0}},
        "additionalProperties": False,
    }
    for value in Drawing(schema, tokenizer).draw(100):
        for key, number in value.items():
            assert key.startswith('"') if number == 0 else re.fullmatch(r'[^\\"]{1,2}', key)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a\b", r"\b, a word boundary, is not supported (character 2)"),
        (r"\Ba", r"\B, a word boundary, is not supported (character 1)"),
        ("(?i)a", "those of a group, (?i:…) and (?s:…) (character 1)"),
        ("(?m:^a$)", "those of a group"),
        ("a(?!b)", "the only supported lookaround is (?=…) after ^ (character 2)"),
        ("(?<=a)b", "the only supported lookaround is"),
        ("a(?=b)", "(?=…) is supported only at the start of a pattern, after ^ (character 2)"),
        (r"(a)\1", "back references are not supported (character 4)"),
        (r"(?<n>a)\k<n>", "back references are not supported"),
        (r"\Aa\Z", r"ECMA-262 has no \A; use ^ and $ (character 1)"),
        (r"\a", r"ECMA-262 has no \a"),
        (r"\p{Greek}", r"ECMA-262 has no property \p{Greek}"),
        (r"\pL", r"\p needs the name of a property in braces"),
        (r"(?i:\p{Lu})", r"\p{Lu} where case is ignored is not supported"),
        ("(?P<n>a)", "ECMA-262 has no such group (character 1)"),
        ("a++", '"+" follows another quantifier (character 3)'),
        ("(^a|b)*", "^ or $ inside a repetition is not supported"),
        ("^*", "there is nothing to repeat"),
        ("a{2,1}", "the numbers of the quantifier are out of order (character 2)"),
        ("a{9999999}", "more than 1,000,000 repetitions are not supported"),
        ("(a", "a group is not closed (character 1)"),
        ("a)", '")" closes no group (character 2)'),
        ("[a", "a class is not closed (character 1)"),
        ("[b-a]", "the range is out of order (character 3)"),
        ("\\", "the pattern ends with a backslash"),
        (r"\x1", "the escape has too few hexadecimal digits"),
        (r"\u{110000}", "there is no such character"),
        ("(" * 200 + ")" * 200, "groups are nested deeper than 100 levels"),
    ],
)
def test_an_unsupported_construct_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        full_match_expressions(pattern)
    assert reason in str(caught.value)


def test_anchors_that_multiply_alternatives_are_bounded() -> None:
    assert full_match_expressions("(^|,)a($|,)" * 40)
    with pytest.raises(GrammarError, match="too complex"):
        full_match_expressions("(?:(?:a?|^)(?:b?|$)){1}" * 2_000)


def test_a_pattern_of_unsupported_characters_has_no_expression() -> None:
    assert full_match_expressions(r"^\x01$") is None
    assert full_match_expressions(r"^a\x7f?\x0b{0,3}$") == ["^(?:a)$"]
    assert full_match_expressions(r"[^\s\S]") is None
