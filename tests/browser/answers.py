"""Answers of a scripted server, for what no small model says on demand, and steps of a chat."""

import json
from typing import Any

from playwright.async_api import Page, Request, Route, expect

__all__ = ["ANSWER", "answer_with", "answered", "body_of", "chunk", "say", "usage"]

ANSWER = ".message.assistant"


def chunk(**choice: Any) -> str:
    """Return one event of a streamed chat."""
    whole = {"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
    return f"data: {json.dumps(whole)}\n\n"


def usage(prompt: int, output: int) -> str:
    """Return the event of a stream that has the usage."""
    figures = {"prompt_tokens": prompt, "completion_tokens": output}
    return f"data: {json.dumps({'choices': [], 'usage': figures})}\n\n"


def body_of(request: Request) -> dict[str, Any]:
    """Return the request's JSON object."""
    body: dict[str, Any] = json.loads(request.post_data or "")
    return body


async def answer_with(page: Page, *events: str) -> list[dict[str, Any]]:
    """Answer the page's next chats with these events. Return the list of the bodies they send."""
    bodies: list[dict[str, Any]] = []

    async def fulfil(route: Route, request: Request) -> None:
        bodies.append(body_of(request))
        await route.fulfill(
            content_type="text/event-stream", body="".join(events) + "data: [DONE]\n\n"
        )

    await page.route("**/v1/chat/completions", fulfil)
    return bodies


async def say(page: Page, text: str) -> None:
    await page.fill("#box", text)
    await page.press("#box", "Enter")


async def answered(page: Page, count: int) -> None:
    await expect(page.locator(f"{ANSWER} .actions")).to_have_count(count)
