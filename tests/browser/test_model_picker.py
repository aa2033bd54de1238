"""The model picker in Chromium: what a model's state means for the next message.

The cards of /v1/models are scripted: which model is in memory changes within a test.
"""

import json
from typing import Any

from playwright.async_api import Page, Request, Route, expect

from tests.browser.answers import ANSWER, answered, chunk, say

GIB = 2**30


def card(model: str, **status: Any) -> dict[str, Any]:
    """Return a model card with a state."""
    whole = {"progress": None, "memory_bytes": 2 * GIB, "idle_until": None, "error": None} | status
    return {"id": model, "max_model_len": 100, "max_output_length": 100, "status": whole}


class Cards:
    """The answer of /v1/models, which a test may change."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = list(cards)

    async def fulfil(self, route: Route) -> None:
        await route.fulfill(json={"object": "list", "data": self.cards})


async def with_cards(page: Page, *cards: dict[str, Any]) -> Cards:
    """Load the page with these models."""
    scripted = Cards(*cards)
    await page.route("**/v1/models", scripted.fulfil)
    await page.reload()
    await expect(page.locator("#model option")).to_have_count(len(cards))
    return scripted


async def test_states_of_models_and_the_effect_of_a_message_are_shown(page: Page) -> None:
    idle, failed = card("cold", value="idle"), card("bad", value="failed", error="No such file.")
    loading = card("warm", value="loading", progress=0.43)
    await with_cards(page, card("hot", value="loaded"), idle, loading, failed)
    await expect(page.locator("#model option")).to_have_text(
        ["hot", "cold · idle", "warm · loading 43 %", "bad · failed"]
    )
    line = page.locator("#model-state")
    await expect(line).to_be_hidden()
    await page.select_option("#model", "cold")
    await expect(line).to_contain_text("cold is not in memory (2 GiB). A message loads it")
    await page.select_option("#model", "bad")
    await expect(line).to_contain_text("bad could not be loaded: No such file.")


async def test_message_to_an_idle_model_shows_the_progress_until_the_answer(page: Page) -> None:
    scripted = await with_cards(page, card("cold", value="idle"))
    held: list[Route] = []
    await page.route("**/v1/chat/completions", lambda route: held.append(route))
    await say(page, "Hello")
    progress = page.locator(f"{ANSWER} .progress")
    await expect(progress).to_have_text("Waiting until cold is loaded")
    scripted.cards = [card("cold", value="loading", progress=0.5)]
    await expect(progress).to_have_text("cold is loading 50 %")
    scripted.cards = [card("cold", value="loaded")]
    await expect(progress).to_be_hidden()
    body = chunk(delta={"content": "Here."}) + "data: [DONE]\n\n"
    await held[0].fulfill(content_type="text/event-stream", body=body)
    await answered(page, 1)
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Here.")
    await expect(page.locator("#model-state")).to_be_hidden()


async def test_idle_model_can_be_loaded_before_the_first_message(page: Page) -> None:
    scripted = await with_cards(page, card("cold", value="idle"))
    asked: list[Any] = []

    async def load(route: Route, request: Request) -> None:
        asked.append(json.loads(request.post_data or ""))
        scripted.cards = [card("cold", value="loaded")]
        await route.fulfill(json={})

    await page.route("**/v1/models/load", load)
    await page.click("text=Load now")
    await expect(page.locator("#model option")).to_have_text(["cold"])
    assert asked == [{"model": "cold"}]


async def test_refused_load_says_why(page: Page) -> None:
    await with_cards(page, card("cold", value="idle"))
    error = {"error": {"message": "This key may not load models.", "type": "permission_error"}}
    await page.route("**/v1/models/load", lambda route: route.fulfill(status=403, json=error))
    await page.click("text=Load now")
    await expect(page.locator("#status")).to_have_text("This key may not load models.")


async def test_gauge_warns_before_the_context_is_full(page: Page) -> None:
    await with_cards(page, card("hot", value="loaded"))
    figures = {"choices": [], "usage": {"prompt_tokens": 80, "completion_tokens": 8}}
    body = chunk(delta={"content": "Yes."}) + f"data: {json.dumps(figures)}\n\ndata: [DONE]\n\n"
    await page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    await page.route("**/tokenize", lambda route: route.fulfill(json={"count": 30}))
    await say(page, "Hello")
    await expect(page.locator("#context")).to_contain_text("88 of 100 tokens")
    await expect(page.locator("#context-warning")).to_contain_text("about 12 tokens are left")
    await page.fill("#box", "A long message")
    await expect(page.locator("#context")).to_contain_text("118 of 100 tokens")
    await expect(page.locator("#context-warning")).to_contain_text(
        "18 tokens longer than the context"
    )
    await page.fill("#box", "")
    await page.click("#new")
    await expect(page.locator("#context-warning")).to_be_hidden()
