"""Probes of a chat template, which show its form of calls and reasoning."""

import json
from collections.abc import Sequence
from dataclasses import replace

import grpc

from services.common.json_values import Json
from services.tokenizer.chat.answer.derivation import (
    CALLS,
    CONTENT,
    IDS,
    REASONING,
    SCHEMAS,
    TYPED,
    Renderings,
)
from services.tokenizer.chat.template.render_protocol import RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from services.tokenizer.chat.template.template_messages import TemplateFacts, template_messages
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["probe_answers", "with_thinking"]

_QUESTION = "kinkajou"


async def probe_answers(renderer: Renderer, name: str, facts: TemplateFacts) -> Renderings:
    """Return the renderings of answers of every kind."""
    probe = _Probe(renderer, name, facts)
    one, two = CALLS[:1], CALLS
    typed = [(CALLS[0][0], TYPED)]
    seen = Renderings(
        header=await probe.text(None),
        plain=await probe.text(_answer(CONTENT)),
        one=await probe.text(_answer("", one)),
        two=await probe.text(_answer("", two)),
        said=await probe.text(_answer(CONTENT, two)) or await probe.text(_answer(CONTENT, one)),
        typed=await probe.text(_answer("", typed)),
    )
    for content, calls in ((CONTENT, ()), ("", one)):
        text = await probe.text(_thought(content, calls))
        if REASONING in text:
            return replace(seen, thought=text)
    return seen


async def with_thinking(renderer: Renderer, name: str, facts: TemplateFacts) -> TemplateFacts:
    """Return `facts` with the place of reasoning in a message."""
    probe = _Probe(renderer, name, facts)
    if facts.names_thinking and not await probe.text(_thought(CONTENT, CALLS[:1])):
        facts = replace(facts, thinks_or_speaks=True)
        probe = _Probe(renderer, name, facts)
    shows = [await probe.text(each) for each in (_thought(CONTENT), _thought("", CALLS[:1]))]
    if any(REASONING in text for text in shows):
        return facts
    tried = replace(facts, thinks_in_parts=True)
    text = await _Probe(renderer, name, tried).text(_thought(CONTENT))
    return tried if REASONING in text and CONTENT in text and "{" not in text else facts


class _Probe:
    """Renderer of conversations that consist of a question and an answer."""

    def __init__(self, renderer: Renderer, name: str, facts: TemplateFacts) -> None:
        self._renderer = renderer
        self._name = name
        self._facts = facts

    async def text(self, answer: completion_pb2.Message | None) -> str:
        """Return the text behind the question; "" if the template refuses the answer.

        Raises UNAVAILABLE if the process of the renderer fails.
        """
        question = completion_pb2.Message(
            role=completion_pb2.ROLE_USER, parts=[completion_pb2.ContentPart(text=_QUESTION)]
        )
        messages = [question] if answer is None else [question, answer]
        job = RenderJob(
            self._name,
            template_messages(messages, self._facts),
            [_tool(name) for name in SCHEMAS],
            add_generation_prompt=answer is None,
        )
        try:
            rendering = await self._renderer.render(job)
        except ServiceError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                raise  # the template is not at fault
            return ""
        return rendering.text.rpartition(_QUESTION)[2]


def _thought(
    content: str, calls: Sequence[tuple[str, dict[str, Json]]] = ()
) -> completion_pb2.Message:
    message = _answer(content, calls)
    message.reasoning = REASONING
    return message


def _answer(
    content: str, calls: Sequence[tuple[str, dict[str, Json]]] = ()
) -> completion_pb2.Message:
    return completion_pb2.Message(
        role=completion_pb2.ROLE_ASSISTANT,
        parts=[completion_pb2.ContentPart(text=content)] if content else [],
        tool_calls=[
            completion_pb2.ToolCall(id=call_id, name=name, arguments_json=json.dumps(arguments))
            for call_id, (name, arguments) in zip(IDS, calls, strict=False)
        ],
    )


def _tool(name: str) -> Json:
    parameters: Json = SCHEMAS[name]
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }
