"""Masks allow no white space in front of the commas and colons of JSON, and leave the rest."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex, ids_of
from services.grammar.matching.vocabulary import Vocabulary, load
from services.grammar.specification import check, translate
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "choice": {"enum": [" , ", ' "', 'b"\n', None]},
        "list": {"type": "array", "items": {"type": ["integer", "object"]}, "maxItems": 3},
        "last": {"enum": ["x", 1.5]},
    },
    "required": ["text", "choice"],
    "additionalProperties": False,
}
_EITHER: dict[str, Any] = {
    "anyOf": [
        {"properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False},
        {
            "properties": {"a": {"const": "y"}, "b": {"type": "null"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    ],
    "type": "object",
}


class _Words:
    """A tokenizer of bytes and of some words, in which one token ends a string and goes on."""

    words = (b'"\n', b'" ,', b'x"\n', b'y"\n  ', b'", ', b" ,", b"\n  ", b'":', b'" :', b',"')
    tokens = tuple(bytes([byte]) for byte in range(256)) + words + (b"<end>",)
    eos_token_id = len(tokens) - 1
    bos_token_id = None
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Words()))
WORDS = Vocabulary(_TOKENIZER, len(_Words.tokens), (_Words.eos_token_id,), "")
MODEL = load(Path(__file__).parents[4] / "models" / "tokenwire-code-6m")


class _Writer:
    """A writer of texts that the masks of a grammar allow."""

    def __init__(self, vocabulary: Vocabulary, **spec: Any) -> None:
        grammar = GrammarSpec(**spec)
        check(grammar)
        self.vocabulary = vocabulary
        self._end = vocabulary.size
        self._filler = MaskFiller(vocabulary, LLExecutor(num_threads=1), self._end + 1)
        prototype = compile_prototype(vocabulary.tokenizer, translate(grammar))
        state = initial_state(grammar, TokenIndex(vocabulary))
        self._start = Matcher(prototype, (self._end,), state)

    def next(self, *pieces: bytes | str) -> set[bytes]:
        """Return the tokens that may follow tokens, or the bytes of a text."""
        matcher = self._start.fork()
        for piece in pieces:
            ids = list(piece.encode()) if isinstance(piece, str) else [_Words.tokens.index(piece)]
            matcher.accept(ids, self._end)
        [mask] = self._filler.fill([matcher])
        texts = [*_Words.tokens[:-1], b"<end>", b""]
        return {texts[token] for token in ids_of(mask)}

    def allows(self, text: str) -> bool:
        """Return whether the masks allow all tokens of a text, and its end."""
        matcher = self._start.fork()
        for token in [*self.vocabulary.tokenizer.tokenize_str(text), self._end]:
            [mask] = self._filler.fill([matcher])
            if not mask >> token & 1:
                return False
            matcher.accept([token], self._end)
        return True

    def write(self, seed: int) -> str | None:
        """Return a random text; None if it does not end within 200 tokens."""
        source, matcher, ids = random.Random(seed), self._start.fork(), list[int]()
        while len(ids) < 200:
            [mask] = self._filler.fill([matcher])
            token = source.choice(list(ids_of(mask)))
            matcher.accept([token], self._end)
            if token == self._end:
                return self.vocabulary.tokenizer.decode_bytes(ids).decode(errors="replace")
            ids.append(token)
        return None


@pytest.mark.parametrize("vocabulary", [WORDS, MODEL], ids=["words", "model"])
@pytest.mark.parametrize("schema", [_OBJECT, _EITHER], ids=["object", "either"])
def test_no_white_space_stands_before_a_comma_or_a_colon(
    schema: dict[str, Any], vocabulary: Vocabulary
) -> None:
    writer = _Writer(vocabulary, json_schema=json.dumps(schema))
    texts = list(filter(None, map(writer.write, range(40))))
    assert texts
    for text in texts:
        assert not re.search(r"\s[,:]", _STRING.sub('""', text)), text
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_white_space_that_models_write_is_allowed(indent: int | str | None) -> None:
    value = {"text": "a , b", "choice": " , ", "list": [1, {"a": "b :", "c": []}], "last": "x"}
    text = json.dumps(value, indent=indent)
    for vocabulary in (WORDS, MODEL):
        assert _Writer(vocabulary, json_schema=json.dumps(_OBJECT)).allows(text)
        assert _Writer(vocabulary, json_object={}).allows(text)


def test_a_required_member_leaves_only_the_comma() -> None:
    """Otherwise a model that would end the object writes a line break, and meets the comma late."""
    writer = _Writer(WORDS, json_schema=json.dumps(_OBJECT))
    assert writer.next('{"text": "a"') == {b",", b',"'}
    assert writer.next('{"text"') == {b":"}
    assert writer.next('{"text": "a", "choice": null') == {b",", b',"', b"}", b" ", b"\n", b"\n  "}
    assert writer.next('{"text": "a", "choice": null\n') == {b"}", b" ", b"\t"}


def test_a_token_that_ends_a_string_may_break_the_line_only_before_a_bracket() -> None:
    writer = _Writer(WORDS, json_schema=json.dumps(_OBJECT))
    ends = {b'"\n', b'" ,', b'x"\n', b'y"\n  '}
    assert not writer.next('{"text": "a') & ends
    assert b'", ' in writer.next('{"text": "a')
    assert b'"\n' in writer.next('{"text": "a", "choice": null, "last": "x')
    assert not writer.next('{"te') & {b'" :'}


def test_a_text_that_came_to_white_space_can_still_go_on() -> None:
    """A request resumes behind any text that its grammar allows."""
    writer = _Writer(WORDS, json_schema=json.dumps(_OBJECT))
    assert writer.next('{"text": "a"\n') == {b",", b',"'}
    assert b"," in writer.next('{"text": ', b'"', "a", b'"\n')


def test_white_space_that_a_client_chose_stays_as_it_is() -> None:
    writer = _Writer(WORDS, json_schema=json.dumps(_OBJECT), json_whitespace=" ?")
    assert writer.allows('{"text" : "" , "choice" : null}')
