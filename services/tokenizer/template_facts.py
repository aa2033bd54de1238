"""Facts of a checkpoint's chat templates, read without an engine."""

from dataclasses import dataclass
from pathlib import Path

from services.tokenizer.chat.answer.tool_formats import answer_marks
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.text.vocabulary import Vocabulary

__all__ = ["ChatFacts", "read_chat_facts"]


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """Form of a checkpoint's conversations."""

    has_template: bool
    shows_tools: bool = False
    """True if a template itself shows the tools of a request; else Tokenwire describes them"""
    tool_format: str = ""
    """Form of tool calls in answers; empty = the checkpoint has no template"""
    reasoning_format: str = ""
    """Form of reasoning in answers; empty = it has none"""


async def read_chat_facts(directory: Path) -> ChatFacts:
    """Probe the templates of a checkpoint in Hugging Face form.

    Raises StartupError for files that can't be read, and ServiceError for a template that can't.
    """
    templates = ChatTemplates(Vocabulary(directory, answer_marks()), directory.name)
    if not templates.is_available:
        return ChatFacts(has_template=False)
    templates.start()
    try:
        await templates.until_probed()
    finally:
        await templates.stop()
    answers = templates.answers
    return ChatFacts(
        has_template=True,
        shows_tools=templates.shows_tools,
        tool_format=answers.calls.name,
        reasoning_format="" if answers.reasoning is None else answers.reasoning.name,
    )
