"""The playground in Chromium: the history sent is the history shown, and nothing shown is lost."""

import re
from typing import Any

from playwright.async_api import Page, Request, Route, expect

from tests.browser.answers import ANSWER, answer_with, answered, body_of, chunk, say


async def test_model_answers_and_the_next_request_carries_what_is_shown(page: Page) -> None:
    await page.evaluate("document.querySelector('#settings-form [name=max_tokens]').value = 8")
    await say(page, "What is Python?")
    await answered(page, 1)
    shown = await page.inner_text(f"{ANSWER} .content")
    assert shown.strip()
    async with page.expect_request("**/v1/chat/completions") as sent:
        await say(page, "And why?")
    messages = body_of(await sent.value)["messages"]
    assert [each["role"] for each in messages[-3:]] == ["user", "assistant", "user"]
    assert messages[-2]["content"].split() == shown.split()
    await answered(page, 2)


async def test_conversation_survives_a_reload(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Kept."}))
    await say(page, "Hello")
    await expect(page.locator("#status")).to_have_text("The answer is complete.")
    await page.reload()
    await answered(page, 1)
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Kept.")


async def test_escape_stops_the_answer_and_keeps_its_text(page: Page) -> None:
    fields = '{"min_tokens": 2000, "ignore_eos": true, "max_tokens": 2000}'
    await page.evaluate(
        "text => { document.querySelector('#settings-form [name=further]').value = text; }", fields
    )
    await say(page, "Count")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text(re.compile(r"\S"))
    await page.keyboard.press("Escape")
    await answered(page, 1)
    await expect(page.locator(ANSWER)).to_contain_text("Stopped.")
    assert (await page.inner_text(f"{ANSWER} .content")).strip()
    assert await page.evaluate("document.activeElement.id") == "box"


async def test_error_shows_the_reason_and_retry_sends_the_same_messages(page: Page) -> None:
    bodies: list[Any] = []

    async def refuse(route: Route, request: Request) -> None:
        bodies.append(body_of(request))
        error = {"error": {"message": "The queue is full.", "type": "overloaded_error"}}
        await route.fulfill(status=503, json=error)

    await page.route("**/v1/chat/completions", refuse)
    await say(page, "Hello")
    await expect(page.locator(".failure")).to_contain_text("The queue is full.")
    await page.unroute("**/v1/chat/completions")
    bodies += await answer_with(page, chunk(delta={"content": "Better."}))
    async with page.expect_request("**/v1/chat/completions") as again:
        await page.click(".failure button")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Better.")
    assert body_of(await again.value)["messages"] == bodies[0]["messages"]
    await expect(page.locator(".failure")).to_have_count(0)


async def test_message_stays_that_was_sent_before_the_last_conversation_was_loaded(
    page: Page,
) -> None:
    """An empty conversation would take its place."""
    await page.add_init_script("""
        const getAll = IDBObjectStore.prototype.getAll;
        const later = new Promise((resolve) => (window.finishLoading = resolve));
        IDBObjectStore.prototype.getAll = function () {
            const request = getAll.apply(this), late = {};
            request.onsuccess = () => later.then(() => {
                late.result = request.result;
                late.onsuccess();
            });
            return late;
        };
    """)
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await page.reload(wait_until="domcontentloaded")
    await say(page, "Hello")
    await answered(page, 1)
    await page.evaluate("finishLoading()")
    await page.evaluate("import(document.querySelector('script[type=module]').src).then(() => 0)")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Yes.")


async def test_edited_message_is_sent_in_place_of_the_old_one(page: Page) -> None:
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await say(page, "First")
    await answered(page, 1)
    await page.click(".message.user >> text=Edit")
    await page.fill(".message.user .editor textarea", "Second")
    await page.click("text=Send edited")
    await expect(page.locator(".message.user .content")).to_have_text("Second")
    await answered(page, 1)
    assert [each["content"] for each in bodies[-1]["messages"] if each["role"] == "user"] == [
        "Second"
    ]


async def test_regenerated_answer_is_a_version_beside_the_old_one(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "One."}))
    await say(page, "Hello")
    await answered(page, 1)
    await page.unroute("**/v1/chat/completions")
    await answer_with(page, chunk(delta={"content": "Two."}))
    await page.click("text=Regenerate")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Two.")
    await page.click("[aria-label='Previous version']")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("One.")


async def test_tool_results_go_back_with_the_call(page: Page) -> None:
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    await answer_with(page, chunk(delta={"tool_calls": [call]}, finish_reason="tool_calls"))
    await say(page, "Weather in Bern?")
    await expect(page.locator(".call")).to_contain_text("weather")
    await page.unroute("**/v1/chat/completions")
    bodies = await answer_with(page, chunk(delta={"content": "Sunny."}))
    await page.fill(".results textarea", "20 degrees")
    await page.click("text=Send results")
    await expect(page.locator(f"{ANSWER} .content").last).to_have_text("Sunny.")
    request, result = bodies[-1]["messages"][-2:]
    assert request["tool_calls"][0]["function"] == call["function"]
    assert (result["role"], result["tool_call_id"], result["content"]) == (
        "tool", "call_1", "20 degrees",
    )  # fmt: skip


async def test_hostile_markdown_stays_text(page: Page) -> None:
    hostile = (
        "<script>document.title = 'owned'</script> <img src=x onerror=alert(1)>\n\n"
        "[click](javascript:alert(1)) [good](https://example.org)\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n"
    )
    await answer_with(page, chunk(delta={"content": hostile}))
    await say(page, "Hello")
    await answered(page, 1)
    content = page.locator(f"{ANSWER} .content")
    assert await content.locator("script, img, b").count() == 0
    hrefs = await content.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert hrefs == ["https://example.org/"]
    assert await content.locator("table td").all_inner_texts() == ["1", "2"]
    assert await content.locator("pre code").inner_text() == "print('<b>')\n"
    assert await page.title() == "Tokenwire playground"


async def test_keyboard_reaches_the_probabilities_of_each_token(page: Page) -> None:
    await page.evaluate("document.querySelector('#settings-form [name=logprobs]').checked = true")
    scored = [(" the", -0.1), (" cat", -1.5)]
    content = [
        {"token": token, "logprob": logprob, "top_logprobs": [{"token": token, "logprob": logprob}]}
        for token, logprob in scored
    ]
    event = chunk(delta={"content": " the cat"}, logprobs={"content": content})
    bodies = await answer_with(page, event)
    await say(page, "Hello")
    await answered(page, 1)
    assert bodies[0]["top_logprobs"]
    summary = page.locator(".probabilities summary")
    await summary.focus()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    details = page.locator(".token-details")
    await expect(details).to_contain_text('" the" 90.5 %')
    await page.keyboard.press("ArrowRight")
    await expect(details).to_contain_text('" cat" 22.3 %')
    focused = await page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == '" cat", 22.3 %'


async def test_edit_is_kept_while_an_answer_runs(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    await say(page, "First")
    await answered(page, 1)
    await page.unroute("**/v1/chat/completions")
    held: list[Route] = []
    await page.route("**/v1/chat/completions", lambda route: held.append(route))
    await page.click(".message.user >> text=Edit")
    box = page.locator(".message.user .editor textarea")
    await box.fill("Second")
    await say(page, "Next")
    await page.click("text=Send edited")
    await expect(page.locator("#status")).to_contain_text("An answer is on its way")
    assert await box.input_value() == "Second"
    await page.keyboard.press("Escape")


async def test_switching_modes_keeps_both(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Still here."}))
    await say(page, "Hello")
    await answered(page, 1)
    await page.check("[name=mode][value=completion]")
    await page.fill("#completion [name=prompt]", "def sub(a, b):")
    await page.check("[name=mode][value=chat]")
    await expect(page.locator(f"{ANSWER} .content")).to_have_text("Still here.")
    await page.check("[name=mode][value=completion]")
    assert await page.input_value("#completion [name=prompt]") == "def sub(a, b):"


async def test_completion_streams_into_the_page(page: Page) -> None:
    await page.check("[name=mode][value=completion]")
    await page.click("#send")
    await expect(page.locator("#completion-output")).to_have_text(re.compile(r"\S"))


async def test_key_is_used_changed_and_forgotten(page: Page) -> None:
    await answer_with(page, chunk(delta={"content": "Yes."}))
    if await page.locator("#settings").is_hidden():
        await page.click("#show-settings")
    for key in ("first", "second"):
        await page.fill("#key", key)
        await page.click("text=Use key")
        async with page.expect_request("**/v1/chat/completions") as sent:
            await say(page, "Hello")
        assert (await sent.value).headers["authorization"] == f"Bearer {key}"
    await page.click("#forget-key")
    async with page.expect_request("**/v1/chat/completions") as sent:
        await say(page, "Hello")
    assert "authorization" not in (await sent.value).headers


async def test_phone_shows_the_answer_and_the_message_box_together(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 800})
    await answer_with(page, chunk(delta={"content": "Line\n\n" * 60 + "End."}))
    await say(page, "Hello")
    await answered(page, 1)
    await expect(page.locator("#box")).to_be_in_viewport()
    await expect(page.get_by_text("End.")).to_be_in_viewport()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390


async def test_settings_are_sent_only_when_they_are_set(page: Page) -> None:
    bodies = await answer_with(page, chunk(delta={"content": "Yes."}))
    await say(page, "Hello")
    await answered(page, 1)
    assert set(bodies[0]) == {"model", "messages", "stream", "stream_options"}
    await page.fill("#settings-form [name=temperature]", "0")
    await page.fill("#settings-form [name=max_tokens]", "9")
    await say(page, "Hello")
    await answered(page, 2)
    assert (bodies[1]["temperature"], bodies[1]["max_tokens"]) == (0, 9)


async def test_empty_settings_show_what_the_server_uses(page: Page) -> None:
    """The defaults of the page are those of the API's document."""
    document = await page.evaluate("fetch('openapi.json').then(answer => answer.json())")
    schemas = document["components"]["schemas"]
    numbers = page.locator("#settings-form .numbers input")
    for field in await numbers.all():
        name = await field.get_attribute("name")
        default = schemas["ChatBody"]["properties"][name].get("default")
        if default is not None and name != "top_k":
            assert float(await field.get_attribute("placeholder") or "nan") == default, name
    limit = page.locator("#settings-form [name=max_tokens]")
    await expect(limit).to_have_attribute("placeholder", "rest of context")
    await page.check("[name=mode][value=completion]")
    default = schemas["CompletionBody"]["properties"]["max_tokens"]["default"]
    await expect(limit).to_have_attribute("placeholder", str(default))


async def test_speed_of_an_answer_is_kept_with_it(page: Page) -> None:
    await page.fill("#settings-form [name=max_tokens]", "8")
    await say(page, "What is Python?")
    await answered(page, 1)
    line = page.locator(f"{ANSWER} .usage")
    await expect(line).to_contain_text(re.compile(r"\d answer tokens, .*tokens/s, first token"))
    shown = await line.inner_text()
    await page.reload()
    await expect(line).to_have_text(shown)
