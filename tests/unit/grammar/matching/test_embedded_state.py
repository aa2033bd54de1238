"""JSON in calls of tools is written as JSON that is the whole output, in every form of calls."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLTokenizer

from services.grammar import GrammarError
from services.grammar.matching.embedded_state import EmbeddedState
from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex, ids_of
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.specification import check, translate
from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.call_syntax import JsonArguments
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer_grammar import build_answer_grammar
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.tool_schemas import arguments_schemas
from tests.unit.tokenizer.chat.checkpoints import TEMPLATES, chat_vocabulary
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

_FORMATS = sorted(set(TEMPLATES) - {"parts", "thinking"})
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_REQUIRED = completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED)
_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 9},
        "y": {"type": "array", "items": {"enum": [1.5, " , "]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["x", "y"],
    "additionalProperties": False,
}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": _PLACE, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place"],
    "additionalProperties": False,
}


_SET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "digits": {"type": "array", "items": {"enum": [1, 2, 12, "a"]}, "uniqueItems": True}
    },
    "required": ["digits"],
    "additionalProperties": False,
}


class Caller:
    """A model of some family that calls tools at random."""

    def __init__(self, directory: Path, template: str) -> None:
        words = chat_vocabulary(directory, template)
        self.encode = words.encode
        self.templates = ChatTemplates(words, "m")
        self.end = words.ids["</s>"]
        tokenizer = LLTokenizer(str(directory / "tokenizer.json"), eos_token=self.end)
        self.size = tokenizer.vocab_size
        self._vocabulary = Vocabulary(tokenizer, self.size, (self.end,), "")
        self._filler = MaskFiller(self._vocabulary, LLExecutor(num_threads=1), self.size)
        self.index = TokenIndex(self._vocabulary)
        syntaxes = self.templates.answers.calls.syntaxes
        self.writes_json = isinstance(syntaxes[0].arguments, JsonArguments)

    def matcher(self, schema: Any, **fields: Any) -> Matcher:
        """Return the matcher of an answer with calls of the tool f."""
        spec = self.grammar(schema, **fields)
        prototype = compile_prototype(self._vocabulary.tokenizer, translate(spec))
        return Matcher(prototype, (self.end,), initial_state(spec, self.index))

    def grammar(self, schema: Any, **fields: Any) -> GrammarSpec:
        """Return the grammar of an answer with calls of the tool f."""
        tool = completion.Tool(name="f", parameters_json=json.dumps(schema), strict=True)
        request = completion.GenerateRequest(tools=[tool], **fields)
        grammar = build_answer_grammar(request, self.templates.answers, ReasoningState.NONE)
        assert grammar is not None
        check(grammar.spec)
        return grammar.spec

    def mask(self, matcher: Matcher) -> int:
        """Return the tokens that may follow, as bits."""
        return self._filler.fill([matcher])[0]

    def write(self, start: Matcher, seed: int, begin: str = "") -> list[int] | None:
        """Return a random answer with some text at its beginning; None if it does not end."""
        source, matcher = random.Random(seed), start.fork()
        ids = self.encode(begin, add_special_tokens=False)
        matcher.accept(ids, self.size)
        while len(ids) < 600:
            if source.random() < 0.3:
                ids += matcher.take_forced(self.size)
            mask = self.mask(matcher)
            assert mask, self.read(ids)
            is_end = mask >> self.end & 1 and source.random() < 0.5
            token = self.end if is_end else source.choice(list(ids_of(mask)))
            matcher.accept([token], self.size)
            if token == self.end:
                return ids
            ids.append(token)
        return None

    def read(self, ids: list[int]) -> str:
        """Return the text of an answer."""
        return "".join(map(Detokenizer(self.templates.table).feed, ids))

    def calls(self, text: str, schema: Any) -> list[str]:
        """Return the arguments of the calls in a text, as the model wrote them."""
        tool = completion.Tool(name="f", parameters_json=json.dumps(schema))
        parser = self.templates.parser(ReasoningState.NONE, arguments_schemas([tool]))
        calls: list[str] = []
        for part in (*parser.feed(text), *parser.finish(is_cut=False)):
            if part.kind is SegmentKind.CALL:
                calls.append("")
            elif part.kind is SegmentKind.ARGUMENTS:
                calls[-1] += part.text
        return calls


@pytest.fixture(scope="module", params=_FORMATS)
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Caller:
    return Caller(tmp_path_factory.mktemp("model"), TEMPLATES[request.param])


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Caller:
    return Caller(tmp_path_factory.mktemp("hermes"), TEMPLATES["hermes"])


def test_no_white_space_stands_before_a_comma_or_a_colon_of_arguments(caller: Caller) -> None:
    start = caller.matcher(_SCHEMA, tool_choice=_REQUIRED)
    written = 0
    for seed in range(12):
        ids = caller.write(start, seed)
        if ids is None:
            continue
        text = caller.read(ids)
        for arguments in caller.calls(text, _SCHEMA):
            jsonschema.validate(json.loads(arguments), _SCHEMA)
            if arguments in text:  # other notations than JSON are translated
                written += 1
                assert not re.search(r"\s[,:]", _STRING.sub('""', arguments)), text
    assert bool(written) == caller.writes_json


def test_items_of_a_set_differ_in_arguments_of_a_strict_tool(caller: Caller) -> None:
    """pydantic describes a `set` so."""
    if not caller.writes_json:
        with pytest.raises((GrammarError, ServiceError), match="uniqueItems"):
            caller.grammar(_SET, tool_choice=_REQUIRED)
        return
    for fields in ({"tool_choice": _REQUIRED}, {}):
        start = caller.matcher(_SET, **fields)
        lengths: set[int] = set()
        for seed in range(12):
            for arguments in caller.calls(caller.read(caller.write(start, seed) or []), _SET):
                value = json.loads(arguments)
                jsonschema.validate(value, _SET)
                lengths.add(len(value["digits"]))
        assert fields == {} or len(lengths) > 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.data())
def test_resumption_and_draft_tokens_lead_to_the_same_state(
    hermes: Caller, seed: int, data: st.DataObject
) -> None:
    start = hermes.matcher(_SET)
    ids = hermes.write(start, seed, begin='<tool_call>\n{"name": "f", "arg') or []
    kept = data.draw(st.integers(0, len(ids)))
    resumed, whole = start.fork(), start.fork()
    resumed.accept(ids[:kept], hermes.size)
    whole.accept(ids, hermes.size)
    walked = resumed.walk(ids[kept:], hermes.size)
    assert len(walked) == len(ids) - kept
    if walked:
        assert hermes.mask(walked[-1]) == hermes.mask(whole)


def test_text_that_looks_like_a_call_is_free(hermes: Caller) -> None:
    """Only the control token begins a call; models write about calls, too."""
    start = hermes.matcher(_SET)
    for text in (
        'f", "arguments": {"digits": [1, 1, 1]} , and <tool_call {"name" : "f", "arguments": {',
        '{"name": "f", "arguments": {"digits": [1, 1]}}',
    ):
        hermes.write(start, 0, begin=text)
    call = '<tool_call>\n{"name": "f", "arguments": {"digits": [1, 2]}}\n</tool_call>'
    hermes.write(start, 0, begin=f"{call} [1, 1] {call}")
    with pytest.raises(RefusedTokenError, match="repeats a key or an item"):
        hermes.write(start, 0, begin=f"{call} [1, 1] {call.replace('2', '1')}")


def test_text_around_values_is_followed_to_its_end(caller: Caller) -> None:
    """Otherwise JSON behind that place would have no constraint."""
    for fields in ({"tool_choice": _REQUIRED}, {}):
        start = caller.matcher(_SCHEMA, **fields)
        for seed in range(6):
            state = initial_state(caller.grammar(_SCHEMA, **fields), caller.index)
            if state is None:
                assert not caller.writes_json
                continue
            for token in caller.write(start, seed) or ():
                state = state.after(token)
                assert isinstance(state, EmbeddedState)
                assert state.outline is not None
