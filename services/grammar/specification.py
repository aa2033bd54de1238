"""The grammars that clients send, and their translation for llguidance.

Regular expressions, Lark and choices take one step. `gbnf` translates GBNF to Lark, and
`structural_tag` translates a tag to a Lark grammar with one JSON Schema per structure. A JSON
Schema passes these stages, all but the last two in `schemas`:

1. `validation` parses the JSON text and refuses keywords that no grammar enforces; `finiteness`
   refuses schemas that only endless values satisfy.
2. `string_keywords` replaces patterns and formats by regular expressions that llguidance enforces
   exactly. Package `patterns` parses and translates them.
3. `lowering` replaces the keywords that llguidance lacks, such as "not", "oneOf" and "contains":
   - `native_subset` finds the subschemas that can stay as they are.
   - `normal_forms` turns each other subschema into a union of sets of values. `keywords` gives the
     sets of single keywords. `number_sets`, `string_sets`, `array_sets` and `object_sets` intersect
     them. `conjunction` represents the schemas that members and items must satisfy.
   - `lowering` writes each set in native keywords, and each union as "anyOf".
4. llguidance compiles the lowered schema (`matching.prototype`), with the white space of
   `patterns.white_space` between its tokens.
5. During generation, `matching.uniqueness` forbids repeated keys and items, which no context-free
   grammar can express. It asks `json_positions` which subschemas apply, and `word_sets` which
   prefixes only used words complete. `matching.separators` leaves out white space in front of
   commas and colons. `matching.outline` finds JSON in other text,
   in which repetitions are forbidden in each "json_value" alone.

Negation applies to schemas, never to sets. So a set that is left out, where a union is too large,
makes the output narrower and never invalid.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from llguidance import LLMatcher

from services.common.json_values import Json
from services.grammar import GrammarError, gbnf, lark, structural_tag
from services.grammar.patterns import white_space
from services.grammar.schemas import validation
from services.grammar.schemas.exact_numbers import narrow_bounds
from services.grammar.schemas.json_positions import JsonPositions, allows_repeats
from services.grammar.schemas.lowering import lower
from services.grammar.schemas.string_keywords import lower_strings, restore_patterns
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = [
    "Kind",
    "check",
    "check_white_space",
    "has_default_spaces",
    "identity",
    "kind_of",
    "locate",
    "outline",
    "positions",
    "translate",
]

Kind: TypeAlias = Literal[
    "json_schema", "json_object", "regex", "lark", "llguidance", "choice", "gbnf", "structural_tag"
]

# No \u escapes: an escaped key would not be recognized as a key that the schema names.
_ESCAPES: Mapping[str, Json] = {"json_allowed_escapes": 'nrbtf\\"'}
_COMPACT: Mapping[str, Json] = {"x-guidance": {**_ESCAPES, "whitespace_flexible": False}}
_MAX_SHOWN = 100  # characters of a pattern in a message
_WITH_JSON = frozenset({"json_schema", "json_object", "structural_tag", "lark", "llguidance"})

_Compilable: TypeAlias = Callable[[Json, str], Mapping[str, Json]]

_ANY_OBJECT: Mapping[str, Json] = {"type": "object"}
_PLACE = re.compile(r" at line (\d+) column (\d+)$")


def kind_of(spec: GrammarSpec) -> Kind:
    """Return the kind of a grammar; raise GrammarError if none is set."""
    kind = spec.WhichOneof("spec")
    if kind is None:
        raise GrammarError("A grammar must be one of the kinds of GrammarSpec.")
    return kind


def identity(spec: GrammarSpec, tenant: str = "") -> str:
    """Return the SHA-256, in hex, of a grammar's tenant, kind and content.

    Tenants share no compiled grammars: the time of a request would tell one what another sent.
    """
    kind = kind_of(spec)
    if kind == "choice":
        content = json.dumps(list(spec.choice.choices))
    elif kind == "structural_tag":
        content = spec.structural_tag.SerializeToString(deterministic=True).hex()
    else:
        content = "" if kind == "json_object" else getattr(spec, kind)
    if spec.HasField("json_whitespace"):
        content = json.dumps([content, spec.json_whitespace])
    salt = hashlib.sha256(tenant.encode()).hexdigest()
    return hashlib.sha256(f"{salt}\n{kind}\n{content}".encode()).hexdigest()


def check_white_space(spec: GrammarSpec) -> None:
    """Raise GrammarError for a json_whitespace that is not white space, or has no effect."""
    kind = kind_of(spec)
    if spec.HasField("json_whitespace") and kind not in _WITH_JSON:
        raise GrammarError(f"A grammar of the kind {kind} has no white space; leave it out.")
    _json_options(spec)


def check(spec: GrammarSpec) -> None:
    """Raise GrammarError, with the place, for faults that the compiler ignores or can't locate.

    The grammar is within the bounds of its fields.
    """
    kind = kind_of(spec)
    if kind == "json_schema":
        validation.check(validation.parse(spec.json_schema))
    elif kind == "llguidance":
        _check_llguidance(validation.parse(spec.llguidance))
    elif kind == "gbnf":
        gbnf.to_lark(spec.gbnf)
    elif kind == "structural_tag":
        structural_tag.check(spec.structural_tag)


def translate(spec: GrammarSpec) -> str:
    """Return a checked grammar in llguidance's JSON form.

    Raises GrammarError, with the place, for schemas that llguidance can't enforce exactly. Other
    faults show when the result is compiled.
    """
    kind = kind_of(spec)
    options = _json_options(spec)

    def compilable(schema: Json, path: str = "$") -> Mapping[str, Json]:
        return {**options, **_lowered(schema, path)}

    if kind == "json_schema":
        return _grammar("json_schema", compilable(validation.parse(spec.json_schema)))
    if kind == "json_object":
        return _grammar("json_schema", compilable(_ANY_OBJECT))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.regex))
    if kind == "choice":
        return _grammar("lark_grammar", _lark_of_choices(spec.choice.choices))
    if kind == "lark":
        return _grammar("lark_grammar", lark.with_options(spec.lark, _spaces_of(options)))
    if kind == "gbnf":
        return _grammar("lark_grammar", gbnf.to_lark(spec.gbnf))
    if kind == "structural_tag":
        parts = structural_tag.parts_of(spec.structural_tag, "tag", compilable)
        return json.dumps({"grammars": parts})
    return _translate_parts(json.loads(spec.llguidance), compilable, _spaces_of(options))


def has_default_spaces(spec: GrammarSpec) -> bool:
    """Return whether a grammar has JSON whose white space the client does not choose."""
    return kind_of(spec) in _WITH_JSON - {"lark"} and not spec.HasField("json_whitespace")


def outline(spec: GrammarSpec, value: int, numbered_value: int) -> str | None:
    """Return the grammar of the text around JSON; None where there is no such text.

    The token `value` stands in place of each "json_schema". The token `numbered_value`, a number
    and ";" stand in place of each "json_value". The numbers count them from 0.
    """
    kind = kind_of(spec)
    if kind == "structural_tag":
        parts = structural_tag.parts_of(spec.structural_tag, "tag", _left_out)
        grammar: dict[str, Any] = {"grammars": parts}
    elif kind == "llguidance":
        grammar = json.loads(spec.llguidance)
        for number, part in enumerate(_values_of(grammar)):
            del part["json_value"]
            part.pop("json_schema", None)
            part["lark_grammar"] = f'start: <[{numbered_value}]> "{number};"'
        grammar = json.loads(_translate_parts(grammar, _left_out, _spaces_of(_json_options(spec))))
    else:
        return None
    for part in grammar["grammars"]:
        if part.pop("json_schema", None) is not None:
            part["lark_grammar"] = f"start: <[{value}]>"
    text = json.dumps(grammar)
    return text if f"<[{value}]>" in text or f"<[{numbered_value}]>" in text else None


def positions_of_values(spec: GrammarSpec) -> list[JsonPositions | None]:
    """Return the positions of each "json_value" of an llguidance grammar, in their order."""
    if kind_of(spec) != "llguidance":
        return []
    values = _values_of(json.loads(spec.llguidance))
    return [_positions(part["json_value"]) for part in values]


def _values_of(grammar: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [part for part in grammar["grammars"] if _schema_keyword(part) == "json_value"]


def positions(spec: GrammarSpec) -> JsonPositions | None:
    """Return the positions for duplicate detection; None where llguidance allows no repetition."""
    kind = kind_of(spec)
    if kind == "json_object":
        return JsonPositions(_ANY_OBJECT, _COMPACT)
    if kind != "json_schema":
        return None
    return _positions(validation.parse(spec.json_schema))


def _positions(schema: Json) -> JsonPositions | None:
    lowered = _lowered(schema)
    return JsonPositions(lowered, _COMPACT) if allows_repeats(lowered) else None


def locate(spec: GrammarSpec, reason: str) -> str:
    """Return the compiler's reason in terms of the grammar as sent, with the place if known."""
    kind = kind_of(spec)
    if kind == "regex":  # llguidance wraps the expression in a rule, and quotes both
        _, found, rest = reason.partition(" (in regex): ")
        return rest.rpartition("\n   1 | start: /")[0] if found else reason
    if kind == "lark":  # leave out the options that `translate` added
        return str(LLMatcher.validate_grammar(_grammar("lark_grammar", spec.lark))) or reason
    if kind == "llguidance":
        for index, part in enumerate(json.loads(spec.llguidance)["grammars"]):
            if (keyword := _schema_keyword(part)) is not None:
                path = _path_of_part(index, keyword)
                reason = restore_patterns(part[keyword], path, reason)
    if kind in ("llguidance", "gbnf", "structural_tag"):
        return _PLACE.sub("", reason.partition("\n   1 | ")[0])
    if kind != "json_schema":
        return reason
    schema = validation.parse(spec.json_schema)
    reason = _PLACE.sub("", restore_patterns(schema, "$", reason))
    return validation.locate(schema, reason)


def _left_out(schema: Json, path: str) -> Mapping[str, Json]:
    return {}


def _grammar(field: str, value: object) -> str:
    return json.dumps({"grammars": [{field: value}]})


def _lark_of_choices(choices: Iterable[str]) -> str:
    # one terminal: the compiler builds a single automaton for any number of choices
    return "start: CHOICE\nCHOICE: " + " | ".join(map(gbnf.lark_literal, choices))


def _lowered(schema: Json, path: str = "$") -> Mapping[str, Json]:
    """Return an equivalent schema that llguidance enforces exactly."""
    try:
        lowered = narrow_bounds(lower(lower_strings(schema, path), path))
    except GrammarError as error:
        raise GrammarError(restore_patterns(schema, path, str(error))) from None
    return lowered if isinstance(lowered, Mapping) else {}  # true allows everything


def _json_options(spec: GrammarSpec) -> Mapping[str, Json]:
    """Return the member of a schema that tells llguidance how to write JSON."""
    spaces = white_space.DEFAULT
    if spec.HasField("json_whitespace"):
        try:
            spaces = white_space.as_expression(spec.json_whitespace)
        except GrammarError as error:
            pattern = spec.json_whitespace[:_MAX_SHOWN]
            raise GrammarError(f'"{pattern}" can\'t be white space of JSON: {error}.') from None
    return {"x-guidance": {**_ESCAPES, "whitespace_pattern": spaces}} if spaces else _COMPACT


def _spaces_of(options: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return JSON options without those that only our own translation of a schema relies on."""
    own = options["x-guidance"]
    assert isinstance(own, Mapping)
    return {"x-guidance": {name: own[name] for name in own if name not in _ESCAPES}}


def _translate_parts(
    grammar: dict[str, Any], compilable: _Compilable, spaces: Mapping[str, Json]
) -> str:
    """Lower the schemas of an llguidance grammar, and translate parts of kinds that it lacks."""
    translated_parts: list[Any] = []
    further: list[Any] = []
    for index, part in enumerate(grammar["grammars"]):
        known = dict(part) if isinstance(part, dict) else part
        if isinstance(known, dict) and "gbnf" in known:
            known["lark_grammar"] = gbnf.to_lark(known.pop("gbnf"))
        elif isinstance(known, dict) and isinstance(known.get("lark_grammar"), str):
            known["lark_grammar"] = lark.with_options(known["lark_grammar"], spaces)
        elif isinstance(known, dict) and "structural_tag" in known:
            tag = structural_tag.read(known["structural_tag"])
            name = known.get("name") or f"tag_{index}"
            known, *schemas = structural_tag.parts_of(tag, name, compilable)
            further += schemas
        elif (keyword := _schema_keyword(known)) is not None:
            path = _path_of_part(index, keyword)
            known["json_schema"] = compilable(known.pop(keyword), path)
        translated_parts.append(known)
    return json.dumps(grammar | {"grammars": translated_parts + further})


def _schema_keyword(part: Any) -> str | None:
    """Return the keyword under which a part of an llguidance grammar holds a JSON Schema."""
    known = part if isinstance(part, dict) else {}
    keywords = ("json_value", "json_schema")
    return next((keyword for keyword in keywords if known.get(keyword) is not None), None)


def _path_of_part(index: int, keyword: str) -> str:
    return f"$.grammars[{index}].{keyword}"


def _check_llguidance(grammar: Json) -> None:
    grammars = grammar.get("grammars") if isinstance(grammar, dict) else None
    if not isinstance(grammars, list):
        raise GrammarError('An llguidance grammar is a JSON object with the array "grammars".')
    for index, part in enumerate(grammars):
        if not isinstance(part, dict):
            continue
        if (keyword := _schema_keyword(part)) is not None:
            path = _path_of_part(index, keyword)
            validation.check(part[keyword], path, is_followed=keyword == "json_value")
        if "gbnf" in part:
            if not isinstance(part["gbnf"], str):
                raise GrammarError(f"$.grammars[{index}].gbnf must be a string.")
            gbnf.to_lark(part["gbnf"])
        if "structural_tag" in part:
            structural_tag.check(structural_tag.read(part["structural_tag"]))
