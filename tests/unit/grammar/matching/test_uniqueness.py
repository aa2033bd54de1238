"""No object repeats a key, no unique array repeats an item, and no text leads to a dead end."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLTokenizer

from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.json_state import JsonState
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex, ids_of
from services.grammar.matching.uniqueness import UniquenessState
from services.grammar.matching.vocabulary import Vocabulary, load
from services.grammar.specification import check, positions, translate
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, JsonObject

BYTES = LLTokenizer("byte")
BY_BYTE = Vocabulary(BYTES, BYTES.vocab_size, tuple(BYTES.eos_tokens), "")
WHOLE = load(Path(__file__).parents[4] / "models" / "tokenwire-code-6m")
INDEXES = {vocabulary.size: TokenIndex(vocabulary) for vocabulary in (BY_BYTE, WHOLE)}
FILLERS = {
    vocabulary.size: MaskFiller(vocabulary, LLExecutor(num_threads=1), vocabulary.size + 1)
    for vocabulary in (BY_BYTE, WHOLE)
}
SHORT = {"type": "string", "pattern": "^[ab]{1,2}$"}
UNIQUE: dict[str, dict[str, Any]] = {
    "of a list": {"items": {"enum": ["ab", "a", 'a"', 1, True, None]}},
    "of integers": {"items": {"type": "integer", "minimum": 0, "maximum": 2}},
    "of few texts": {"items": SHORT, "minItems": 6},
    "of arrays": {"items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "of objects": {"items": {"properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x"]}},
                             "type": "object", "additionalProperties": False}},
    "within another": {"items": {"type": "array", "items": {"type": "string"},
                                 "uniqueItems": True}},
}  # fmt: skip
OBJECTS: dict[str, dict[str, Any]] = {
    "few keys": {"patternProperties": {"^[ab]{1,2}$": {"enum": [1]}},
                 "additionalProperties": False},
    "few keys, many of them": {"patternProperties": {"^[ab]{1,2}$": {"enum": [1]}},
                               "additionalProperties": False, "minProperties": 6},
    "open": {"properties": {"a": {"enum": [1]}}, "additionalProperties": {"enum": [1, ""]},
             "maxProperties": 3},
}  # fmt: skip
SCHEMAS = {name: {"type": "array", "uniqueItems": True} | schema for name, schema in UNIQUE.items()}
SCHEMAS |= {name: {"type": "object"} | schema for name, schema in OBJECTS.items()}


def fresh(spec: GrammarSpec, vocabulary: Vocabulary) -> Matcher:
    check(spec)
    state = initial_state(spec, INDEXES[vocabulary.size])
    assert isinstance(state, JsonState)
    assert state.uniqueness is not None
    prototype = compile_prototype(vocabulary.tokenizer, translate(spec))
    return Matcher(prototype, (vocabulary.size,), state)


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> int:
    return FILLERS[vocabulary.size].fill([matcher])[0]


def walk(start: Matcher, vocabulary: Vocabulary, seed: int) -> list[int]:
    """Allowed tokens, at random, to the end; short ones are likelier, so that values meet."""
    source, matcher, ids = random.Random(seed), start.fork(), list[int]()
    while len(ids) < 200:
        if source.random() < 0.3:
            ids += matcher.take_forced(vocabulary.size)
        allowed = list(ids_of(mask_of(matcher, vocabulary)))
        assert allowed, vocabulary.tokenizer.decode_bytes(ids)
        token = source.choice(allowed)
        matcher.accept([token], vocabulary.size)
        if token == vocabulary.size:
            break
        ids.append(token)
    return ids


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("vocabulary", [BY_BYTE, WHOLE], ids=["bytes", "tokens"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_complete_texts_repeat_nothing_and_every_text_can_end(
    name: str, vocabulary: Vocabulary
) -> None:
    schema = SCHEMAS[name]
    start = fresh(GrammarSpec(json_schema=json.dumps(schema)), vocabulary)
    for seed in range(6 if vocabulary is BY_BYTE else 2):  # a mask of 8,192 tokens takes longer
        ids = walk(start, vocabulary, seed)
        if len(ids) < 200:
            text = vocabulary.tokenizer.decode_bytes(ids).decode()
            value = json.loads(text, object_pairs_hook=distinct)
            jsonschema.validate(value, schema)


def accepts(spec: GrammarSpec, text: str) -> bool:
    matcher = fresh(spec, BY_BYTE)
    try:
        matcher.accept(list(text.encode()), 256)
    except RefusedTokenError:
        return False
    return matcher.may_end


def test_json_mode_repeats_no_key() -> None:
    spec = GrammarSpec(json_object=JsonObject())
    for text in (
        '{"a":1,"b":{"a":1},"c":[{"a":1},{"a":2}]}',
        '{"a\\n":1,"a":2,"":3}',
        '{\n  "a": 1,\n  "b" : { "a": [ ] },\n  "a ": 2,\n  " a": 3\n}',
    ):
        assert accepts(spec, text)
    for text in (
        '{"a": 1, "a": 2}',
        '{\n"a" : 1\n,\n"a"\n: 2}',
        '{"a":1,"a":2}',
        '{"x":[{"é":1,"é":1}]}',
        '{"\\"":1,"\\"":2}',
        '{"":1,"":2}',
    ):
        assert not accepts(spec, text)


def test_equal_values_of_different_text_are_repetitions() -> None:
    spec = GrammarSpec(json_schema='{"type":"array","uniqueItems":true}')
    for text in (
        '[1,"1",true,10,0.1,[1],{"a":1}]',
        '[{"a":1,"b":2},{"a":2,"b":1}]',
        "[1,12,1.5]",
        '[ 1,\n 12, [ 1 ], [1, 1 ], "a", "a ", " a" ]',
    ):
        assert accepts(spec, text)
    for text in (
        "[1, 1]",
        "[1 ,1 ]",
        "[[1],[ 1 ]]",
        '[{"a":1, "b":[] },{ "b" : [ ],\n"a":1}]',
        "[1,1.0]",
        "[0,-0]",
        "[100,1e2]",
        '[{"a":1,"b":2},{"b":2,"a":1}]',
        "[[0.5],[5e-1]]",
    ):
        assert not accepts(spec, text)


@settings(max_examples=12)
@given(st.integers(0, 1000), st.sampled_from(sorted(SCHEMAS)))
def test_every_token_that_repeats_something_is_forbidden(seed: int, name: str) -> None:
    """The index of tokens misses none, whatever the white space in them."""
    index = INDEXES[WHOLE.size]
    spec = GrammarSpec(json_schema=json.dumps(SCHEMAS[name]))
    where = positions(spec)
    assert where is not None
    state, every = UniquenessState(where, index), (1 << WHOLE.size) - 1
    matcher = compile_prototype(WHOLE.tokenizer, translate(spec)).deep_copy()
    for token in walk(fresh(spec, WHOLE), WHOLE, seed)[:40]:
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & every
        if mask.bit_count() < 500:
            repeating = {one for one in ids_of(mask) if state.after(one) is None}
            assert set(ids_of(state.forbidden(mask))) == repeating
        matcher.consume_token(token)
        following = state.after(token)
        if following is None:
            break
        state = following


def test_a_token_with_a_repeated_key_is_forbidden() -> None:
    start = fresh(GrammarSpec(json_object=JsonObject()), WHOLE)
    tokens = WHOLE.tokenizer
    start.accept(tokens.tokenize_str('{"":1,"a":2,'), WHOLE.size)
    mask = mask_of(start, WHOLE)
    repeating = [t for t in range(WHOLE.size) if bytes(tokens.decode_bytes([t]))[:2] == b'""']
    assert repeating
    assert not any(mask >> token & 1 for token in repeating)


@settings(max_examples=12)
@given(st.integers(0, 1000), st.sampled_from(sorted(SCHEMAS)), st.data())
def test_resumption_and_draft_tokens_lead_to_the_same_state(
    seed: int, name: str, data: st.DataObject
) -> None:
    start = fresh(GrammarSpec(json_schema=json.dumps(SCHEMAS[name])), WHOLE)
    ids = walk(start, WHOLE, seed)
    kept = data.draw(st.integers(0, len(ids)))
    resumed, whole = start.fork(), start.fork()
    resumed.accept(ids[:kept], WHOLE.size)
    whole.accept(ids, WHOLE.size)
    walked = resumed.walk(ids[kept:], WHOLE.size)
    assert len(walked) == len(ids) - kept
    if walked:
        assert mask_of(walked[-1], WHOLE) == mask_of(whole, WHOLE)


def test_a_resumed_sequence_may_not_repeat_a_key() -> None:
    matcher = fresh(GrammarSpec(json_object=JsonObject()), BY_BYTE)
    with pytest.raises(RefusedTokenError, match="Token 9, id 34, repeats a key"):
        matcher.accept(list(b'{"a":1,"a":1}'), 256)


def test_schemas_that_allow_no_repetition_have_no_positions() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "string"}},
              "additionalProperties": False}  # fmt: skip
    assert positions(GrammarSpec(json_schema=json.dumps(closed))) is None
    assert positions(GrammarSpec(regex="a")) is None
