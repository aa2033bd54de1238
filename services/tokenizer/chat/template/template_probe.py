"""Detection of a chat template's expectations, by rendering small conversations."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TypeAlias

import grpc

from services.common.json_values import Json
from services.tokenizer.chat.template.render_protocol import RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from services.tokenizer.chat.template.template_messages import (
    EmptyContent,
    TemplateFacts,
    template_messages,
)
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["find_turn_end", "probe_template"]

_WORD = "quetzal"  # no template contains one of these
_ANSWER = "axolotl"
_TOOL_NAME = "kakapo"
_WORDS = ("quetzal", "axolotl", "numbat", "okapi", "tarsier")
_THINKING = re.compile(r"""message\.thinking|message\[['"]thinking['"]\]""")
_NOTHING = re.compile("None|null|[Uu]ndefined")  # forms in which templates write a missing content
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": _TOOL_NAME,
        "parameters": {
            "type": "object",
            "properties": {_TOOL_NAME: {"type": "string", "description": _TOOL_NAME}},
            "required": [_TOOL_NAME],
        },
    },
}
_USER, _ASSISTANT = completion_pb2.ROLE_USER, completion_pb2.ROLE_ASSISTANT
_SYSTEM, _DEVELOPER = completion_pb2.ROLE_SYSTEM, completion_pb2.ROLE_DEVELOPER
_Role: TypeAlias = "completion_pb2.Role.ValueType"


async def probe_template(
    renderer: Renderer, name: str, source: str, image_mark: str = ""
) -> TemplateFacts:
    """Return the facts of a template. Raises INVALID_ARGUMENT if it refuses a user's message.

    image_mark: the text that the model's processor replaces by an image; "" for text-only models.
    """
    probe = _Probe(renderer, name)
    facts = TemplateFacts(
        knows_developer="developer" in source,
        names_thinking=bool(_THINKING.search(source)) and "reasoning_content" not in source,
    )
    question = [_message(_USER, _WORD)]
    try:
        plain, tools = await probe.render(question, facts), False
    except ServiceError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            raise  # the template is not at fault
        plain, tools = await probe.render(question, facts, tools=True), True
    if _WORD not in plain:
        facts = replace(facts, takes_parts=True)
    if image_mark:
        facts = await _with_image_parts(probe, facts, image_mark)
    facts = await _with_roles(probe, facts, tools=tools)
    return await _with_calls(probe, facts)


async def find_turn_end(renderer: Renderer, name: str, facts: TemplateFacts) -> str:
    """Return the text after a message of the assistant; "" if the template refuses it."""
    messages = [_message(_USER, _WORD), _message(_ASSISTANT, _ANSWER)]
    probe = _Probe(renderer, name)
    text = await probe.try_render(messages, facts)
    if text is None:
        text = await probe.try_render(messages, facts, tools=True)
    return "" if text is None else text.rpartition(_ANSWER)[2].lstrip()


class _Probe:
    """Renderings of one template."""

    def __init__(self, renderer: Renderer, name: str) -> None:
        self._renderer = renderer
        self._name = name

    async def render(
        self,
        messages: Sequence[completion_pb2.Message],
        facts: TemplateFacts,
        *,
        tools: bool = False,
    ) -> str:
        """Return the prompt. Raises INVALID_ARGUMENT if the template refuses it."""
        rendering = await self._renderer.render(
            RenderJob(
                self._name,
                template_messages(messages, facts),
                [_TOOL] if tools else None,
                add_generation_prompt=messages[-1].role != _ASSISTANT,
            )
        )
        return rendering.text

    async def try_render(
        self,
        messages: Sequence[completion_pb2.Message],
        facts: TemplateFacts,
        *,
        tools: bool = False,
    ) -> str | None:
        """Return the prompt; None if the template refuses it. Raises UNAVAILABLE as `Renderer`."""
        try:
            return await self.render(messages, facts, tools=tools)
        except ServiceError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                raise  # the template is not at fault
            return None

    async def shows(self, roles: Sequence[_Role], facts: TemplateFacts, *, tools: bool) -> bool:
        """Return whether the prompt has the messages of these roles."""
        messages = [_message(role, word) for role, word in zip(roles, _WORDS, strict=False)]
        text = await self.try_render(messages, facts, tools=tools)
        return text is not None and all(message.parts[0].text in text for message in messages)

    async def call_example(self, facts: TemplateFacts) -> str:
        """Return the call of NAME with an ARGUMENT, as the template writes it."""
        question = _message(_USER, _WORD)
        call = completion_pb2.ToolCall(
            id="call_0123456789", name="NAME", arguments_json='{"ARGUMENT": "VALUE"}'
        )
        calls = completion_pb2.Message(role=_ASSISTANT, tool_calls=[call])
        asked = await self.try_render([question], facts, tools=True) or ""
        answer = [question, _message(_ASSISTANT, _ANSWER)]
        header, _, end = (await self.try_render(answer, facts, tools=True) or "").partition(_ANSWER)
        called = await self.try_render([question, calls], facts, tools=True) or ""
        for before in sorted((asked, header), key=len, reverse=True):
            if called.startswith(before):
                example = called.removeprefix(before)
                return (example.partition(end.strip())[0] if end.strip() else example).strip()
        return ""

    async def shows_call_pair(self, facts: TemplateFacts) -> bool:
        """Return whether the prompt has both calls of a message."""
        message, result = _call_and_answer(f'{{"{_ANSWER}{_WORD}": 1}}')
        message.tool_calls.add(
            id="call_1123456789", name=_ANSWER, arguments_json=f'{{"{_WORD}{_ANSWER}": 1}}'
        )
        other = completion_pb2.Message()
        other.CopyFrom(result)
        other.tool_call_id = message.tool_calls[1].id
        messages = [_message(_USER, _WORD), message, result, other]
        text = await self.try_render(messages, facts, tools=True)
        return text is not None and _ANSWER + _WORD in text and _WORD + _ANSWER in text

    async def shows_result(self, facts: TemplateFacts) -> bool:
        """Return whether the prompt has a tool's result behind an answer without a call."""
        _, result = _call_and_answer("{}")
        messages = [_message(_USER, _WORD), _message(_ASSISTANT, _ANSWER), result]
        text = await self.try_render(messages, facts, tools=True)
        return text is not None and _ANSWER in text and _WORDS[-1] in text


async def _with_image_parts(probe: _Probe, facts: TemplateFacts, mark: str) -> TemplateFacts:
    """Return `facts` with the answer whether the template writes a mark for an image part."""
    parts = [completion_pb2.ContentPart(image=b""), completion_pb2.ContentPart(text=_WORD)]
    message = completion_pb2.Message(role=_USER, parts=parts)
    tried = replace(facts, takes_image_parts=True)
    written = await probe.try_render([message], tried)
    if written is None:
        return facts
    return tried if _WORD in written and written.count(mark) == 1 else facts


async def _with_roles(probe: _Probe, facts: TemplateFacts, *, tools: bool) -> TemplateFacts:
    """Return `facts` with the places where the template takes instructions."""

    async def shows(*roles: _Role) -> bool:
        return await probe.shows(roles, facts, tools=tools)

    if facts.knows_developer and not await shows(_DEVELOPER, _USER):
        facts = replace(facts, knows_developer=False)
    kinds = (_SYSTEM, _DEVELOPER) if facts.knows_developer else (_SYSTEM,)
    leading = [await shows(first, second, _USER) for first, second in product(kinds, kinds)]
    late = [
        await shows(*roles)
        for kind in kinds
        for roles in (
            (_SYSTEM, _USER, _ASSISTANT, kind, _USER),
            (_SYSTEM, _USER, kind),
            (_USER, _ASSISTANT, _USER, kind),
        )
    ]
    return replace(
        facts,
        takes_system=await shows(_SYSTEM, _USER),
        takes_system_pair=all(leading),
        takes_late_system=all(late),
        takes_user_pair=await shows(_USER, _USER),
    )


async def _with_calls(probe: _Probe, facts: TemplateFacts) -> TemplateFacts:
    """Return `facts` with the form of earlier calls, and whether the prompt has tools and calls."""
    question = [_message(_USER, _WORD)]
    plain = await probe.try_render(question, facts, tools=True)
    facts = replace(facts, shows_tools=plain is not None and _TOOL_NAME in plain)
    arguments = f'{{"{_WORD}{_ANSWER}": "{_ANSWER}{_WORD}"}}'
    for short, as_text, empty in product((False, True), (False, True), EmptyContent):
        tried = replace(facts, empty_content=empty, arguments_are_text=as_text, short_ids=short)
        calls = [*question, *_call_and_answer(arguments)]
        text = await probe.try_render(calls, tried, tools=True)
        if text is None or f"{_ANSWER}{_WORD}" not in text or _WORDS[-1] not in text:
            continue
        calls[1].parts.add(text=_WORDS[2])
        spoken = await probe.try_render(calls, tried, tools=True)
        if len(_NOTHING.findall(text)) <= len(_NOTHING.findall(spoken or plain or "")):
            tried = replace(tried, takes_call_pair=await probe.shows_call_pair(tried))
            if not tried.shows_tools:
                tried = replace(tried, call_example=await probe.call_example(tried))
            return await _with_broken_arguments(probe, question, tried)
    return replace(facts, shows_calls=False, shows_results=await probe.shows_result(facts))


async def _with_broken_arguments(
    probe: _Probe, question: Sequence[completion_pb2.Message], facts: TemplateFacts
) -> TemplateFacts:
    """Return `facts` with the answer whether a template that takes objects writes broken text."""
    text = f'{{"{_WORD}{_ANSWER}": "{_ANSWER}{_WORD}'
    tried = replace(facts, keeps_broken_arguments=True)
    messages = [*question, *_call_and_answer(text)]
    written = await probe.try_render(messages, tried, tools=True)
    return tried if written is not None and text in written else facts


def _call_and_answer(arguments: str) -> Sequence[completion_pb2.Message]:
    call = completion_pb2.ToolCall(id="call_0123456789", name=_ANSWER, arguments_json=arguments)
    answer = completion_pb2.ContentPart(text=_WORDS[-1])
    return [
        completion_pb2.Message(role=_ASSISTANT, tool_calls=[call]),
        completion_pb2.Message(role=completion_pb2.ROLE_TOOL, parts=[answer], tool_call_id=call.id),
    ]


def _message(role: _Role, text: str) -> completion_pb2.Message:
    return completion_pb2.Message(role=role, parts=[completion_pb2.ContentPart(text=text)])
