"""Grammars of calls: every text that they allow parses into calls that fit their schemas."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.common.json_values import Json
from services.grammar import specification
from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer_grammar import AnswerGrammar, build_answer_grammar
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import arguments_schemas
from tests.unit.tokenizer.chat.checkpoints import TEMPLATES, chat_vocabulary
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types

_FORMATS = sorted(set(TEMPLATES) - {"parts", "thinking"})
_SCHEMAS: dict[str, dict[str, Any]] = {
    "by_reference": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
    },
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "now": {"$ref": "#/$defs/flag"},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "null"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["days"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
    "get_any": {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": "two"}, "c": {"enum": [True, None]}},
        "additionalProperties": False,
    },
}
_REQUIRED = completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED)


def _tools(*, strict: bool = False) -> list[completion.Tool]:
    return [
        completion.Tool(name=name, parameters_json=json.dumps(schema), strict=strict)
        for name, schema in _SCHEMAS.items()
    ]


class _Model:
    """A model that says any text that the grammar allows."""

    def __init__(self, directory: Path, template: str) -> None:
        self.vocabulary: Vocabulary = chat_vocabulary(directory, template)
        self.templates = ChatTemplates(self.vocabulary, "m")
        self._end = self.vocabulary.ids["</s>"]
        self._tokenizer = LLTokenizer(str(directory / "tokenizer.json"), eos_token=self._end)

    def grammar(
        self, state: ReasoningState = ReasoningState.NONE, **fields: Any
    ) -> AnswerGrammar | None:
        return build_answer_grammar(
            completion.GenerateRequest(**fields), self.templates.answers, state
        )

    def matcher(self, grammar: AnswerGrammar) -> LLMatcher:
        specification.check(grammar.spec)
        matcher = LLMatcher(self._tokenizer, specification.translate(grammar.spec))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def say(
        self, grammar: AnswerGrammar, seed: int, *, begin: str = "", most: int = 2_000
    ) -> str | None:
        """Return random text; None if it did not end."""
        matcher, generator = self.matcher(grammar), random.Random(seed)
        ids = self.vocabulary.encode(begin, add_special_tokens=False) if begin else []
        assert matcher.try_consume_tokens(ids) == len(ids)
        while not matcher.is_stopped() and len(ids) < most:
            mask = matcher.compute_logit_bias()
            allowed = [token for token, bias in enumerate(mask) if bias]
            token = generator.choice(allowed)
            if self._end in allowed and generator.random() < 0.5:
                token = self._end
            if token == self._end:
                break
            assert matcher.consume_token(token)
            ids.append(token)
        if not matcher.is_accepting() and not matcher.is_stopped():
            return None
        detokenizer = Detokenizer(self.templates.table)
        return "".join(map(detokenizer.feed, ids))

    def read(self, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
        """Return reasoning, content and calls."""
        parser = self.templates.parser(ReasoningState.POSSIBLE, arguments_schemas(_tools()))
        said = {SegmentKind.REASONING: "", SegmentKind.CONTENT: ""}
        calls: list[tuple[str, str]] = []
        for part in (*parser.feed(text), *parser.finish(is_cut=False)):
            if part.kind is SegmentKind.CALL:
                calls.append((part.text, ""))
            elif part.kind is SegmentKind.ARGUMENTS:
                calls[-1] = calls[-1][0], calls[-1][1] + part.text
            elif part.kind in said:
                said[part.kind] += part.text
        decoded = [(name, json.loads(arguments)) for name, arguments in calls]
        return said[SegmentKind.REASONING], said[SegmentKind.CONTENT], decoded


@pytest.fixture(scope="module", params=_FORMATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Model:
    return _Model(tmp_path_factory.mktemp("model"), TEMPLATES[request.param])


def test_forced_calls_fit_their_schemas(model: _Model) -> None:
    """Every tool is called, with and without optional arguments, in one call or several."""
    seen: set[str] = set()
    counts: set[int] = set()
    for single in (False, True):
        grammar = model.grammar(
            tools=_tools(), tool_choice=_REQUIRED, parallel_tool_calls=not single
        )
        assert grammar is not None
        for seed in range(24):
            text = model.say(grammar, seed)
            if text is None:
                continue
            _, content, calls = model.read(text)
            assert content == ""
            assert 1 <= len(calls) <= (1 if single else 99)
            counts.add(len(calls))
            for name, arguments in calls:
                seen.add(name)
                jsonschema.validate(arguments, _SCHEMAS[name])
    assert seen == set(_SCHEMAS)
    several = model.templates.answers.calls.name not in ("harmony", "json", "llama3_json")
    assert (len(counts) > 1) == several


_PARAMETERS: dict[str, dict[str, Any]] = {
    "path": {"type": "string", "minLength": 1, "maxLength": 4096, "description": "A path. " * 40},
    "day": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$", "description": "A day. " * 40},
    "url": {"type": "string", "format": "uri", "description": "What to fetch. " * 20},
    "timeout": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    "todos": {
        "type": "array",
        "maxItems": 64,
        "items": {
            "type": "object",
            "properties": {
                "content": {"type": "string", "minLength": 1},
                "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                "id": {"type": "string", "format": "uuid"},
            },
            "required": ["content", "status", "id"],
            "additionalProperties": False,
        },
    },
    "label": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
    "mode": {"type": "string", "enum": ["content", "count"], "default": "count"},
}
_AGENT_SCHEMA: Json = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": _PARAMETERS,
    "required": ["path", "timeout"],
    "additionalProperties": False,
}


def test_tool_set_of_an_agent_makes_a_grammar(model: _Model) -> None:
    """Coding agents send 100 kB of tools, with keywords that some forms can't enforce."""
    text = json.dumps(_AGENT_SCHEMA)
    count = 100_000 // len(text) + 1
    tools = [
        completion.Tool(name=f"mcp__server__{number}", parameters_json=text)
        for number in range(count)
    ]
    grammar = model.grammar(tools=tools, tool_choice=_REQUIRED)
    assert grammar is not None
    model.matcher(grammar)


def test_named_tool_is_the_only_one_called(model: _Model) -> None:
    grammar = model.grammar(tools=_tools(), tool_choice=completion.ToolChoice(name="get_any"))
    assert grammar is not None
    said = [text for seed in range(4) if (text := model.say(grammar, seed)) is not None]
    assert said
    for text in said:
        [(name, arguments)] = model.read(text)[2]
        assert name == "get_any"
        jsonschema.validate(arguments, _SCHEMAS[name])


def test_call_of_a_strict_tool_fits_its_schema(model: _Model) -> None:
    """Text before the call, or instead of it, stays free."""
    form = model.templates.answers.calls
    reasoning = model.templates.answers.reasoning
    opens = reasoning.frame[0] if reasoning is not None else ""
    grammar = model.grammar(tools=_tools(strict=True))
    assert grammar is not None
    free = model.matcher(grammar)
    words = model.vocabulary.encode(f"{opens}return the def ", add_special_tokens=False)
    assert free.try_consume_tokens(words) == len(words)
    assert free.is_accepting() or opens
    begin = form.opens[0] if form.opens else "{"
    for before in ("", "Well: ") if form.opens and not opens else ("",):
        text = model.say(grammar, 5, begin=before + begin)
        if text is None:
            continue
        _, content, calls = model.read(text.partition("\x00")[0])
        assert calls
        assert content.startswith(before.strip())
        for name, arguments in calls[:1]:
            jsonschema.validate(arguments, _SCHEMAS[name])


def test_grammar_constrains_content_after_reasoning_and_beside_calls(tmp_path: Path) -> None:
    """The grammar is the content's: reasoning stays free, and so does the choice of a call."""
    template = TEMPLATES["hermes"] + "{# </think> #}"
    model = _Model(tmp_path, template)
    content = types.GrammarSpec(json_schema='{"type":"object","properties":{"a":{"const":1}},'
        '"required":["a"],"additionalProperties":false}')  # fmt: skip
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for state, texts in (
        (ReasoningState.OPEN, {"hm {</think>\n\n": True}),
        (ReasoningState.POSSIBLE, {"<think>hm</think>\n\n": True, "": True}),
        (ReasoningState.NONE, {"": True, "<think>hm</think>": False}),
    ):
        grammar = model.grammar(state, grammar=content, tools=_tools())
        assert grammar is not None
        for thought, allowed in texts.items():
            for answer in ('{"a":1}', call):
                ids = model.vocabulary.encode(thought + answer, add_special_tokens=False)
                matcher = model.matcher(grammar)
                taken = matcher.try_consume_tokens(ids) == len(ids)
                assert (taken and matcher.is_accepting()) == allowed
    assert model.grammar(grammar=content) is None


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ({"regex": "[a/]b"}, "/b", "cb"),
        ({"json_object": types.JsonObject()}, "{}", "[]"),
        ({"lark": 'start: "re" rest\nrest: "turn"'}, "return", "re"),
        ({"choice": types.ChoiceList(choices=["a", 'b"'])}, 'b"', "b"),
        ({"llguidance": '{"grammars":[{"lark_grammar":"start: \\"ab\\""}]}'}, "ab", "a"),
    ],
)
def test_every_kind_of_grammar_constrains_content(
    kind: dict[str, Any], right: str, wrong: str, tmp_path: Path
) -> None:
    model = _Model(tmp_path, TEMPLATES["thinking"])
    grammar = model.grammar(ReasoningState.OPEN, grammar=types.GrammarSpec(**kind))
    assert grammar is not None
    for text, expected in ((right, True), (wrong, False)):
        ids = model.vocabulary.encode(f"x</think>{text}", add_special_tokens=False)
        matcher = model.matcher(grammar)
        taken = matcher.try_consume_tokens(ids) == len(ids)
        assert (taken and matcher.is_accepting()) == expected


def test_schema_that_a_form_can_not_enforce_is_refused_by_its_field(tmp_path: Path) -> None:
    """Of a strict tool. Of others it is named, since tools of agents have such keywords."""
    schema: Json = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    tools = [completion.Tool(name="f", parameters_json=json.dumps(schema), strict=True)]
    model = _Model(tmp_path / "xml", TEMPLATES["qwen3_coder"])
    with pytest.raises(ServiceError) as caught:
        model.grammar(tools=tools, tool_choice=_REQUIRED)
    assert caught.value.field == "tools[0].parameters_json"
    schema = {"properties": {"a": {}}, "required": ["a", "b"], "minProperties": 2}
    together = [completion.Tool(name="f", parameters_json=json.dumps(schema), strict=True)]
    with pytest.raises(ServiceError, match="minProperties"):
        model.grammar(tools=together, tool_choice=_REQUIRED)
    for kept in (tools, together):
        kept[0].strict = False
    first, second = (model.grammar(tools=kept, tool_choice=_REQUIRED) for kept in (tools, together))
    assert first is not None
    assert second is not None
    assert first.ignored == ["tools[0].parameters_json.properties.a.pattern"]
    assert second.ignored == [
        "tools[0].parameters_json.minProperties",
        "tools[0].parameters_json.required",
    ]
    bare = _Model(tmp_path / "json", TEMPLATES["json"])
    with pytest.raises(ServiceError) as caught:
        bare.grammar(tools=tools, grammar=types.GrammarSpec(regex="a"))
    assert caught.value.field == "grammar"


@pytest.mark.parametrize("text", ['{"grammars": []}', '{"grammars": [1]}', "[]"])
def test_llguidance_grammar_without_parts_is_refused(model: _Model, text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        model.grammar(tools=_tools(), grammar=types.GrammarSpec(llguidance=text))
    assert caught.value.field.startswith("grammar")


def test_bare_strings_may_have_keywords_that_are_never_enforced(tmp_path: Path) -> None:
    """pydantic's SecretStr and bytes have such keywords."""
    model = _Model(tmp_path / "xml", TEMPLATES["qwen3_coder"])
    secret: Any = {"type": "string", "format": "password", "writeOnly": True}
    secret |= {"contentEncoding": "x"}
    for schema, is_taken in ((secret, True), ({"format": "date"}, False), ({"format": []}, False)):
        properties = {"properties": {"a": {"type": "string"} | schema}}
        text = json.dumps(properties)
        tools = [completion.Tool(name="f", parameters_json=text, strict=True)]
        with contextlib.nullcontext() if is_taken else pytest.raises(ServiceError, match="format"):
            grammar = model.grammar(tools=tools, tool_choice=_REQUIRED)
            assert grammar is not None
            assert grammar.ignored == [
                "tools[0].parameters_json.properties.a.format",
                "tools[0].parameters_json.properties.a.contentEncoding",
            ]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": {"a": 1, "b": {"enum": 5}, "c": {"anyOf": 7}, "d": {"type": [[]]}}},
        {"properties": {"a": {"$ref": "#/x/y"}, "b": {"$ref": "#"}}, "required": 3},
        {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}},
    ],
)
def test_invalid_schema_is_refused_or_left_to_the_grammar_service(
    model: _Model, schema: dict[str, Any]
) -> None:
    """Calls are parsed in either case."""
    tools = [completion.Tool(name="f", parameters_json=json.dumps(schema))]
    with contextlib.suppress(ServiceError):
        model.grammar(tools=tools, tool_choice=_REQUIRED)
    parser = model.templates.parser(ReasoningState.NONE, arguments_schemas(tools))
    text = "<function=f><parameter=a>1</parameter><parameter=c>1</parameter></function>"
    assert [*parser.feed(text), *parser.finish(is_cut=False)]
