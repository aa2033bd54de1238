"""Formats of calls and reasoning that templates show: they need no row in a table."""

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.grammar import specification
from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.call_syntax import JsonArguments, Notation
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.rendered_text import common_prefix
from services.tokenizer.chat.answer.tool_formats import answer_marks
from services.tokenizer.chat.answer_grammar import build_answer_grammar
from services.tokenizer.chat.chat_templates import ChatPrompt, ChatTemplates
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import arguments_schemas
from tests.unit.tokenizer.chat.derived_templates import DERIVED
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "names": {"type": "array", "items": {}}},
            "additionalProperties": False,
        },
    },
    "required": ["city"],
    "additionalProperties": False,
}
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    completion.Tool(name=name, description=name, parameters_json=json.dumps(schema))
    for name, schema in (("get_weather", _SCHEMA), ("get_time", _EMPTY))
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "get_weather",
        {
            "city": 'São "Tomé"', "days": 3, "deep": True, "note": "- a",
            "tags": ["b", "c"], "where": {"x": 1},
        },
    ),
    ("get_time", {}),
]  # fmt: skip
_QUESTION = "kinkajou?"
_Answer = tuple[str, str, list[tuple[str, Any]]]


class Model:
    """A model's templates and its vocabulary."""

    def __init__(self, directory: Path, source: str, tokens: Sequence[str] = ()) -> None:
        tokenizer = byte_level(("<s>", "</s>", "<|im_start|>", "<|im_end|>", *tokens), ())
        write_checkpoint(directory, tokenizer, chat_template=source)
        self.vocabulary = Vocabulary(directory, answer_marks())
        self.templates = ChatTemplates(self.vocabulary, "m")
        end = self.vocabulary.ids["</s>"]
        self._tokenizer = LLTokenizer(str(directory / "tokenizer.json"), eos_token=end)

    async def prompt(self, *messages: completion.Message, asks: bool) -> str:
        prompt = ChatPrompt(
            messages=messages,
            tools=TOOLS,
            template="",
            arguments_json="",
            add_generation_prompt=asks,
            continue_last_message=False,
        )
        return (await self.templates.render(prompt)).text

    async def answer(self, message: completion.Message) -> tuple[str, ReasoningState]:
        """Return what the template writes for the answer, and the state of its beginning."""
        question = completion.Message(
            role=completion.ROLE_USER, parts=[completion.ContentPart(text=_QUESTION)]
        )
        before = await self.prompt(question, asks=True)
        after = await self.prompt(question, message, asks=False)
        if not after.startswith(before):
            head = after.rpartition(_QUESTION)[0] + _QUESTION
            shared = common_prefix(before[len(head) :], after[len(head) :])
            before = head + shared
        form = self.templates.answers.reasoning
        is_open = form is not None and before.rstrip().endswith(form.opens.strip())
        state = ReasoningState.OPEN if is_open else ReasoningState.POSSIBLE
        return after.removeprefix(before), state

    def read(self, text: str, state: ReasoningState, generator: random.Random) -> _Answer:
        """Return content, reasoning and calls, which do not depend on the pieces of the text."""
        cuts = sorted(generator.randrange(len(text) + 1) for _ in range(len(text) // 3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole, cut = (self._read(parts, state) for parts in ([text], pieces))
        assert whole == cut
        return whole

    def _read(self, pieces: Sequence[str], state: ReasoningState) -> _Answer:
        parser = self.templates.parser(state, arguments_schemas(TOOLS))
        said = {SegmentKind.CONTENT: "", SegmentKind.REASONING: ""}
        calls: list[tuple[str, str]] = []
        segments = [part for piece in pieces for part in parser.feed(piece)]
        for part in (*segments, *parser.finish(is_cut=False)):
            if part.kind is SegmentKind.CALL:
                calls.append((part.text, ""))
            elif part.kind is SegmentKind.ARGUMENTS:
                calls[-1] = calls[-1][0], calls[-1][1] + part.text
            elif part.kind in said:
                said[part.kind] += part.text
        decoded = [(name, json.loads(arguments)) for name, arguments in calls]
        return said[SegmentKind.CONTENT], said[SegmentKind.REASONING], decoded

    def accepts(self, text: str) -> bool:
        """Return whether the grammar of required calls accepts the text."""
        choice = completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED)
        request = completion.GenerateRequest(tools=TOOLS, tool_choice=choice)
        grammar = build_answer_grammar(request, self.templates.answers, ReasoningState.NONE)
        assert grammar is not None
        matcher = LLMatcher(self._tokenizer, specification.translate(grammar.spec))
        assert not matcher.is_error(), matcher.get_error()
        ids = self.vocabulary.encode(text, add_special_tokens=False)
        is_taken = matcher.try_consume_tokens(ids) == len(ids)
        return is_taken and (matcher.is_accepting() or matcher.is_stopped())


@asynccontextmanager
async def started(directory: Path, source: str, tokens: Sequence[str] = ()) -> AsyncIterator[Model]:
    model = Model(directory, source, tokens)
    model.templates.start()
    try:
        yield model
    finally:
        await model.templates.stop()


def message(
    calls: Sequence[tuple[str, dict[str, Any]]], content: str = "", reasoning: str = ""
) -> completion.Message:
    return completion.Message(
        role=completion.ROLE_ASSISTANT,
        parts=[completion.ContentPart(text=content)] if content else [],
        reasoning=reasoning,
        tool_calls=[
            completion.ToolCall(
                id=f"call0000{place}", name=name, arguments_json=json.dumps(arguments)
            )
            for place, (name, arguments) in enumerate(calls)
        ],
    )


_PLAIN = ("braces", "pythonic", "tags_of_seed", "types_of_values")
"""Kinds whose marks are tried without tokens as well"""


@pytest.mark.parametrize(
    ("kind", "has_tokens"),
    [*((kind, True) for kind in DERIVED), *((kind, False) for kind in _PLAIN)],
)
async def test_answers_are_read_and_written_as_the_template_does(
    kind: str, has_tokens: bool, tmp_path: Path
) -> None:
    """Calls would arrive as text, and required ones push the model off what it has learned."""
    derived = DERIVED[kind]
    generator = random.Random(1)
    async with started(tmp_path, derived.source, derived.tokens if has_tokens else ()) as model:
        answers = [([], "Just this.", "Hm."), (CALLS[:1], "", ""), (CALLS, "", "")]
        if not derived.begins_messages:
            answers += [(CALLS[1:], "Let me see.", "Hm."), (CALLS, "Let me see.", "Hm.")]
        for calls, content, thought in answers:
            if derived.is_single and len(calls) > 1:
                continue
            reasoning = thought if derived.thinks else ""
            text, state = await model.answer(message(calls, content, reasoning))
            text = text.partition("<|im_end|>")[0]
            found = model.read(text, state, generator)
            assert (found[0].strip(), found[1].strip(), found[2]) == (content, reasoning, calls)
        for count in (1,) if derived.is_single else (1, 2):
            calls = (_exact_calls(model) * 2)[:count]
            text, _ = await model.answer(message(calls))
            assert model.accepts(text.partition("<|im_end|>")[0])
        assert not model.accepts("No.")


def _exact_calls(model: Model) -> list[tuple[str, dict[str, Any]]]:
    """Return calls without JSON, in which a grammar may leave out spaces."""
    form = model.templates.answers.calls.syntaxes[0].arguments
    if isinstance(form, JsonArguments):
        return CALLS[1:]
    if form.notation is not Notation.JSON:
        return CALLS
    name, arguments = CALLS[0]
    plain = {key: value for key, value in arguments.items() if not isinstance(value, list | dict)}
    return [(name, plain), *CALLS[1:]]


def test_mark_of_the_vocabulary_tells_the_form_if_the_template_shows_none(tmp_path: Path) -> None:
    """LFM2's template writes tools and results, but no calls."""
    source = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    calls = Model(tmp_path / "lfm2", source, ("<|tool_call_start|>",)).templates.answers.calls
    assert calls.name == "lfm2"
    assert Model(tmp_path / "plain", source).templates.answers.calls.name == "json"
