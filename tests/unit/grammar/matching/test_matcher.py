"""Matchers are exact after a fork, a resumption and forced tokens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLTokenizer

from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.specification import translate
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

BYTES = LLTokenizer("byte")
SIZE = BYTES.vocab_size
VOCABULARY = Vocabulary(BYTES, SIZE, tuple(BYTES.eos_tokens), "")
END = SIZE + 3  # among the padding ids of wider logits
WIDTH = SIZE + 10
SCHEMA = """{"type":"object","properties":{"a":{"type":"array","items":{"enum":["x","yy",1]}},
    "b":{"type":"string","pattern":"^[a-c]{2,5}$"}},"required":["b"],"additionalProperties":false}"""
PROTOTYPE = compile_prototype(BYTES, translate(GrammarSpec(json_schema=SCHEMA)))
FILLER = MaskFiller(VOCABULARY, LLExecutor(), WIDTH)


def fresh() -> Matcher:
    return Matcher(PROTOTYPE.deep_copy(), (END,))


def mask_of(matcher: Matcher) -> int:
    return FILLER.fill([matcher])[0]


def walk(seed: int) -> list[int]:
    """Return random allowed tokens up to the end."""
    source, matcher, ids = random.Random(seed), fresh(), list[int]()
    while not ids or ids[-1] != END:
        mask = mask_of(matcher)
        ids.append(source.choice([token for token in range(WIDTH) if mask >> token & 1]))
        matcher.accept(ids[-1:], WIDTH)
    return ids


@settings(max_examples=50)
@given(st.integers(0, 1000), st.data())
def test_a_resumed_matcher_equals_one_that_took_each_step(seed: int, data: st.DataObject) -> None:
    ids = walk(seed)
    resumed_at = data.draw(st.integers(0, len(ids)))
    matcher, resumed = fresh(), fresh()
    for accepted in ids[:resumed_at]:
        matcher.accept([accepted], WIDTH)
        if data.draw(st.booleans()):
            mask_of(matcher)
    resumed.accept(ids[:resumed_at], WIDTH)
    for token in [*ids[resumed_at:], None]:
        assert mask_of(matcher) == mask_of(resumed)
        assert matcher.terminated == resumed.terminated
        assert matcher.fork().take_forced(WIDTH) == resumed.fork().take_forced(WIDTH)
        if token is not None:
            matcher.accept([token], WIDTH)
            resumed.accept([token], WIDTH)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.data())
def test_a_fork_is_independent_of_its_source(seed: int, data: st.DataObject) -> None:
    ids = walk(seed)
    at = data.draw(st.integers(0, len(ids)))
    matcher = fresh()
    matcher.accept(ids[:at], WIDTH)
    fork = matcher.fork()
    fork.accept(ids[at:], WIDTH)
    other = fresh()
    other.accept(ids[:at], WIDTH)
    assert mask_of(matcher) == mask_of(other)
    assert fork.terminated


def test_the_end_is_allowed_only_where_the_grammar_may_end() -> None:
    matcher = fresh()
    assert not mask_of(matcher) >> END & 1
    with pytest.raises(RefusedTokenError, match="unfinished"):
        matcher.accept([*b'{"b":"a', END], WIDTH)
    done = fresh()
    done.accept(list(b'{"b":"ab"}'), WIDTH)
    assert mask_of(done) == 1 << END
    assert done.terminated


def test_nothing_follows_the_end() -> None:
    matcher = fresh()
    matcher.accept([*b'{"b":"ab"}', END], WIDTH)
    with pytest.raises(RefusedTokenError, match="follows the end"):
        matcher.accept([ord("x")], WIDTH)


def test_padding_ids_are_never_allowed() -> None:
    free = Matcher(
        compile_prototype(BYTES, translate(GrammarSpec(regex="(?s:.*)"))).deep_copy(), (END,)
    )
    assert mask_of(free) >> SIZE == 1 << (END - SIZE)
    with pytest.raises(RefusedTokenError, match="outside the vocabulary"):
        free.accept([SIZE], SIZE)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.data())
def test_forced_tokens_are_the_only_ids_of_their_masks(seed: int, data: st.DataObject) -> None:
    ids = walk(seed)
    stepping = fresh()
    stepping.accept(ids[: data.draw(st.integers(0, len(ids)))], WIDTH)
    jumping = stepping.fork()
    for forced in jumping.take_forced(WIDTH):
        assert mask_of(stepping) == 1 << forced
        stepping.accept([forced], WIDTH)
    assert mask_of(stepping) == mask_of(jumping)
    assert stepping.terminated == jumping.terminated


def test_very_long_forced_text_is_computed_once_a_step_and_holds_up_no_other_matcher() -> None:
    prototype = compile_prototype(BYTES, translate(GrammarSpec(regex="a{100000}")))
    stepping = Matcher(prototype.deep_copy(), (END,))
    for _ in range(3):
        assert stepping.fork().take_forced(WIDTH) == [ord("a")]
        assert mask_of(stepping) == 1 << ord("a")
        stepping.accept([ord("a")], WIDTH)


def test_a_matcher_may_be_slow_sometimes_but_not_on_average() -> None:
    matcher = fresh()
    matcher.charge(0.2)
    for _ in range(1000):
        matcher.charge(0.001)
    assert not matcher.is_too_slow
    for _ in range(1000):
        matcher.charge(0.02)
    assert matcher.is_too_slow
