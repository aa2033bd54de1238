"""Structural tags: free text in which a trigger starts a part that follows a JSON Schema."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from google.protobuf.json_format import ParseDict, ParseError

from services.common.bounds import fault_of
from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.gbnf import lark_literal
from services.grammar.schemas import validation
from tokenwire.pb.types.v1.types_pb2 import StructuralTag, TaggedStructure

__all__ = ["check", "parts_of", "read"]

_ANY_JSON = "{}"


def read(value: Json) -> StructuralTag:
    """Read a structural tag from its protobuf JSON form; raise GrammarError if it is not one."""
    try:
        return ParseDict(cast(dict[str, Any], value), StructuralTag())
    except (ParseError, TypeError, AttributeError) as error:
        raise GrammarError(f"This is not a structural tag: {error}.") from None


def check(tag: StructuralTag) -> None:
    """Raise GrammarError for the first fault, with its path."""
    if (fault := fault_of(tag)) is not None:
        raise GrammarError(fault.sentence)
    for index, trigger in enumerate(tag.triggers):
        if not any(structure.begin.startswith(trigger) for structure in tag.structures):
            raise GrammarError(f"No structure's begin starts with triggers[{index}].")
    for index, structure in enumerate(tag.structures):
        if _trigger_of(structure, tag.triggers) is None:
            raise GrammarError(f"structures[{index}].begin starts with none of the triggers.")
        place = f"structures[{index}].schema"
        try:
            schema = validation.parse(structure.schema or _ANY_JSON)
        except GrammarError as error:
            raise GrammarError(f"{place}: {error}") from None
        validation.check(schema, place, is_followed=False)


def parts_of(
    tag: StructuralTag, name: str, compilable: Callable[[Json, str], Json]
) -> list[dict[str, Any]]:
    """Return a checked tag as grammars of llguidance.

    The first, called `name`, is the whole tag. Each other one holds the schema of a structure.
    `compilable(schema, path)` returns a schema in the form that llguidance compiles.

    A trigger takes effect at its last character: where one trigger is a prefix of another, the
    shorter one counts.
    """
    bodies: dict[str, list[str]] = {}
    parts: list[dict[str, Any]] = [{"name": name}]
    for index, structure in enumerate(tag.structures):
        trigger = _trigger_of(structure, tag.triggers)
        assert trigger is not None
        part = f"{name}_schema_{index}"
        schema = json.loads(structure.schema or _ANY_JSON)
        lowered = compilable(schema, f"structures[{index}].schema")
        parts.append({"name": part, "json_schema": lowered})
        rest = structure.begin.removeprefix(trigger)
        end = structure.end
        body = f"{rest and lark_literal(rest)} @{part} {end and lark_literal(end)}"
        bodies.setdefault(trigger, []).append(body)
    rules = ["TEXT: /(?s:.*)/"]
    tagged: list[str] = []
    for index, (trigger, alternatives) in enumerate(bodies.items()):
        rules.append(f"open_{index}[lazy]: TEXT {lark_literal(trigger)}")
        tagged.append(f"open_{index} ({' | '.join(alternatives)})")
    start = f"start: ({' | '.join(tagged)})* TEXT"
    parts[0]["lark_grammar"] = "\n".join([start, *rules])
    return parts


def _trigger_of(structure: TaggedStructure, triggers: Sequence[str]) -> str | None:
    found = [trigger for trigger in triggers if structure.begin.startswith(trigger)]
    return min(found, key=len, default=None)
