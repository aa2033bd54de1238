"""Marks around reasoning by family of models."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "reasoning_formats_of"]


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
    others: Sequence[str] = ()
    """Further marks between parts of a message"""
    signs: Sequence[str] = ()
    """Strings that a chat template with this form contains; () = the end mark"""

    @property
    def texts(self) -> Sequence[str]:
        """All texts that may contain control tokens."""
        return (self.opens, self.closes, self.resumes, *self.frame, *self.others)

    @property
    def separators(self) -> Sequence[str]:
        """Marks that belong to no part of a message."""
        marks = (*self.frame, self.resumes, *self.others)
        return tuple(dict.fromkeys(mark.strip() for mark in marks if mark.strip()))


REASONING_FORMATS: Sequence[ReasoningFormat] = (
    ReasoningFormat(
        "harmony",  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|>",
        resumes="<|start|>assistant",
        frame=("<|channel|>final<|message|>", ""),
        signs=("<|channel|>", "<|start|>"),
    ),
    ReasoningFormat(
        "muse",  # Muse Glimmer
        " to=self<|message|>",
        "<|eom|>",
        resumes="<|start|>assistant",
        frame=(" to=user<|message|>", ""),
        others=("<|eom|>",),
        signs=("to=self", "<|message|>", "<|eom|>"),
    ),
    ReasoningFormat(
        "solar",  # Solar Open
        "<|think|>",
        "<|end|>",
        resumes="<|begin|>assistant",
        frame=("<|content|>", ""),
        others=("<|end|>",),
        signs=("<|think|>", "<|content|>", "<|begin|>assistant"),
    ),
    ReasoningFormat(
        "command",  # Command A and R7B
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        others=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        others=("[END FINAL RESPONSE]",),
        signs=("[BEGIN FINAL RESPONSE]",),
    ),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        frame=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        signs=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", signs=("<|channel>", "thought")),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", signs=("<|inner_prefix|>",)),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", signs=("seed:think",)),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningFormat(
        "hunyuan",  # A13B
        "<think>",
        "</think>",
        others=("<answer>", "</answer>"),
        signs=("<think>", "<answer>"),
    ),
    ReasoningFormat(
        "response",  # ERNIE 4.5 Thinking, Granite 3.3
        "<think>",
        "</think>",
        others=("<response>", "</response>"),
        signs=("<think>", "</response>"),
    ),
    ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
)


def reasoning_formats_of(setting: str, templates: Collection[str]) -> Sequence[ReasoningFormat]:
    """Return the format named `setting`; for "auto", all formats whose signs a template has."""
    if setting != "auto":
        return [form for form in REASONING_FORMATS if form.name == setting]
    return [
        form
        for form in REASONING_FORMATS
        if any(
            all(sign in template for sign in form.signs or (form.closes,)) for template in templates
        )
    ]
