"""Tokens of reasoning, as OpenAI's SDK for Python reads them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.services.shim import running_shim
from tests.stack import Stack, running_service

TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endfor %}assistant: <think>"""
"""Its prompts end inside reasoning, which a short answer does not leave"""


@pytest.fixture
async def client(stack: Stack, tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--engine", stack.engine, "--model", str(stack.model))
    template_flag = ("--chat-template", str(template))
    async with (
        running_service("tokenizer", *flags, *template_flag, log=tmp_path / "log") as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
    ):
        yield AsyncOpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


async def test_tokens_of_reasoning_are_counted(client: AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="default", input="Hello!", max_output_tokens=8, temperature=0
    )
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.usage is not None
    thought = response.usage.output_tokens_details.reasoning_tokens
    assert 7 <= thought <= 8  # white space at the start belongs to no part
    chat = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=8,
        temperature=0,
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == thought
