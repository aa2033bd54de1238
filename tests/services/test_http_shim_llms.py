"""GET /llms.txt: a language model that reads it can use the server."""

import re

import httpx

from tests.stack import Stack


async def test_page_for_language_models_leads_to_what_it_names(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        page = await http.get("/llms.txt")
        assert page.headers["content-type"] == "text/plain; charset=utf-8"
        assert page.text.startswith("# Tokenwire\n\n> ")
        links = re.findall(r"\]\((/[^)]*)\)", page.text)
        assert "/openapi.json" in links
        for link in links:
            assert (await http.get(link)).status_code == 200, link
        fields = (await http.get("/openapi.json")).text
        for field in re.findall(r"`([a-z_]{4,})`", page.text):
            assert f'"{field}"' in fields, field
