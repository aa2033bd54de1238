"""The reference page has the whole OpenAPI document, escaped."""

import copy
from html.parser import HTMLParser

from services.http_shim.documentation.openapi import document
from services.http_shim.documentation.reference import reference


class Page(HTMLParser):
    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: set[str] = set()
        self.text = ""
        self.tags: set[str] = set()
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name == "href" and value and value.startswith("#"):
                self.targets.add(value[1:])

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_has_every_route_and_field_and_no_broken_links() -> None:
    expected = document()
    page = Page(reference(expected))
    assert len(page.ids) == len(set(page.ids))
    assert page.targets <= set(page.ids)
    for path in expected["paths"]:
        assert path in page.text
    for name, schema in expected["components"]["schemas"].items():
        assert name in page.ids
        for field, meaning in schema["properties"].items():
            assert field in page.text
            assert meaning.get("description", "") in page.text


def test_types_are_described_in_words() -> None:
    text = Page(reference(document())).text
    for words in (
        "number (from 0 to 2) or null, default 1",  # temperature
        "string (from 1 to 1000 characters) or "
        "array of string (from 1 to 1000 characters) (up to 4096 items) or null",
        "array of array of integer (from 0) (from 1 items) (from 1 to 128 items), required",
        "array of Tool (up to 128 items)",
        "string (like ^[A-Za-z0-9_-]{1,128}$), required",
        "object of number (from -100 to 100)",
        '"error" or "truncate"',
    ):
        assert words in text


def test_text_of_the_document_is_escaped() -> None:
    changed = copy.deepcopy(document())
    changed["info"]["description"] = "<canvas title='&'></canvas>"
    page = Page(reference(changed))
    assert "canvas" not in page.tags
    assert changed["info"]["description"] in page.text
