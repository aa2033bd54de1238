"""Tools of a real MCP server in Chromium: no call without consent, no server but those named."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request, Route, expect

from tests.browser.answers import ANSWER, answered, body_of, chunk, say
from tests.services.shim import running_shim
from tests.stack import Stack, free_ports

pytest.importorskip("mcp.server.mcpserver")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mcp_server.py"
WAIT_MILLISECONDS = 60_000


@asynccontextmanager
async def running_tools(page_origin: str, port: int) -> AsyncIterator[str]:
    """Run the MCP server of the examples; yield its URL once it listens."""
    command = (sys.executable, str(EXAMPLE), "--page", page_origin, "--port", str(port))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if b"running on" in line:
                break
        draining = asyncio.ensure_future(process.stderr.read())
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        await process.wait()
    await draining


@pytest.fixture(scope="module")
async def servers(stack: Stack) -> AsyncIterator[tuple[str, str]]:
    """The URLs of a shim that allows one MCP server, and of that server."""
    (port,) = free_ports(1)
    allowed = ("--mcp-origins", f"http://127.0.0.1:{port}")
    async with (
        running_shim("--tokenizer", stack.tokenizer, *allowed) as shim,
        running_tools(shim.url, port) as url,
    ):
        yield shim.url, url


@pytest.fixture
async def tools(browser: Browser, servers: tuple[str, str]) -> AsyncIterator[tuple[Page, str]]:
    """The playground of the shim in a new profile, and the URL of the MCP server."""
    playground, url = servers
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = await context.new_page()
    await page.goto(playground)
    await page.wait_for_selector("#model option", state="attached")
    yield page, url
    await context.close()


async def add_server(page: Page, url: str) -> None:
    await page.fill("#mcp-form [name=url]", url)
    await page.click("text=Add server")


async def call_then_answer(page: Page, *calls: tuple[str, str], rounds: int = 1) -> list[Any]:
    """Answer chats with these calls `rounds` times, then with a text. Return their bodies."""
    bodies: list[Any] = []
    made = [
        {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": text}}
        for index, (name, text) in enumerate(calls)
    ]

    async def fulfil(route: Route, request: Request) -> None:
        bodies.append(body_of(request))
        delta = {"tool_calls": made} if len(bodies) <= rounds else {"content": "Done."}
        body = chunk(delta=delta) + "data: [DONE]\n\n"
        await route.fulfill(content_type="text/event-stream", body=body)

    await page.route("**/v1/chat/completions", fulfil)
    return bodies


def results(body: dict[str, Any]) -> list[str]:
    return [each["content"] for each in body["messages"] if each["role"] == "tool"]


async def test_tool_runs_after_consent_and_its_result_goes_to_the_model(
    tools: tuple[Page, str],
) -> None:
    page, url = tools
    await add_server(page, url)
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    bodies = await call_then_answer(page, ("add", '{"a": 2, "b": 3}'))
    calls: list[str] = []
    page.on("request", lambda sent: calls.append(sent.post_data or ""))
    await say(page, "Add")
    await expect(page.locator(".call pre")).to_have_text('{\n  "a": 2,\n  "b": 3\n}')
    assert not [each for each in calls if "tools/call" in each]
    schema = bodies[0]["tools"][0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator(f"{ANSWER} .content").last).to_have_text("Done.")
    assert results(bodies[1]) == ["5"]
    assert len([each for each in calls if "tools/call" in each]) == 1


async def test_allowed_tool_runs_without_asking_in_its_conversation_alone(
    tools: tuple[Page, str],
) -> None:
    page, url = tools
    await add_server(page, url)
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    bodies = await call_then_answer(page, ("add", '{"a": 2, "b": 3}'), rounds=3)
    await say(page, "Add")
    await page.click("text=Run, and allow in this conversation")
    await expect(page.locator(f"{ANSWER} .content").last).to_have_text("Done.")
    assert results(bodies[3]) == ["5"] * 3
    await page.unroute("**/v1/chat/completions")
    await call_then_answer(page, ("add", '{"a": 2, "b": 3}'))
    await page.click("#new")
    await say(page, "Add")
    await expect(page.locator(".call-result")).to_contain_text("Run add at 127.0.0.1")


async def test_declined_and_failed_calls_are_told_to_the_model(tools: tuple[Page, str]) -> None:
    page, url = tools
    await add_server(page, url)
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    calls = (("divide", '{"a": 1, "b": 0}'), ("add", "{}"), ("add", '{"a":'))
    bodies = await call_then_answer(page, *calls)
    await say(page, "Divide")
    forms = page.locator(".call-result")
    for index in (0, 2):
        await forms.nth(index).get_by_role("button", name="Run", exact=True).click()
    await expect(forms.nth(0)).to_contain_text("Error executing tool divide")
    await forms.nth(1).get_by_role("button", name="Decline").click()
    await answered(page, 2)
    failed, declined, broken = results(bodies[1])
    assert "divide" in failed
    assert declined == "The user declined this call."
    assert broken.startswith("The call failed: ")
    await expect(page.locator(".message.tool h2").first).to_have_text("Failure of divide")


async def test_escape_cancels_a_running_tool(tools: tuple[Page, str]) -> None:
    page, url = tools
    await add_server(page, url)
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    bodies = await call_then_answer(page, ("wait", '{"seconds": 600}'))
    await say(page, "Wait")
    async with page.expect_request(url):
        await page.get_by_role("button", name="Run", exact=True).click()
    await page.keyboard.press("Escape")
    await expect(page.locator(".call-result")).to_contain_text("The call was cancelled.")
    assert len(bodies) == 1


async def test_server_of_an_earlier_revision_gets_a_session(tools: tuple[Page, str]) -> None:
    page, url = tools
    sent: list[tuple[str, str | None, str | None]] = []

    async def refuse_modern(route: Route, request: Request) -> None:
        version = request.headers.get("mcp-protocol-version")
        if version == "2026-07-28":
            error = {"code": -32601, "message": "Method not found"}
            headers = {"access-control-allow-origin": "*"}
            body = {"jsonrpc": "2.0", "id": body_of(request)["id"], "error": error}
            await route.fulfill(status=400, json=body, headers=headers)
            return
        if request.post_data:
            session = request.headers.get("mcp-session-id")
            sent.append((json.loads(request.post_data)["method"], version, session))
        await route.continue_()

    await page.route(url, refuse_modern)
    await add_server(page, url)
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    bodies = await call_then_answer(page, ("add", '{"a": 2, "b": 3}'))
    await say(page, "Add")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.locator(f"{ANSWER} .content").last).to_have_text("Done.")
    assert results(bodies[1]) == ["5"]
    assert [method for method, _, _ in sent] == [
        "initialize", "notifications/initialized", "tools/list", "tools/call",
    ]  # fmt: skip
    assert {version for _, version, _ in sent[1:]} == {"2025-11-25"}
    assert len({session for _, _, session in sent[1:]} - {None}) == 1


async def test_page_reaches_no_server_that_the_operator_did_not_name(
    tools: tuple[Page, str],
) -> None:
    """Text of a model could otherwise make the page send a conversation anywhere."""
    page, _ = tools
    reached: list[str] = []
    await page.context.route("**/other", lambda route: reached.append(route.request.url))
    await add_server(page, "http://127.0.0.1:9/other")
    await expect(page.locator("#mcp-servers .error")).to_contain_text(
        "Start the server with --mcp-origins http://127.0.0.1:9."
    )
    assert reached == []


async def test_servers_stay_until_they_are_removed(tools: tuple[Page, str]) -> None:
    page, url = tools
    await add_server(page, url)
    await page.reload()
    await expect(page.locator("#mcp-servers summary")).to_have_text("3 tools")
    await page.uncheck("#mcp-servers input")
    await expect(page.locator("#mcp-servers li")).to_contain_text("Off")
    await page.reload()
    await expect(page.locator("#mcp-servers li")).to_contain_text("Off")
    await page.click(f"[aria-label='Remove {url}']")
    await expect(page.locator("#mcp-servers li")).to_have_count(0)
