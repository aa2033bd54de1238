"""Accessibility of the pages, by axe-core from npm, in light and dark, on a desk and a phone."""

import shutil
import subprocess
import tarfile
from typing import Any

import pytest
from playwright.async_api import Browser, FilePayload, Page, expect

from tests.browser.answers import answer_with, answered, chunk, say, usage
from tests.stack import Stack

AXE = "axe-core@4.14.1"
WAIT_MILLISECONDS = 60_000
LONG = (
    "# Title\n\n$x^2$ and $$\\sum_i x_i$$\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```python\nx = 1\n```\n\n" + "Text. " * 300
)
CALL = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
NOTES = FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"A note")


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("this machine has no npm")
    folder = tmp_path_factory.mktemp("axe")
    packed = subprocess.run(
        ["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, check=False
    )
    if packed.returncode:
        pytest.skip("the npm registry can't be reached")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


async def violations(page: Page, axe: str) -> list[Any]:
    """Return the names of the rules that the page breaks, with the elements."""
    await page.evaluate(axe)
    found: list[Any] = await page.evaluate(
        """async () => (await axe.run()).violations.map(
            ({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 200))]
        )"""
    )
    return found


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_state_of_the_playground_is_accessible(
    browser: Browser, stack: Stack, axe: str, scheme: Any, width: int
) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(stack.url)
    await page.wait_for_selector("#model option", state="attached")
    assert await violations(page, axe) == []
    await answer_with(page, chunk(delta={"content": LONG}), usage(1900, 10))
    await page.set_input_files("#files", [NOTES])
    await expect(page.locator("#attached > li")).to_have_count(1)
    assert await violations(page, axe) == []
    await say(page, "Where is Bern?")
    await answered(page, 1)
    await expect(page.locator("#context-warning")).to_be_visible()
    assert await violations(page, axe) == []
    await page.unroute("**/v1/chat/completions")
    await answer_with(page, chunk(delta={"tool_calls": [CALL]}))
    await say(page, "And the weather?")
    await answered(page, 2)
    assert await violations(page, axe) == []
    await page.locator(".message").last.get_by_role("button", name="Delete").click()
    await expect(page.locator("#toast")).to_be_visible()
    assert await violations(page, axe) == []
    await page.keyboard.press("Control+k")
    await page.keyboard.type("text")
    await expect(page.locator("mark")).to_have_text(["Text"])
    assert await violations(page, axe) == []
    await page.keyboard.press("Enter")
    await page.click("#system-summary")
    if width < 1100:
        await page.click("#show-settings")
    assert await violations(page, axe) == []
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    await context.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("path", "shown"), [("status", ".card .state.good"), ("admin", "#models th")]
)
async def test_pages_of_operators_are_accessible(
    browser: Browser, stack: Stack, axe: str, path: str, shown: str, scheme: Any, width: int
) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(f"{stack.url}/{path}")
    await page.locator(shown).first.wait_for()
    assert await violations(page, axe) == []
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    await context.close()
