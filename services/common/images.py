"""Decoding of clients' images with Pillow; limits are checked before any pixel is decoded."""

import io
import warnings

from PIL import ExifTags, Image, UnidentifiedImageError

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_RATIO

__all__ = ["FORMATS", "ImageError", "decode", "size_of"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read, as Pillow names them"""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions that turn an image upright, by EXIF's orientation"""
_ON_ITS_SIDE = (5, 6, 7, 8)


class ImageError(Exception):
    """An image that can't be read. The message is one sentence for the client."""


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels, from the header alone. Raises ImageError."""
    with _opened(data) as image:
        turned = _orientation(image) in _ON_ITS_SIDE
        return (image.height, image.width) if turned else image.size


def decode(data: bytes) -> Image.Image:
    """Return the first frame in RGB, turned upright by its EXIF data. Raises ImageError.

    Transparent parts keep their colour. Takes up to a second for the largest images.
    """
    with _opened(data) as image:
        try:
            turn = _TURNS.get(_orientation(image))
            if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to 8
                picture = image.point(lambda value: value / 256).convert("L").convert("RGB")
            else:
                picture = image.convert("RGB")
            return picture if turn is None else picture.transpose(turn)
        except Exception as error:  # Pillow's decoders raise errors of many types
            raise ImageError(f"The image is truncated or damaged: {error}.") from None


def _orientation(image: Image.Image) -> int:
    """Return the orientation in the image's EXIF data; 1 = upright."""
    try:
        # the base class reads the header alone; PNG's own method decodes all pixels to find
        # EXIF data behind them
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data, without which the image can be read
        return 1
    return orientation if isinstance(orientation, int) else 1


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
    except Image.DecompressionBombError:
        raise ImageError(
            f"The image has too many pixels; images may have at most {MAX_IMAGE_PIXELS:,} in all."
        ) from None
    except Exception as error:
        raise ImageError(f"The image can't be read: {error}.") from None
    try:
        _check_size(*image.size)
    except ImageError:
        image.close()
        raise
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"The image has {width} x {height} pixels; images may have at most "
            f"{MAX_IMAGE_PIXELS:,} in all."
        )
    # processors scale the shorter side to a fixed length, and the other would fill the memory
    if max(width, height) > MAX_IMAGE_RATIO * min(width, height):
        raise ImageError(
            f"The image has {width} x {height} pixels; one side may be at most {MAX_IMAGE_RATIO} "
            "times the other."
        )
