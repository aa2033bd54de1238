"""Headless Chromium, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

__all__ = ["chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = [
    "--no-sandbox",  # Chromium's sandbox refuses to run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Else each window loads the pages of its address bar: almost a second of processor time.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup",
]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start the Chromium of this machine. Skips the test if there is none."""
    executable = next(filter(None, map(shutil.which, _NAMES)), None)
    if executable is None:
        pytest.skip("this machine has no Chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()
