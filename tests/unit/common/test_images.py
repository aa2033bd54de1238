"""Images of clients: what is read, and that nothing else is, at any size."""

import io
import struct
import zlib
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from services.common.images import FORMATS, ImageError, decode, size_of

PICTURE = Image.effect_mandelbrot((31, 17), (-2, -1, 1, 1), 50).convert("RGB")
LOSSLESS = ("PNG", "GIF")


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind: str) -> None:
    file = file_of(PICTURE, kind)
    assert size_of(file) == (31, 17)
    difference = np.abs(np.asarray(decode(file), int) - np.asarray(PICTURE, int))
    assert difference.mean() < (1 if kind in LOSSLESS else 10)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "lime")]
    file = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert decode(file).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(orientation: int) -> None:
    """Telephones store how they were held, and every viewer turns the picture."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = file_of(PICTURE, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert np.array_equal(np.asarray(decode(file)), np.asarray(expected))
    assert size_of(file) == expected.size


@pytest.mark.parametrize("value", [0, 9, 60_000])
def test_unknown_orientation_changes_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    assert size_of(file_of(PICTURE, "PNG", exif=exif)) == PICTURE.size


def test_sixteen_bits_of_grey_keep_their_order() -> None:
    """An X-ray must not turn white."""
    levels = np.arange(0, 65_536, 256, dtype=np.uint16)[None]
    image = decode(file_of(Image.fromarray(levels), "PNG"))
    grey = [image.getpixel((x, 0)) for x in range(image.width)]
    assert all(before <= after for before, after in pairwise(grey))  # type: ignore[operator]
    assert (grey[0], grey[-1]) == ((0, 0, 0), (255, 255, 255))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L"])
def test_other_colors_become_rgb(mode: str) -> None:
    assert decode(file_of(PICTURE.convert(mode), "PNG")).mode == "RGB"


def test_cmyk_becomes_rgb() -> None:
    image = decode(file_of(PICTURE.convert("CMYK"), "JPEG"))
    assert (image.mode, image.size) == ("RGB", PICTURE.size)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str) -> None:
    file = file_of(PICTURE, kind)
    for read in (size_of, decode):
        with pytest.raises(ImageError, match="not a PNG, JPEG, WebP or GIF file"):
            read(file)


@pytest.mark.parametrize("file", [b"", b"\x89PNG", b"<svg/>", b"%PDF-1.7", b"GIF89a", b"RIFF"])
def test_what_is_no_image_is_refused(file: bytes) -> None:
    for read in (size_of, decode):
        with pytest.raises(ImageError):
            read(file)


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_image_is_refused(kind: str) -> None:
    file = file_of(PICTURE, kind)
    with pytest.raises(ImageError):
        decode(file[: len(file) * 2 // 3])


def test_too_many_pixels_are_refused_from_the_header() -> None:
    """A few bytes of a decompression bomb would fill the memory."""
    side = int(MAX_IMAGE_PIXELS**0.5) + 1
    for read in (size_of, decode):
        with pytest.raises(ImageError, match=f"{side} x {side} pixels"):
            read(resized(side, side))


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(ImageError, match=f"at most {MAX_IMAGE_BYTES:,}"):
        size_of(file_of(PICTURE, "PNG") + b"\0" * MAX_IMAGE_BYTES)


@given(kind=st.sampled_from(FORMATS), place=st.floats(0, 1), piece=st.binary(min_size=1))
def test_damaged_files_give_an_image_or_an_error(kind: str, place: float, piece: bytes) -> None:
    file = bytearray(file_of(PICTURE, kind))
    start = int(place * len(file))
    file[start : start + len(piece)] = piece
    for read in (size_of, decode):
        with suppress(ImageError):
            read(bytes(file))


def resized(width: int, height: int) -> bytes:
    """Return a small PNG file whose header claims another size."""
    file = bytearray(file_of(Image.new("L", (1, 1)), "PNG"))
    file[16:24] = struct.pack(">II", width, height)
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return bytes(file)
