"""How families of models write tool calls and reasoning, and which of it a model uses."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.answer.call_readers import (
    CallReader,
    read_json_calls,
    read_mistral_calls,
    read_pythonic_calls,
    read_tagged_json_call,
    read_xml_call,
)

__all__ = [
    "JSON_FORMAT",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ReasoningFormat",
    "ToolFormat",
    "answer_marks",
    "detect_reasoning_format",
    "detect_tool_format",
]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The calls of one family."""

    name: str
    opens: Sequence[str]
    """What begins calls anywhere in a message."""
    leads: str
    """Characters that may begin calls at the very start of a message, without a mark."""
    signs: Sequence[str]
    """What of a template tells the family: all of these."""
    marks: Sequence[str]
    """Control tokens that its calls consist of: kept in the decoded text."""
    read: CallReader
    repeats: bool = False
    """Whether several calls are written one after the other, each with its mark."""
    between: str = ""
    """What then stands between them."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """What stands around reasoning."""

    name: str
    opens: str
    closes: str


# in this order: a template of the later ones may show what is a sign of an earlier one
TOOL_FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "qwen3_coder",
        opens=("<tool_call>", "<function="),
        leads="",
        signs=("<tool_call>", "<function=", "<parameter="),
        marks=("<tool_call>", "</tool_call>"),
        read=read_xml_call,
        repeats=True,
        between="\n",
    ),
    ToolFormat(
        "hermes",  # and Qwen 2.5, Qwen 3, the embedded model
        opens=("<tool_call>",),
        leads="",
        signs=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        read=read_tagged_json_call,
        repeats=True,
        between="\n",
    ),
    ToolFormat(
        "mistral",
        opens=("[TOOL_CALLS]",),
        leads="",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        read=read_mistral_calls,
        repeats=True,
    ),
    ToolFormat(
        "mistral_array",  # before v11 of Mistral's tokenizers
        opens=("[TOOL_CALLS]",),
        leads="",
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        read=read_mistral_calls,
    ),
    ToolFormat(
        "pythonic",  # Llama 3.2 and 4, as their cards have it
        opens=("<|python_start|>",),
        leads="[",
        signs=("func_name1(",),
        marks=("<|python_start|>", "<|python_end|>"),
        read=read_pythonic_calls,
    ),
    ToolFormat(
        "llama3_json",
        opens=("<|python_tag|>",),
        leads="{",
        signs=('"parameters":', "tools"),
        marks=("<|python_tag|>",),
        read=read_json_calls,
    ),
)
# where the template knows no calls: what a grammar forces
JSON_FORMAT = ToolFormat("json", opens=(), leads="{", signs=(), marks=(), read=read_json_calls)
REASONING_FORMATS: Sequence[ReasoningFormat] = (
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
    ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
)


def answer_marks() -> frozenset[str]:
    """The marks of every format."""
    calls = (mark for form in TOOL_FORMATS for mark in form.marks)
    reasoning = (mark for form in REASONING_FORMATS for mark in (form.opens, form.closes))
    return frozenset((*calls, *reasoning))


def detect_tool_format(setting: str, templates: Collection[str]) -> ToolFormat:
    """The one of that name; for "auto", the first whose signs one of the templates shows, or bare
    JSON."""
    for form in TOOL_FORMATS:
        if form.name == setting or (
            setting == "auto"
            and any(all(sign in template for sign in form.signs) for template in templates)
        ):
            return form
    return JSON_FORMAT


def detect_reasoning_format(setting: str, templates: Collection[str]) -> ReasoningFormat | None:
    """The one of that name; for "auto", the first that one of the templates closes."""
    for form in REASONING_FORMATS:
        if form.name == setting or (
            setting == "auto" and any(form.closes in template for template in templates)
        ):
            return form
    return None
