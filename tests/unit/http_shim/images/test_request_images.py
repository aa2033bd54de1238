"""Images of requests: data URLs, and the limits on all images of a request."""

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_IMAGES_BYTES
from services.http_shim.images.request_images import RequestImages, decode_data_url
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

PIXEL = "data:image/png;base64,AAEC"


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def refusal(url: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        decode_data_url(url, "images[0]")
    assert caught.value.field == "images[0]"
    assert caught.value.message.startswith("images[0] ")
    return caught.value


@given(st.binary(min_size=1))
def test_data_url_of_any_bytes_is_decoded_to_them(data: bytes) -> None:
    assert decode_data_url(data_url(data), "images[0]") == data


def test_data_above_one_step_of_the_decoder_is_complete() -> None:
    data = bytes(range(256)) * 5_000
    assert decode_data_url(data_url(data), "images[0]") == data


_FORGIVING = re.compile(r"([AQgw+/]{4})*([AQgw+/]{2}(==)?|[AQgw+/]{3}=?)?")


@given(st.text(alphabet="AQgw+/=- \n", max_size=12))
def test_base64_is_accepted_exactly_if_browsers_accept_it(text: str) -> None:
    """https://infra.spec.whatwg.org/#forgiving-base64"""
    bare = "".join(text.split())
    if bare and _FORGIVING.fullmatch(bare):
        data = base64.b64decode(bare.rstrip("=") + "===")
        assert decode_data_url(f"data:image/png;base64,{text}", "images[0]") == data
    else:
        refusal(f"data:image/png;base64,{text}")


@pytest.mark.parametrize(
    "url",
    [
        "DATA:image/png;BASE64,AAEC",
        "data:IMAGE/PNG;base64,AAEC",
        "data:image/jpg;base64,AAEC",
        "data:image/jpeg;name=a.jpg;base64,AAEC",
        "data:image/webp; base64,AAEC",
        "data:image/gif;base64,AA\r\nEC\n",  # `base64` of GNU breaks lines
    ],
)
def test_spellings_of_data_urls_are_accepted(url: str) -> None:
    assert decode_data_url(url, "images[0]") == b"\0\1\2"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must be a data URL"),
        ("AAEC", "must be a data URL"),
        ("data:image/png;base64", "must be a data URL"),
        ("file:///etc/passwd,", "must be a data URL"),
        ("ftp://example.com/a.png", "must be a data URL"),
        ("image/png,AAEC", "must be a data URL"),
        ("data:,", "must be in base64"),
        ("data:image/png,AAEC", "must be in base64"),
        ("data:image/png;base64;x,AAEC", "must be in base64"),
        ("data:;base64,AAEC", "media type ''"),
        ("data:image/svg+xml;base64,AAEC", "media type 'image/svg+xml'"),
        ("data:text/html;base64,AAEC", "media type 'text/html'"),
        ("data:image/png;base64,", "has no data"),
        ("data:image/png;base64, \n", "has no data"),
        ("data:image/png;base64,AAE", ""),
        ("data:image/png;base64,AA-_", "is not valid base64"),
        ("data:image/png;base64,AA%3D%3D", "is not valid base64"),
        ("data:image/png;base64,A", "is not valid base64"),
        ("data:image/png;base64,AAA==", "is not valid base64"),
        ("data:image/png;base64,AA==AAEC", "is not valid base64"),
        ("data:image/png;base64,AAé=", "is not valid base64"),
    ],
)
def test_invalid_data_urls_are_refused_with_the_reason(url: str, said: str) -> None:
    if said:
        assert said in refusal(url).message
    else:
        assert decode_data_url(url, "images[0]") == b"\0\1"


def test_errors_never_quote_the_image() -> None:
    """They are logged."""
    secret = "c2VjcmV0IHBpeGVscw"
    for url in (secret, f"data:image/png,{secret}", f"data:image/png;base64,{secret}!"):
        assert secret not in refusal(url).message
    long = refusal(f"data:{'x' * 10_000};base64,{secret}")
    assert len(long.message) < 300


def test_largest_image_is_accepted_and_one_byte_more_refused() -> None:
    assert len(decode_data_url(data_url(bytes(MAX_IMAGE_BYTES)), "images[0]")) == MAX_IMAGE_BYTES
    assert "too large" in refusal(data_url(bytes(MAX_IMAGE_BYTES + 1))).message


def test_images_of_a_request_are_limited_together() -> None:
    images = RequestImages()
    large = data_url(bytes(MAX_IMAGES_BYTES // 3))
    for index in range(3):
        images.add(large, f"images[{index}]")
    assert images.size == MAX_IMAGES_BYTES
    with pytest.raises(ServiceError) as caught:
        images.add(PIXEL, "images[3]")
    assert caught.value.field == "images[3]"
    assert f"{MAX_IMAGES_BYTES:,}" in caught.value.message


def test_one_image_too_many_is_named() -> None:
    images = RequestImages()
    for index in range(MAX_IMAGES):
        images.add(PIXEL if index % 2 else "https://example.com/a.png", f"images[{index}]")
    with pytest.raises(ServiceError) as caught:
        images.add(PIXEL, "images[16]")
    assert caught.value.field == "images[16]"


def test_fetched_images_stand_in_the_order_of_the_request() -> None:
    images = RequestImages()
    for index, url in enumerate(["https://a/1", PIXEL, "HTTP://a/2"]):
        images.add(url, f"images[{index}]")
    remote = images.remote()
    assert [(index, image.url) for index, image in remote] == [
        (0, "https://a/1"),
        (2, "HTTP://a/2"),
    ]
    images.replace(2, b"second")
    images.replace(0, b"first")
    request = completion_pb2.GenerateRequest(prompts=completion_pb2.Prompts(images=[b""] * 3))
    images.copy_into(request)
    assert list(request.prompts.images) == [b"first", b"\0\1\2", b"second"]


def test_url_of_an_image_is_not_shown_in_logs() -> None:
    """URLs of object stores hold signatures."""
    images = RequestImages()
    images.add("https://a/1?signature=secret", "images[0]")
    assert "secret" not in repr(images.remote())
