"""The API reference in Chromium: a newcomer tries each operation where it is described."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from playwright.async_api import Browser, Locator, Page, expect

from services.common.accounts.key_file import add_key
from tests.services.shim import running_shim
from tests.stack import Stack

WAIT_MILLISECONDS = 60_000


REFUSED = {
    **{
        f"{prefix}/{path}": 400
        for prefix in ("", "/v1")
        for path in ("embeddings", "rerank", "score", "classify", "pooling")
    },
    "/v1/models/load": 400,
    "/v1/models/unload": 400,
    "/v1/load_lora_adapter": 403,
    "/v1/unload_lora_adapter": 403,
    "/v1/responses/{response_id}/cancel": 400,
    "/v1/files": 400,
    "/v1/batches": 404,
    "/api/embed": 400,
    "/api/embeddings": 400,
    **{f"/api/{path}": 501 for path in ("pull", "delete", "create", "copy", "push")},
}
"""Statuses of changes that a server refuses unless it is told to serve them or has such a model"""


async def opened(browser: Browser, url: str, width: int = 1280) -> Page:
    """Return the reference in a new profile. Its context is the caller's to close."""
    context = await browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(f"{url}/docs")
    await page.wait_for_selector(".try")
    return page


@pytest.fixture
async def reference(browser: Browser, stack: Stack) -> AsyncIterator[Page]:
    page = await opened(browser, stack.url)
    yield page
    await page.context.close()


def trial(page: Page, path: str) -> Locator:
    """Return the form of an operation."""
    return page.locator(f"pre[data-path='{path}'] ~ .try").first


async def send(form: Locator, body: str) -> None:
    """Open a form, send this body, and wait for the whole answer."""
    await form.locator("summary").click()
    await form.locator("textarea").fill(body)
    await form.get_by_role("button", name="Send").click()
    await expect(form.locator("[role=status]")).to_contain_text(
        re.compile(r"\d ms$"), timeout=WAIT_MILLISECONDS
    )


async def kept_response(stack: Stack) -> str:
    """Return the id of a new response."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        return (await client.responses.create(input="Hello!", max_output_tokens=4)).id


async def kept_file(stack: Stack) -> str:
    """Return the id of a new file."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        return (await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")).id


async def kept_batch(stack: Stack) -> str:
    """Return the id of a new batch."""
    file_id = await kept_file(stack)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        return (
            await client.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            )
        ).id


KEPT = {"response_id": kept_response, "file_id": kept_file, "batch_id": kept_batch}


async def test_every_operation_answers_its_example(reference: Page, stack: Stack) -> None:
    for form in await reference.locator(".try").all():
        await form.locator("summary").click()
        for field in await form.locator("input[name=model]").all():
            await expect(field).to_have_value(stack.model_id)
        for name, make in KEPT.items():
            for field in await form.locator(f"input[name={name}]").all():
                await field.fill(await make(stack))
        await form.get_by_role("button", name="Send").click()
        state = form.locator("[role=status]")
        await expect(state).to_contain_text(re.compile(r"\d ms$"), timeout=WAIT_MILLISECONDS)
        command = form.locator("xpath=preceding-sibling::pre[@data-path]").last
        path, method = [await command.get_attribute(f"data-{key}") for key in ("path", "method")]
        status = 200 if (method or "").upper() == "GET" else REFUSED.get(path or "", 200)
        await expect(state).to_contain_text(re.compile(f"^{status} "))
        assert await form.locator(".answer").inner_text()


async def test_command_names_the_server_it_was_read_from(reference: Page, stack: Stack) -> None:
    command = await reference.locator("pre[data-path='/v1/completions']").inner_text()
    assert f"{stack.url}/v1/completions" in command
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await shell.communicate()
    assert json.loads(answer)["choices"]


async def test_stream_is_shown(reference: Page) -> None:
    form = trial(reference, "/v1/completions")
    body = {"prompt": "x = ", "max_tokens": 4, "stream": True}
    await send(form, json.dumps(body))
    await expect(form.locator(".answer")).to_contain_text("data: [DONE]")


async def test_error_is_told_in_words(reference: Page) -> None:
    form = trial(reference, "/v1/completions")
    await send(form, '{"prompt": "x", "temperature": -1}')
    await expect(form.locator("[role=status].error")).to_contain_text("400")
    await expect(form.locator(".answer")).to_contain_text("temperature")


async def test_request_can_be_stopped(reference: Page) -> None:
    form = trial(reference, "/v1/completions")
    body = {"prompt": "x = ", "min_tokens": 1900, "max_tokens": 1900, "n": 16, "stream": True}
    await form.locator("summary").click()
    await form.locator("textarea").fill(json.dumps(body))
    await form.get_by_role("button", name="Send").click()
    await form.get_by_role("button", name="Stop").click()  # once it is enabled
    await expect(form.locator("[role=status]")).to_have_text("Stopped.", timeout=WAIT_MILLISECONDS)


async def test_page_fits_a_phone(browser: Browser, stack: Stack) -> None:
    page = await opened(browser, stack.url, width=390)
    for form in await page.locator(".try summary").all():  # the widest that the page can be
        await form.click()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await page.context.close()


async def test_key_is_used(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = add_key(keys)
    async with running_shim("--tokenizer", stack.tokenizer, "--keys", str(keys)) as shim:
        page = await opened(browser, shim.url)
        await page.fill("#key", secret)
        await page.press("#key", "Enter")
        form = trial(page, "/v1/completions")
        await send(form, '{"prompt": "x = ", "max_tokens": 2}')
        await expect(form.locator("[role=status]")).to_contain_text("200")
    await page.context.close()
