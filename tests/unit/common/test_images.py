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

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_RATIO
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


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_photos_of_every_format_are_turned(kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = file_of(PICTURE, kind, exif=exif)
    assert size_of(file) == decode(file).size == (PICTURE.height, PICTURE.width)


def test_sixteen_bits_of_grey_are_turned() -> None:
    """The size alone decides about the image's tokens, so the pixels must agree with it."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 8
    levels = np.arange(6, dtype=np.uint16).reshape(2, 3) << 8
    file = file_of(Image.fromarray(levels), "PNG", exif=exif)
    assert np.array_equal(np.asarray(decode(file))[..., 0], np.rot90(levels >> 8))
    assert size_of(file) == (2, 3)


def test_size_is_read_from_the_header_alone() -> None:
    """The tokenizer service reads it in the midst of other requests."""
    noise = np.random.default_rng(1).integers(0, 256, (200, 100, 3), dtype=np.uint8)
    file = file_of(Image.fromarray(noise), "PNG")
    assert size_of(file[:64]) == (100, 200)


@pytest.mark.parametrize("value", [0, 9, 60_000])
def test_unknown_orientation_changes_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    assert size_of(file_of(PICTURE, "PNG", exif=exif)) == PICTURE.size


def test_sixteen_bits_of_grey_keep_their_order() -> None:
    """An X-ray must not turn white."""
    levels = np.arange(0, 65_536, 256, dtype=np.uint16).reshape(16, 16)
    image = decode(file_of(Image.fromarray(levels), "PNG"))
    grey = [image.getpixel((x, y)) for y in range(16) for x in range(16)]
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


def test_far_too_many_pixels_are_refused_with_the_limit() -> None:
    """Pillow refuses such an image itself, and speaks of an attack."""
    with pytest.raises(ImageError, match=f"at most {MAX_IMAGE_PIXELS:,}"):
        size_of(resized(100_000, 100_000))


@pytest.mark.parametrize("transposed", [False, True])
def test_too_narrow_image_is_refused(transposed: bool) -> None:
    """Scaled until its short side has 336 pixels, such an image would fill the memory."""
    for width, is_read in [(MAX_IMAGE_RATIO, True), (MAX_IMAGE_RATIO + 1, False)]:
        image = Image.new("RGB", (1, width) if transposed else (width, 1))
        file = file_of(image, "PNG")
        if is_read:
            assert size_of(file) == decode(file).size == image.size
        else:
            with pytest.raises(ImageError, match="at most 200 times the other"):
                size_of(file)


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(ImageError, match=f"at most {MAX_IMAGE_BYTES:,}"):
        size_of(file_of(PICTURE, "PNG") + b"\0" * MAX_IMAGE_BYTES)


@given(kind=st.sampled_from(FORMATS), place=st.floats(0, 1), piece=st.binary(min_size=1))
def test_damaged_files_give_an_image_or_an_error(kind: str, place: float, piece: bytes) -> None:
    file = bytearray(file_of(PICTURE, kind))
    start = int(place * len(file))
    file[start : start + len(piece)] = piece
    with suppress(ImageError):
        size = size_of(bytes(file))
        assert min(size) > 0
        assert decode(bytes(file)).size == size


def resized(width: int, height: int) -> bytes:
    """Return a small PNG file whose header claims another size."""
    file = bytearray(file_of(Image.new("L", (1, 1)), "PNG"))
    file[16:24] = struct.pack(">II", width, height)
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return bytes(file)
