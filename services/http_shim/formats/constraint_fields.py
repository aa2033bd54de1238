"""Request fields of vLLM, SGLang and llama.cpp that constrain the output."""

from msgspec import Struct

from services.common.constraint_texts import JsonObject, StructuralTagFormat, Texts

__all__ = [
    "ConstraintFields",
    "JsonObject",
    "StructuralTagFormat",
    "StructuredOutputs",
]


class StructuredOutputs(Struct):
    """`structured_outputs` of vLLM: one constraint, and options."""

    json: str | JsonObject | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTagFormat | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ConstraintFields(Struct):
    """Constraint fields besides `response_format` and `grammar`."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | JsonObject | None = None
    regex: str | None = None
    choice: Texts | None = None
    ebnf: str | None = None
    structural_tag: str | StructuralTagFormat | None = None
