"""Grammars of messages: calls in the model's own form, with free or constrained content.

They are Lark grammars in llguidance's dialect, with a further grammar for each schema.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from services.common.annotations import ENCODINGS, ENFORCED_FORMATS
from services.tokenizer.chat.answer.argument_schemas import (
    json_types,
    named_values,
    object_of,
    properties_of,
)
from services.tokenizer.chat.answer.tool_formats import ReasoningFormat, ToolFormat
from services.tokenizer.tool_schemas import IndexedTool, arguments_schema, rebase_references
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MessageGrammar", "ReasoningState"]

_ROOT = "#/$defs/root"  # place of the whole schema inside the schema of one argument
# keywords of JSON Schema that constrain nothing
_ANNOTATIONS = ENCODINGS | {
    "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly",
    "title", "writeOnly",
}  # fmt: skip
_OBJECT_KEYWORDS = frozenset({
    "$defs", "$ref", "additionalProperties", "definitions", "properties", "required", "type",
})  # fmt: skip


class ReasoningState(Enum):
    """State of reasoning at the end of a prompt."""

    NONE = "the model does not reason, or has finished"
    POSSIBLE = "the model may begin to reason"
    OPEN = "the prompt ends inside reasoning"


class MessageGrammar:
    """Builder of the grammar of one message."""

    def __init__(
        self, calls: ToolFormat, token_ids: Mapping[str, int], frame: tuple[str, str] = ("", "")
    ) -> None:
        """Take the form of calls, the ids of marks that no text can spell, marks around content."""
        self._format = calls
        self._token_ids = token_ids
        self._tokens = re.compile(f"({'|'.join(map(re.escape, token_ids))})")
        self._frame = frame
        self._rules = ["TEXT: /(?s:.*)/"]
        self._parts: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        """Fields of the request, by the places of the grammar built from them"""
        self.ignored: list[str] = []
        """Paths of schema keywords that the form of calls can't enforce"""

    def forced_calls(self, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the rule of one call or, unless `single`, more."""
        write = _INNER[self._format.name]
        inner = self.rule("inner", write(self, tools, single))
        call = f"{self._opening()} {inner}"
        if single or not self._format.repeats:
            return self.rule("calls", call)
        between = _literal(self._format.between)
        return self.rule("calls", f"{call} ({between} {call})*")

    def optional_calls(self, tools: Sequence[IndexedTool], *, single: bool) -> str:
        """Return the rule of free text with calls wherever the model begins them."""
        form = self._format
        inner = self.rule("inner", _INNER[form.name](self, tools, single))
        if not form.opens:
            leads = re.escape(form.leads)
            self._rules.append(f"OTHER: /\\s*[^{leads}\\s](?s:.*)/")
            return self.rule("message", f"{inner} | OTHER |")
        if any(self._frame):
            call = f"{self._opening()} {inner}"
            return self.rule("message", f"{call} | {self.framed('TEXT')}")
        begin = self.through("begin", form.opens[0])
        return self.rule(
            "message", f"{begin} {inner} | TEXT" if single else f"({begin} {inner})* TEXT"
        )

    def content(self, grammar: types_pb2.GrammarSpec) -> str:
        """Return the rule of content by the request's grammar. Raises INVALID_ARGUMENT."""
        return self.framed(self._content(grammar))

    def _content(self, grammar: types_pb2.GrammarSpec) -> str:
        kind = grammar.WhichOneof("spec")
        if kind == "json_schema":
            return self._part(
                "content", {"json_schema": _read_json(grammar.json_schema)}, "grammar"
            )
        if kind == "json_object":
            return self._part("content", {"json_schema": {"type": "object"}}, "grammar")
        if kind == "lark":
            return self._part("content", {"lark_grammar": grammar.lark}, "grammar")
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
            return self._part("content", {"gbnf": grammar.gbnf}, "grammar")
        if kind == "structural_tag":
            tag = MessageToDict(grammar.structural_tag, preserving_proto_field_name=True)
            return self._part("content", {"structural_tag": tag}, "grammar")
        if kind == "regex":
            return self.rule("content", _regex(grammar.regex))
        return self.rule("content", " | ".join(map(_literal, grammar.choice.choices)))

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

    def leave_out(
        self, keywords: Collection[str], tool: completion_pb2.Tool, place: str, path: str, why: str
    ) -> None:
        """Note keywords of the schema at `path` that the form of calls can't enforce.

        Raises INVALID_ARGUMENT with the reason for the tool at `place` if it is strict.
        """
        if keywords and tool.strict:
            raise invalid(place, f"{why} {', '.join(sorted(keywords))}.")
        self.ignored += (f"{path}.{keyword}" for keyword in sorted(keywords))

    def finish(self, start: str) -> types_pb2.GrammarSpec:
        """Return the grammar that starts with the rule `start`."""
        lark = "\n".join([f"start: {start}", *self._rules])
        grammars = [{"lark_grammar": lark}, *self._parts]
        return types_pb2.GrammarSpec(llguidance=json.dumps({"grammars": grammars}))

    def mark(self, text: str) -> str:
        """Return a mark with its tokens, all else spelled."""
        pieces = self._tokens.split(text) if self._token_ids else [text]
        return " ".join(
            _literal(piece) if (token := self._token_ids.get(piece)) is None else f"<[{token}]>"
            for piece in pieces
            if piece
        )

    def schema(self, name: str, schema: Mapping[str, Any], place: str) -> str:
        """Add a rule of JSON by a schema from `place` of the request; return its reference."""
        return self._part(name, {"json_schema": schema}, place)

    def _opening(self) -> str:
        return self.mark(self._format.opens[0]) if self._format.opens else ""

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name, which is `name` without options in brackets."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def through(self, name: str, mark: str) -> str:
        """Add a rule of text that ends with a mark; return its name."""
        # a mark without a token could also be part of the text: a lazy rule ends at the first one
        options = "" if mark.startswith(tuple(self._token_ids)) else "[lazy]"
        return self.rule(name + options, f"TEXT {self.mark(mark)}")

    def _part(self, name: str, grammar: Mapping[str, Any], place: str) -> str:
        self._parts.append({"name": name, **grammar})
        self.places[f"$.grammars[{len(self._parts)}].json_schema"] = place
        return f"@{name}"


def _json_call(
    grammar: MessageGrammar,
    key: str,
    tools: Sequence[IndexedTool],
    head: str = "",
) -> str:
    """Return the rule of {"name": …, key: {…}}, with the spaces of templates.

    head: rule of what stands before the name.
    """
    options = []
    head = head or _literal('{"name": "')
    for index, tool in tools:
        named = _literal(f'{tool.name}", "{key}": ')
        options.append(f'{head} {named} {_schema(grammar, index, tool)} "}}"')
    return grammar.rule("call", " | ".join(options))


def _hermes(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    call = _json_call(grammar, "arguments", tools)
    return f'"\\n" {call} "\\n" {grammar.mark("</tool_call>")}'


def _llama3(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return _json_call(grammar, "parameters", tools)


def _bare(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return _json_call(grammar, "arguments", tools)


def _mistral(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return _between_names(grammar, tools, "", "[ARGS]", "")


def _mistral_array(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return _array(_json_call(grammar, "arguments", tools), single)


def _phi4(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return f"{_mistral_array(grammar, tools, single)} {grammar.mark('<|/tool_call|>')}"


def _command(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    number, begin = grammar.rule("number", "/[0-9]+/"), _literal('{"tool_call_id": "')
    head = " ".join((begin, number, _literal('", "tool_name": "')))
    call = _json_call(grammar, "parameters", tools, head)
    calls = _repeated(call, _literal(",\n    "), single)
    return rf'"[\n    " {calls} "\n]" {grammar.mark("<|END_ACTION|>")}'


def _minimax(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    calls = _repeated(_json_call(grammar, "arguments", tools), _literal("\n"), single)
    return rf'"\n" {calls} "\n" {grammar.mark("</tool_calls>")}'


def _harmony(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    return _between_names(grammar, tools, "", " <|constrain|>json<|message|>", "")


def _deepseek_v3(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    begin = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    call = _between_names(grammar, tools, begin, "\n```json\n", "\n```<｜tool▁call▁end｜>")
    calls = _repeated(call, _literal("\n"), single)
    return f"{calls} {grammar.mark('<｜tool▁calls▁end｜>')}"


def _deepseek_v31(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    marks = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    calls = _repeated(_between_names(grammar, tools, *marks), "", single)
    return f"{calls} {grammar.mark('<｜tool▁calls▁end｜>')}"


def _kimi_k2(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    marks = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    begin, middle, end = map(grammar.mark, marks)
    number = grammar.rule("number", "/[0-9]+/")
    options = []
    for index, tool in tools:
        head = f"{begin} {_literal(tool.name + ':')} {number} {middle}"
        options.append(f"{head} {_schema(grammar, index, tool)} {end}")
    calls = _repeated(grammar.rule("call", " | ".join(options)), "", single)
    return f"{calls} {grammar.mark('<|tool_calls_section_end|>')}"


def _between_names(
    grammar: MessageGrammar, tools: Sequence[IndexedTool], begin: str, middle: str, end: str
) -> str:
    """Return the rule of a name and its arguments, with marks before, between and behind them."""
    first, then, last = map(grammar.mark, (begin, middle, end))
    options = [
        f"{first} {_literal(tool.name)} {then} {_schema(grammar, index, tool)} {last}"
        for index, tool in tools
    ]
    return grammar.rule("call", " | ".join(options))


def _pythonic(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    options = []
    for index, tool in tools:
        members: list[tuple[str, bool]] = []
        for name, schema, place, required in _properties(grammar, index, tool):
            if not name.isidentifier():
                raise invalid(place, f"This model's calls can't have a parameter named {name!r}.")
            value = grammar.schema(f"value_{index}_{len(members)}", schema, place)
            members.append((f"{_literal(name + '=')} {value}", required))
        listed = _chosen(grammar, f"list_{index}", members, _literal(", "))
        options.append(f'{_literal(tool.name + "(")} {listed} ")"')
    return _array(grammar.rule("call", " | ".join(options)), single)


def _array(call: str, single: bool) -> str:
    return f'"[" {_repeated(call, _literal(", "), single)} "]"'


def _repeated(call: str, between: str, single: bool) -> str:
    return call if single else f"{call} ({between} {call})*"


def _xml(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    tags = ("<parameter=", ">\n", "\n</parameter>\n")
    call = _tagged(grammar, tools, ("<function=", ">\n", "</function>\n"), tags)
    return f'"\\n" {call} {grammar.mark("</tool_call>")}'


def _glm45(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    tags = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    return _tagged(grammar, tools, ("", "\n", "</tool_call>"), tags)


def _minimax_m2(grammar: MessageGrammar, tools: Sequence[IndexedTool], single: bool) -> str:
    tags = ('<parameter name="', '">', "</parameter>\n")
    call = _tagged(grammar, tools, ('<invoke name="', '">\n', "</invoke>\n"), tags)
    calls = _repeated(call, "", single)
    return f'"\\n" {calls} {grammar.mark("</minimax:tool_call>")}'


def _tagged(
    grammar: MessageGrammar,
    tools: Sequence[IndexedTool],
    call: tuple[str, str, str],
    tags: tuple[str, str, str],
) -> str:
    """Return the rule of a call whose arguments stand between tags.

    call: marks before the name, behind it, and behind the arguments; tags: marks before a key,
    behind it, and behind its value.
    """
    options = []
    before, behind, last = map(grammar.mark, call)
    key_begin, key_end, _ = map(grammar.mark, tags)
    text = grammar.through("string", tags[2])
    for index, tool in tools:
        members: list[tuple[str, bool]] = []
        for name, schema, place, required in _properties(grammar, index, tool):
            rule = f"value_{index}_{len(members)}"
            parameter = _Parameter(tool, name, schema, place)
            value = _tagged_value(grammar, rule, parameter, (text, grammar.mark(tags[2])))
            members.append((f"{key_begin} {_literal(name)} {key_end} {value}", required))
        listed = _chosen(grammar, f"list_{index}", members, "")
        options.append(f"{before} {_literal(tool.name)} {behind} {listed} {last}")
    return grammar.rule("call", " | ".join(options))


_INNER: Mapping[str, Callable[[MessageGrammar, Sequence[IndexedTool], bool], str]] = {
    "command": _command,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "glm45": _glm45,
    "granite": _mistral_array,
    "harmony": _harmony,
    "hermes": _hermes,
    "json": _bare,
    "kimi_k2": _kimi_k2,
    "llama3_json": _llama3,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "mistral": _mistral,
    "mistral_array": _mistral_array,
    "phi4": _phi4,
    "pythonic": _pythonic,
    "qwen3_coder": _xml,
}


class _Parameter(NamedTuple):
    """A parameter of a tool."""

    tool: completion_pb2.Tool
    name: str
    schema: Mapping[str, Any]
    place: str
    """Field of the request with the tool's schema"""


def _tagged_value(
    grammar: MessageGrammar, name: str, parameter: _Parameter, ends: tuple[str, str]
) -> str:
    """Return the rule of a value and the mark behind it: a bare string, or JSON.

    ends: the rule of any text with that mark, and of the mark.
    """
    text, end = ends
    schema, place = parameter.schema, parameter.place
    kinds = json_types(schema, schema)
    if "string" not in kinds:
        return f"{grammar.schema(name, schema, place)} {end}"
    values = named_values(schema)
    if values and all(isinstance(value, str) for value in values):
        return f"({' | '.join(map(_literal, values))}) {end}"
    unknown = schema.keys() - _ANNOTATIONS - {"type", "$defs"}
    kind = schema.get("format")
    if isinstance(kind, str) and kind not in ENFORCED_FORMATS:
        unknown.discard("format")
    grammar.leave_out(
        unknown,
        parameter.tool,
        place,
        f"{place}.properties.{parameter.name}",
        "This model writes strings without quotes, so they can't be constrained by",
    )
    return text


def _chosen(
    grammar: MessageGrammar, name: str, members: Sequence[tuple[str, bool]], separator: str
) -> str:
    """Return the rule of members in their order, in which optional ones may be absent."""
    if not members:
        return ""
    tail = ""  # the rule of what follows a member; members are added from the last on
    heads: list[str] = []
    for place in range(len(members) - 1, -1, -1):
        member, required = members[place]
        if required:
            heads = [f"{member} {tail}"]
        else:
            heads.insert(0, f"{member} {tail}")
        following = f"{separator} {member} {tail}"
        body = following if required else f"{following} | {tail}" if tail else f"{following} |"
        tail = grammar.rule(f"{name}_{place}", body)
    optional = "" if any(required for _, required in members) else " |"
    return grammar.rule(name, " | ".join(heads) + optional)


def _schema(grammar: MessageGrammar, index: int, tool: completion_pb2.Tool) -> str:
    """Return the reference to the grammar of a tool's arguments."""
    return grammar.schema(f"arguments_{index}", *_arguments(index, tool))


def _arguments(index: int, tool: completion_pb2.Tool) -> tuple[dict[str, Any], str]:
    """Return the schema of a tool's arguments, and its place in the request."""
    return arguments_schema(tool, f"tools[{index}]"), f"tools[{index}].parameters_json"


def _properties(
    grammar: MessageGrammar, index: int, tool: completion_pb2.Tool
) -> Iterable[tuple[str, dict[str, Any], str, bool]]:
    """Yield each parameter of a tool: name, schema, place in the request, whether required."""
    root, place = _arguments(index, tool)
    described = object_of(root)
    required = described.get("required")
    unknown = (root.keys() | described.keys()) - _ANNOTATIONS - _OBJECT_KEYWORDS
    if isinstance(required, list) and any(name not in properties_of(root) for name in required):
        unknown |= {"required"}
    grammar.leave_out(
        unknown,
        tool,
        place,
        place,
        "This model writes arguments one by one, so the whole object can't be constrained by",
    )
    for name, schema in properties_of(root).items():
        own = schema if isinstance(schema, dict) else {}
        if "$ref" in json.dumps(own):
            moved = rebase_references(root, _ROOT)
            own = {**rebase_references(own, _ROOT), "$defs": {"root": moved}}
        yield name, own, place, isinstance(required, list) and name in required


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _regex(pattern: str) -> str:
    """Return a regular expression between slashes."""
    escaped = re.sub(
        r"\\.|/",
        lambda match: match.group() if match.group() != "/" else "\\/",
        pattern,
        flags=re.DOTALL,
    )
    return f"/{escaped}/".replace("\n", "\\n")


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("grammar", f"The grammar is not JSON: {error}.") from None
