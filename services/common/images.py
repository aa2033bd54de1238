"""Images of clients: decoding with Pillow, within limits that hold before any pixel is decoded."""

import io
import warnings

from PIL import Image, UnidentifiedImageError

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS

__all__ = ["FORMATS", "ImageError", "decode", "size_of"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read, as Pillow names them"""


class ImageError(Exception):
    """An image that can't be read. The message is one sentence for the client."""


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels, from the header alone. Raises ImageError."""
    with _opened(data) as image:
        return image.size


def decode(data: bytes) -> Image.Image:
    """Return the first frame in RGB; transparent parts keep their colour. Raises ImageError.

    Takes up to a second for the largest images.
    """
    with _opened(data) as image:
        try:
            return image.convert("RGB")
        except Exception as error:  # Pillow's decoders raise whatever they stumble on
            raise ImageError(f"The image is truncated or damaged: {error}.") from None


def _opened(data: bytes) -> Image.Image:
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(
            f"The image has {len(data):,} bytes; images may have at most {MAX_IMAGE_BYTES:,}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("The image is not a PNG, JPEG, WebP or GIF file.") from None
    except Exception as error:
        raise ImageError(f"The image can't be read: {error}.") from None
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        image.close()
        raise ImageError(
            f"The image has {width} x {height} pixels; images may have at most "
            f"{MAX_IMAGE_PIXELS:,} in all."
        )
    return image
