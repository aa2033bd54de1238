"""Files of a message in Chromium: what is sent, what is refused, and what a reload keeps."""

import base64
from typing import Any

import pytest
from playwright.async_api import FilePayload, Page, expect

from tests.browser.answers import answer_with, answered, chunk, say
from tests.pdfs import pdf

YES = chunk(delta={"content": "Yes."})
NOTES = FilePayload(name="notes.py", mimeType="text/x-python", buffer=b"print('```')\n")
PAPER = FilePayload(name="paper.pdf", mimeType="application/pdf", buffer=pdf("A page"))
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
DOT = FilePayload(name="dot.png", mimeType="image/png", buffer=PNG)


def user_parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = body["messages"][-1]["content"]
    return parts


async def attach(page: Page, *files: FilePayload) -> None:
    await page.set_input_files("#files", list(files))


async def test_text_pdf_and_image_are_sent_as_the_parts_that_the_server_reads(page: Page) -> None:
    bodies = await answer_with(page, YES)
    await attach(page, NOTES, PAPER, DOT)
    await expect(page.locator("#attached > li")).to_have_count(3)
    await say(page, "What are these?")
    await answered(page, 1)
    text, document, question, image = user_parts(bodies[0])
    assert text["text"] == "File notes.py:\n````\nprint('```')\n````\n\n"
    encoded = base64.b64encode(PAPER["buffer"]).decode()
    assert document["file"] == {
        "filename": "paper.pdf",
        "file_data": f"data:application/pdf;base64,{encoded}",
    }
    assert question == {"type": "text", "text": "What are these?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


async def test_dropped_and_pasted_files_are_attached(page: Page) -> None:
    give = """([target, event, property]) => {
        const data = new DataTransfer();
        data.items.add(new File(["a,b"], `${event}.csv`, { type: "text/csv" }));
        const options = { bubbles: true, cancelable: true, [property]: data };
        const Kind = event === "paste" ? ClipboardEvent : DragEvent;
        document.querySelector(target).dispatchEvent(new Kind(event, options));
    }"""
    await page.evaluate(give, ["#messages", "drop", "dataTransfer"])
    await page.evaluate(give, ["#box", "paste", "clipboardData"])
    await expect(page.locator("#attached summary")).to_have_text(
        ["drop.csv (3 bytes)", "paste.csv (3 bytes)"]
    )
    await page.click("[aria-label='Remove drop.csv']")
    await expect(page.locator("#attached summary")).to_have_text(["paste.csv (3 bytes)"])


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (FilePayload(name="a.txt", mimeType="text/plain", buffer=b"x" * 600_000), "may have 512 K"),
        (FilePayload(name="a.pdf", mimeType="application/pdf", buffer=b"x" * 6_000_000), "5 MiB"),
        (FilePayload(name="a.zip", mimeType="application/zip", buffer=b"PK\0\xff"), "neither"),
    ],
)
async def test_file_that_cannot_be_sent_is_refused_with_the_reason(
    page: Page, file: FilePayload, reason: str
) -> None:
    await attach(page, file)
    await expect(page.locator("#status")).to_contain_text(f"{file['name']}: it")
    await expect(page.locator("#status")).to_contain_text(reason)
    await expect(page.locator("#attached > li")).to_have_count(0)


async def test_files_survive_a_reload_and_go_with_the_next_request(page: Page) -> None:
    bodies = await answer_with(page, YES)
    await attach(page, NOTES, DOT)
    await say(page, "Keep them")
    await expect(page.locator("#status")).to_have_text("The answer is complete.")
    await page.reload()
    await expect(page.locator(".message.user img")).to_be_visible()
    await page.click(".attached-file summary")
    await expect(page.locator(".attached-file pre")).to_have_text("print('```')\n")
    await say(page, "Again")
    await answered(page, 2)
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]


async def test_exported_conversation_brings_its_files_back(page: Page) -> None:
    bodies = await answer_with(page, YES)
    await attach(page, PAPER, DOT)
    await say(page, "Carry me")
    await answered(page, 1)
    async with page.expect_download() as download:
        await page.click("#export-json")
    exported = await (await download.value).path()
    await page.click("#delete-all")
    await page.set_input_files("#import", exported)
    await expect(page.locator(".message.user img")).to_be_visible()
    await say(page, "Again")
    await answered(page, 2)
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]
