"""From what a client asked for to what llguidance compiles."""

import hashlib
import json
import re
from typing import Literal, TypeAlias

from llguidance import LLMatcher

from services.grammar import json_schema
from services.grammar.error import GrammarError
from tokenwire.types.v1.types_pb2 import GrammarSpec

__all__ = ["Kind", "check", "identity", "kind_of", "locate", "size_of", "translate"]

Kind: TypeAlias = Literal["json_schema", "json_object", "regex", "lark", "llguidance", "choice"]

# Compact JSON: a model that may pad with whitespace sooner or later does so for ever. No escapes by
# code point: a key could be spelt so that it is not seen to be one that the schema names.
_OPTIONS = r'"x-guidance":{"whitespace_flexible":false,"json_allowed_escapes":"nrbtf\\\""}'

_END = "}]}"
_PLACE = re.compile(r" at line (\d+) column (\d+)$")


def kind_of(spec: GrammarSpec) -> Kind:
    """Which kind of grammar it is; raises GrammarError for none."""
    kind = spec.WhichOneof("spec")
    if kind is None:
        raise GrammarError("A grammar must be one of the kinds of GrammarSpec.")
    return kind


def size_of(spec: GrammarSpec) -> int:
    """Bytes of the grammar, as sent."""
    return spec.ByteSize()


def identity(spec: GrammarSpec) -> str:
    """SHA-256, in hex, of what defines the grammar: its kind and its content."""
    kind = kind_of(spec)
    if kind == "choice":
        content = json.dumps(list(spec.choice.choices))
    else:
        content = "" if kind == "json_object" else getattr(spec, kind)
    return hashlib.sha256(f"{kind}\n{content}".encode()).hexdigest()


def check(spec: GrammarSpec) -> None:
    """Refuse, with the place, what the compiler would refuse without it, or ignore."""
    kind = kind_of(spec)
    if kind == "json_schema":
        json_schema.check(json_schema.parse(spec.json_schema))
    elif kind == "choice":
        if not spec.choice.choices:
            raise GrammarError("There must be at least one choice.")
        for index, choice in enumerate(spec.choice.choices):
            if not choice:
                raise GrammarError(f"choices[{index}] is empty.")
    elif kind == "llguidance":
        _check_llguidance(json_schema.parse(spec.llguidance))


def translate(spec: GrammarSpec) -> str:
    """The grammar in llguidance's JSON form. Says nothing about whether it compiles."""
    kind = kind_of(spec)
    if kind == "json_schema":
        return _grammar("json_schema", _with_options(spec.json_schema))
    if kind == "json_object":
        return _grammar("json_schema", _with_options('{"type":"object"}'))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.regex))
    if kind == "choice":
        return _grammar("lark_grammar", json.dumps(_lark_of_choices(list(spec.choice.choices))))
    if kind == "lark":
        return _grammar("lark_grammar", json.dumps(spec.lark))
    return _with_options_in_parts(spec.llguidance)


def locate(spec: GrammarSpec, reason: str) -> str:
    """The compiler's reason with the place that it means, where that can be told: in what was
    sent, not in what it was translated to."""
    kind = kind_of(spec)
    if kind == "regex":  # a rule was made of it; the reason shows the regex itself, too
        _, found, rest = reason.partition(" (in regex): ")
        return rest.rpartition("\n   1 | start: /")[0] if found else reason
    if kind == "llguidance":
        return _PLACE.sub("", reason)
    if kind != "json_schema":
        return reason
    if place := _PLACE.search(reason):
        line, column = map(int, place.groups())
        return f"{reason[: place.start()]} at {_place_in(spec, line, column)}"
    return json_schema.locate(json_schema.parse(spec.json_schema), reason)


def _place_in(spec: GrammarSpec, line: int, column: int) -> str:
    """Where in a schema it is that the compiler found at a line and column, in bytes, of its
    translation; both end alike."""
    lines = translate(spec).encode().split(b"\n")
    behind = len(b"\n".join([lines[line - 1][column:], *lines[line:]])) - len(_END)
    schema = spec.json_schema.rstrip().encode()
    before = schema[: len(schema) - behind].decode(errors="ignore")
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10)) - 1}"


def _grammar(field: str, value: str) -> str:
    return f'{{"grammars":[{{"{field}":{value}{_END}'


def _lark_of_choices(choices: list[str]) -> str:
    # one terminal: the compiler makes one automaton of it, whatever their number
    literals = (json.dumps(text, ensure_ascii=False) for text in choices)
    return "start: CHOICE\nCHOICE: " + " | ".join(literals).replace("\x7f", "\\u007f")


def _with_options(schema: str) -> str:
    """The schema's text with our options as its first key."""
    body = schema.strip()
    if body == "true":
        body = "{}"
    inner = body.removeprefix("{")
    separator = "" if inner.lstrip().startswith("}") else ","
    return f"{{{_OPTIONS}{separator}{inner}"


def _with_options_in_parts(grammar: str) -> str:
    """The same for the schemas of an llguidance grammar, which was checked."""
    value = json.loads(grammar)
    for part in value["grammars"]:
        if isinstance(part, dict) and isinstance(schema := part.get("json_schema"), dict):
            part["json_schema"] = json.loads(_with_options(json.dumps(schema)))
    return json.dumps(value)


def _check_llguidance(grammar: json_schema.Json) -> None:
    grammars = grammar.get("grammars") if isinstance(grammar, dict) else None
    if not isinstance(grammars, list):
        raise GrammarError('An llguidance grammar is a JSON object with the array "grammars".')
    for index, part in enumerate(grammars):
        if isinstance(part, dict) and part.get("json_schema") is not None:
            json_schema.check(part["json_schema"], f"$.grammars[{index}].json_schema")
