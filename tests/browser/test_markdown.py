"""Markdown in Chromium: an answer that streams ends as the whole answer, and runs nothing."""

from itertools import pairwise
from random import Random

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from tests.stack import Stack

BLOCKS = (
    "A paragraph with **bold**, *slanted*, ~~struck~~ words and `code`.",
    "Two lines,\nof which the second has a [link](https://example.org/a_b).",
    "# Heading",
    "Underlined\n---",
    "***",
    "#no heading\n#\nbut text",
    "1. one\n2. two\n   - inner **b**\n     more\n\n   loose",
    "- a\n- b\nlazy\n* other list",
    "7) seven\n8) eight",
    "> quote\nlazy line\n> > deeper\n> - item",
    "```python\ndef f(x):\n    return 'a' + x  # why\n```",
    '1. Run this:\n   ```sh\n   echo "$HOME"\n   ```\n2. Done.',
    "~~~\n```\n~~~",
    "    indented\n\n    code",
    "| a | b |\n|---|--:|\n| 1 | `2` |",
    "text before\n| a |\n|---|\n| 1 |",
    "see [the manual][m] and [a note]",
    "[m]: https://example.org/manual\n[a note]: <https://example.org/note> 'Title'",
    "https://example.org/x, www.example.org, a@example.org",
    "line  \nbreak\\\nbreak &amp; <b>tag</b> \\* 2 * 3",
    "42",
    "-",
    "Inline $a_1 * b$ and \\(c * d\\), $$x^2$$ and \\[y\\], for $5 and $10.",
    "$$\n\\frac{a}{b}\n- c\n$$",
    "Text before\n\\[\n* x \\\\\n# y\n\\] and after",
    "$$\nnever closed\n- item",
    "- item\n  $$\n  a_1\n  $$\n- $b$",
    "> \\[ q \\].\n> $r",
)
DRAW = """([pieces, prefixes]) => import("/playground/markdown.js").then(({ Markdown }) => {
    const drawn = (parts, ends) => {
        const parent = document.createElement("div");
        const markdown = new Markdown(parent);
        const texts = parts.map((part) => { markdown.append(part); return parent.textContent; });
        if (ends) markdown.end();
        return { html: parent.innerHTML, texts };
    };
    const streamed = drawn(pieces, true);
    return {
        streamed: streamed.html,
        whole: drawn([pieces.join("")], true).html,
        texts: streamed.texts,
        fresh: prefixes.map((prefix) => drawn([prefix], false).texts[0]),
    };
})"""


def pieces_of(text: str, random: Random) -> list[str]:
    """Cut a text into pieces of a token's length."""
    cuts = sorted({0, len(text), *random.sample(range(len(text)), len(text) // 3)})
    return [text[start:end] for start, end in pairwise(cuts)]


async def drawn(page: Page, *pieces: str) -> Locator:
    """Draw an answer that comes in these pieces; return its element."""
    await page.evaluate(
        """(pieces) => import("/playground/markdown.js").then(({ Markdown }) => {
            const parent = document.createElement("div");
            parent.id = "drawn";
            document.querySelector("#messages").replaceChildren(parent);
            const markdown = new Markdown(parent);
            for (const piece of pieces) markdown.append(piece);
            markdown.end();
        })""",
        pieces,
    )
    return page.locator("#drawn")


@pytest.mark.parametrize("seed", range(12))
async def test_streamed_answer_ends_as_the_whole_answer(page: Page, seed: int) -> None:
    random = Random(seed)
    for _ in range(12):
        blocks = random.choices(BLOCKS, k=random.randint(1, 6))
        text = "".join(block + random.choice(("\n", "\n\n")) for block in blocks)
        pieces = pieces_of(text, random)
        prefixes = ["".join(pieces[: count + 1]) for count in range(len(pieces))]
        answer = await page.evaluate(DRAW, [pieces, prefixes])
        assert answer["streamed"] == answer["whole"], text
        if "]: " not in text:  # a link's target comes after it; the end of the answer links it
            assert answer["texts"] == answer["fresh"], text


async def test_link_may_stand_before_its_target(page: Page) -> None:
    pieces = ("See [the manual][1].\n\nMore.\n\n", "[1]: https://example.org/m\n")
    answer = await drawn(page, *pieces)
    await expect(answer.locator("a")).to_have_attribute("href", "https://example.org/m")


@pytest.mark.parametrize(
    "hostile",
    [
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](data:text/html;base64,PHNjcmlwdD4=)",
        "[a](vbscript:x)",
        "[a](file:///etc/passwd)",
        "[a](//example.org)",
        "[a](/v1/files)",
        "<javascript:alert(1)>",
        "[a][1]\n\n[1]: javascript:alert(1)",
        "![a](javascript:alert(1))",
        "<b onclick=alert(1)>x</b>",
        "<img src=x onerror=alert(1)>",
        "<!-- <script>alert(1)</script> -->",
        '```"><script>alert(1)</script>\nx\n```',
        "```html\n<script>alert(1)</script>\n```",
    ],
)
async def test_answer_brings_no_element_of_its_own(page: Page, hostile: str) -> None:
    answer = await drawn(page, hostile)
    assert await answer.locator("a, b, img, script, iframe, style").count() == 0
    names = await answer.locator("*").evaluate_all(
        "all => all.flatMap(each => each.getAttributeNames())"
    )
    assert not [name for name in names if name.startswith("on") or name == "style"]


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        ("Euler: $e^{i\\pi}+1=0$.", ["$e^{i\\pi}+1=0$"]),
        ("\\(a_1 * b_1\\) and \\[c\\]", ["\\(a_1 * b_1\\)", "\\[c\\]"]),
        ("$$\nx\n- y\n$$\n\nEnd", ["$$\nx\n- y\n$$"]),
        ("the $n$-th of $5$", ["$n$", "$5$"]),
        ("It costs $5 and $10.", []),
        ("It costs $5, or 10$ in cash.", []),
        ("US$5 to US$10, $1M–$2M, **$5** and **$10**, 5$ and 6$", []),
        ("\\$a\\$ and `$x$`", []),
        ("```tex\n$x$ \\(y\\)\n$$\nz\n$$\n```", []),
        ("    $x$\n\n    \\[y\\]", []),
        ("\\[a\\](https://example.org)", []),
    ],
)
async def test_formulas_are_found_and_amounts_of_money_are_not(
    page: Page, text: str, formulas: list[str]
) -> None:
    answer = await drawn(page, *text)
    found = await answer.locator(".formula").evaluate_all(
        "all => all.map(each => each.dataset.source)"
    )
    assert found == formulas
    await expect(answer.locator(".formula .katex math")).to_have_count(len(formulas))


async def test_formulas_need_no_style_that_the_policy_forbids(page: Page) -> None:
    refused: list[str] = []
    page.on("console", lambda line: refused.append(line.text))
    texts = (
        "\\color{red}{x}",
        "\\fbox{y}",
        "\\cancel{z}",
        "\\sqrt{\\frac{a}{b}}",
        "\\left(q\\right)",
    )
    answer = await drawn(page, *(f"${text}$ " for text in texts))
    await expect(answer.locator(".formula .katex")).to_have_count(5)
    used = "document.fonts.load('16px KaTeX_Math').then(fonts => fonts.length)"
    assert await page.evaluate(used) == 1
    assert refused == []


async def test_formula_that_is_not_valid_shows_its_source(page: Page) -> None:
    answer = await drawn(page, "Bad: $\\frac{a$, $\\href{javascript:alert(1)}{x}$.")
    await expect(answer).to_contain_text("$\\frac{a$")
    assert await answer.locator("a").count() == 0


async def test_image_of_another_server_is_a_link(page: Page) -> None:
    """A picture would tell its server who reads the answer."""
    answer = await drawn(page, "![a cat](https://example.org/cat.png)")
    assert await answer.locator("img").count() == 0
    await expect(answer.locator("a")).to_have_text("a cat")
    await expect(answer.locator("a")).to_have_attribute("href", "https://example.org/cat.png")


async def test_image_in_a_link_leaves_one_link(page: Page) -> None:
    answer = await drawn(page, "[![built](https://example.org/badge.svg)](https://example.org/ci)")
    await expect(answer.locator("a")).to_have_attribute("href", "https://example.org/ci")
    await expect(answer.locator("a")).to_have_text("built")


async def test_links_do_not_tell_which_page_they_are_on(page: Page) -> None:
    answer = await drawn(page, "[a](https://example.org) <mailto:a@example.org>")
    relations = await answer.locator("a").evaluate_all("links => links.map(link => link.rel)")
    assert relations == ["noopener noreferrer"] * 2


async def test_code_has_colours_of_its_language_and_keeps_its_text(page: Page) -> None:
    code = "".join(f"def f{number}(x):\n    return x + {number}  # add\n" for number in range(30))
    found = await page.evaluate(
        """async ([code, language]) => {
            const { Markdown } = await import("/playground/markdown.js");
            const parent = document.createElement("div");
            const markdown = new Markdown(parent);
            const text = "```" + language + "\\n" + code + "```";
            for (const character of text) markdown.append(character);
            markdown.end();
            const element = parent.querySelector("pre code");
            return [element.textContent, element.querySelectorAll(".code-keyword").length];
        }""",
        [code, "python"],
    )
    assert found == [code, 60]
    for language in ("unknown", ""):
        answer = await drawn(page, f"```{language}\n{code}```")
        assert await answer.locator("pre code").text_content() == code
        assert await answer.locator("pre code span").count() == 0


async def test_button_of_growing_code_keeps_the_focus(page: Page) -> None:
    kept = await page.evaluate(
        """async () => {
            const { Markdown } = await import("/playground/markdown.js");
            const parent = document.querySelector("#messages");
            const markdown = new Markdown(parent);
            markdown.append("- Run:\\n  ```sh\\n  ls\\n");
            const copy = parent.querySelector("button");
            copy.focus();
            markdown.append("  pwd\\n  ```\\n- Then:\\n");
            markdown.end();
            return document.activeElement === copy && copy.isConnected;
        }"""
    )
    assert kept


async def test_browser_refuses_text_as_html(page: Page) -> None:
    """The page's policy: a later change of the pages can't bring HTML of a model into them."""
    refused = await page.evaluate(
        """() => {
            try {
                document.createElement("div").innerHTML = "<b>x</b>";
                return "accepted";
            } catch (error) {
                return error.name;
            }
        }"""
    )
    assert refused == "TypeError"


async def test_browser_refuses_a_changed_script(browser: Browser, stack: Stack) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    changed = {"content_type": "text/javascript", "body": "window.changed = true"}
    await page.route("**/vendor/**", lambda route: route.fulfill(**changed))
    await page.goto(stack.url)
    assert await page.evaluate("window.changed") is None
    await context.close()
