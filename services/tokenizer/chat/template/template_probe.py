"""Detection of a chat template's expectations, by rendering small conversations."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from services.tokenizer.chat.template.render_protocol import RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from services.tokenizer.chat.template.template_messages import TemplateFacts, template_messages
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["find_turn_end", "probe_template"]

_WORD = "quetzal"  # no template contains it, nor `_ANSWER`
_ANSWER = "axolotl"
_THINKING = re.compile(r"""message\.thinking|message\[['"]thinking['"]\]""")
_TOOL = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": _WORD,
        "parameters": {"type": "object", "properties": {_WORD: {"type": "string"}}},
    },
}


async def probe_template(
    renderer: Renderer, name: str, source: str, image_mark: str = ""
) -> TemplateFacts:
    """Return what the template expects. Raises INVALID_ARGUMENT if it refuses a user's message.

    image_mark: the text that the model's processor replaces by an image; "" for text-only models.
    """
    facts = TemplateFacts(
        knows_developer="developer" in source,
        names_thinking=bool(_THINKING.search(source)) and "reasoning_content" not in source,
    )
    question = [_message(completion_pb2.ROLE_USER, _WORD)]
    plain = await _render(renderer, name, question, facts)
    if _WORD not in plain:
        facts = replace(facts, takes_parts=True)
    if image_mark:
        facts = await _with_image_parts(renderer, name, facts, image_mark)
    calls = [*question, *_call_and_answer(f'{{"{_WORD}{_ANSWER}": "{_ANSWER}{_WORD}"}}')]
    for short, as_text, empty in product((False, True), (False, True), (None, "")):
        tried = replace(facts, empty_content=empty, arguments_are_text=as_text, short_ids=short)
        try:
            text = await _render(renderer, name, calls, tried)
        except ServiceError:
            continue
        if f"{_ANSWER}{_WORD}" in text and text.count("None") == plain.count("None"):
            return await _with_broken_arguments(renderer, name, question, tried)
    return facts


async def _with_image_parts(
    renderer: Renderer, name: str, facts: TemplateFacts, mark: str
) -> TemplateFacts:
    """Return `facts` with whether the template writes a mark for an image among the parts."""
    parts = [completion_pb2.ContentPart(image=b""), completion_pb2.ContentPart(text=_WORD)]
    message = completion_pb2.Message(role=completion_pb2.ROLE_USER, parts=parts)
    tried = replace(facts, takes_image_parts=True)
    try:
        written = await _render(renderer, name, [message], tried)
    except ServiceError:
        return facts
    return tried if _WORD in written and written.count(mark) == 1 else facts


async def _with_broken_arguments(
    renderer: Renderer, name: str, question: Sequence[completion_pb2.Message], facts: TemplateFacts
) -> TemplateFacts:
    """Return `facts` with whether the template, which takes objects, also writes broken text."""
    text = f'{{"{_WORD}{_ANSWER}": "{_ANSWER}{_WORD}'
    tried = replace(facts, keeps_broken_arguments=True)
    try:
        written = await _render(renderer, name, [*question, *_call_and_answer(text)], tried)
    except ServiceError:
        return facts
    return tried if text in written else facts


async def find_turn_end(renderer: Renderer, name: str, facts: TemplateFacts) -> str:
    """Return the text after a message of the assistant; "" if the template refuses it."""
    messages = [
        _message(completion_pb2.ROLE_USER, _WORD),
        _message(completion_pb2.ROLE_ASSISTANT, _ANSWER),
    ]
    try:
        text = await _render(renderer, name, messages, facts)
    except ServiceError:
        return ""
    return text.rpartition(_ANSWER)[2].lstrip()


def _call_and_answer(arguments: str) -> Sequence[completion_pb2.Message]:
    call = completion_pb2.ToolCall(id="call_0123456789", name=_ANSWER, arguments_json=arguments)
    answer = completion_pb2.ContentPart(text=_WORD)
    return [
        completion_pb2.Message(role=completion_pb2.ROLE_ASSISTANT, tool_calls=[call]),
        completion_pb2.Message(role=completion_pb2.ROLE_TOOL, parts=[answer], tool_call_id=call.id),
    ]


def _message(role: "completion_pb2.Role.ValueType", text: str) -> completion_pb2.Message:
    return completion_pb2.Message(role=role, parts=[completion_pb2.ContentPart(text=text)])


async def _render(
    renderer: Renderer, name: str, messages: Sequence[completion_pb2.Message], facts: TemplateFacts
) -> str:
    role = messages[-1].role
    rendering = await renderer.render(
        RenderJob(
            name,
            template_messages(messages, facts),
            [_TOOL] if role == completion_pb2.ROLE_TOOL else None,
            add_generation_prompt=role != completion_pb2.ROLE_ASSISTANT,
        )
    )
    return rendering.text
