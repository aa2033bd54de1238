"""Probes of templates: what a template refuses or leaves out is known before a client asks."""

from typing import Any

import grpc
import pytest

from services.tokenizer.chat.template.answer_probe import probe_answers, with_thinking
from services.tokenizer.chat.template.render_protocol import Rendering, RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from services.tokenizer.chat.template.template_messages import EmptyContent, TemplateFacts
from services.tokenizer.chat.template.template_probe import find_turn_end, probe_template
from tokenwire.errors import ServiceError

_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
_TURN = "<{{ m.role }}>{{ m.content }}" + _CALLS + "<end>"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_LOOP = _TOOLS + "{% for m in messages %}GUARD" + _TURN + "{% endfor %}"
_FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
)
_NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
_ONE_CALL = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
_EXAMPLE = '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}'
_CONTENT = "{{ m.content if m.content is defined and m.content is not none else '' }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (_LOOP.replace("GUARD", ""), {}),
        (
            _LOOP.replace("GUARD", _FIRST),
            {"takes_system_pair": False, "takes_late_system": False},
        ),
        (
            _LOOP.replace("GUARD", _NO_SYSTEM),
            {"takes_system": False, "takes_system_pair": False, "takes_late_system": False},
        ),
        (_LOOP.replace("GUARD", _ONE_CALL), {"takes_call_pair": False}),
        (
            _LOOP.replace("GUARD", "").replace(_TOOLS, ""),
            {"shows_tools": False, "call_example": _EXAMPLE},
        ),
        (
            _LOOP.replace("GUARD", "").replace(_CALLS, ""),
            {"shows_calls": False, "empty_content": EmptyContent.TEXT},
        ),
        (
            "{% for m in messages if m.role in ('user', 'assistant') %}"
            "{{ '<' + m.content + '>' }}{% endfor %}",
            {
                "shows_tools": False, "shows_calls": False, "shows_results": False,
                "takes_system": False, "takes_system_pair": False, "takes_late_system": False,
                "empty_content": EmptyContent.TEXT,
            },
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
            "{% for m in messages %}" + _ALTERNATE + _TURN.replace(_CALLS, "") + "{% endfor %}",
            {
                "shows_tools": False, "shows_calls": False, "shows_results": False,
                "takes_system": False, "takes_system_pair": False, "takes_late_system": False,
                "takes_user_pair": False, "empty_content": EmptyContent.TEXT,
            },
        ),
        (
            "{% set n = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
            "{% set n.s = m.content %}{% endif %}{% endfor %}{{ n.s }}"
            + _LOOP.replace("GUARD", "").replace("messages %", "messages if m.role != 'system' %"),
            {"takes_system_pair": False, "takes_late_system": False},
        ),
    ],
)  # fmt: skip
async def test_refusals_and_losses_are_found(template: str, expected: dict[str, Any]) -> None:
    facts = await _probed(template)
    assert facts == TemplateFacts(**{"empty_content": EmptyContent.ABSENT, **expected})


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (_CONTENT, EmptyContent.ABSENT),
        ("{{ m.content + '' }}", EmptyContent.TEXT),  # as Granite 3.3
        ("{{ m['content'] | tojson if m['content'] is not string else '' }}", EmptyContent.TEXT),
        (
            "{{ m.content is none }}{{ '' if m.content is none else m.content }}",
            EmptyContent.ABSENT,
        ),
    ],
)
async def test_message_that_only_calls_has_no_word_for_nothing(
    content: str, form: EmptyContent
) -> None:
    """Models would read `None` or `null` as an answer."""
    source = "{% for m in messages %}" + content + "{{ m.content or '' }}" + _CALLS + "{% endfor %}"
    assert (await _probed(source)).empty_content is form


async def test_calls_that_need_a_missing_content_get_none() -> None:
    """As in the template of DeepSeek R1."""
    called = "{% if m.tool_calls and m.content is none %}" + _CALLS + "{% endif %}"
    source = "{% for m in messages %}{{ m.content or '' }}" + called + "{% endfor %}"
    assert (await _probed(source)).empty_content is EmptyContent.NULL


async def test_template_of_tools_alone_is_probed_with_tools() -> None:
    """`tool_use` templates read the tools without a look whether there are any."""
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + _LOOP.replace("GUARD", "")
    facts = await _probed(source)
    assert facts.shows_tools
    assert facts.takes_system
    renderer = Renderer({"t": source}, {})
    assert await find_turn_end(renderer, "t", facts) == "<end>"
    await renderer.stop()


async def test_probes_fail_if_the_render_process_fails() -> None:
    """A fact that a failure hides would count as refused, for as long as the service runs."""
    source = "{% for m in messages %}{{ m.content }}" + _CALLS + "{% endfor %}"
    renderer = _FailingRenderer({"t": source}, {})
    try:
        for probe in (
            lambda: probe_template(renderer, "t", source),
            lambda: with_thinking(renderer, "t", TemplateFacts(names_thinking=True)),
            lambda: probe_answers(renderer, "t", TemplateFacts()),
            lambda: find_turn_end(renderer, "t", TemplateFacts()),
        ):
            renderer.answers = 1_000
            await probe()
            for answers in range(1_000 - renderer.answers):
                renderer.answers = answers
                with pytest.raises(ServiceError) as caught:
                    await probe()
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    finally:
        await renderer.stop()


class _FailingRenderer(Renderer):
    """A renderer whose processes are killed after some answers."""

    answers = 0

    async def render(self, job: RenderJob) -> Rendering:
        if self.answers == 0:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_RENDERER", "It was killed twice.")
        self.answers -= 1
        return await super().render(job)


async def _probed(source: str) -> TemplateFacts:
    renderer = Renderer({"t": source}, {})
    try:
        return await probe_template(renderer, "t", source)
    finally:
        await renderer.stop()
