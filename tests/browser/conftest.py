"""Fixtures of the browser tests: one Chromium, and a fresh page of the playground per test."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page

from tests.browser.chromium import chromium
from tests.stack import Stack

_WAIT_MILLISECONDS = 60_000


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest.fixture
async def page(browser: Browser, stack: Stack) -> AsyncIterator[Page]:
    """The playground in a new profile. Fails at an error of the page's scripts."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(_WAIT_MILLISECONDS)
    shown = await context.new_page()
    errors: list[str] = []
    shown.on("pageerror", lambda error: errors.append(str(error)))
    await shown.goto(stack.url)
    await shown.wait_for_selector("#model option", state="attached")
    yield shown
    await context.close()
    assert errors == []
