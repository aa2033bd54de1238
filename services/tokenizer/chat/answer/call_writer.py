"""Rules of tool calls of any syntax."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.tokenizer.chat.answer.argument_schemas import object_of, properties_of
from services.tokenizer.chat.answer.call_syntax import (
    NAME,
    CallSyntax,
    KeywordArguments,
    TaggedArguments,
)
from services.tokenizer.chat.answer.grammar_rules import GrammarRules, chosen, literal
from services.tokenizer.chat.answer.value_grammars import (
    ANNOTATIONS,
    Parameter,
    keyword_value,
    tagged_value,
)
from services.tokenizer.tool_schemas import IndexedTool, arguments_schema, rebase_references
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["CallWriter"]

_ROOT = "#/$defs/root"  # place of the whole schema inside the schema of one argument
_OBJECT_KEYWORDS = frozenset({
    "$defs", "$ref", "additionalProperties", "definitions", "properties", "required", "type",
})  # fmt: skip


class CallWriter:
    """Writer of the rules of calls of one syntax."""

    def __init__(self, grammar: GrammarRules, syntax: CallSyntax, suffix: str = "") -> None:
        """syntax: syntax of the calls. suffix: end of the names of its rules."""
        self.suffix = suffix
        self._grammar = grammar
        self._syntax = syntax

    def calls(self, tools: Sequence[IndexedTool], *, single: bool, written: str) -> str:
        """Return the body of one call or, unless `single`, more, behind the text `written`."""
        mark, syntax = self._grammar.mark, self._syntax
        rules = {
            tool.name: self._grammar.rule(f"tool_{index}{self.suffix}", self._call(index, tool))
            for index, tool in tools
        }
        lead = syntax.lead.lstrip("\n")  # as many line breaks as a model writes
        calls = self._behind(lead.lstrip().removeprefix(written) if written else lead, rules)
        if not written and lead != syntax.lead:
            calls = f"{literal(syntax.lead[: -len(lead)])}? {calls}"
        if not single and not syntax.is_single:
            calls += f" ({self._behind(syntax.between + syntax.begins, rules)})*"
        closes = syntax.closes.rstrip()
        space = syntax.closes[len(closes) :]
        return " ".join([calls, mark(closes), f"{literal(space)}?" if space else ""])

    def _behind(self, text: str, rules: Mapping[str, str]) -> str:
        """Return the body of any tool's call behind a text."""
        mark = self._grammar.mark
        if NAME not in text:
            return f"{mark(text)} ({' | '.join(rules.values())})"
        named = (f"{mark(text.replace(NAME, name))} {rule}" for name, rule in rules.items())
        return f"({' | '.join(named)})"

    def _call(self, index: int, tool: completion_pb2.Tool) -> str:
        """Return the body of a call from its name on."""
        grammar, syntax = self._grammar, self._syntax
        form = syntax.arguments
        if isinstance(form, TaggedArguments):
            arguments = self._tagged(index, tool, form)
        elif isinstance(form, KeywordArguments):
            arguments = self._keywords(index, tool, form)
        else:
            arguments = grammar.value(f"arguments_{index}{self.suffix}", *_arguments(index, tool))
        name = literal(tool.name)
        return f"{name} {grammar.mark(syntax.middle)} {arguments} {grammar.mark(syntax.ends)}"

    def _keywords(self, index: int, tool: completion_pb2.Tool, form: KeywordArguments) -> str:
        grammar = self._grammar
        members: list[tuple[str, bool]] = []
        for name, schema, place, required in _properties(grammar, index, tool, form):
            if not name.isidentifier():
                raise invalid(place, f"This model's calls can't have a parameter named {name!r}.")
            rule = f"value_{index}_{len(members)}{self.suffix}"
            value = keyword_value(grammar, rule, Parameter(tool, name, schema, place), form)
            members.append((f"{grammar.mark(name + form.middle)} {value}", required))
        return chosen(grammar, f"list_{index}{self.suffix}", members, grammar.mark(form.between))

    def _tagged(self, index: int, tool: completion_pb2.Tool, form: TaggedArguments) -> str:
        grammar = self._grammar
        members: list[tuple[str, bool]] = []
        for name, schema, place, required in _properties(grammar, index, tool, form):
            rule = f"value_{index}_{len(members)}{self.suffix}"
            member = tagged_value(grammar, rule, Parameter(tool, name, schema, place), form)
            members.append((f"{grammar.mark(form.begins)} {literal(name)} {member}", required))
        return chosen(grammar, f"list_{index}{self.suffix}", members, grammar.mark(form.between))


def _arguments(index: int, tool: completion_pb2.Tool) -> tuple[dict[str, Any], str]:
    """Return the schema of a tool's arguments, and its place in the request."""
    return arguments_schema(tool, f"tools[{index}]"), f"tools[{index}].parameters_json"


def _properties(
    grammar: GrammarRules,
    index: int,
    tool: completion_pb2.Tool,
    form: TaggedArguments | KeywordArguments,
) -> Iterable[tuple[str, dict[str, Any], str, bool]]:
    """Yield each parameter of a tool: name, schema, place in the request, whether required."""
    root, place = _arguments(index, tool)
    described = object_of(root)
    required = described.get("required")
    unknown = (root.keys() | described.keys()) - ANNOTATIONS - _OBJECT_KEYWORDS
    if isinstance(required, list) and any(name not in properties_of(root) for name in required):
        unknown |= {"required"}
    grammar.leave_out(
        unknown,
        tool,
        place,
        place,
        "This model writes arguments one by one, so the whole object can't be constrained by",
    )
    properties = properties_of(root).items()
    for name, schema in sorted(properties) if form.is_sorted else properties:
        own = schema if isinstance(schema, dict) else {}
        if "$ref" in json.dumps(own):
            moved = rebase_references(root, _ROOT)
            own = {**rebase_references(own, _ROOT), "$defs": {"root": moved}}
        yield name, own, place, isinstance(required, list) and name in required
