"""Content security policy of the pages."""

import pytest

from services.http_shim.documentation.page_policy import mcp_origins_of, page_policy


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
