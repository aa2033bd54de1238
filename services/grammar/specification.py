"""From what a client asked for to what llguidance compiles."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from llguidance import LLMatcher

from services.common.json_values import Json
from services.grammar import gbnf, structural_tag
from services.grammar.error import GrammarError
from services.grammar.schemas import json_schema, rewriting, strings
from services.grammar.schemas.json_positions import JsonPositions, may_repeat
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["Kind", "check", "identity", "kind_of", "locate", "positions", "size_of", "translate"]

Kind: TypeAlias = Literal[
    "json_schema", "json_object", "regex", "lark", "llguidance", "choice", "gbnf", "structural_tag"
]

# Compact JSON: a model that may pad with whitespace sooner or later does so for ever. No escapes by
# code point: a key could be spelt so that it is not seen to be one that the schema names.
_OPTIONS: Mapping[str, Json] = {
    "x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
}

_ANY_OBJECT: Mapping[str, Json] = {"type": "object"}
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
    elif kind == "structural_tag":
        content = spec.structural_tag.SerializeToString(deterministic=True).hex()
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
    elif kind == "gbnf":
        gbnf.to_lark(spec.gbnf)
    elif kind == "structural_tag":
        structural_tag.check(spec.structural_tag)


def translate(spec: GrammarSpec) -> str:
    """The grammar in llguidance's JSON form. Says nothing about whether it compiles, but raises
    GrammarError, with the place, where llguidance could not hold strings of a schema."""
    kind = kind_of(spec)
    if kind == "json_schema":
        return _grammar("json_schema", _compiled(json_schema.parse(spec.json_schema)))
    if kind == "json_object":
        return _grammar("json_schema", _compiled(_ANY_OBJECT))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.regex))
    if kind == "choice":
        return _grammar("lark_grammar", _lark_of_choices(list(spec.choice.choices)))
    if kind == "lark":
        return _grammar("lark_grammar", spec.lark)
    if kind == "gbnf":
        return _grammar("lark_grammar", gbnf.to_lark(spec.gbnf))
    if kind == "structural_tag":
        parts = structural_tag.parts_of(spec.structural_tag, "tag", _compiled)
        return json.dumps({"grammars": parts})
    return _of_parts(json.loads(spec.llguidance))


def positions(spec: GrammarSpec) -> JsonPositions | None:
    """How to follow a text that may repeat keys or items as far as the compiler can tell; None
    where it can't."""
    kind = kind_of(spec)
    if kind == "json_object":
        return JsonPositions(_ANY_OBJECT, _OPTIONS)
    if kind != "json_schema":
        return None
    plain = _plain(json_schema.parse(spec.json_schema))
    return JsonPositions(plain, _OPTIONS) if may_repeat(plain) else None


def locate(spec: GrammarSpec, reason: str) -> str:
    """The compiler's reason with the place that it means, where that can be told: in what was
    sent, not in what it was translated to."""
    kind = kind_of(spec)
    if kind == "regex":  # a rule was made of it; the reason shows the regex itself, too
        _, found, rest = reason.partition(" (in regex): ")
        return rest.rpartition("\n   1 | start: /")[0] if found else reason
    if kind == "llguidance":
        for index, part in enumerate(json.loads(spec.llguidance)["grammars"]):
            if isinstance(part, dict) and part.get("json_schema") is not None:
                reason = strings.given_words(part["json_schema"], _part(index), reason)
    if kind in ("llguidance", "gbnf", "structural_tag"):
        return _PLACE.sub("", reason.partition("\n   1 | ")[0])
    if kind != "json_schema":
        return reason
    schema = json_schema.parse(spec.json_schema)
    reason = _PLACE.sub("", strings.given_words(schema, "$", reason))
    return json_schema.locate(schema, reason)


def _grammar(field: str, value: object) -> str:
    return json.dumps({"grammars": [{field: value}]})


def _lark_of_choices(choices: list[str]) -> str:
    # one terminal: the compiler makes one automaton of it, whatever their number
    literals = (json.dumps(text, ensure_ascii=False) for text in choices)
    return "start: CHOICE\nCHOICE: " + " | ".join(literals).replace("\x7f", "\\u007f")


def _plain(schema: Json, path: str = "$") -> Mapping[str, Json]:
    """The same schema in the keywords and expressions that the compiler holds exactly."""
    try:
        plain = rewriting.rewrite(strings.held_exactly(schema, path), path)
    except GrammarError as error:
        raise GrammarError(strings.given_words(schema, path, str(error))) from None
    return plain if isinstance(plain, Mapping) else {}  # true allows all


def _compiled(schema: Json, path: str = "$") -> Mapping[str, Json]:
    """The schema as the compiler takes it."""
    return {**_OPTIONS, **_plain(schema, path)}


def _of_parts(grammar: dict[str, Any]) -> str:
    """An llguidance grammar, which was checked, with its schemas as the compiler takes them; parts
    that llguidance does not know become what they stand for."""
    translated: list[Any] = []
    further: list[Any] = []
    for index, part in enumerate(grammar["grammars"]):
        known = dict(part) if isinstance(part, dict) else part
        if isinstance(known, dict) and "gbnf" in known:
            known["lark_grammar"] = gbnf.to_lark(known.pop("gbnf"))
        elif isinstance(known, dict) and "structural_tag" in known:
            tag = structural_tag.read(known["structural_tag"])
            name = known.get("name") or f"tag_{index}"
            known, *schemas = structural_tag.parts_of(tag, name, _compiled)
            further += schemas
        elif isinstance(known, dict) and known.get("json_schema") is not None:
            known["json_schema"] = _compiled(known["json_schema"], _part(index))
        translated.append(known)
    return json.dumps(grammar | {"grammars": translated + further})


def _part(index: int) -> str:
    return f"$.grammars[{index}].json_schema"


def _check_llguidance(grammar: Json) -> None:
    grammars = grammar.get("grammars") if isinstance(grammar, dict) else None
    if not isinstance(grammars, list):
        raise GrammarError('An llguidance grammar is a JSON object with the array "grammars".')
    for index, part in enumerate(grammars):
        if not isinstance(part, dict):
            continue
        if part.get("json_schema") is not None:
            json_schema.check(part["json_schema"], _part(index), is_whole=False)
        if "gbnf" in part:
            if not isinstance(part["gbnf"], str):
                raise GrammarError(f"$.grammars[{index}].gbnf must be a string.")
            gbnf.to_lark(part["gbnf"])
        if "structural_tag" in part:
            structural_tag.check(structural_tag.read(part["structural_tag"]))
