"""The status page in Chromium: an operator sees what each model does, and what is away."""

import re
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, expect

from services.common.accounts.key_file import add_key
from tests.services.shim import running_shim
from tests.stack import Stack

CARD = ".card"
WAIT_MILLISECONDS = 60_000


async def opened(browser: Browser, url: str, width: int = 1280) -> Page:
    """Return the status page in a new profile. Its context is the caller's to close."""
    context = await browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(f"{url}/status")
    return page


async def shows(page: Page, selector: str, text: str) -> None:
    await expect(page.locator(selector)).to_contain_text(
        re.compile(text), timeout=WAIT_MILLISECONDS
    )


async def test_counts_of_a_model_are_shown_as_they_change(browser: Browser, stack: Stack) -> None:
    page = await opened(browser, stack.url)
    await shows(page, f"{CARD} h2", re.escape(stack.model_id))
    await shows(page, f"{CARD} .state", "Serving")
    before = await page.inner_text(f"{CARD} .outcomes")
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        body = {"prompt": "x = ", "max_tokens": 4}
        assert (await http.post("/v1/completions", json=body)).is_success
    await expect(page.locator(f"{CARD} .outcomes")).not_to_have_text(
        before, timeout=WAIT_MILLISECONDS
    )
    await shows(page, f"{CARD} .chart:first-child .value", r"^[\d.,]+/s$")
    fourth_line = page.locator(".chart path[class^=line][d*=L]").nth(3)
    await expect(fourth_line).to_be_attached(timeout=WAIT_MILLISECONDS)
    await page.context.close()


async def test_reload_keeps_the_history_and_charts_have_units(
    browser: Browser, stack: Stack
) -> None:
    page = await opened(browser, stack.url)
    line = page.locator(".chart path.line-0[d*=L]").first
    await expect(line).to_be_attached(timeout=WAIT_MILLISECONDS)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        [model] = (await http.get("/status.json", params={"since": "-1"})).json()["models"]
    assert len(model["history"]) >= 2, "the server has it, whatever pages are open"
    async with page.expect_response(lambda reply: "status.json" in reply.url) as answered:
        await page.reload()
    [model] = (await (await answered.value).json())["models"]
    assert len(model["history"]) >= 2
    await expect(line).to_be_attached(timeout=WAIT_MILLISECONDS)
    await shows(page, ".chart:first-child .times", "0 min")
    await shows(page, ".chart:first-child .scale", "/s")
    await page.context.close()


async def test_page_fits_a_phone(browser: Browser, stack: Stack) -> None:
    page = await opened(browser, stack.url, width=390)
    await shows(page, f"{CARD} .state", "Serving")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await page.context.close()


async def test_lost_services_are_told(browser: Browser, stack: Stack) -> None:
    """A chart that stands still would look like a server without work."""
    async with running_shim("--tokenizer", stack.tokenizer) as shim:
        page = await opened(browser, shim.url)
        await shows(page, f"{CARD} .state", "Serving")
        shim.process.terminate()
        await shim.process.wait()
        await shows(page, "#server.error", "does not answer")
    await page.context.close()


async def test_key_is_asked_for_and_used(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = add_key(keys)
    async with running_shim("--tokenizer", stack.tokenizer, "--keys", str(keys)) as shim:
        page = await opened(browser, shim.url)
        await page.fill("#key", secret)
        await page.press("#key", "Enter")
        await shows(page, f"{CARD} .state", "Serving")
        await expect(page.locator("#key-form")).to_be_hidden()
    await page.context.close()
