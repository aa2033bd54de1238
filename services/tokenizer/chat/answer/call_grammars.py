"""Grammars of messages: calls in the model's own form, with free or constrained content.

The grammars are in llguidance's dialect of Lark, with a further grammar for each schema.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from google.protobuf.json_format import MessageToDict

from services.tokenizer.chat.answer.call_syntax import CallSyntax
from services.tokenizer.chat.answer.call_writer import CallWriter
from services.tokenizer.chat.answer.grammar_rules import GrammarRules, literal, regex
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat
from services.tokenizer.chat.answer.tool_formats import ToolFormat
from services.tokenizer.tool_schemas import IndexedTool
from tokenwire.errors import invalid
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MessageGrammar", "ReasoningState"]


class ReasoningState(Enum):
    """State of reasoning at the end of a prompt."""

    NONE = "the model does not reason, or has finished"
    POSSIBLE = "the model may begin to reason"
    OPEN = "the prompt ends inside reasoning"


class MessageGrammar(GrammarRules):
    """Builder of the grammar of one message."""

    def __init__(
        self, calls: ToolFormat, token_ids: Mapping[str, int], frame: tuple[str, str] = ("", "")
    ) -> None:
        """calls: form of calls. token_ids: ids of marks that no text can spell. frame: marks
        around content.
        """
        super().__init__(token_ids)
        self._format = calls
        self._frame = frame
        self._writers = 0

    def forced_calls(self, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the rule of one call or, unless `single`, more."""
        calls = self._all_calls(tools, single=single)
        before, behind = map(self.mark, self._frame)  # some models write an empty content first
        return f"({before} {behind})? {calls}" if before and behind else calls

    def optional_calls(self, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the rule of free text with calls wherever the model begins them."""
        syntax, *others = self._format.syntaxes
        if not syntax.opening:
            leads = re.escape(syntax.leads)
            self.rule("OTHER", f"/\\s*[^{leads}\\s](?s:.*)/")
            calls = self._inner(syntax, tools, single=single)
            marked = [
                self._marked(other, tools, single=single) for other in others if other.opening
            ]
            return self.rule("message", " | ".join([calls, *marked, "OTHER", ""]))
        if any(self._frame):
            inner, (before, behind) = self._all_calls(tools, single=single), self._frame
            if not behind:
                return self.rule("message", f"{inner} | {self.mark(before)} TEXT")
            text = f"{self.mark(before)} {self.through('framed', behind)}"
            return self.rule("message", f"({text})? {inner} | {text} |")
        inner = self._inner(syntax, tools, single=single, written=syntax.opening)
        begin = self.through("begin", syntax.opening)
        if syntax.is_opened:
            content = self.mark(syntax.content)
            return self.rule("message", f"{inner} | {content} ({begin} {inner})* TEXT")
        return self.rule(
            "message", f"{begin} {inner} | TEXT" if single else f"({begin} {inner})* TEXT"
        )

    def _all_calls(self, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the body of calls from the beginning of a message."""
        syntaxes = self._format.syntaxes[: self._format.written]
        calls = [
            self._inner(
                syntax, tools, single=single, written=syntax.begins if syntax.is_opened else ""
            )
            for syntax in syntaxes
        ]
        return f"({' | '.join(calls)})"

    def _marked(self, syntax: CallSyntax, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the body of calls behind a mark, in front of which other text may be."""
        inner = self._inner(syntax, tools, single=single, written=syntax.opening)
        begin = self.through(f"begin_{inner}", syntax.opening, text="OTHER?")
        return f"{begin} {inner}"

    def _inner(
        self, syntax: CallSyntax, tools: Sequence[IndexedTool], *, single: bool, written: str = ""
    ) -> str:
        """Return the rule of calls behind the text `written`."""
        number = self._writers
        self._writers += 1
        writer = CallWriter(self, syntax, f"_s{number}" if number else "")
        return self.rule(
            f"calls{writer.suffix}", writer.calls(tools, single=single, written=written)
        )

    def content(self, grammar: types_pb2.GrammarSpec) -> str:
        """Return the rule of content by the request's grammar. Raises INVALID_ARGUMENT."""
        return self.framed(self._content(grammar))

    def _content(self, grammar: types_pb2.GrammarSpec) -> str:
        kind = grammar.WhichOneof("spec")
        if kind == "json_schema":
            return self.part("content", {"json_schema": _read_json(grammar.json_schema)}, "grammar")
        if kind == "json_object":
            return self.part("content", {"json_schema": {"type": "object"}}, "grammar")
        if kind == "lark":
            return self.part("content", {"lark_grammar": grammar.lark}, "grammar")
        if kind == "llguidance":
            given = _read_json(grammar.llguidance)
            grammars = given.get("grammars") if isinstance(given, dict) else None
            if not isinstance(grammars, list) or not grammars or not isinstance(grammars[0], dict):
                raise invalid(
                    "grammar.llguidance",
                    'llguidance must be an object with a list "grammars" of one or more objects.',
                )
            first, *others = grammars
            name = first.get("name") or "content"
            self._parts.extend([{**first, "name": name}, *others])
            return f"@{name}"
        if kind == "gbnf":
            return self.part("content", {"gbnf": grammar.gbnf}, "grammar")
        if kind == "structural_tag":
            tag = MessageToDict(grammar.structural_tag, preserving_proto_field_name=True)
            return self.part("content", {"structural_tag": tag}, "grammar")
        if kind == "regex":
            return self.rule("content", regex(grammar.regex))
        return self.rule("content", " | ".join(map(literal, grammar.choice.choices)))

    def framed(self, content: str) -> str:
        """Return the rule of content between its marks."""
        return " ".join(
            filter(None, (self.mark(self._frame[0]), content, self.mark(self._frame[1])))
        )

    def reasoned(self, form: ReasoningFormat, state: ReasoningState, message: str) -> str:
        """Return the rule of a message after its reasoning."""
        thought = self.through("thought", form.closes)
        between = self.mark(form.resumes) or r"/\n{0,2}/"
        if state is ReasoningState.POSSIBLE:
            return f"({self.mark(form.opens)} {thought} {between})? {message}"
        return f"{thought} {between} {message}"


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("grammar", f"The grammar is not JSON: {error}.") from None
