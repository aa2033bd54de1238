"""Conversation in the order of roles, and with the tools, that a chat template can write.

Agents send instructions in the middle of a conversation, and tools to models whose templates have
no place for them. Content that a template would refuse or leave out is moved to a place that the
template accepts.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.tokenizer.chat.template.arguments import lenient_arguments
from services.tokenizer.chat.template.template_messages import TemplateFacts
from services.tokenizer.tool_schemas import template_tools
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["FittedConversation", "fit_conversation"]

_SYSTEM_ROLES = (completion_pb2.ROLE_SYSTEM, completion_pb2.ROLE_DEVELOPER)
_USER, _ASSISTANT = completion_pb2.ROLE_USER, completion_pb2.ROLE_ASSISTANT
_TOOL = completion_pb2.ROLE_TOOL
_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{form}"""  # this and the form are those of Hermes 2 and Qwen 2.5, which many models know
_HERMES_FORM = """For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_OWN_FORM = """For each function call, return its name and arguments in this form:
"""


@dataclass(frozen=True, slots=True)
class FittedConversation:
    """Messages and tools for the template."""

    messages: Sequence[completion_pb2.Message]
    tools: Sequence[completion_pb2.Tool]
    moved: Sequence[int]
    """Indices of the request's messages that were joined to another, or have another role"""


def fit_conversation(
    messages: Sequence[completion_pb2.Message],
    tools: Sequence[completion_pb2.Tool],
    facts: TemplateFacts,
    example_mark: str = "",
) -> FittedConversation:
    """Return the conversation with everything in a place that the template takes.

    Leading instructions become one message, or the beginning of the first question; later ones
    become text of the user within <system_message>. Tools that the template would leave out are
    described, with the template's own form of a call (`example_mark` stands for it), or with that
    of Hermes if it has none; calls that it would leave out become text.
    """
    turns = [_Turn(message, index) for index, message in enumerate(messages)]
    if not facts.shows_calls:
        turns = [_without_calls(turn, facts) for turn in turns]
    elif not facts.takes_call_pair:
        turns = _with_single_calls(turns)
    if describes := bool(tools) and not facts.shows_tools:
        own_form = _OWN_FORM + example_mark if example_mark else ""
        form = own_form if facts.shows_calls else _HERMES_FORM
        turns = _with_tools(turns, tools, form)
    count = _leading(turns)
    lead, rest = turns[:count], turns[count:]
    moved: list[_Turn] = []
    if len(lead) > 1 and not facts.takes_system_pair:
        moved += lead[1:]
        lead = [_joined(lead[0].message.role, lead)]
    if not facts.takes_late_system:
        moved += (turn for turn in rest if turn.is_system)
        rest = _with_late_instructions(rest, facts)
    if lead and not facts.takes_system:
        moved += lead
        rest = [*(_Turn(_said(_USER, turn.message.parts), turn.index) for turn in lead), *rest]
        lead = []
    if not facts.takes_user_pair:
        rest, merged = _merge_users(rest, {turn.index for turn in moved})
        moved += merged
    return FittedConversation(
        [turn.message for turn in [*lead, *rest]],
        () if describes else tools,
        sorted({turn.index for turn in moved if turn.index is not None}),
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message, and its index in the request; None = the server added the message."""

    message: completion_pb2.Message
    index: int | None

    @property
    def is_system(self) -> bool:
        return self.message.role in _SYSTEM_ROLES


def _leading(turns: Sequence[_Turn]) -> int:
    """Return the number of instructions at the start."""
    return next((at for at, turn in enumerate(turns) if not turn.is_system), len(turns))


def _with_tools(
    turns: Sequence[_Turn], tools: Sequence[completion_pb2.Tool], form: str
) -> list[_Turn]:
    """Return the turns with a description of the tools at the end of the leading instructions."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    text = completion_pb2.ContentPart(text=_TOOLS_TEXT.format(tools="\n".join(lines), form=form))
    count = _leading(turns)
    if count == 0:
        return [_Turn(_said(completion_pb2.ROLE_SYSTEM, [text]), None), *turns]
    last = turns[count - 1]
    described = _joined(last.message.role, [last, _Turn(_said(_USER, [text]), None)])
    return [*turns[: count - 1], described, *turns[count:]]


def _without_calls(turn: _Turn, facts: TemplateFacts) -> _Turn:
    """Return the turn with its calls, or the result of one, as text."""
    message = turn.message
    if message.role == _TOOL and not facts.shows_results:
        text = f"<tool_response>\n{_text(message.parts)}\n</tool_response>"
        return _Turn(_said(_USER, _enclosed(message.parts, text, "tool_response")), turn.index)
    if not message.tool_calls:
        return turn
    calls = [
        {"name": call.name, "arguments": lenient_arguments(call.arguments_json)}
        for call in message.tool_calls
    ]
    if not facts.shows_tools:  # in the form that the description of the tools asks for
        lines = (json.dumps(call, ensure_ascii=False) for call in calls)
        written = "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)
    else:
        written = json.dumps(calls, ensure_ascii=False)
    spoken = _said(_ASSISTANT, [*message.parts, completion_pb2.ContentPart(text=written)])
    spoken.reasoning = message.reasoning
    return _Turn(spoken, turn.index)


def _with_single_calls(turns: Sequence[_Turn]) -> list[_Turn]:
    """Return the turns with a message for each call, before the results of that call."""
    written: list[_Turn] = []
    at = 0
    while at < len(turns):
        turn, end = turns[at], at + 1
        calls = turn.message.tool_calls
        while len(calls) > 1 and end < len(turns) and turns[end].message.role == _TOOL:
            end += 1
        results = turns[at + 1 : end]
        for number, call in enumerate(calls if len(calls) > 1 else ()):
            message = completion_pb2.Message(role=_ASSISTANT, tool_calls=[call])
            if number == 0:
                message.parts.extend(turn.message.parts)
                message.reasoning = turn.message.reasoning
            written.append(_Turn(message, turn.index))
            written += (each for each in results if each.message.tool_call_id == call.id)
        ids = {call.id for call in calls}
        written += (each for each in results if each.message.tool_call_id not in ids)
        if len(calls) <= 1:
            written.append(turn)
        at = end
    return written


def _with_late_instructions(turns: Sequence[_Turn], facts: TemplateFacts) -> list[_Turn]:
    """Return the turns with instructions as text of the user, or of a tool's result beside them."""
    written: list[_Turn] = []
    waiting: list[_Turn] = []  # for the next turn
    for at, turn in enumerate(turns):
        if not turn.is_system:
            role = turn.message.role
            written.append(_joined(role, [*waiting, turn], turn) if waiting else turn)
            waiting = []
            continue
        parts = turn.message.parts
        text = f"<system_message>\n{_text(parts)}\n</system_message>"
        marked = _Turn(_said(_USER, _enclosed(parts, text, "system_message")), turn.index)
        following = next((each for each in turns[at:] if not each.is_system), None)
        if following is not None and following.message.role == _TOOL:
            waiting.append(marked)  # nothing may part a call from its result
        elif written and written[-1].message.role == _TOOL and not facts.takes_user_pair:
            written[-1] = _joined(_TOOL, [written[-1], marked], written[-1])
        else:
            written.append(marked)
    return written


def _merge_users(
    turns: Sequence[_Turn], moved: Collection[int | None]
) -> tuple[list[_Turn], list[_Turn]]:
    """Return the turns with consecutive messages of the user joined, and the joined turns.

    moved: indices of turns that were moved. A turn joined to one of them keeps its role, and is not
    returned.
    """
    kept: list[_Turn] = []
    merged: list[_Turn] = []
    for turn in turns:
        if kept and kept[-1].message.role == turn.message.role == _USER:
            if kept[-1].index not in moved:
                merged.append(turn)
            kept[-1] = _joined(_USER, [kept[-1], turn])
        else:
            kept.append(turn)
    return kept, merged


def _joined(
    role: "completion_pb2.Role.ValueType", turns: Sequence[_Turn], like: _Turn | None = None
) -> _Turn:
    """Return one turn with the contents of several, and the other fields of `like`."""
    parts = [part for turn in turns for part in turn.message.parts]
    if not any(part.HasField("image") for part in parts):
        text = "\n\n".join(_text(turn.message.parts) for turn in turns)
        parts = [completion_pb2.ContentPart(text=text)]
    message = _said(role, parts)
    if like is not None:
        message.name, message.tool_call_id = like.message.name, like.message.tool_call_id
    return _Turn(message, (like or turns[0]).index)


def _enclosed(
    parts: Sequence[completion_pb2.ContentPart], text: str, tag: str
) -> Sequence[completion_pb2.ContentPart]:
    """Return the parts within a tag; `text` is that of parts without images."""
    if not any(part.HasField("image") for part in parts):
        return [completion_pb2.ContentPart(text=text)]
    begin, end = (completion_pb2.ContentPart(text=f"<{slash}{tag}>") for slash in ("", "/"))
    return [begin, *parts, end]


def _said(
    role: "completion_pb2.Role.ValueType", parts: Iterable[completion_pb2.ContentPart]
) -> completion_pb2.Message:
    return completion_pb2.Message(role=role, parts=parts)


def _text(parts: Iterable[completion_pb2.ContentPart]) -> str:
    return "\n".join(part.text for part in parts)
