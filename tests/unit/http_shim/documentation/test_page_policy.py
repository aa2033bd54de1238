"""Content security policy of the pages."""

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from services.http_shim.documentation.openapi import document
from services.http_shim.documentation.page_policy import mcp_origins_of, page_policy
from services.http_shim.documentation.pages import page_routes


def test_pages_reach_their_own_server_and_the_named_origins_alone() -> None:
    origins = mcp_origins_of("http://127.0.0.1:8080, https://tools.example.com")
    directives = page_policy(origins).split("; ")
    assert "connect-src 'self' http://127.0.0.1:8080 https://tools.example.com" in directives
    assert "connect-src 'self'" in page_policy([]).split("; ")
    assert "default-src 'none'" in directives


@pytest.mark.parametrize(
    "wrong",
    [
        "*",
        "https://*",
        "https://*.example.com",
        "example.com",
        "ws://example.com",
        "https://example.com/mcp",
        "https://example.com;script-src",
        "https://[::1]:8080",
    ],
)
def test_origin_that_would_widen_or_break_the_policy_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        mcp_origins_of(f"https://good.example, {wrong}")


def test_browser_that_has_a_page_gets_its_new_policy() -> None:
    """Browsers keep the stored policy when the answer is 304."""
    before = TestClient(Starlette(routes=page_routes(["https://a.example"], document()))).get("/")
    tag = {"if-none-match": before.headers["etag"]}
    client = TestClient(Starlette(routes=page_routes([], document())))
    after = client.get("/", headers=tag)
    assert after.status_code == 200
    assert "a.example" not in after.headers["content-security-policy"]
    assert client.get("/", headers={"if-none-match": after.headers["etag"]}).status_code == 304
