"""Conversations that fit a template: each text is in the prompt, where the template takes it."""

import json
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.template.fitted_conversation import fit_conversation
from services.tokenizer.chat.template.template_messages import TemplateFacts
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_SWITCHES = [
    "shows_tools", "shows_calls", "shows_results", "takes_call_pair", "takes_system",
    "takes_system_pair", "takes_late_system", "takes_user_pair",
]  # fmt: skip
_TOOL = completion.Tool(name="f", description="does", parameters_json='{"type": "object"}')
_CALLS = [completion.ToolCall(id=f"c{n}", name="f", arguments_json=f'{{"n": {n}}}') for n in (1, 2)]


def _says(role: str, text: str = "", **fields_: Any) -> completion.Message:
    parts = [completion.ContentPart(text=text)] if text else []
    return completion.Message(role=f"ROLE_{role.upper()}", parts=parts, **fields_)  # type: ignore[arg-type]


def _written(messages: list[completion.Message], **facts: bool) -> list[tuple[str, str]]:
    """Return role and text of each message for a template with these facts."""
    fitted = fit_conversation(messages, (), TemplateFacts(**facts))  # type: ignore[arg-type]
    return [
        (completion.Role.Name(each.role)[5:].lower(), "\n".join(part.text for part in each.parts))
        for each in fitted.messages
    ]


def test_conversation_that_the_template_takes_is_unchanged() -> None:
    """The prompt is then that of transformers."""
    messages = [
        _says("system", "s"),
        _says("developer", "d"),
        _says("user", "q"),
        _says("assistant", "a", tool_calls=_CALLS),
        _says("tool", "r", tool_call_id="c1"),
        _says("system", "late"),
    ]
    fitted = fit_conversation(messages, [_TOOL], TemplateFacts())
    assert (fitted.messages, fitted.tools, fitted.moved) == (messages, [_TOOL], [])


def test_leading_instructions_are_joined() -> None:
    """Codex sends instructions of the system and of the developer."""
    messages = [_says("system", "s"), _says("developer", "d"), _says("user", "q")]
    assert _written(messages, takes_system_pair=False) == [("system", "s\n\nd"), ("user", "q")]
    fitted = fit_conversation(messages, (), replace(TemplateFacts(), takes_system_pair=False))
    assert fitted.moved == [1]


def test_instructions_begin_the_question_where_no_system_is_known() -> None:
    facts = {"takes_system": False, "takes_system_pair": False, "takes_late_system": False}
    messages = [_says("system", "s"), _says("user", "q"), _says("assistant", "a")]
    expected = [("user", "s\n\nq"), ("assistant", "a")]
    assert _written(messages, takes_user_pair=False, **facts) == expected
    assert _written(messages[:1], **facts) == [("user", "s")]


def test_late_instructions_are_marked_text_of_the_user() -> None:
    """Claude Code sends a reminder behind the conversation, or within it."""
    messages = [
        _says("user", "q"),
        _says("system", "1"),
        _says("assistant", "a", tool_calls=_CALLS[:1]),
        _says("system", "2"),
        _says("tool", "r", tool_call_id="c1"),
        _says("system", "3"),
    ]
    first, second, third = (f"<system_message>\n{n}\n</system_message>" for n in (1, 2, 3))
    assert _written(messages, takes_late_system=False) == [
        ("user", "q"),
        ("user", first),
        ("assistant", "a"),
        ("tool", f"{second}\n\nr"),
        ("user", third),
    ]
    facts = TemplateFacts(takes_late_system=False, takes_user_pair=False)
    fitted = fit_conversation(messages, (), facts)
    assert fitted.moved == [1, 3, 5]
    assert fitted.messages[-1].tool_call_id == "c1"
    assert _written(messages, takes_late_system=False, takes_user_pair=False) == [
        ("user", f"q\n\n{first}"),
        ("assistant", "a"),
        ("tool", f"{second}\n\nr\n\n{third}"),
    ]


def test_users_in_a_row_are_one_where_roles_must_alternate() -> None:
    messages = [_says("user", "1"), _says("user", "2"), _says("assistant", "a")]
    assert _written(messages, takes_user_pair=False) == [("user", "1\n\n2"), ("assistant", "a")]


def test_tools_without_a_place_are_described_in_the_instructions() -> None:
    """The model would not know of tools that the template leaves out."""
    facts = TemplateFacts(shows_tools=False, shows_calls=False, shows_results=False)
    messages = [
        _says("system", "s"),
        _says("user", "q"),
        _says("assistant", "Look:", tool_calls=_CALLS),
        _says("tool", "r1", tool_call_id="c1"),
    ]
    fitted = fit_conversation(messages, [_TOOL], facts)
    assert fitted.tools == ()
    system, _, call, result = fitted.messages
    assert system.parts[0].text.startswith("s\n\n# Tools")
    line = system.parts[0].text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(line)["function"]["name"] == "f"
    assert not call.tool_calls
    assert "".join(part.text for part in call.parts) == (
        'Look:<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"n": 2}}\n</tool_call>'
    )
    assert (result.role, result.parts[0].text) == (
        completion.ROLE_USER,
        "<tool_response>\nr1\n</tool_response>",
    )
    alone = fit_conversation(messages[1:2], [_TOOL], facts).messages
    assert [message.role for message in alone] == [completion.ROLE_SYSTEM, completion.ROLE_USER]


def test_calls_that_the_template_leaves_out_are_text() -> None:
    """A result would stand there without its call."""
    messages = [_says("user", "q"), _says("assistant", tool_calls=_CALLS[:1])]
    assert _written(messages, shows_calls=False)[1:] == [
        ("assistant", '[{"name": "f", "arguments": {"n": 1}}]')
    ]


def test_each_call_is_before_its_result_where_a_message_has_one() -> None:
    """gpt-oss's template drops the second call; Llama's refuses it."""
    messages = [
        _says("user", "q"),
        _says("assistant", "Look:", tool_calls=_CALLS, reasoning="hm"),
        _says("tool", "r1", tool_call_id="c1"),
        _says("tool", "r2", tool_call_id="c2"),
        _says("user", "thanks"),
    ]
    fitted = fit_conversation(messages, (), TemplateFacts(takes_call_pair=False)).messages
    roles = [completion.Role.Name(each.role)[5:].lower() for each in fitted]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [each.tool_calls[0].id for each in fitted if each.tool_calls] == ["c1", "c2"]
    assert [each.reasoning for each in fitted if each.tool_calls] == ["hm", ""]


_MESSAGES = st.lists(
    st.one_of(
        st.sampled_from(["system", "developer", "user", "assistant"]).map(
            lambda role: (role, False)
        ),
        st.sampled_from([("tool", True), ("assistant", True)]),
    ),
    min_size=1,
    max_size=7,
)


@given(_MESSAGES, st.fixed_dictionaries({name: st.booleans() for name in _SWITCHES}))
def test_no_text_is_lost_and_the_order_of_roles_is_kept(
    drawn: list[tuple[str, bool]], switches: dict[str, bool]
) -> None:
    """Whatever the template refuses, each text is in the prompt once."""
    messages = []
    for place, (role, is_call) in enumerate(drawn):
        calls = _CALLS if role == "assistant" and is_call else []
        number = {"tool_call_id": "c1"} if role == "tool" else {}
        messages.append(_says(role, f"text{place}.", tool_calls=calls, **number))
    facts = TemplateFacts(**switches)  # type: ignore[arg-type]
    fitted = fit_conversation(messages, [_TOOL], facts)
    texts = "\n".join(part.text for each in fitted.messages for part in each.parts)
    for place in range(len(messages)):
        assert texts.count(f"text{place}.") == 1
    systems = [
        place
        for place, each in enumerate(fitted.messages)
        if each.role in (completion.ROLE_SYSTEM, completion.ROLE_DEVELOPER)
    ]
    if not facts.takes_late_system:
        assert systems == [*range(len(systems))]
    if not facts.takes_system and not facts.takes_late_system:
        assert not systems
    if not facts.takes_user_pair:
        roles = [each.role for each in fitted.messages]
        users = [place for place, role in enumerate(roles) if role == completion.ROLE_USER]
        assert all(second - first > 1 for first, second in pairwise(users))
    if not facts.shows_tools:
        assert "# Tools" in texts
    assert set(fitted.moved) <= set(range(len(messages)))


def test_every_switch_is_known_here() -> None:
    names = {field.name for field in fields(TemplateFacts)}
    assert {name for name in names if name.startswith(("shows_", "takes_"))} == {
        *_SWITCHES,
        "takes_parts",
        "takes_image_parts",
    }


@pytest.mark.parametrize("late", [False, True])
def test_images_of_instructions_keep_their_order(late: bool) -> None:
    """The engine would show each image in the place of another one."""
    image = [completion.ContentPart(image=b"1")]
    system = completion.Message(role=completion.ROLE_SYSTEM, parts=image)
    user = completion.Message(role=completion.ROLE_USER, parts=[completion.ContentPart(image=b"2")])
    facts = TemplateFacts(takes_system=False, takes_late_system=False, takes_user_pair=False)
    fitted = fit_conversation([user, system] if late else [system, user], (), facts)
    [message] = fitted.messages
    shown = [part.image for part in message.parts if part.HasField("image")]
    assert shown == ([b"2", b"1"] if late else [b"1", b"2"])
