"""URLs that images are fetched from, and the hosts that the operator allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.images.remote_urls import (
    AllowedSources,
    RemoteUrl,
    RemoteUrlError,
    parse_remote_url,
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://example.com", RemoteUrl("http", "example.com", 80, "/")),
        (
            "HTTPS://Example.COM./a/b.png?c=d#e",
            RemoteUrl("https", "example.com", 443, "/a/b.png?c=d"),
        ),
        ("https://example.com:80/é%20", RemoteUrl("https", "example.com", 80, "/%C3%A9%20")),
        ("https://example.com?a", RemoteUrl("https", "example.com", 443, "/?a")),
        ("https://bücher.example/", RemoteUrl("https", "xn--bcher-kva.example", 443, "/")),
        ("http://[2606:4700::1]/", RemoteUrl("http", "2606:4700::1", 80, "/")),
    ],
)
def test_urls_are_read_in_their_parts(text: str, url: RemoteUrl) -> None:
    assert parse_remote_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com/",
        "example.com/a.png",
        "//example.com/a.png",
        "http:///a.png",
        "http://",
        "http://user@example.com/",
        "http://user:password@example.com/",
        "http://@example.com/",
        "http://example.com:x/",
        "http://example.com:99999/",
        "http://[::1",
        "http://[fe80::1%25eth0]/",
        "http://a..example/",
        "http://" + "a" * 64 + ".example/",
        "http://exam ple.com/",
        "http://example.com/a b",
        "http://example.com/\r\nHost: other",
        "http://example.com\\@other/",
        "http://exa%6dple.com/",
        "http://example.com/" + "a" * 8_192,
    ],
)
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(RemoteUrlError):
        parse_remote_url(text)


@given(st.text(), st.text())
def test_any_text_is_a_url_or_refused(host: str, rest: str) -> None:
    """Otherwise a request could end in a 500."""
    try:
        url = parse_remote_url(f"http://{host}/{rest}")
        moved = url.join(rest)
    except RemoteUrlError:
        return
    for each in (url, moved):
        each.host_header.encode("ascii")
        assert all("!" <= character <= "~" for character in each.target)


def is_allowed(sources: AllowedSources, text: str) -> bool:
    try:
        sources.require(parse_remote_url(text))
    except RemoteUrlError:
        return False
    return True


def test_without_a_list_any_host_is_allowed_at_the_ports_of_the_web() -> None:
    sources = AllowedSources([])
    assert is_allowed(sources, "http://example.com/")
    assert is_allowed(sources, "https://example.com:80/")
    for port in (22, 6379, 8080):
        assert not is_allowed(sources, f"http://example.com:{port}/")


def test_list_allows_exactly_its_hosts_and_ports() -> None:
    sources = AllowedSources(["Images.example", "*.cdn.example", "store.example:8443"])
    for text in (
        "https://images.example/", "http://images.example./", "https://a.cdn.example/",
        "https://a.b.cdn.example/", "https://store.example:8443/",
    ):  # fmt: skip
        assert is_allowed(sources, text)
    for text in (
        "https://other.example/", "https://a.images.example/", "https://cdn.example/",
        "https://evilcdn.example/", "https://store.example/", "https://images.example:8443/",
        "https://images.example.evil/",
    ):  # fmt: skip
        assert not is_allowed(sources, text)


@pytest.mark.parametrize("entry", ["https://a", "a/b", "a:0", "a:99999", "a b", "*", "*.", "a.*.b"])
def test_invalid_entry_of_the_list_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a source of images"):
        AllowedSources([entry])
