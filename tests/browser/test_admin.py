"""The admin page in Chromium: an operator sees models, usage and keys, and nobody else does."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from services.common.accounts.key_file import add_key
from tests.services.shim import running_jobs, running_shim
from tests.stack import Stack, free_ports

WAIT_MILLISECONDS = 60_000
BODY = {"prompt": "x = ", "max_tokens": 4, "ignore_eos": True}


class Office:
    """A server with keys, of which one has a budget and some usage."""

    def __init__(self, url: str, admin: str, user: str) -> None:
        self.url = url
        self.admin = admin
        self.user = user


@pytest.fixture(scope="module")
async def office(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    keys, token = folder / "keys.json", folder / "token"
    keys.write_text(json.dumps({"tiers": {"default": {"requests_per_minute": 600}}}))
    token.write_text("t" * 32)
    admin = add_key(keys, "default", "boss", admin=True)
    user = add_key(keys, "default", "alice <b>", monthly_tokens=1_000)
    known = ("--tokenizer", stack.tokenizer, "--keys", str(keys), "--peer-token-file", str(token))
    [port] = free_ports(1)
    async with (
        running_jobs("--port", str(port), *known),
        running_shim(*known, "--jobs", f"127.0.0.1:{port}") as shim,
    ):
        headers = {"authorization": f"Bearer {user}"}
        async with httpx.AsyncClient(base_url=shim.url, timeout=60, headers=headers) as http:
            assert (await http.post("/v1/completions", json=BODY)).is_success
        yield Office(shim.url, admin, user)


async def opened(browser: Browser, url: str, key: str = "", width: int = 1280) -> Page:
    """Return the admin page in a new profile. Its context is the caller's to close."""
    context = await browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(f"{url}/admin")
    if key:
        await page.fill("#key", key)
        await page.press("#key", "Enter")
    return page


async def shows(page: Page, selector: str, text: str) -> None:
    await expect(page.locator(selector)).to_contain_text(
        re.compile(text), timeout=WAIT_MILLISECONDS
    )


async def test_operator_sees_models_usage_and_keys(
    browser: Browser, office: Office, stack: Stack
) -> None:
    page = await opened(browser, office.url, office.admin)
    await shows(page, "#models", re.escape(stack.model_id))
    await shows(page, "#models", "serving")
    await shows(page, "#sums", re.escape(stack.model_id))
    await shows(page, "#keys", "alice <b>")  # shown as text
    await shows(page, "#keys", "of 1,000 tokens")
    await shows(page, "#keys", "requests per minute: 600")
    await expect(page.locator("#bars rect.output[height='0.00']")).to_have_count(30)
    await page.select_option("#by", "key")
    await shows(page, "#sums", "alice")
    stored = await page.evaluate("[JSON.stringify(localStorage), document.cookie]")
    assert stored == ["{}", ""], "the key stays in the tab's session"
    content = await page.content()
    assert office.admin not in content
    assert office.user not in content
    await page.context.close()


async def test_key_without_the_right_is_told_so(browser: Browser, office: Office) -> None:
    page = await opened(browser, office.url, office.user)
    await shows(page, "#server.error", "needs an admin key")
    await expect(page.locator("#content")).to_be_hidden()
    await page.fill("#key", office.admin)
    await page.press("#key", "Enter")
    await expect(page.locator("#content")).to_be_visible(timeout=WAIT_MILLISECONDS)
    await page.context.close()


async def test_page_fits_a_phone(browser: Browser, office: Office) -> None:
    page = await opened(browser, office.url, office.admin, width=400)
    await shows(page, "#keys", "alice")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400
    await page.context.close()


async def test_server_without_keys_and_jobs_shows_what_it_has(
    browser: Browser, stack: Stack, tmp_path: Path
) -> None:
    async with running_shim("--tokenizer", stack.tokenizer) as shim:
        page = await opened(browser, shim.url)
        await shows(page, "#models", "serving")
        await shows(page, "#usage-caption", "without the jobs service")
        await shows(page, "#keys-note", "has no keys")
        await page.context.close()
