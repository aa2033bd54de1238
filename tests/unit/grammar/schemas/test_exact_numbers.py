"""Numbers beyond the precision of a double are exact, narrower, or refused with their path."""

import pytest

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.validation import check, parse
from tests.unit.grammar.drawing import Drawing

BIG = [2**53, 2**53 + 1, 2**53 + 2, 10**17 + 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
COMPARED = {
    "maximum": lambda number, bound: number <= bound,
    "minimum": lambda number, bound: number >= bound,
    "exclusiveMaximum": lambda number, bound: number < bound,
    "exclusiveMinimum": lambda number, bound: number > bound,
}


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("keyword", COMPARED)
def test_no_number_beyond_a_large_bound_is_allowed(keyword: str, kind: str) -> None:
    for bound in (sign * size for size in BIG for sign in (1, -1)):
        try:
            drawing = Drawing({"type": kind, keyword: bound})
        except GrammarError:
            continue  # no number remains
        for number in (bound - 1, bound, bound + 1, 2 * bound, 10 * bound):
            if not COMPARED[keyword](number, bound):
                assert not drawing.allows(str(number)), (bound, number)
        for number in (0, 7, -(2**52)):
            assert drawing.allows(str(number)) == COMPARED[keyword](number, bound)


def test_the_bounds_of_64_bits_allow_all_but_the_outermost_integers() -> None:
    drawing = Drawing({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    for number in (1234567890123456789, -1234567890123456789, 9 * 10**18, 2**53 + 1):
        assert drawing.allows(str(number))


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 2**64 - 1])
def test_a_constant_that_would_be_rounded_is_refused_with_its_path(number: int) -> None:
    cases: tuple[tuple[Json, str], ...] = (
        ({"const": number}, r"\$\.const"),
        (
            {"properties": {"a": {"enum": [1, {"b": [number]}]}}},
            r"\$\.properties\.a\.enum\[1\]\.b\[0\]",
        ),
    )
    for schema, place in cases:
        with pytest.raises(GrammarError, match=f"number at {place} can't be enforced exactly"):
            check(schema)


def test_a_fraction_with_too_many_digits_is_refused() -> None:
    for text, place in (
        ('{"const": 1.00000000000000001}', r"\$\.const"),
        ('{"items": {"maximum": 0.10000000000000000555}}', r"\$\.items\.maximum"),
    ):
        with pytest.raises(GrammarError, match=place):
            check(parse(text))
    check(parse('{"default": 1.00000000000000001, "maximum": 0.1, "const": 1.50}'))


@pytest.mark.parametrize("number", [2**53, 2**53 + 2, -(2**53), 2**62, 10**20, 9007199254740991])
def test_a_constant_that_is_a_double_is_exact(number: int) -> None:
    for schema in ({"const": number}, {"enum": ["a", number]}):
        drawing = Drawing(schema)
        assert drawing.allows(str(number))
        assert not drawing.allows(str(number + 1))
        assert not drawing.allows(str(number - 1))


def test_multiples_of_two_large_numbers_are_multiples_of_both() -> None:
    one, other = 65_537, 65_539
    parts: Json = [{"type": "integer", "multipleOf": one}, {"multipleOf": other}]
    with pytest.raises(GrammarError, match="multipleOf"):
        Drawing({"allOf": parts})
    drawing = Drawing({"allOf": [{"multipleOf": 1_500}, {"type": "number", "multipleOf": 0.7}]})
    assert drawing.allows("10500")
    assert not drawing.allows("1500")
