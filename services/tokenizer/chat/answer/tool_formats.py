"""Forms of tool calls and reasoning by family of models, and their detection."""

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
    """Form of tool calls in one family."""

    name: str
    opens: Sequence[str]
    """Marks that begin calls anywhere in a message"""
    leads: str
    """Characters that begin calls without a mark at the start of a message"""
    signs: Sequence[str]
    """Strings that a chat template of this family contains, all of them"""
    marks: Sequence[str]
    """Control tokens in calls, which the decoded text keeps"""
    read: CallReader
    repeats: bool = False
    """True if each of several calls has its own mark"""
    between: str = ""
    """Text between such calls"""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around reasoning."""

    name: str
    opens: str
    closes: str


# the order matters: a template of an earlier form may contain the signs of a later one
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
        "pythonic",  # Llama 3.2 and 4, by their model cards
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
# the form that a grammar forces if the template has none
JSON_FORMAT = ToolFormat("json", opens=(), leads="{", signs=(), marks=(), read=read_json_calls)
REASONING_FORMATS: Sequence[ReasoningFormat] = (
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
    ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
)


def answer_marks() -> frozenset[str]:
    """Return the marks of every format."""
    calls = (mark for form in TOOL_FORMATS for mark in form.marks)
    reasoning = (mark for form in REASONING_FORMATS for mark in (form.opens, form.closes))
    return frozenset((*calls, *reasoning))


def detect_tool_format(setting: str, templates: Collection[str]) -> ToolFormat:
    """Return the format of that name; for "auto", the first whose signs a template has, or JSON."""
    for form in TOOL_FORMATS:
        if form.name == setting or (
            setting == "auto"
            and any(all(sign in template for sign in form.signs) for template in templates)
        ):
            return form
    return JSON_FORMAT


def detect_reasoning_format(setting: str, templates: Collection[str]) -> ReasoningFormat | None:
    """Return the format of that name; for "auto", the first whose end mark a template contains."""
    for form in REASONING_FORMATS:
        if form.name == setting or (
            setting == "auto" and any(form.closes in template for template in templates)
        ):
            return form
    return None
