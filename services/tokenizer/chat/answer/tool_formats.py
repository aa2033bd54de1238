"""Forms of tool calls and reasoning by family of models, and their detection."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.answer.call_parts import CallReader
from services.tokenizer.chat.answer.call_readers import (
    read_json_calls,
    read_mistral_calls,
    read_pythonic_calls,
    read_tagged_json_call,
    read_xml_call,
)
from services.tokenizer.chat.answer.section_readers import (
    read_command_calls,
    read_deepseek_calls,
    read_glm_call,
    read_invocations,
    read_json_lines,
    read_kimi_calls,
    read_listed_calls,
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
    read: CallReader | None
    """None: `HarmonyParser` reads messages of this form as a whole"""
    repeats: bool = False
    """True if each of several calls has its own mark"""
    between: str = ""
    """Text between such calls"""
    ends: Sequence[str] = ()
    """Control tokens with which the model ends a message, though the template may not"""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around reasoning."""

    name: str
    opens: str
    closes: str
    resumes: str = ""
    """Text between reasoning and what follows it; "" for up to two line breaks"""
    frame: tuple[str, str] = ("", "")
    """Marks around content"""
    tokens: Sequence[str] = ()
    """Control tokens in all of these; () = each is a token"""
    signs: Sequence[str] = ()
    """Strings that a chat template with this form contains; () = the end mark"""

    @property
    def marks(self) -> Sequence[str]:
        """Control tokens in the text of an answer, which the decoded text keeps."""
        return self.tokens or tuple(filter(None, (self.opens, self.closes, *self.frame)))


_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
# the order matters: a template of an earlier form may contain the signs of a later one
TOOL_FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "harmony",  # gpt-oss
        opens=("<|channel|>commentary to=functions.",),
        leads="",
        signs=("<|channel|>", "<|start|>"),
        marks=_HARMONY_TOKENS,
        read=None,
        ends=("<|call|>", "<|return|>"),
    ),
    ToolFormat(
        "deepseek_v3",  # and R1
        opens=("<｜tool▁calls▁begin｜>",),
        leads="",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        marks=_DEEPSEEK_TOKENS,
        read=read_deepseek_calls,
    ),
    ToolFormat(
        "deepseek_v31",
        opens=("<｜tool▁calls▁begin｜>",),
        leads="",
        signs=("<｜tool▁calls▁begin｜>",),
        marks=_DEEPSEEK_TOKENS,
        read=read_deepseek_calls,
    ),
    ToolFormat(
        "kimi_k2",
        opens=("<|tool_calls_section_begin|>",),
        leads="",
        signs=("<|tool_calls_section_begin|>",),
        marks=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        read=read_kimi_calls,
    ),
    ToolFormat(
        "glm45",
        opens=("<tool_call>",),
        leads="",
        signs=("<tool_call>", "<arg_key>"),
        marks=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        read=read_glm_call,
        repeats=True,
        between="\n",
    ),
    ToolFormat(
        "minimax_m2",
        opens=("<minimax:tool_call>",),
        leads="",
        signs=("<minimax:tool_call>",),
        marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        read=read_invocations,
    ),
    ToolFormat(
        "minimax",  # M1
        opens=("<tool_calls>",),
        leads="",
        signs=("<tool_calls>",),
        marks=("<tool_calls>", "</tool_calls>"),
        read=read_json_lines,
    ),
    ToolFormat(
        "command",  # Command A and R7B
        opens=("<|START_ACTION|>",),
        leads="",
        signs=("<|START_ACTION|>",),
        marks=("<|START_ACTION|>", "<|END_ACTION|>"),
        read=read_command_calls,
    ),
    ToolFormat(
        "phi4",  # mini
        opens=("<|tool_call|>",),
        leads="",
        signs=("<|tool|>", "<|/tool|>"),
        marks=("<|tool_call|>", "<|/tool_call|>"),
        read=read_listed_calls,
    ),
    ToolFormat(
        "granite",  # 3; later ones have the form of Hermes
        opens=("<|tool_call|>",),
        leads="",
        signs=("<|tool_call|>",),
        marks=("<|tool_call|>",),
        read=read_listed_calls,
    ),
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
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        resumes="<|start|>assistant",
        frame=("<|channel|>final<|message|>", ""),
        tokens=_HARMONY_TOKENS,
        signs=("<|channel|>", "<|start|>"),
    ),
    ReasoningFormat(
        "command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
    ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
)


def answer_marks() -> frozenset[str]:
    """Return the marks of every format."""
    calls = (mark for form in TOOL_FORMATS for mark in form.marks)
    reasoning = (mark for form in REASONING_FORMATS for mark in form.marks)
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
    """Return the format of that name; for "auto", the first whose signs a template has, or None."""
    for form in REASONING_FORMATS:
        if form.name == setting or (
            setting == "auto"
            and any(
                all(sign in template for sign in form.signs or (form.closes,))
                for template in templates
            )
        ):
            return form
    return None
