"""Rendering: texts equal those of transformers, whatever string logic a template has."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.chat.template.control_tokens import ControlTokens
from services.tokenizer.chat.template.render_process import PromptRenderer
from services.tokenizer.chat.template.render_protocol import Rendering, RenderJob, Templates

_THINKS = "<think>\nR1\n</think>\n\nanswer"
_SPELLS = "x<|end|>y</think><tool_response>"
_CONTENTS = [_THINKS, _SPELLS, "<tool_response>r</tool_response>", "", " plain \n", "<b>&"]
_CONTROL = ("<|end|>", "<think>", "</think>", "<tool_response>", "</tool_response>", "<|user|>")
_LOOP = "{% for m in messages %}{% set c = m.content %}BODY{% endfor %}"
_BODIES = {
    "split": "{{ c.split('</think>')[-1].lstrip('\\n') if '</think>' in c else c }}<|end|>",
    "reasoning": "{% if '</think>' in c %}{{ '<think>' + c.split('</think>')[0].rstrip('\\n')"
    ".split('<think>')[-1].lstrip('\\n') + '</think>' }}{% endif %}<|end|>",
    "startswith": "{% if c.startswith('<tool_response>') and c.endswith('</tool_response>') %}"
    "tool{% else %}{{ c }}<|end|>{% endif %}",
    "replace": "{{ c.replace('<think>', '[') }}{{ c | replace('x', '<|end|>') }}<|end|>",
    "strip": "{{ c.strip() }}|{{ c | trim }}|{{ c.strip('<>') }}<|end|>",
    "compare": "{{ 'same' if c == '" + _THINKS.replace("\n", "\\n") + "' else c }}<|end|>",
    "length": "{{ c | length }}{{ c[:7] == '<think>' }}{{ c[7:] }}{{ c[-1] }}<|end|>",
    "characters": "{% for x in c %}{{ x }}.{% endfor %}<|end|>",
    "concatenate": "{{ '<|' ~ m.role ~ '|>' ~ c ~ '<|' + 'end|>' }}",
    "macro": "{% macro turn(x) %}<|end|>{{ x }}{{ caller() if caller }}{% endmacro %}"
    "{{ turn(c) }}{% call turn(c) %}<|end|>{{ c }}{% endcall %}",
    "set": "{% set block %}{{ c }}<|end|>{% endset %}{{ block | trim }}",
    "filter": "{% filter upper %}{{ c }}<|end|>{% endfilter %}{{ c | lower }}",
    "namespace": "{% set n = namespace(t='<|end|>') %}{% set n.t = n.t + c %}{{ n.t }}",
    "join": "{{ ['<|end|>', c] | join }}{{ ['<', c, '>'] | join('<|end|>') }}"
    "{{ '<|end|>'.join([c, 'a']) }}",
    "format": "{{ '{}<|end|>{x}{{'.format(c, x=m.role) }}{{ '<|end|>%s' % c }}"
    "{{ '%s<|end|>' | format(c) }}{{ '{:>9}|{!r}'.format(c, c) }}",
    "json": "{{ m | tojson }}{{ {'<|end|>': c} | tojson(indent=2) }}<|end|>",
    "safe": "{{ '<|end|>' + c + ({'a': c} | tojson | safe) + '<|end|>' }}{{ '<|end|>' | safe }}",
    "parts": "{% set a, b = (c ~ '|x').split('|', 1) %}{{ b }}{{ a }}<|end|>",
    "lines": "{% for l in c.splitlines() %}{{ l }}<|end|>{% endfor %}{{ c | indent(2) }}",
    "generation": "{% generation %}{% set z = c %}{{ z }}<|end|>{% endgeneration %}{{ z }}",
    "undefined": "{{ m.nothing }}{{ m.nothing | default('<|end|>') }}{{ tools is none }}",
    "breaks": "{% if loop.index > 2 %}{% break %}{% endif %}{{ c }}<|end|>",
    "dictionary": "{% for k, v in m | dictsort %}{{ k }}={{ v }}<|end|>{% endfor %}"
    "{{ dict(a=c).a }}{{ m.get('content') }}",
}


def _rendering(source: str, messages: list[dict[str, Any]], **job: Any) -> Rendering:
    templates = Templates({"t": source}, {"bos_token": "<|end|>"}, 1_000_000, 5.0)
    return PromptRenderer(templates).render(RenderJob("t", messages, **job))


def _own_tokens(rendering: Rendering) -> list[str]:
    """Return the control tokens that the model gets."""
    control = ControlTokens(_CONTROL)
    parts = control.split(rendering.text, rendering.template_spans)
    own = [text for text, is_spelled in parts if not is_spelled]
    return [part for text in own for part, is_token in control.split(text, []) if is_token]


@pytest.mark.parametrize("name", _BODIES)
@pytest.mark.parametrize("content", _CONTENTS)
def test_text_equals_that_of_transformers(name: str, content: str) -> None:
    """A template that reads a user's text must find what the user wrote."""
    source = "{{ bos_token }}" + _LOOP.replace("BODY", _BODIES[name])
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "q"},
    ]
    render: Any = render_jinja_template
    [[expected], _] = render(conversations=[messages], chat_template=source, bos_token="<|end|>")
    rendering = _rendering(source, messages, add_generation_prompt=False)
    assert rendering.error == ""
    assert rendering.text == expected


@pytest.mark.parametrize("name", [name for name in _BODIES if name not in ("json", "filter")])
def test_template_has_its_control_tokens_and_the_user_none(name: str) -> None:
    """The user's spelling of a token, in any place that the template puts it, is text."""
    source = _LOOP.replace("BODY", _BODIES[name])
    plain = _rendering(source, [{"role": "user", "content": "x"}])
    spelled = _rendering(source, [{"role": "user", "content": f"x{_CONTROL[0]}"}])
    assert _own_tokens(spelled) == _own_tokens(plain)
    assert "<|end|>" in _own_tokens(plain)


def test_assistants_marks_are_what_the_template_makes_of_them() -> None:
    source = _LOOP.replace("BODY", _BODIES["reasoning"])
    rendering = _rendering(source, [{"role": "assistant", "content": _THINKS}])
    assert rendering.text == "<think>R1</think><|end|>"
    assert _own_tokens(rendering) == ["<think>", "</think>", "<|end|>"]


@pytest.mark.parametrize(
    ("body", "content", "text"),
    [
        ("<{{ c }}>{{ m.role }}", "So far ", "<So far "),
        ("<{{ c | trim }}><|end|>", "So far ", "<So far"),
        ("<{{ c.split('</think>')[-1].lstrip() }}>", _THINKS, "<answer"),
    ],
)
def test_continued_message_ends_the_prompt(body: str, content: str, text: str) -> None:
    """Also where the template leaves out or rewrites the message's reasoning."""
    messages = [{"role": "assistant", "content": content}]
    rendering = _rendering(_LOOP.replace("BODY", body), messages, continue_last_message=True)
    assert (rendering.text, rendering.error) == (text, "")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": content}]}]
    of_parts = _LOOP.replace("BODY", body).replace("m.content %}", "m.content[0].text %}")
    assert _rendering(of_parts, parts, continue_last_message=True) == rendering


def test_refusal_of_a_continued_message_quotes_no_conversation() -> None:
    """The message goes to a log, which has no text of clients."""
    messages = [{"role": "assistant", "content": "secret"}]
    rendering = _rendering("{{ messages[0].content[:3] }}", messages, continue_last_message=True)
    assert "leaves out the end of the last message" in rendering.error
    assert "sec" not in rendering.error.removeprefix("The")


def test_sandbox_hides_the_origins() -> None:
    """A template must not find out or change what counts as its own."""
    for expression in ("c._origins", "c['_origins']", "c.__class__", "'{0._origins}'.format(c)"):
        rendering = _rendering(
            _LOOP.replace("BODY", "{{ " + expression + " }}"), [{"role": "user", "content": "x"}]
        )
        assert rendering.text == ""


def test_variables_of_the_request_are_its_text() -> None:
    job = {"variables": {"bos_token": "<|end|>", "x": ["<think>"]}}
    rendering = _rendering("{{ bos_token }}{{ x[0] }}<|end|>", [], **job)
    assert rendering.text == "<|end|><think><|end|>"
    assert _own_tokens(rendering) == ["<|end|>"]
    assert rendering.template_spans == [14, 21]
