"""Chats over HTTP with a template that guards the order of roles, and refuses a word."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.services.shim import Shim, running_shim
from tests.stack import Stack, running_service

_GUARD = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if 'xyzzy' in message.content %}{{ raise_exception('no ' + message.content) }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class _Guarded:
    http: httpx.AsyncClient
    shim: Shim
    tokenizer_log: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(
    stack: Stack, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[_Guarded]:
    folder = tmp_path_factory.mktemp("roles")
    template = folder / "guarded.jinja"
    template.write_text(_GUARD + (embedded_model / "chat_template.jinja").read_text())
    async with (
        running_service(
            "tokenizer",
            *("--model", str(embedded_model), "--engine", stack.engine),
            *("--chat-template", str(template)),
            log=folder / "log",
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as client,
    ):
        yield _Guarded(client, shim, folder / "log")


@pytest.fixture
def http(guarded: _Guarded) -> httpx.AsyncClient:
    return guarded.http


async def test_chat_says_which_roles_the_prompt_has_not(http: httpx.AsyncClient) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "The time is 9."},
    ]
    body = {"messages": messages, "max_tokens": 2}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ignored = response.headers["x-tokenwire-ignored"]
    assert ignored == "messages[1].role, messages[3].role"
    prompt = await http.post("/apply-template", json={"messages": messages})
    assert "Be brief.\n\nBe kind." in prompt.json()["prompt"]
    plain = await http.post("/v1/chat/completions", json=body | {"messages": messages[2:3]})
    assert "x-tokenwire-ignored" not in plain.headers


async def test_other_apis_name_the_moved_message_as_the_client_wrote_it(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    items = [{"role": "user", "content": "Hello"}, {"role": "developer", "content": "Be kind."}]
    response = await http.post(
        "/v1/responses",
        json={"instructions": "Be brief.", "input": items, "max_output_tokens": 2, "store": False},
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-tokenwire-ignored"] == "input[1]"
    message = {
        "model": stack.model_id,
        "max_tokens": 2,
        "system": "Be brief.",
        "messages": [items[0], {"role": "system", "content": "Be kind."}],
    }
    response = await http.post("/v1/messages", json=message)
    assert response.status_code == 200, response.text
    assert response.headers["x-tokenwire-ignored"] == "messages[1]"


async def test_moved_message_has_its_number_in_the_whole_conversation(
    http: httpx.AsyncClient,
) -> None:
    """Older turns may be left out of the prompt."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a b c " * 20_000},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "The time is 9."},
    ]
    body = {"messages": messages, "max_tokens": 2, "truncation": "auto"}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tokenwire-ignored"] == "messages[4].role"


async def test_refusal_of_a_template_is_logged_without_the_conversation(guarded: _Guarded) -> None:
    """Templates quote what they refuse; logs have no text of clients."""
    body = {"messages": [{"role": "user", "content": "my xyzzy"}], "max_tokens": 2}
    response = await guarded.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "no my xyzzy"
    assert response.json()["error"]["code"] == "template_refused"
    answered = await guarded.shim.answered(response.headers["x-request-id"])
    assert "xyzzy" not in str(answered)
    assert "xyzzy" not in guarded.tokenizer_log.read_text()
