"""Saved conversations in Chromium: search, undo, titles, and those of the first format."""

import json
from typing import Any

from playwright.async_api import Page, expect

from tests.browser.answers import ANSWER, answer_with, answered, chunk, say

TITLES = "#conversations .title"
LEAF: dict[str, Any] = {"children": [], "shown": 0}
PNG = "data:image/png;base64,iVBORw0KGgo="


async def converse(page: Page, *questions: str) -> None:
    """Start a conversation for each question."""
    for question in questions:
        await page.click("#new")
        await say(page, question)
        await expect(page.locator("#status")).to_have_text("The answer is complete.")


async def stored(page: Page) -> list[dict[str, Any]]:
    """Return the conversations of the browser's storage."""
    found: list[dict[str, Any]] = await page.evaluate(
        "import('/playground/storage.js').then(({ loadConversations }) => loadConversations())"
    )
    return found


async def test_deleted_conversation_comes_back_by_undo_and_stays_after_a_reload(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await converse(page, "First", "Second")
    await page.click("[aria-label='Delete First']")
    await expect(page.locator(TITLES)).to_have_text(["Second"])
    assert len(await stored(page)) == 1
    assert await page.evaluate("document.activeElement.textContent") == "Undo"
    await page.keyboard.press("Enter")
    await expect(page.locator(TITLES)).to_have_text(["Second", "First"])
    await page.reload()
    await expect(page.locator(TITLES)).to_have_text(["Second", "First"])


async def test_deleted_conversation_is_gone_after_a_reload(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await converse(page, "First", "Second")
    await page.click("[aria-label='Delete Second']")
    await expect(page.locator(TITLES)).to_have_text(["First"])
    await page.reload()
    await expect(page.locator(TITLES)).to_have_text(["First"])


async def test_answer_that_ends_does_not_bring_its_deleted_conversation_back(page: Page) -> None:
    await page.route("**/v1/chat/completions", lambda route: None)  # the answer never begins
    await say(page, "First")
    await page.click("[aria-label='Delete First']")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator(TITLES)).to_have_count(0)
    assert await stored(page) == []


async def test_all_conversations_come_back_by_undo(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await converse(page, "First", "Second")
    await page.click("#delete-all")
    await expect(page.locator(TITLES)).to_have_count(0)
    await expect(page.locator("#toast")).to_contain_text("Deleted 2 conversations.")
    await page.click("#toast >> text=Undo")
    await expect(page.locator(TITLES)).to_have_text(["Second", "First"])
    await expect(page.locator(".message.user .content")).to_have_text("Second")


async def test_deleted_message_comes_back_with_those_after_it(page: Page) -> None:
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await say(page, "Hello")
    await answered(page, 1)
    await page.locator(".message.user").get_by_role("button", name="Delete").click()
    await expect(page.locator(".message")).to_have_count(0)
    await expect(page.locator("#toast")).to_contain_text("Deleted the message and 1 after it.")
    await page.keyboard.press("Enter")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Yes.")
    await say(page, "More")
    await answered(page, 2)
    assert [each["role"] for each in bodies[-1]["messages"]] == ["user", "assistant", "user"]


async def test_escape_closes_the_undo_line_and_returns_to_the_message(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await converse(page, "First")
    await page.click("[aria-label='Delete First']")
    await page.keyboard.press("Escape")
    await expect(page.locator("#toast")).to_be_hidden()
    assert await page.evaluate("document.activeElement.id") == "box"


async def test_search_finds_words_of_titles_and_answers_by_keyboard(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "The Straße is in Bern, by the river."}))
    await converse(page, "Where is it?")
    await page.unroute("**/v1/chat/completions")
    await answer_with(page, chunk(delta={"content": "A cat."}))
    await converse(page, "Which animal?")
    await page.keyboard.press("Control+k")
    await page.keyboard.type("river BERN")
    await expect(page.locator(f"{TITLES} .snippet mark")).to_have_text("river")
    await expect(page.locator("#found")).to_have_text("1 of 2 conversations")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.locator(f"{ANSWER} .content")).to_contain_text("Straße")
    marks = "[...CSS.highlights.get('found')].map(range => range.toString())"
    assert await page.evaluate(marks) == ["Bern", "river"]
    await page.keyboard.press("Control+k")
    await page.keyboard.press("Escape")
    await expect(page.locator(TITLES)).to_have_count(2)
    await page.fill("#search", "animal")
    await expect(page.locator(TITLES)).to_have_text(["Which animal?"])


async def test_search_goes_through_hundreds_of_long_conversations(page: Page) -> None:
    found = await page.evaluate(
        """async () => {
            const { search } = await import("/playground/search.js");
            const long = "lorem ipsum ".repeat(2000);
            const message = (content) => ({ role: "user", content, children: [], shown: 0 });
            const named = (index) => ({ name: `Number ${index}`, updated: 1, shown: 0 });
            const all = Array.from({ length: 500 }, (_, index) => (
                { ...named(index), children: [message(`${long} needle${index} end`)] }
            ));
            const found = search(all, "needle42 IPSUM");
            return found.map(({ conversation, snippet }) => [conversation.name, snippet.match]);
        }"""
    )
    assert found[0] == ["Number 42", "needle42"]
    assert [name for name, _ in found] == ["Number 42", *(f"Number {420 + i}" for i in range(10))]


async def test_title_is_of_the_first_words_until_the_user_writes_one(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    question = "# Please explain to me how the **tides** of the northern sea come about each day"
    await converse(page, question)
    short = "Please explain to me how the tides of the northern sea come…"
    await expect(page.locator(TITLES)).to_have_text([short])
    await page.fill("#title", "Tides")
    await page.press("#title", "Enter")
    await expect(page.locator(TITLES)).to_have_text(["Tides"])
    await page.reload()
    await expect(page.locator("#title")).to_have_value("Tides")


async def test_model_makes_a_title_only_when_asked(page: Page) -> None:
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await converse(page, "Hello")
    assert len(bodies) == 1
    await page.unroute("**/v1/chat/completions")
    asked = await answer_with(page, chunk(delta={"content": '**"A Short Greeting."**\n'}))
    await page.click("#suggest")
    await expect(page.locator(TITLES)).to_have_text(["A Short Greeting"])
    assert "Hello" in asked[0]["messages"][0]["content"]
    await page.click("#toast >> text=Undo")
    await expect(page.locator(TITLES)).to_have_text(["Hello"])


async def test_system_prompt_belongs_to_its_conversation(page: Page) -> None:
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await page.fill("#settings-form [name=system]", "Be brief.")
    await converse(page, "First")
    await page.click("#system-summary")
    await page.fill("#system", "Be long.")
    await say(page, "More")
    await answered(page, 2)
    await converse(page, "Second")
    await page.click(f"{TITLES} >> text=First")
    await expect(page.locator("#system")).to_have_value("Be long.")
    sent = [body["messages"][0] for body in bodies]
    assert [each["content"] for each in sent] == ["Be brief.", "Be long.", "Be brief."]
    assert {each["role"] for each in sent} == {"system"}


async def store_in_first_format(page: Page, conversation: dict[str, Any]) -> None:
    """Store a conversation as version 1 did. No page may hold the storage open."""
    await page.evaluate(
        """(conversation) => new Promise((resolve, reject) => {
            indexedDB.deleteDatabase("tokenwire-playground");
            const request = indexedDB.open("tokenwire-playground", 1);
            request.onupgradeneeded = () => {
                request.result.createObjectStore("conversations", { keyPath: "id" });
            };
            request.onerror = () => reject(request.error);
            request.onsuccess = () => {
                const transaction = request.result.transaction("conversations", "readwrite");
                transaction.objectStore("conversations").put(conversation);
                transaction.oncomplete = () => { request.result.close(); resolve(); };
            };
        })""",
        conversation,
    )


async def test_conversation_of_the_first_format_opens_with_its_images(page: Page) -> None:
    """Version 1 kept images within messages, the usage as a text, and prefilled settings."""
    answer = {"role": "assistant", "content": "A dot.", "usage": "3 tokens"} | LEAF
    question = {"role": "user", "content": "See", "images": [PNG], "children": [answer], "shown": 0}
    home = page.url
    await page.goto(f"{home}llms.txt")
    old = {"id": "old", "name": "", "updated": 1, "children": [question], "shown": 0}
    await store_in_first_format(page, old)
    settings = json.dumps({"temperature": "0.2", "max_tokens": "512", "top_p": "0.9"})
    await page.evaluate("text => localStorage.setItem('tokenwire.settings', text)", settings)
    await page.goto(home)
    await expect(page.locator(".message.user img")).to_have_attribute("src", PNG)
    await expect(page.locator(f"{ANSWER} .usage")).to_have_text("3 tokens")
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await say(page, "More")
    await answered(page, 2)
    parts = bodies[0]["messages"][0]["content"]
    assert parts[1] == {"type": "image_url", "image_url": {"url": PNG}}
    assert not {"temperature", "max_tokens"} & set(bodies[0])
    assert bodies[0]["top_p"] == 0.9


async def test_full_storage_is_told(page: Page) -> None:
    """A conversation must not vanish without a word."""
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await page.evaluate(
        """() => {
            IDBObjectStore.prototype.put = () => {
                throw new DOMException("full", "QuotaExceededError");
            };
        }"""
    )
    await say(page, "Hello")
    await expect(page.locator("#status")).to_contain_text("the browser's storage is full")


async def test_imported_file_brings_no_permission_and_no_foreign_data(page: Page) -> None:
    """Whoever shares a conversation must not allow tools in the reader's browser."""
    types = ("image/png", "image/svg+xml", "application/pdf", "text/plain")
    attachments = [{"id": kind, "name": kind, "type": kind, "size": 1} for kind in types]
    files = [
        {"id": "image/png", "data": "data:image/png;base64,eA=="},
        {"id": "image/svg+xml", "data": "data:image/svg+xml;base64,eA=="},
        {"id": "application/pdf", "data": "https://example.org/a.pdf"},
        {"id": "text/plain", "data": "a text"},
    ]
    message = {"role": "user", "content": "x", "attachments": attachments} | LEAF
    exported = {
        "conversation": {"allowedTools": ["http://x/mcp add"], "children": [message], "shown": 0},
        "files": files,
    }
    conversation, data = await page.evaluate(
        """async (text) => {
            const { fromJson } = await import("/playground/conversation.js");
            const { conversation, files } = fromJson(text);
            return [conversation, files];
        }""",
        json.dumps(exported),
    )
    assert conversation["allowedTools"] == []
    (message,) = conversation["children"]
    assert [each["name"] for each in message["attachments"]] == ["image/png", "text/plain"]
    assert [each["data"] for each in data] == ["data:image/png;base64,eA==", "a text"]
    assert not {each["id"] for each in data} & set(types)
