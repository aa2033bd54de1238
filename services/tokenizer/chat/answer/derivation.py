"""Derivation of the form of calls and reasoning from what a chat template writes for them.

A template is rendered with small conversations (`template.answer_probe`). The words of the probes
are known, so the text between them is the template's own. Texts are compared in whole units, such
as tags and words (`rendered_text`). A differential comparison of this kind was first used by
llama.cpp.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.json_values import Json
from services.tokenizer.chat.answer.call_syntax import (
    ID,
    KEY,
    KIND,
    NAME,
    CallSyntax,
    KeywordArguments,
    Notation,
    TaggedArguments,
)
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat
from services.tokenizer.chat.answer.rendered_text import (
    common_prefix,
    common_suffix,
    marks_in,
    merged,
    units_of,
)

__all__ = ["CALLS", "CONTENT", "IDS", "REASONING", "SCHEMAS", "TYPED", "Renderings", "derive_calls",
           "derive_reasoning"]  # fmt: skip

CONTENT, REASONING = "numbat", "pangolin"
IDS = ("callone01", "calltwo02")
CALLS: Sequence[tuple[str, dict[str, Json]]] = (
    ("find_tapir", {"aye": "eland", "bongo": "fossa"}),
    ("get_okapi", {"dugong": "gaur", "coati": "hoatzin"}),
)
TYPED: dict[str, Json] = {
    "aye": "eland", "bilby": True, "fennec": 2.5, "ibex": 7351, "loris": ["quoll", "zebu"],
    "okay": {"xerus": 8462},
}  # fmt: skip
"""Arguments of every type, sorted, since some templates sort them"""
_TYPES = {
    "aye": "string", "bilby": "boolean", "fennec": "number", "ibex": "integer", "loris": "array",
    "okay": "object",
}  # fmt: skip
_OTHERS: dict[str, Json] = {
    "bilby": {"type": "boolean"}, "fennec": {"type": "number"}, "ibex": {"type": "integer"},
    "loris": {"type": "array", "items": {"type": "string"}},
    "okay": {"type": "object", "properties": {"xerus": {"type": "integer"}}},
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    name: {
        "type": "object",
        "properties": {**{key: {"type": "string"} for key in arguments}, **_OTHERS},
    }
    for name, arguments in CALLS
}
"""Schemas of the probes' tools by name"""


_END = re.compile(r"eos|eot|eom|end.of", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Renderings:
    """Rendered probes, from the end of the question on; "" = the template refuses the probe."""

    header: str = ""
    """Beginning of the assistant's message"""
    plain: str = ""
    """Rendering of an answer without calls"""
    one: str = ""
    """Rendering of an answer with the first call"""
    two: str = ""
    """Rendering of an answer with both calls"""
    said: str = ""
    """Rendering of an answer with content and both calls, or one if two are not possible"""
    typed: str = ""
    """Rendering of an answer with a call that has arguments of every type"""
    thought: str = ""
    """Rendering of an answer with reasoning and content, or reasoning and calls"""


@dataclass(frozen=True, slots=True)
class _Call:
    """Places of one call in a text."""

    name: int
    args: int
    """Place at which the arguments begin: the object, or the first parameter's name"""
    end: int
    """Place behind the object, or behind the last value"""
    members: Sequence[str] = ()
    """Texts between name, parameters and values, from the first parameter's name on"""


def derive_calls(
    seen: Renderings, reasoning: ReasoningFormat | None
) -> tuple[CallSyntax, str] | None:
    """Return the syntax of calls, and the mark that ends a message with calls, or None."""
    text, count = (seen.two, 2) if _shows_all(seen.two) else (seen.one, 1)
    for call_id in IDS:
        text = text.replace(call_id, ID)
    calls = _outline(text, CALLS[:count])
    if not calls:
        return None
    first, last = calls[0], calls[-1]
    names = [name for name, _ in CALLS]
    middles = [
        text[call.name + len(name) : call.args] for call, name in zip(calls, names, strict=False)
    ]
    middle = middles[0] if count == 1 else merged(*middles)
    if middle is None:
        return None
    between = text[first.end : last.name] if count == 2 else None
    behind = text[last.end :]
    form: TaggedArguments | KeywordArguments | None = None
    if first.members:
        parts = _arguments(middle, calls, between, behind)
        if parts is None:
            return None
        form, middle, between, behind = parts
    lead = _lead(text[: first.name], seen, reasoning)
    lead = lead.replace(names[0], NAME)
    is_opened = False
    if between is None:
        opens, begins, joins = "", lead, ""
        ends = ""
    else:
        between = between.replace(names[1], NAME)
        begins = _beginning(between, lead)
        if not lead.strip():
            begins = _beginning(between, text[: first.name])
            is_opened = bool(begins.strip())
        rest = between[: len(between) - len(begins)]
        ends = common_prefix(rest, behind)
        opens = "" if is_opened else lead[: len(lead) - len(begins)]
        joins, behind = rest[len(ends) :], behind[len(ends) :]
    plain_end = seen.plain.rpartition(CONTENT)[2]
    if reasoning is not None:
        plain_end = plain_end.removeprefix(reasoning.frame[1])
    closes, turn_end = _closing(behind, plain_end)
    if between is None:
        ends, closes = closes, ""
    syntax = CallSyntax(
        begins, middle, ends, opens=opens, between=joins, closes=closes,
        is_single=count == 1, is_opened=is_opened,
        content=_content_mark(seen) if is_opened else "",
    )  # fmt: skip
    if form is not None:
        syntax = replace(syntax, arguments=_typed(form, seen.typed, middle))
    return (syntax, turn_end) if syntax.opening or syntax.leads or is_opened else None


def _shows_all(text: str) -> bool:
    return all(name in text for name, _ in CALLS)


def _outline(text: str, wanted: Sequence[tuple[str, Mapping[str, Json]]]) -> list[_Call]:
    """Return the places of the calls; [] if a call is not found."""
    found: list[_Call] = []
    at = 0
    for name, arguments in wanted:
        in_order = dict(sorted(arguments.items()))
        call = (
            _json_call(text, at, name, arguments)
            or _member_call(text, at, name, arguments)
            or _member_call(text, at, name, in_order)
        )
        if call is None or (found and bool(found[0].members) != bool(call.members)):
            return []
        found.append(call)
        at = call.end
    return found


def _json_call(text: str, at: int, name: str, arguments: Mapping[str, Json]) -> _Call | None:
    keys = (text.find(f'"{key}"', at) for key in arguments)
    key = min(keys)
    begin = text.rfind("{", at, key) if key >= 0 else -1
    name_at = text.rfind(name, at, begin) if begin >= 0 else -1
    if name_at < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
    except ValueError:
        return None
    return _Call(name_at, begin, end) if value == arguments else None


def _member_call(text: str, at: int, name: str, arguments: Mapping[str, Json]) -> _Call | None:
    words = [str(word) for item in arguments.items() for word in item]
    places: list[int] = []
    begin = text.find(words[0], at)
    name_at = text.rfind(name, at, begin) if begin >= 0 else -1
    if name_at < 0:
        return None
    for word in words:
        place = text.find(word, begin)
        if place < 0:
            return None
        places.append(place)
        begin = place + len(word)
    gaps = [
        text[place + len(word) : following]
        for place, word, following in zip(places, words, places[1:], strict=False)
    ]
    return _Call(name_at, places[0], begin, (words[0], *gaps, words[2]))


def _arguments(
    middle: str, calls: Sequence[_Call], between: str | None, behind: str
) -> tuple[TaggedArguments | KeywordArguments, str, str | None, str] | None:
    """Return the form of arguments, and the texts around them without the parts of that form."""
    first, last = calls[0].members, calls[-1].members
    key, to_value, joint, _, second = first
    if to_value != last[1] or first[3] != to_value:
        return None
    joint = joint.replace(key, KEY)
    last_key = last[-1]
    behind = behind.replace(last_key, KEY)
    begins = _beginning(middle, joint)
    rest = joint[: len(joint) - len(begins)]
    ends = common_prefix(rest, behind)
    if between is not None:
        between = between.replace(second, KEY)
        ends = common_prefix(ends, between)
        between = between[len(ends) :]
    form: TaggedArguments | KeywordArguments | None = _keywords(
        to_value, ends, rest[len(ends) :], begins
    )
    if form is None:
        if not ends.strip() or not begins.strip():
            return None
        form = TaggedArguments(begins, to_value, ends, rest[len(ends) :])
        middle = middle[: len(middle) - len(begins)]
    is_sorted = list(calls[-1].members[::4]) == sorted(CALLS[-1][1])
    return replace(form, is_sorted=is_sorted), middle, between, behind[len(ends) :]


def _beginning(first: str, second: str) -> str:
    """Return the common end of two texts, without the end of a tag in front of it."""
    shared = common_suffix(first, second)
    return shared[1:] if shared.startswith((">]", "><")) else shared


def _keywords(to_value: str, quote: str, between: str, begins: str) -> KeywordArguments | None:
    middle = to_value.removesuffix(quote)
    if not quote.strip() or middle == to_value or middle.strip() not in ("=", ":") or begins:
        return None
    notation = Notation.PYTHON if quote in ("'", '"') else Notation.BARE
    return KeywordArguments(middle, quote, between, notation)


def _lead(text: str, seen: Renderings, reasoning: ReasoningFormat | None) -> str:
    """Return the text between the beginning of a message, or its content, and the first name."""
    header = seen.header
    lead = text.removeprefix(header)
    if lead == text:
        lead = text[len(common_prefix(text, header)) :]
    if reasoning is not None:
        lead = lead.rpartition(reasoning.closes)[2]
    name = CALLS[0][0]
    _, content, said = seen.said.partition(CONTENT)
    if content and name in said:
        call_at = said.find(next(iter(CALLS[0][1])))
        said = said[: said.rfind(name, 0, call_at)].replace(IDS[0], ID)
        if lead.strip() and (shared := common_suffix(lead, said)).strip():
            lead = shared
    for mark in reasoning.separators if reasoning is not None else ():
        lead = lead.removeprefix(mark)
    return lead


def _content_mark(seen: Renderings) -> str:
    """Return the text in front of content."""
    before = seen.plain.partition(CONTENT)[0]
    return before.removeprefix(seen.header) if before.startswith(seen.header) else ""


def _closing(behind: str, plain_end: str) -> tuple[str, str]:
    """Return the text behind calls without the end of the message, and a mark that ends it."""
    shared = common_suffix(behind, plain_end)
    if shared.strip():
        space = shared[: len(shared) - len(shared.lstrip())]
        return behind[: len(behind) - len(shared)] + space, ""
    rest = behind.rstrip()
    units = units_of(rest)
    is_mark = bool(units) and units[-1] in marks_in(rest)
    if not is_mark or not (plain_end.strip() or _END.search(units[-1])):
        return rest, ""
    return rest[: len(rest) - len(units[-1])], units[-1]


def _typed(
    form: TaggedArguments | KeywordArguments, text: str, middle: str
) -> TaggedArguments | KeywordArguments:
    """Return the form with the notation of values that are not strings."""
    if isinstance(form, KeywordArguments) or not text:
        return form
    values = _values_behind(text, form)
    listed = values.get("loris", "")
    notation = Notation.JSON
    if "quoll" in listed and form.begins.strip() in listed:
        inner = listed.partition(form.begins.strip())[2]
        notation, item = Notation.TAGS, inner.partition(form.middle.strip())[0]
        form = replace(form, item=item)
    elif "['quoll'" in listed or "True" in values.get("bilby", ""):
        notation = Notation.PYTHON
    return replace(_with_kinds(form, values), notation=notation)


def _values_behind(text: str, form: TaggedArguments) -> dict[str, str]:
    """Return the text behind the name of each parameter, up to the next one's."""
    found: dict[str, str] = {}
    at = text.rfind(CALLS[0][0], 0, text.find("eland"))
    keys = list(TYPED)
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        begin = text.find(form.begins.strip() + key, at)
        if begin < 0:
            return found
        at = begin + len(form.begins.strip() + key)
        end = text.find(form.begins.strip() + following, at) if following else len(text)
        found[key] = text[at:end]
    return found


def _with_kinds(form: TaggedArguments, values: Mapping[str, str]) -> TaggedArguments:
    """Return the form with the texts of the types between a name and its value, if it has any."""
    number = values.get("ibex", "").partition("7351")[0]
    if not number or number == form.middle:
        return form
    before, after = common_prefix(form.middle, number), common_suffix(form.middle, number)
    kinds = {
        _TYPES[key]: text.removeprefix(before).partition(after)[0] for key, text in values.items()
    }
    if not before or not after:
        return form
    own = form.middle[len(before) : len(form.middle) - len(after)]
    others = {kind: text for kind, text in kinds.items() if kind != "string"}
    shared = set(others.values())
    null = next(iter(shared)) if len(shared) == 1 else "null"
    return replace(
        form, middle=f"{before}{KIND}{after}", kinds={**kinds, "string": own, "null": null}
    )


def derive_reasoning(seen: Renderings, known: Sequence[ReasoningFormat]) -> ReasoningFormat | None:
    """Return the first known format whose marks the template writes, or else a derived format.

    Without a rendering of reasoning, return the first known format, or None.
    """
    before, found, behind = seen.thought.partition(REASONING)
    first = next(iter(known), None)
    if not found:
        return first
    behind = behind.lstrip()
    for form in known:
        gap = behind.removeprefix(form.closes).partition(CONTENT)
        is_framed = (
            not gap[1] or not form.separators or any(mark in gap[0] for mark in form.separators)
        )
        if behind.startswith(form.closes) and is_framed:
            return form
    opening, closing = marks_in(before)[-1:], marks_in(behind)[:1]
    if not opening or not closing or "/" not in closing[0] or opening == closing:
        return first
    if not behind.startswith(closing[0]) or not before.rstrip().endswith(opening[0]):
        return first
    return ReasoningFormat("template", opening[0], closing[0])
