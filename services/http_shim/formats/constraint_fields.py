"""Request fields of vLLM, SGLang and llama.cpp that constrain the output."""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Raw, Struct

__all__ = [
    "ConstraintFields",
    "JsonObject",
    "StructuralTagFormat",
    "StructuredOutputs",
    "TaggedStructure",
]

JsonObject: TypeAlias = dict[str, Raw]  # values stay as the client wrote them
_Texts: TypeAlias = Annotated[list[str], Meta(max_length=65_536)]  # more than a grammar may have


class TaggedStructure(Struct):
    """One of `structures`: a constrained part that a trigger may start."""

    begin: str
    end: str
    schema: JsonObject | bool | None = None


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag"):
    """Structural tag: free text in which triggers start constrained parts; `format` is refused."""

    structures: list[TaggedStructure] | None = None
    triggers: _Texts | None = None
    format: Any = None


class StructuredOutputs(Struct):
    """`structured_outputs` of vLLM: one constraint, and options."""

    json: str | JsonObject | None = None
    regex: str | None = None
    choice: _Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTagFormat | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ConstraintFields(Struct):
    """Constraint fields besides `response_format` and `grammar`."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None
    json_schema: str | JsonObject | None = None
    regex: str | None = None
    choice: _Texts | None = None
    ebnf: str | None = None
    structural_tag: str | StructuralTagFormat | None = None
