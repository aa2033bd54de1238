"""Constraints in the form of other servers: grammars as text, and structural tags in JSON."""

import re
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from tokenwire.errors import invalid
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "JsonObject",
    "StructuralTagFormat",
    "TaggedStructure",
    "Texts",
    "grammar_of_text",
    "json_text",
    "structural_tag_of",
]

JsonObject: TypeAlias = dict[str, Any]
Texts: TypeAlias = Annotated[list[str], Meta(max_length=65_536)]  # more than a grammar may have
# a Lark grammar has the rule `start`, a GBNF grammar the rule `root`
_LARK = re.compile(r"^\s*(?:%llguidance\b|\??start(?:\.\d+)?\s*:(?!:=))", re.MULTILINE)


class TaggedStructure(Struct):
    """One of `structures`: a constrained part that a trigger may start."""

    begin: str
    end: str
    schema: JsonObject | bool | None = None


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag"):
    """Structural tag: free text in which triggers start constrained parts; `format` is refused."""

    structures: list[TaggedStructure] | None = None
    triggers: Texts | None = None
    format: Any = None


_TAG = msgspec.json.Decoder(StructuralTagFormat)


def json_text(value: str | JsonObject | bool) -> str:
    """Return JSON as text; what a client wrote as text stays as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def grammar_of_text(text: str) -> types_pb2.GrammarSpec:
    """Return the grammar of a text in Lark or GBNF."""
    if _LARK.search(text):
        return types_pb2.GrammarSpec(lark=text)
    return types_pb2.GrammarSpec(gbnf=text)


def structural_tag_of(value: str | StructuralTagFormat, name: str) -> types_pb2.GrammarSpec:
    """Return the grammar of a structural tag, given as JSON text or read from a larger JSON.

    Raises INVALID_ARGUMENT, with the field `name`, for a tag that the proto can't express.
    """
    if isinstance(value, str):
        try:
            value = _TAG.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(name, f"{name} is not a structural tag: {error}.") from None
    if value.format is not None:
        raise invalid(name, f"{name}.format is not supported; use structures and triggers.")
    structures = [_structure(structure) for structure in value.structures or ()]
    tag = types_pb2.StructuralTag(structures=structures, triggers=value.triggers)
    return types_pb2.GrammarSpec(structural_tag=tag)


def _structure(structure: TaggedStructure) -> types_pb2.TaggedStructure:
    schema = "" if structure.schema is None else json_text(structure.schema)
    return types_pb2.TaggedStructure(begin=structure.begin, schema=schema, end=structure.end)
